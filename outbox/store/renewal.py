"""What is done after a disk failed to write or to flush, before anything else is stored in the file.

Linux takes what a failed flush did not write for written: the next flush succeeds without it (fsync(2);
lwn.net/Articles/752063). An event accepted on top of that would be gone after a power cut.
"""

from __future__ import annotations

import os

from outbox.errors import StoreDamaged, StoreError, StoreFull
from outbox.store import statements as sql
from outbox.store.faults import FAULTS, NO_ROOM, store_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outbox.store.connection import Connection

_CHUNK_BYTES = 1024 * 1024


def renew_log(connection: Connection) -> None:
    """Write and flush the whole log once more, and read the file from its first page to its last.

    First a commit of its own takes the place of the one that failed: whoever reads the log after a crash must
    not find what was refused. Nobody else commits meanwhile, and the file's lifecycle byte is held.
    Raises StoreError when the disk still fails, StoreDamaged when the file is not whole.
    """
    db = connection.db
    try:
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        db.execute(sql.ADD_TOTAL, ("log_renewed", 1))
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        _write_again(f"{connection.file}-wal")
        _remove(connection.suspect_mark)  # to fail since then takes the lock that is held here
        db.execute("ROLLBACK")
        db.release_memory()  # else what is read would come from there
        ((verdict, *_),) = db.execute("PRAGMA quick_check(1)").fetchall()
    except FAULTS as error:
        raise store_error(error, connection.file, db.system_errno) from error
    except OSError as error:
        kind = StoreFull if error.errno in NO_ROOM else StoreError
        raise kind(
            f"The disk of {connection.name} does not keep what is written: {error.strerror}. Nothing was "
            "stored; what waits is kept. Look at the disk and at the kernel's log; it is tried again."
        ) from error
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
    if verdict != "ok":
        raise StoreDamaged(f"The file {connection.name} is damaged: {verdict}. Run: outbox doctor")


def _remove(mark: str) -> None:
    try:
        os.unlink(mark)  # noqa: PTH108 - the paths here are texts
    except OSError:
        return


def _write_again(log: str) -> None:
    """The same bytes at the same places: nobody who reads meanwhile sees a difference."""
    fd = os.open(log, os.O_RDWR | os.O_CLOEXEC)
    try:
        offset = 0
        while chunk := os.pread(fd, _CHUNK_BYTES, offset):
            offset += os.pwrite(fd, chunk, offset)
        os.fsync(fd)
    finally:
        os.close(fd)
