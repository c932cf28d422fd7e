"""One outbox file: made, opened, checked, and its transactions. What the rows mean is decided elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from outbox.bounds import Bounds
from outbox.errors import (
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreHeld,
    StoreTooNew,
)
from outbox.event import Limits
from outbox.store import schema, statements
from outbox.store.directory import StateDirectory, is_regular, sync_folder
from outbox.store.locks import lifecycle_byte, owners_lock, sender_byte

BUSY_TIMEOUT_MS = 5_000
_JOURNAL_LIMIT_BYTES = 8 * 1024 * 1024

# A child must not use, and not even close, its parent's connections: it leaves them alone and opens its own.
_process_generation = 0
_abandoned: list[apsw.Connection] = []


def _count_fork() -> None:
    global _process_generation  # noqa: PLW0603 - one number for each process
    _process_generation += 1


os.register_at_fork(after_in_child=_count_fork)


def encode_rules(limits: Limits, bounds: Bounds) -> str:
    """The rules of a producer as they stand in the file."""
    return json.dumps(
        {
            "maxPayloadBytes": limits.max_payload_bytes,
            "maxNesting": limits.max_nesting,
            "messageBodyMaxChars": limits.message_body_max_chars,
            "customKinds": list(limits.custom_kinds),
            "keyScope": limits.key_scope,
            "bounds": bounds.to_json(),
        },
        separators=(",", ":"),
    )


def decode_rules(text: str) -> tuple[Limits, Bounds]:
    """The opposite of `encode_rules`."""
    rules = json.loads(text)
    limits = Limits(
        max_payload_bytes=rules["maxPayloadBytes"],
        max_nesting=rules["maxNesting"],
        message_body_max_chars=rules["messageBodyMaxChars"],
        custom_kinds=tuple(rules["customKinds"]),
        key_scope=rules["keyScope"],
    )
    return limits, Bounds.from_json(rules["bounds"])


class OutboxFile:
    """The open file of one agent's outbox. Threads may share it; transactions take turns.

    Made by `open_outbox` or `create_outbox`.
    """

    def __init__(self, state: StateDirectory, path: Path, connection: apsw.Connection) -> None:
        """Wrap an open connection whose file was checked."""
        self.state = state
        self.path = path
        self._db = connection
        self._mutex = threading.RLock()
        self._synchronous = ""
        self._closed = False
        self._born_in = _process_generation
        self._rules_text = ""
        self._body_limit: int | None = None
        row = self.one(statements.READ_OUTBOX)
        self.agent: str = row[0]
        self.stream: str = row[1]
        self.limits, self.bounds = Limits(), Bounds()
        self.learn_rules(row[3])
        self._inode = os.stat(path).st_ino
        self._lifecycle = lifecycle_byte(self.agent)
        self._sender = sender_byte(self.agent)
        self._locks = owners_lock(state.path)

    # Reading -----------------------------------------------------------------------------------------------

    def rows(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        """All rows of a statement, outside or inside a transaction."""
        with self._mutex, self._translated():
            return list(self._cursor().execute(sql, args))

    def one(self, sql: str, *args: Any) -> tuple[Any, ...]:
        """The only row of a statement."""
        row = self.maybe(sql, *args)
        if row is None:
            raise StoreDamaged(f"The file {self.path.name} lacks its own row. Run: outbox doctor")
        return row

    def maybe(self, sql: str, *args: Any) -> tuple[Any, ...] | None:
        """The first row of a statement, or None."""
        with self._mutex, self._translated():
            row: tuple[Any, ...] | None = next(self._cursor().execute(sql, args), None)
            return row

    def each(self, sql: str, *args: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a statement one by one; only inside a transaction."""
        return self._cursor().execute(sql, args)

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
        self._db.execute(sql, args)

    def run_many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement for each row, inside a transaction."""
        if rows:
            self._db.executemany(sql, rows)

    @contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        """One write transaction: all of it or nothing.

        `durable` commits with `synchronous=FULL` (it survives a power cut), otherwise with NORMAL (it survives
        a crash, and a later durable commit covers it). Raises StoreBusy, StoreFull, StoreDamaged, StoreError.
        """
        with self._mutex, self._translated(), self._guarded():
            self._set_synchronous("FULL" if durable else "NORMAL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lifecycle byte shared, and make sure that the path still names the file that is open."""
        self._cursor()
        with self._locks.shared(self._lifecycle) as held:
            if not held:
                raise StoreBusy(f"The outbox of {self.agent!r} is just being replaced. Nothing was stored.")
            if self.was_replaced:
                raise StoreClosed(f"The outbox file of {self.agent!r} was replaced; it has to be opened anew.")
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except apsw.Error as error:
            raise _store_error(error, self.path) from error

    def _set_synchronous(self, level: str) -> None:
        if level != self._synchronous:
            self._db.execute(f"PRAGMA synchronous={level}")
            self._synchronous = level

    def _cursor(self) -> apsw.Connection:
        if self._born_in != _process_generation and not self._closed:
            _abandoned.append(self._db)
            self._closed = True
        if self._closed:
            raise StoreClosed(f"The outbox {self.path.name} is closed. Nothing was stored.")
        return self._db

    # Ownership ---------------------------------------------------------------------------------------------

    def become_sender(self) -> None:
        """Take the one sender's place of this outbox; raises StoreHeld while another process has it."""
        if not self._locks.try_exclusive(self._sender):
            raise StoreHeld(
                f"Another process delivers the events of {self.agent!r}. Nothing was changed; it goes on there."
            )

    def resign_sender(self) -> None:
        """Give the sender's place back."""
        self._locks.release(self._sender)

    @property
    def has_sender(self) -> bool:
        """Whether some process, this one included, is the sender right now."""
        return self._locks.holds(self._sender) or self._locks.held_elsewhere(self._sender)

    def set_rules(self, limits: Limits, bounds: Bounds) -> None:
        """Write the rules that producers follow; nothing happens when they stand there already."""
        text = encode_rules(limits, bounds)
        if text != self._rules_text:
            with self.transaction(durable=False):
                self.run(statements.SET_RULES, text)
            self.learn_rules(text)

    def give_space_back(self, pages: int = 2_000) -> None:
        """Return free pages to the file system, a bounded number at a time, and cut the log."""
        with self._mutex, self._translated():
            if self.one("PRAGMA freelist_count")[0] > pages:
                self._cursor().execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    @property
    def was_replaced(self) -> bool:
        """Whether the path no longer names the file that is open."""
        try:
            return os.stat(self.path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def close(self, *, checkpoint: bool = False) -> None:
        """Close; a short-lived producer leaves the checkpoint, and its flushes, to the daemon."""
        with self._mutex:
            if self.closed:
                return
            self._closed = True
            self._db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, not checkpoint)
            self._db.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or a fork left the connection behind."""
        return self._closed or self._born_in != _process_generation


def open_outbox(state: StateDirectory, path: Path, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> OutboxFile:
    """Open an existing outbox file after checking that it is one, of a version this release knows.

    Raises StoreDamaged (no outbox, or unreadable), StoreTooNew (left untouched), StoreError (I/O), StoreBusy.
    """
    if not is_regular(path):
        raise StoreError(f"{path.name} is no regular file. It was left alone; nothing was stored for this agent.")
    if os.stat(path).st_size == 0:
        raise StoreDamaged(f"The file {path.name} is empty. It was left alone. Run: outbox doctor")
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise _store_error(error, path) from error
    try:
        connection.set_busy_timeout(busy_timeout_ms)
        _check(connection, path)
        connection.execute(f"PRAGMA journal_size_limit={_JOURNAL_LIMIT_BYTES}").fetchall()
        return OutboxFile(state, path, connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, apsw.Error):
            raise _store_error(error, path) from error
        raise


def create_outbox(state: StateDirectory, agent: str, limits: Limits, bounds: Bounds, now_ms: int) -> Path:
    """Make an agent's outbox file whole under another name, then give it its own; returns the path.

    A file that stands there already, also one that another process made in the meantime, is left as it is.
    """
    path = state.outbox_path(agent)
    if os.path.lexists(path):
        return path
    stream = str(uuid.uuid4())
    draft = state.agents / f".new-{stream}.sqlite"
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        _fill(draft, agent, stream, encode_rules(limits, bounds), now_ms)
        try:
            os.link(draft, path)
        except FileExistsError:
            return path
        sync_folder(state.agents)
    except apsw.Error as error:
        raise _store_error(error, path) from error
    except OSError as error:
        raise StoreFull(
            f"The outbox file of {agent!r} cannot be made: {error.strerror}. Nothing was stored."
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def _fill(draft: Path, agent: str, stream: str, rules: str, now_ms: int) -> None:
    connection = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL").fetchall()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN")
        connection.execute(schema.CREATE)
        connection.execute(
            "INSERT INTO outbox (id, agent, stream, created_at_ms, rules) VALUES (1, ?, ?, ?, ?)",
            (agent, stream, now_ms, rules),
        )
        connection.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={schema.VERSION}")
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
    finally:
        connection.close()


def _check(connection: apsw.Connection, path: Path) -> None:
    version = connection.pragma("user_version")
    if connection.pragma("application_id") != schema.APPLICATION_ID:
        raise StoreDamaged(f"The file {path.name} is no outbox. It was left alone. Run: outbox doctor")
    if version > schema.VERSION:
        raise StoreTooNew(
            f"The file {path.name} was written by a newer release (format {version}; this one knows "
            f"{schema.VERSION}). It was not touched. Upgrade relay-outbox to read it."
        )


def _store_error(error: apsw.Error, path: Path) -> StoreError:
    if isinstance(error, (apsw.BusyError, apsw.LockedError)):
        return StoreBusy(
            f"The file {path.name} was locked by another program for too long. Nothing was stored; try again."
        )
    if isinstance(error, apsw.FullError):
        return StoreFull(f"The disk is full ({path.name}). Nothing was stored; what waits is kept.")
    if isinstance(error, (apsw.CorruptError, apsw.NotADBError, apsw.FormatError)):
        return StoreDamaged(f"The file {path.name} cannot be read: {error}. Nothing was stored.")
    if isinstance(error, apsw.ConnectionClosedError):
        return StoreClosed(f"The outbox {path.name} is closed. Nothing was stored.")
    return StoreError(f"The file {path.name} could not be used: {error}. Nothing was stored.")
