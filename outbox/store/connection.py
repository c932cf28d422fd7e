"""The connection to one outbox file: whose turn it is, what a transaction is, what becomes of it in a fork.

What stands in the file is not known here.
"""

from __future__ import annotations

import os
import time
from _thread import RLock  # what threading.RLock is; all of threading takes a hook a millisecond to load
from collections.abc import Callable, Generator
from types import TracebackType
from weakref import WeakSet

import apsw

from outbox.errors import StoreBusy, StoreClosed, StoreDamaged, StoreError, StoreFull
from outbox.store.faults import FAULTS, is_write_fault, store_error
from outbox.store.locks import OwnersLock, lifecycle_byte

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

Inode = tuple[int, int]

_LONGEST_PAUSE_MS = 4
_CHECKPOINT_PAGES = 1_000
_LOG_LEFT_BYTES = 1024 * 1024


class Connection:
    """Reads and transactions of one file. Threads may share it; transactions take turns.

    Every write transaction holds the file's lifecycle byte shared, and begins only while the path still names
    the open file: whoever replaces the file holds that byte exclusively. `file` is its path as text, `name`
    what it is called in its folder. While `suspect_mark` is there, a write or a flush has failed, and the log
    was not renewed since.
    """

    def __init__(self, path: str | os.PathLike[str], locks: OwnersLock, busy_timeout_ms: int) -> None:
        """Open the file, which must be there; nothing is read yet. Raises apsw.Error."""
        self.file = os.fspath(path)
        folder, slash, self.name = self.file.rpartition("/")
        self.suspect_mark = f"{folder}{slash}.suspect-{self.name}"
        self.locks = locks
        self.mutex = RLock()
        self.in_transaction = False
        self._inode = inode_of(self.file)
        self.db = apsw.Connection(self.file, flags=apsw.SQLITE_OPEN_READWRITE)
        self.db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.db.set_busy_handler(self._wait_turn)
        self.checkpoint_pages = _CHECKPOINT_PAGES
        self.db.set_wal_hook(self._committed)
        # Inside a transaction two cursors serve: to make one costs as much as a small statement.
        self.execute = self.db.cursor().execute
        self._ask = self.db.cursor().execute
        self._busy_timeout_ms = busy_timeout_ms
        self._busy_until = 0.0
        self._lifecycle = lifecycle_byte(self.name)
        self._holds_file = False
        self._synchronous = ""
        self._log_is_suspect = os.path.lexists(self.suspect_mark)
        self._closed = False
        self._durable = Transaction(self, "BEGIN IMMEDIATE", "FULL", makes_way=False)
        self._way_out = Transaction(self, "BEGIN IMMEDIATE", "FULL", makes_way=True)
        self._light = Transaction(self, "BEGIN IMMEDIATE", "NORMAL", makes_way=True)
        self._snapshot = Transaction(self, "BEGIN", "", makes_way=False)
        with _forking:
            _connections.add(self)

    # Reading -----------------------------------------------------------------------------------------------

    def rows(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """All rows of a statement, outside or inside a transaction; raises StoreError."""
        with self.mutex:
            self.require_open()
            try:
                return self.db.execute(sql, args).fetchall()
            except FAULTS as error:
                raise store_error(error, self.file) from error

    def one(self, sql: str, *args: Any) -> tuple[Any, ...]:
        """The only row of a statement; raises StoreDamaged when there is none."""
        row = self.maybe(sql, *args)
        if row is None:
            raise StoreDamaged(f"The file {self.name} lacks its own row. Run: outbox doctor")
        return row

    def maybe(self, sql: str, *args: Any) -> tuple[Any, ...] | None:
        """The first row of a statement, or None."""
        rows = self.rows(sql, *args)
        return rows[0] if rows else None

    def each(self, sql: str, *args: Any) -> Generator[tuple[Any, ...], None, None]:
        """The rows of a statement one by one; inside a transaction, and read to its end or closed in it."""
        cursor = self.db.execute(sql, args)
        try:
            yield from cursor
        finally:
            cursor.close(force=True)

    def snapshot(self) -> Transaction:
        """Several statements that read the same state of the file."""
        return self._snapshot

    # Writing -----------------------------------------------------------------------------------------------

    def transaction(self, *, durable: bool, makes_way: bool = False) -> Transaction:
        """One write transaction: all of it or nothing.

        `durable` commits with `synchronous=FULL` (it survives a power cut), otherwise with NORMAL (it
        survives a crash, and a later durable commit covers it; sqlite.org/pragma.html#pragma_synchronous).
        With `makes_way`, as in all that are not durable, a full disk is made to take the next (`make_way`).

        Entering raises StoreBusy after the busy timeout, and StoreClosed when another file stands in the
        place of the open one; leaving raises StoreFull, StoreDamaged or StoreError when nothing was stored.
        """
        if not durable:
            return self._light
        return self._way_out if makes_way else self._durable

    def make_way(self) -> None:
        """The disk is full: do what can be done so that the next commit of a delivery fits on it."""
        self.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def ask(self, sql: str) -> tuple[Any, ...]:
        """`one`, for the way of every event: inside a transaction."""
        rows: list[tuple[Any, ...]] = self._ask(sql).fetchall()
        return rows[0] if rows else self.one(sql)

    def run(self, sql: str, *args: Any) -> None:
        """Run a statement inside a transaction."""
        self.execute(sql, args)

    def run_many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement for each row, inside a transaction."""
        if rows:
            self.db.executemany(sql, rows)

    def checkpoint(self, mode: int) -> None:
        """Copy the log into the file as far as nobody is in the way; the rest is left to a later commit.

        After a whole one the next commit writes the log anew from its start.
        """
        with self.mutex:
            if self._closed:
                return
            try:
                self.db.set_busy_handler(None)
                self.db.wal_checkpoint(mode=mode)
            except apsw.Error as error:
                if is_write_fault(error):
                    self._suspect_log()
            finally:
                self.db.set_busy_handler(self._wait_turn)

    # For transactions --------------------------------------------------------------------------------------

    def _committed(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        """What SQLite would do by itself after a commit, but would keep to itself when it fails."""
        if 0 < self.checkpoint_pages <= pages:
            self.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        return apsw.SQLITE_OK

    def distrust_log(self) -> None:
        """A write or a flush failed: nothing is stored any more until the log is renewed (renewal.py).

        It is tried at once, so that nobody finds in the log what was refused.
        """
        self._suspect_log()
        try:
            with self._durable:
                pass
        except StoreError:
            return  # the next one who wants to store something tries again, and is told

    def _suspect_log(self) -> None:
        """Whoever opens the file after this process ends must know, too; after a power cut nobody need.

        Others that have it open get the fault from their own next flush (fsync(2), EIO, since Linux 4.13).
        """
        self._log_is_suspect = True
        try:
            os.close(os.open(self.suspect_mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError:
            return  # no inode, or a read-only disk: then only this process knows

    def _wait_turn(self, tries: int) -> bool:
        """Whether to ask once more for a lock that another process has, after a pause.

        SQLite's own pauses grow to 100 ms: among many producers those who wait longest would meet the short
        moments between two commits least often, and be refused in the end.
        """
        now = time.monotonic()
        if tries == 0:
            self._busy_until = now + self._busy_timeout_ms / 1_000
        if now >= self._busy_until:
            return False
        jitter_ms = time.monotonic_ns() % 1_000 / 1_000  # `random` is dear to import for a hook
        time.sleep((0.5 + jitter_ms) * min(_LONGEST_PAUSE_MS, 1 + tries // 8) / 1_000)
        return True

    def require_open(self) -> None:
        """Raise StoreClosed after `close`, and in a forked child."""
        if self._closed:
            raise StoreClosed(f"The outbox {self.name} is closed. Nothing was stored.")

    def take_file(self, synchronous: str) -> None:
        """Make sure that the path names the open file, and goes on doing so until `leave`."""
        if not self.locks.take_shared(self._lifecycle, self._busy_timeout_ms / 1_000):
            raise StoreBusy(f"The file {self.name} is just being replaced. Nothing was stored; try again.")
        self._holds_file = True
        if self.was_replaced:
            raise StoreClosed(f"The file {self.name} was replaced; it has to be opened anew.")
        if self._log_is_suspect:
            from outbox.store.renewal import renew_log  # noqa: PLC0415 - only a failing disk needs it

            self._synchronous = ""
            renew_log(self)
            self._log_is_suspect = False
        if synchronous != self._synchronous:
            self.db.execute(f"PRAGMA synchronous={synchronous}")
            self._synchronous = synchronous

    def leave(self) -> None:
        """End a transaction; one that is still open here is rolled back."""
        try:
            if not self._closed and self.db.in_transaction:
                _if_possible(lambda: self.db.execute("ROLLBACK"))
        finally:
            if self._holds_file:
                self._holds_file = False
                self.locks.give_shared(self._lifecycle)
            self.in_transaction = False
            self.mutex.release()

    # Life --------------------------------------------------------------------------------------------------

    def log_bytes(self) -> int:
        """How large the write-ahead log is, or was before it began anew."""
        try:
            return os.stat(f"{self.file}-wal").st_size  # noqa: PTH116 - as in `inode_of`
        except OSError:
            return 0

    @property
    def path(self) -> Path:
        """Where the file lies."""
        from pathlib import Path  # noqa: PLC0415 - whoever only appends does without

        return Path(self.file)

    @property
    def was_replaced(self) -> bool:
        """Whether the path no longer names the file that is open."""
        return inode_of(self.file) != self._inode

    @property
    def system_errno(self) -> int:
        """What the system said to the newest call of SQLite that failed."""
        return 0 if self._closed else self.db.system_errno

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child and the connection was its parent's."""
        return self._closed

    def close(self, *, checkpoint: bool = False) -> None:
        """Close; a short-lived producer leaves the checkpoint, and its flushes, to the daemon.

        But where no other process has the file open, whoever opens it next has to read all of the log, and
        takes none of it for copied yet: it would never begin anew. So it is left at 1 MiB at most.

        SQLite removes the log of a file that it checkpoints at its end, by name: it may not do so while the
        file is replaced, or it would be the log of the new one.
        """
        with self.mutex:
            if self._closed:
                return
            wanted = checkpoint or self.log_bytes() > _LOG_LEFT_BYTES
            may_checkpoint = wanted and self.locks.take_shared(self._lifecycle, 0)
            try:
                if may_checkpoint and not self.was_replaced:
                    self._checkpoint_at_close()
                self._closed = True
                self.db.close()
            finally:
                if may_checkpoint:
                    self.locks.give_shared(self._lifecycle)

    def leave_as_it_is(self) -> None:
        """Close a file that is not what it should be: its log is copied nowhere, however long it is."""
        with self.mutex:
            self._closed = True
            self.db.close()

    def _checkpoint_at_close(self) -> None:
        """SQLite's own checkpoint at the end does not tell when it fails: it finds nothing left to do."""
        self.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        if self._log_is_suspect:
            self.distrust_log()
        if not self._log_is_suspect:
            self.db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)

    def leave_to_parent(self) -> None:
        """Close the child's copy; the parent's connection and its locks are not affected."""
        self._closed = True
        _if_possible(self.db.close)
        self.mutex = RLock()


class Transaction:
    """`with box.transaction(...)`; keeps nothing of its own, so that a commit makes no objects.

    What opens it and what cleans up stand in one method, since an interrupt (Ctrl-C) may come between any two
    calls.
    """

    __slots__ = ("_begin", "_connection", "_makes_way", "_synchronous")

    def __init__(self, connection: Connection, begin: str, synchronous: str, *, makes_way: bool) -> None:
        """`synchronous` is "" for a transaction that only reads."""
        self._connection = connection
        self._begin = begin
        self._synchronous = synchronous
        self._makes_way = makes_way

    def __enter__(self) -> None:
        connection = self._connection
        connection.mutex.acquire()
        if connection.in_transaction:
            connection.mutex.release()
            raise StoreBusy(
                f"The file {connection.name} is in the middle of a commit of this very thread (from a "
                "signal handler?). Nothing was stored; try again when it is over."
            )
        try:
            connection.in_transaction = True
            connection.require_open()
            if self._synchronous:
                connection.take_file(self._synchronous)
            connection.execute(self._begin)
        except BaseException as error:
            connection.leave()
            if isinstance(error, FAULTS):
                raise store_error(error, connection.file, connection.system_errno) from error
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, system_errno = self._connection, 0
        try:
            if error is None:
                connection.execute("COMMIT")
        except FAULTS as failed:
            error = failed
        finally:
            if error is not None:
                system_errno = connection.system_errno
            connection.leave()
        if isinstance(error, FAULTS):
            told = store_error(error, connection.file, system_errno)
            if self._synchronous and is_write_fault(error):
                connection.distrust_log()
            if self._makes_way and isinstance(told, StoreFull):
                connection.make_way()
            raise told from error


def _if_possible(act: Callable[[], object]) -> None:
    """Do what nothing depends on, whatever SQLite says to it."""
    try:
        act()
    except apsw.Error:
        return


def inode_of(name: str) -> Inode | None:
    """Which file a path names now; None when there is none."""
    try:
        status = os.stat(name)  # noqa: PTH116 - once a commit: a Path would cost as much as the call itself
    except OSError:
        return None
    return status.st_dev, status.st_ino


# Forks. SQLite keeps one table of locks for each file in a process. A child that inherited it would take
# locks for held that only its parent holds, and lose its events when another process removes the log. So a
# fork waits until no thread is inside SQLite; the child closes its copies, which empties the table.

_connections: WeakSet[Connection] = WeakSet()
_forking = RLock()
_held: list[Connection] = []


def _before_fork() -> None:
    _forking.acquire()
    for connection in list(_connections):
        connection.mutex.acquire()
        _held.append(connection)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().mutex.release()
    _forking.release()


def _after_fork_in_child() -> None:
    global _forking  # noqa: PLW0603 - the parent's belongs to a thread that goes on there
    for connection in _held:
        connection.leave_to_parent()
    _held.clear()
    _connections.clear()
    _forking = RLock()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
