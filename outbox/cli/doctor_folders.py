"""What the doctor looks at around the files: the state directory, its modes, its file system, its disk."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from outbox.cli.doctor_finding import Finding, failure, ok, warning
from outbox.cli.output import bytes_text, count
from outbox.settings import Settings
from outbox.store.directory import StateDirectory, network_file_system

_FEW_INODES = 1_000
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KEPT = "What is on disk stays as it is."


def directories(state: StateDirectory) -> Iterator[Finding]:
    """Whether the state directory is there, ours, and closed to others."""
    name, path = "directory", state.path
    try:
        status = path.stat()
    except FileNotFoundError:
        yield warning(
            name,
            f"{path} is not there: nothing was accepted here yet.",
            "An agent's first event makes it. If events lie elsewhere, name their place: OUTBOX_STATE_DIR",
        )
        return
    except OSError as error:
        yield failure(
            name, f"{path} cannot be looked at: {error.strerror}. {_KEPT}", "Run this as its owner."
        )
        return
    findings = [*_owner(name, path, status), *_modes(name, state)]
    yield from findings or [ok(name, f"{path}, closed to others")]


def _owner(name: str, path: Path, status: os.stat_result) -> Iterator[Finding]:
    if not path.is_dir():
        yield failure(name, f"{path} is no folder. {_KEPT}", "Name another place: OUTBOX_STATE_DIR")
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield failure(
            name,
            f"{path} cannot be written to by this user; its owner is user {status.st_uid}. {_KEPT}",
            "Run commands and producers as its owner.",
        )
    elif status.st_uid != os.geteuid():
        yield warning(
            name,
            f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}.",
            "Run commands as its owner: a file that another user makes there is closed to the daemon.",
        )


def _modes(name: str, state: StateDirectory) -> Iterator[Finding]:
    """Whatever others may look into."""
    folders = [path for path in (state.path, state.agents, state.damaged) if _is_open(path)]
    if folders:
        shown = " ".join(map(str, folders))
        yield warning(name, f"Others may look into {shown}.", f"chmod 700 {shlex.join(map(str, folders))}")
    files = [path for folder in (state.path, state.agents, state.damaged) for path in _open_files(folder)]
    if files:
        yield warning(
            name,
            f"Others may read {count(len(files), 'file')}, such as {files[0]}.",
            f"find {shlex.quote(str(state.path))} -type f -exec chmod 600 {{}} +",
        )


def _open_files(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in entries if not path.is_dir() and _is_open(path))


def _is_open(path: Path) -> bool:
    """Whether others than the owner may do anything with it."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return bool(status.st_mode & _OTHERS) and not stat.S_ISLNK(status.st_mode)


def file_system(state: StateDirectory, settings: Settings) -> Finding:
    """Write-ahead logs and locks need a local one."""
    kind = network_file_system(_nearest(state.path))
    if kind is None:
        return ok("file system", "local")
    said = f"{state.path} lies on a network file system ({kind}), where a write-ahead log can be damaged."
    todo = "Move the state directory to a local disk."
    allowed = settings.daemon.allow_network_fs
    return (warning if allowed else failure)("file system", said, todo)


def disk(state: StateDirectory, settings: Settings) -> Finding:
    """Free bytes, against what must stay free; and whether files can be made at all."""
    found = os.statvfs(_nearest(state.path))
    free, least = found.f_bavail * found.f_frsize, settings.bounds_section.min_free_disk_bytes
    said = f"{bytes_text(free)} free; {bytes_text(least)} are to stay so"
    todo = "Make space, or lower bounds.min_free_disk_bytes."
    if free < least:
        return failure("disk", f"{said}: nothing more is accepted, delivery goes on.", todo)
    if found.f_files and found.f_favail < _FEW_INODES:
        return warning(
            "disk", f"Only {count(found.f_favail, 'more file')} can be made there.", "Remove files."
        )
    if free < 2 * least:
        return warning("disk", f"{said}: soon nothing more will be accepted.", todo)
    return ok("disk", said)


def _nearest(path: Path) -> Path:
    """The path itself, or what is there above it."""
    for folder in (path, *path.parents):
        try:
            folder.stat()
        except OSError:
            continue
        return folder
    return Path("/")
