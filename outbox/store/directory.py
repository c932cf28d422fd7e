"""Where things lie below STATE, and how its files and folders are made: 0700 and 0600, whatever the umask."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import count

from outbox.blake2 import blake2b
from outbox.errors import StoreError
from outbox.store.aside import named_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

# A producer goes by texts: pathlib takes a hook as long to load as Python itself takes to start.
# ruff: noqa: PTH101, PTH102, PTH105, PTH112, PTH114, PTH119, PTH120, PTH123

_SLUG_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_FOLDERS = ("agents", "damaged", "tokens", "hooks", "sidecars")
_OCTAL = r"\\([0-7]{3})"
_NETWORK_FS = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "afs", "fuse.sshfs", "lustre", "beegfs")


def file_name(agent: str) -> str:
    """SLUG-HASH.sqlite: readable, and never equal for two agents (128 bits of BLAKE2b over the exact id)."""
    slug = "".join(c if c in _SLUG_CHARS else "_" for c in agent.lower()[:40])
    return f"{slug}-{blake2b(agent.encode(), digest_size=16).hexdigest()}.sqlite"


class _Below:
    """A path below STATE, made whenever somebody wants one."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, state: StateDirectory, _: object) -> Path:
        from pathlib import Path  # noqa: PLC0415 - whoever only appends does without

        return Path(state.folder, self._name)


class StateDirectory:
    """STATE and its folders. Making one creates what is missing; nothing is created by looking.

    `folder` is its path as text.
    """

    path = _Below("")
    agents = _Below("agents")
    damaged = _Below("damaged")
    relay_state = _Below("relay.sqlite")
    tokens = _Below("tokens")
    wake_socket = _Below("wake.sock")
    daemon_file = _Below("daemon.json")
    rules_file = _Below("rules.json")
    reserve_file = _Below("reserve")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Remember the place; `create` makes it."""
        self.folder = os.fspath(path)

    def create(self, *, allow_network_fs: bool = False) -> StateDirectory:
        """Make STATE and STATE/agents with mode 0700; a missing folder above them is made with that mode too.

        Raises StoreError when it cannot be made, when a link stands in the place of one of its folders, or
        when it lies on a network file system (whose locks and write-ahead logs cannot be trusted) and
        `allow_network_fs` is false.
        """
        for name in _FOLDERS:
            self._require_no_link(name)
        self.make_folders()
        if not allow_network_fs and (kind := network_file_system(self.folder)):
            raise StoreError(
                f"The state directory {self.folder!r} lies on a network file system ({kind}), where a "
                "write-ahead log can be damaged. Nothing was stored. Use a local folder, or set "
                "daemon.allow_network_fs = true if you know better."
            )
        return self

    def make_folders(self) -> None:
        """Make STATE and STATE/agents where they are missing; raises StoreError."""
        try:
            _make_private(f"{self.folder}/agents")
        except OSError as error:
            raise StoreError(
                f"The state directory {self.folder!r} cannot be made: {error.strerror}. "
                "Nothing was stored. Set --state-dir or OUTBOX_STATE_DIR to a folder you can write."
            ) from error

    def _require_no_link(self, name: str) -> None:
        """A link would lead events, tokens or evidence out of STATE; STATE itself may be one."""
        if os.path.islink(folder := f"{self.folder}/{name}"):
            raise StoreError(
                f"The folder {folder!r} is a link, and what is kept here does not leave the state directory. "
                "Nothing was stored or changed. Put a folder in its place; to keep all of it elsewhere, set "
                "--state-dir or OUTBOX_STATE_DIR."
            )

    def outbox_path(self, agent: str) -> Path:
        """The file of one agent's outbox."""
        return self.agents / file_name(agent)

    def outbox_file(self, agent: str) -> str:
        """`outbox_path` as text."""
        return f"{self.folder}/agents/{file_name(agent)}"

    def outbox_files(self) -> Iterator[Path]:
        """Every outbox file there is, of agents long gone and one being replaced too; raises StoreError."""
        self._require_no_link("agents")
        try:
            entries = sorted(os.scandir(agents := self.agents), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(
                f"The folder {str(agents)!r} cannot be read: {error.strerror}. Nothing was changed."
            ) from error
        names = {entry.name for entry in entries}
        for entry in entries:
            if entry.name.endswith(".sqlite") and not entry.name.startswith("."):
                yield agents / entry.name
            elif (name := named_by(entry.name)) and name not in names:
                names.add(name)
                yield agents / name


def _make_private(folder: str) -> None:
    """Make a folder and those above it that are missing, so that they survive a power cut."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder) or "."
    _make_private(above)
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    else:
        os.chmod(folder, 0o700)
        sync_folder(above)


def network_file_system(path: str | os.PathLike[str]) -> str | None:
    """The type of the network file system that `path` lies on, or None for a local one."""
    best, found = "", None
    real = os.path.realpath(path)
    try:
        mounts = _mounts()
    except OSError:
        return None
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        if "\\" in point:
            point = re.sub(_OCTAL, lambda found: chr(int(found[1], 8)), point)
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, kind
    return found if found and found.startswith(_NETWORK_FS) else None


def _mounts() -> str:
    """What is mounted where, as this process sees it; raises OSError."""
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        return file.read()


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Whether a file (no folder, no link, no device) lies there."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def put_aside(state: StateDirectory, files: Iterable[str | os.PathLike[str]]) -> None:
    """Move files that must not be used where they lie to STATE/damaged, under names that no other has."""
    damaged = f"{state.folder}/damaged"
    _make_private(damaged)
    for file in files:
        names = (f"{damaged}/{os.path.basename(file)}.{number}" for number in count(1))
        os.replace(file, next(name for name in names if not os.path.lexists(name)))


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make a rename or a new name in the folder survive a power cut, where the folder can be read at all."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
