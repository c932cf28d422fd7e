"""What SQLite's errors mean for the operator: each becomes one of the StoreErrors, with what was kept."""

from __future__ import annotations

import os

import apsw

from outbox.errors import StoreBusy, StoreClosed, StoreDamaged, StoreError, StoreFull

# What reading a row can raise besides StoreErrors: SQLite hands texts over as they are, Python wants UTF-8.
Fault = apsw.Error | UnicodeDecodeError
FAULTS = (apsw.Error, UnicodeDecodeError)


def store_error(error: Fault, path: str | os.PathLike[str]) -> StoreError:
    """The error to raise in the place of `error`, which came from the file at `path`."""
    name = os.fspath(path).rpartition("/")[2]
    match error:
        case apsw.BusyError() | apsw.LockedError():
            return StoreBusy(
                f"The file {name} was locked by another program for too long. "
                "Nothing was stored; what waits is kept. Try again."
            )
        case apsw.FullError():
            return _full(name)
        case apsw.IOError() if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
            return _full(name)
        case apsw.CorruptError() | apsw.NotADBError() | apsw.FormatError() | UnicodeDecodeError():
            return StoreDamaged(
                f"The file {name} cannot be read: {error}. Nothing was stored; it was left alone. "
                "Run: outbox doctor"
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


def _full(name: str) -> StoreFull:
    return StoreFull(
        f"The disk is full ({name}). Nothing was stored; what waits is kept and goes on being delivered. "
        "Make space."
    )
