"""SQLite files at rest: who has one open, and a private copy of one. SQLite never opens the file itself.

Even a reader of a write-ahead log writes beside it; whoever copies file and log changes nothing at all.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from pathlib import Path

from outbox.errors import StoreBusy
from outbox.store.connection import Inode, inode_of

_FLOCK = struct.Struct("hhqqi")  # struct flock: l_type, l_whence, l_start, l_len, l_pid

# Where SQLite locks (sqlite.org/src: os_unix.c): the pending, reserved and shared bytes of the file; of the
# index of its log the bytes of readers and writers, and the one that everybody who has it open holds.
_FILE_LOCKS = (0x4000_0000, 512)
_INDEX_LOCKS = (120, 9)
_TRIES = 5
_SIDES = ("", "-wal", "-journal")


def holder(path: Path) -> int | None:
    """The other process that has the file open, 0 for one that is not seen from here; None: there is none.

    A connection to a file with a write-ahead log holds a shared lock as long as it is open, and the kernel
    tells whose (fcntl(2), F_OFD_GETLK). One without a log locks only while it works: it is looked for among
    the open files of the processes that this user may look at (proc(5)).
    """
    for name, place in ((path, _FILE_LOCKS), (path.with_name(f"{path.name}-shm"), _INDEX_LOCKS)):
        pid = _locked_by(name, *place)
        if pid is not None:
            return max(pid, 0)
    return _opened_by(path)


def _locked_by(path: Path, start: int, length: int) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, probe))
    finally:
        os.close(fd)
    return None if kind == fcntl.F_UNLCK else pid


def _opened_by(path: Path) -> int | None:
    inode = inode_of(str(path))
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) != os.getpid() and inode in _open_files(process):
            return int(process.name)
    return None


def _open_files(process: Path) -> set[Inode | None]:
    try:
        names = list((process / "fd").iterdir())
    except OSError:  # it has ended, or is somebody else's
        return set()
    return {inode_of(str(name)) for name in names}


def copy_at_rest(path: Path, to: Path) -> None:
    """Copy the file with its log or journal, as it is at one moment; `to` and its side files are made 0600.

    Raises StoreBusy when it changes all the time, OSError when it cannot be read or there is no space.
    """
    for _ in range(_TRIES):
        before = _signature(path)
        for side in _SIDES:
            _copy(path.with_name(path.name + side), to.with_name(to.name + side))
        if _signature(path) == before:
            return
    raise StoreBusy(
        f"The file {str(path)!r} is being written. Nothing was taken. Stop who writes it, and try again."
    )


def _copy(source: Path, to: Path) -> None:
    to.unlink(missing_ok=True)
    if source.exists():
        os.close(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        shutil.copyfile(source, to)


def _signature(path: Path) -> list[tuple[int, int, int] | None]:
    return [_stat(path.with_name(path.name + side)) for side in _SIDES]


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
