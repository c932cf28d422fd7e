"""One open outbox file: checks at opening, reading, transactions. What the rows mean is decided elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import apsw

from outbox.bounds import Bounds
from outbox.errors import StoreBusy, StoreClosed, StoreDamaged, StoreError, StoreHeld, StoreTooNew
from outbox.event import Limits
from outbox.store import schema, statements
from outbox.store.directory import StateDirectory, file_name, is_regular
from outbox.store.faults import FAULTS, store_error
from outbox.store.locks import lifecycle_byte, owners_lock, sender_byte
from outbox.store.rules import decode_rules, encode_rules

BUSY_TIMEOUT_MS = 5_000
_JOURNAL_LIMIT_BYTES = 8 * 1024 * 1024
_FREE_PAGES_KEPT = 2_000
_VACUUM_STEPS = 64


class Transaction:
    """`with box.transaction(...)`; keeps nothing of its own, so that a commit makes no objects.

    All is done in two methods of one class because an interrupt (Ctrl-C) may come between any two calls.
    """

    __slots__ = ("_begin", "_box", "_synchronous")

    def __init__(self, box: OutboxFile, begin: str, synchronous: str) -> None:
        """`synchronous` is "" for a transaction that only reads."""
        self._box = box
        self._begin = begin
        self._synchronous = synchronous

    def __enter__(self) -> None:
        box = self._box
        box._mutex.acquire()
        if box._in_transaction:
            box._mutex.release()
            raise StoreBusy(
                f"The outbox of {box.agent!r} is in the middle of a commit in this very thread (a signal "
                "handler?). Nothing was stored; try again when it is over."
            )
        try:
            box._in_transaction = True
            box._live()
            if self._synchronous:
                box._take_file(self._synchronous)
            box.execute(self._begin)
        except BaseException as error:
            box._leave()
            if isinstance(error, FAULTS):
                raise store_error(error, box.path) from error
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        box = self._box
        try:
            if error is None:
                box.execute("COMMIT")
        except FAULTS as failed:
            error = failed
            raise store_error(failed, box.path) from failed
        finally:
            box._leave()
            if isinstance(error, apsw.FullError):
                box.start_log_anew()
        if isinstance(error, FAULTS):
            raise store_error(error, box.path) from error


class OutboxFile:
    """The open file of one agent's outbox. Threads may share it; transactions take turns.

    Made by `open_outbox`.
    """

    def __init__(
        self,
        state: StateDirectory,
        path: Path,
        connection: apsw.Connection,
        *,
        inode: tuple[int, int] | None,
        busy_timeout_ms: int,
    ) -> None:
        """Wrap an open connection whose file was checked; raises StoreDamaged when it is another agent's."""
        self.state = state
        self.path = path
        self.folder = str(path.parent)
        self._db = connection
        self.execute = connection.cursor().execute  # for statements without rows, inside a transaction
        self._busy_timeout_ms = busy_timeout_ms
        self._mutex = threading.RLock()
        self._in_transaction = False
        self._holds_file = False
        self._synchronous = ""
        self._abandoned = False  # by a fork: the connection is the parent's
        self._closed = False
        self._name = str(path)
        self._inode = inode
        self._locks = owners_lock(state.path)
        self._lifecycle = lifecycle_byte(path.name)
        self._sender = sender_byte(path.name)
        self._durable = Transaction(self, "BEGIN IMMEDIATE", "FULL")
        self._light = Transaction(self, "BEGIN IMMEDIATE", "NORMAL")
        self._snapshot = Transaction(self, "BEGIN", "")
        self._rules_text = ""
        self._body_limit: int | None = None
        self.limits, self.bounds = Limits(), Bounds()
        self.agent, self.stream, rules = self.one(statements.READ_IDENTITY)
        if file_name(self.agent) != path.name:
            raise StoreDamaged(
                f"The file {path.name} holds the outbox of {self.agent!r}, whose place is "
                f"{file_name(self.agent)}. It was left alone. Give it its own name again."
            )
        self.learn_rules(rules)
        _open_files.add(self)

    # Reading -----------------------------------------------------------------------------------------------

    def rows(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """All rows of a statement, outside or inside a transaction."""
        with self._mutex:
            try:
                return self._live().execute(sql, args).fetchall()
            except FAULTS as error:
                raise store_error(error, self.path) from error

    def one(self, sql: str, *args: Any) -> tuple[Any, ...]:
        """The only row of a statement; raises StoreDamaged when there is none."""
        row = self.maybe(sql, *args)
        if row is None:
            raise StoreDamaged(f"The file {self.path.name} lacks its own row. Run: outbox doctor")
        return row

    def maybe(self, sql: str, *args: Any) -> tuple[Any, ...] | None:
        """The first row of a statement, or None."""
        with self._mutex:
            try:
                row: tuple[Any, ...] | None = self._live().execute(sql, args).fetchone()
                return row
            except FAULTS as error:
                raise store_error(error, self.path) from error

    def each(self, sql: str, *args: Any) -> Generator[tuple[Any, ...], None, None]:
        """The rows of a statement one by one; only inside a transaction, and read to its end or closed in it."""
        cursor = self._db.execute(sql, args)
        try:
            yield from cursor
        finally:
            cursor.close(force=True)

    def snapshot(self) -> Transaction:
        """Several statements that read the same state of the file."""
        return self._snapshot

    def learn_rules(self, text: str) -> None:
        """Take over rules as they stand in the file; costs nothing when they did not change."""
        if text != self._rules_text:
            self.limits, self.bounds = decode_rules(text)
            self._rules_text = text
            if self._body_limit is not None:
                self.override_body_limit(self._body_limit)

    def override_body_limit(self, max_chars: int) -> None:
        """Cut message bodies at this length (0: never) whatever the rules say, for this producer."""
        self._body_limit = max_chars
        self.limits = dataclasses.replace(self.limits, message_body_max_chars=max_chars or None)

    # Writing -----------------------------------------------------------------------------------------------

    def run(self, sql: str, *args: Any) -> None:
        """Run a statement inside a transaction."""
        self.execute(sql, args)

    def run_many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement for each row, inside a transaction."""
        if rows:
            self._db.executemany(sql, rows)

    def transaction(self, *, durable: bool) -> Transaction:
        """One write transaction: all of it or nothing.

        `durable` commits with `synchronous=FULL` (it survives a power cut), otherwise with NORMAL (it survives
        a crash, and a later durable commit covers it); see sqlite.org/pragma.html#pragma_synchronous.

        Entering raises StoreBusy after the busy timeout, and StoreClosed when another file stands in the place of
        the open one; leaving raises StoreFull, StoreDamaged or StoreError when nothing was stored.
        """
        return self._durable if durable else self._light

    def set_rules(self, limits: Limits, bounds: Bounds) -> None:
        """Write the rules that producers follow; nothing happens when they stand there already."""
        text = encode_rules(limits, bounds)
        if text != self.one(statements.READ_RULES)[0]:
            with self.transaction(durable=False):
                self.run(statements.SET_RULES, text)
        self.learn_rules(text)

    def give_space_back(self) -> None:
        """Return free pages to the file system in steps that others can come between, and cut the log.

        Up to 8 MiB stay for what comes next.
        """
        if self.one("PRAGMA freelist_count")[0] <= _FREE_PAGES_KEPT:
            return
        for _ in range(_VACUUM_STEPS):
            with self.transaction(durable=False):
                self._db.execute(f"PRAGMA incremental_vacuum({_FREE_PAGES_KEPT})").fetchall()
            if self.one("PRAGMA freelist_count")[0] <= _FREE_PAGES_KEPT:
                break
        self._checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def start_log_anew(self) -> None:
        """Copy the log into the file, so that the next commit writes over it: a full disk then takes it."""
        self._checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _checkpoint(self, mode: int) -> None:
        """Do it now, as far as nobody is in the way; what cannot be done now is done by a later commit."""
        with self._mutex:
            if self.closed:
                return
            self._db.set_busy_timeout(0)
            with contextlib.suppress(apsw.Error):
                self._db.wal_checkpoint(mode=mode)
            self._db.set_busy_timeout(self._busy_timeout_ms)

    # Transactions from inside ------------------------------------------------------------------------------

    def _live(self) -> apsw.Connection:
        if self._closed or self._abandoned:
            raise StoreClosed(f"The outbox {self.path.name} is closed. Nothing was stored.")
        return self._db

    def _take_file(self, synchronous: str) -> None:
        """Make sure that the path names the open file, and goes on doing so until the transaction is over."""
        if not self._locks.take_shared(self._lifecycle, self._busy_timeout_ms / 1_000):
            raise StoreBusy(
                f"The outbox of {self.agent!r} is just being replaced. Nothing was stored; try again."
            )
        self._holds_file = True
        if self.was_replaced:
            raise StoreClosed(f"The outbox file of {self.agent!r} was replaced; it has to be opened anew.")
        if synchronous != self._synchronous:
            self._db.execute(f"PRAGMA synchronous={synchronous}")
            self._synchronous = synchronous

    def _leave(self) -> None:
        """End a transaction; one that is still open here is rolled back."""
        try:
            if not self._closed and self._db.in_transaction:
                with contextlib.suppress(apsw.Error):
                    self._db.execute("ROLLBACK")
        finally:
            if self._holds_file:
                self._holds_file = False
                self._locks.give_shared(self._lifecycle)
            self._in_transaction = False
            self._mutex.release()

    # Ownership ---------------------------------------------------------------------------------------------

    def become_sender(self) -> None:
        """Take the one sender's place of this outbox; raises StoreHeld while another process has it."""
        self._live()
        if not self._locks.try_exclusive(self._sender):
            raise StoreHeld(
                f"Another process delivers the events of {self.agent!r}. Nothing was changed; it goes on there."
            )

    def resign_sender(self) -> None:
        """Give the sender's place back; nothing happens in a forked child, which never had it."""
        if not self._abandoned:
            self._locks.release(self._sender)

    @property
    def has_sender(self) -> bool:
        """Whether some process, this one included, is the sender right now."""
        self._live()
        return self._locks.holds(self._sender) or self._locks.held_elsewhere(self._sender)

    @property
    def was_replaced(self) -> bool:
        """Whether the path no longer names the file that is open."""
        return _inode(self._name) != self._inode

    def close(self, *, checkpoint: bool = False) -> None:
        """Close; a short-lived producer leaves the checkpoint, and its flushes, to the daemon."""
        with self._mutex:
            if self.closed:
                return
            self._closed = True
            if checkpoint:
                self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
            self._db.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or a fork left the connection behind."""
        return self._closed or self._abandoned


# A child must not use, and not even close, its parent's connections (sqlite.org/howtocorrupt.html, 2.7): they are
# kept for good, and what they belonged to counts as closed.
_open_files: WeakSet[OutboxFile] = WeakSet()
_parents_connections: list[apsw.Connection] = []


def _abandon_after_fork() -> None:
    for box in list(_open_files):
        if not box.closed:
            _parents_connections.append(box._db)  # noqa: SLF001 - the other half of OutboxFile
        box._abandoned, box._mutex = True, threading.RLock()  # noqa: SLF001 - a thread of the parent may hold it
    _open_files.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)


def open_outbox(state: StateDirectory, path: Path, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> OutboxFile:
    """Open an existing outbox file after checking that it is one, of a version this release knows.

    Raises StoreDamaged (no outbox, or unreadable), StoreTooNew (left untouched), StoreBusy (locked for all of
    `busy_timeout_ms`), StoreError (I/O).
    """
    locks, byte = owners_lock(state.path), lifecycle_byte(path.name)
    if not locks.take_shared(byte, busy_timeout_ms / 1_000):
        raise StoreBusy(f"The file {path.name} is just being replaced. Nothing was stored; try again.")
    try:
        inode = _look_at(path)
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            _prepare(connection, path, busy_timeout_ms)
            box = OutboxFile(state, path, connection, inode=inode, busy_timeout_ms=busy_timeout_ms)
            if box.was_replaced:
                raise StoreBusy(f"The file {path.name} was just replaced. Nothing was stored; try again.")
            return box  # noqa: TRY300 - the connection lives on in it
        except BaseException:
            connection.close()
            raise
    except FAULTS as error:
        raise store_error(error, path) from error
    finally:
        locks.give_shared(byte)


def _look_at(path: Path) -> tuple[int, int] | None:
    """Which file it is, before it is opened, so that one that takes its place meanwhile is noticed."""
    if not os.path.lexists(path):
        raise StoreError(f"There is no file {path.name}. Nothing was changed.")
    if not is_regular(path):
        raise StoreError(
            f"{path.name} is no regular file. It was left alone; nothing was stored for this agent."
        )
    if not path.stat().st_size:
        raise StoreDamaged(f"The file {path.name} is empty. It was left alone. Run: outbox doctor")
    return _inode(str(path))


def _prepare(connection: apsw.Connection, path: Path, busy_timeout_ms: int) -> None:
    """Check what the file is before anything is written to it, and set what holds for a connection."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.set_busy_timeout(busy_timeout_ms)
    version = connection.pragma("user_version")
    if connection.pragma("application_id") != schema.APPLICATION_ID or version < 1:
        raise StoreDamaged(f"The file {path.name} is no outbox. It was left alone. Run: outbox doctor")
    if version > schema.VERSION:
        raise StoreTooNew(
            f"The file {path.name} was written by a newer release (format {version}; this one knows "
            f"{schema.VERSION}). It was not touched. Upgrade relay-outbox to read it."
        )
    if connection.pragma("journal_mode") != "wal" and connection.pragma("journal_mode", "wal") != "wal":
        raise StoreError(
            f"The file {path.name} cannot have a write-ahead log, without which events are not safe. "
            "Nothing was stored. Move the state directory to a local file system."
        )
    connection.pragma("journal_size_limit", _JOURNAL_LIMIT_BYTES)


def _inode(name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_dev, status.st_ino
