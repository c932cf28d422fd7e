"""What SQLite's errors mean for the operator: each becomes one of the StoreErrors, with what was kept."""

from __future__ import annotations

import errno
import os

import apsw

from outbox.errors import StoreBusy, StoreClosed, StoreDamaged, StoreError, StoreFull

# What reading a row can raise besides StoreErrors: SQLite hands texts over as they are, Python wants UTF-8.
Fault = apsw.Error | UnicodeDecodeError
FAULTS = (apsw.Error, UnicodeDecodeError)


# What the system says of a disk that is full: no space, or none left for this user.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


_NOT_OUR_SCHEMA = ("no such column", "no such table", "unsupported file format")

_WRITE_FAULTS = (
    apsw.SQLITE_IOERR_WRITE,
    apsw.SQLITE_IOERR_FSYNC,
    apsw.SQLITE_IOERR_DIR_FSYNC,
    apsw.SQLITE_IOERR_TRUNCATE,
)


def is_write_fault(error: BaseException) -> bool:
    """Whether the disk failed to write or to flush: what was written before may be in memory only."""
    return isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) in _WRITE_FAULTS


class Misplaced(StoreDamaged):
    """The file `name` says that it is `agent`'s, whose file is called `place`; it is never set aside.

    Nothing tells a file under a wrong name from one with a wrong byte in its agent's name: a person can.
    """

    def __init__(self, name: str, agent: str, place: str) -> None:
        super().__init__(
            f"The file {name} says that it holds the outbox of {agent!r}, whose place is {place}. It was "
            f"left alone. Rename it to {place} if nothing is there. If you know no such agent, the name in "
            "it is damaged: move it away, with its -wal, and its agent's next event makes a new file."
        )


def store_error(error: Fault, path: str | os.PathLike[str], system_errno: int = 0) -> StoreError:
    """The error to raise in the place of `error`, which came from the file at `path`.

    `system_errno` is what the system said, where that is known: SQLite takes a spent quota for another fault.
    """
    name = os.fspath(path).rpartition("/")[2]
    match error:
        case apsw.IOError() if system_errno in NO_ROOM:
            return _full(name)
        case apsw.CantOpenError() if _has_no_room(path):
            return _full(name)
        case apsw.BusyError() | apsw.LockedError():
            return StoreBusy(
                f"The file {name} was locked by another program for too long. "
                "Nothing was stored; what waits is kept. Try again."
            )
        case apsw.FullError():
            return _full(name)
        case apsw.IOError() if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
            return _full(name)
        case apsw.SQLError() if _is_of_schema(str(error)):
            return StoreDamaged(
                f"The file {name} is damaged: its tables are not those of an outbox ({error}). Nothing was "
                "stored; it was left alone. Run: outbox doctor"
            )
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError() | UnicodeDecodeError():
            return StoreDamaged(
                f"The file {name} cannot be read: {error}. Nothing was stored; it was left alone. "
                "Run: outbox doctor"
            )
        case apsw.ReadOnlyError() if _has_an_unknown_format(path):
            return StoreDamaged(
                f"The file {name} is damaged: its header names a format that cannot be written. Nothing was "
                "stored; it was left alone. Run: outbox doctor"
            )
        case apsw.ReadOnlyError():
            return StoreError(
                f"The file {name} can only be read. Nothing was stored; what waits is kept. "
                "Give its owner leave to write to it and to its folder."
            )
        case apsw.ConnectionClosedError():
            return StoreClosed(f"The outbox {name} is closed. Nothing was stored.")
        case _:
            return StoreError(f"The file {name} could not be used: {error}. Nothing was stored.")


def unmovable(name: str) -> StoreDamaged:
    """The error when a row that was read can be neither removed nor moved: it is not where it seems to be."""
    return StoreDamaged(
        f"The file {name} is damaged: an event in it can be read, and not be removed. Nothing was changed. "
        "Run: outbox doctor"
    )


def _is_of_schema(detail: str) -> bool:
    """What a statement of ours meets where a byte of the schema has changed: SQLite keeps it as a text."""
    return detail.startswith(_NOT_OUR_SCHEMA) or " has no column " in detail


def _has_an_unknown_format(path: str | os.PathLike[str]) -> bool:
    """SQLite only reads a file whose header says so (sqlite.org/fileformat2.html, "File format versions")."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as os.fspath elsewhere here
            header = file.read(20)
    except OSError:
        return False
    return len(header) == 20 and header[18] not in {1, 2}


def _has_no_room(path: str | os.PathLike[str]) -> bool:
    """Whether no file can be made beside this one: no block or no inode is free (statvfs(3))."""
    try:
        disk = os.statvfs(os.fspath(path).rpartition("/")[0] or ".")
    except OSError:
        return False
    return not disk.f_bavail or (disk.f_files > 0 and not disk.f_favail)


def _full(name: str) -> StoreFull:
    return StoreFull(
        f"The disk is full ({name}). Nothing was stored; what waits is kept and goes on being delivered. "
        "Make space."
    )
