"""Where things lie below STATE, and how its files and folders are made: 0700 and 0600, whatever the umask."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path

from outbox.errors import StoreError
from outbox.store.aside import named_by

_SLUG_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_octal = re.compile(r"\\([0-7]{3})")
_NETWORK_FS = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "afs", "fuse.sshfs", "lustre", "beegfs")


def file_name(agent: str) -> str:
    """SLUG-HASH.sqlite: readable, and never equal for two agents (128 bits of BLAKE2b over the exact id)."""
    slug = "".join(c if c in _SLUG_CHARS else "_" for c in agent.lower()[:40])
    return f"{slug}-{blake2b(agent.encode(), digest_size=16).hexdigest()}.sqlite"


class StateDirectory:
    """STATE and its folders. Making one creates what is missing; nothing is created by looking."""

    def __init__(self, path: Path) -> None:
        """Remember the place; `create` makes it."""
        self.path = path
        self.agents = path / "agents"
        self.damaged = path / "damaged"
        self.relay_state = path / "relay.sqlite"
        self.tokens = path / "tokens"
        self.wake_socket = path / "wake.sock"
        self.daemon_file = path / "daemon.json"
        self.rules_file = path / "rules.json"
        self.reserve_file = path / "reserve"

    def create(self, *, allow_network_fs: bool = False) -> StateDirectory:
        """Make STATE and STATE/agents with mode 0700; a missing folder above them is made with that mode too.

        Raises StoreError when it cannot be made, or lies on a network file system (whose locks and
        write-ahead logs cannot be trusted) and `allow_network_fs` is false.
        """
        try:
            _make_private(self.agents)
        except OSError as error:
            raise StoreError(
                f"The state directory {str(self.path)!r} cannot be made: {error.strerror}. "
                "Nothing was stored. Set --state-dir or OUTBOX_STATE_DIR to a folder you can write."
            ) from error
        if not allow_network_fs and (kind := network_file_system(self.path)):
            raise StoreError(
                f"The state directory {str(self.path)!r} lies on a network file system ({kind}), where a "
                "write-ahead log can be damaged. Nothing was stored. Use a local folder, or set "
                "daemon.allow_network_fs = true if you know better."
            )
        return self

    def outbox_path(self, agent: str) -> Path:
        """The file of one agent's outbox."""
        return self.agents / file_name(agent)

    def outbox_files(self) -> Iterator[Path]:
        """Every outbox file there is, of agents long gone and one being replaced too; raises StoreError."""
        try:
            entries = sorted(os.scandir(self.agents), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(
                f"The folder {str(self.agents)!r} cannot be read: {error.strerror}. Nothing was changed."
            ) from error
        names = {entry.name for entry in entries}
        for entry in entries:
            if entry.name.endswith(".sqlite") and not entry.name.startswith("."):
                yield Path(entry.path)
            elif (name := named_by(entry.name)) and name not in names:
                names.add(name)
                yield self.agents / name


def _make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, so that they survive a power cut."""
    if folder.is_dir():
        return
    _make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        folder.chmod(0o700)
        sync_folder(folder.parent)


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that `path` lies on, or None for a local one."""
    best, found = "", None
    real = os.path.realpath(path)
    try:
        mounts = Path("/proc/self/mounts").read_text("utf-8", "replace")
    except OSError:
        return None
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        point = _octal.sub(lambda found: chr(int(found[1], 8)), point)
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, kind
    return found if found and found.startswith(_NETWORK_FS) else None


def is_regular(path: Path) -> bool:
    """Whether a file (no folder, no link, no device) lies there."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def put_aside(state: StateDirectory, files: Iterable[Path]) -> list[Path]:
    """Move files that must not be used where they lie to STATE/damaged, under names that no other has."""
    _make_private(state.damaged)
    moved = []
    for file in files:
        names = (state.damaged / f"{file.name}.{number}" for number in count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        moved.append(file.replace(aside))
    return moved


def sync_folder(path: Path) -> None:
    """Make a rename or a new name in the folder survive a power cut, where the folder can be read at all."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
