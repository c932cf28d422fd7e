"""One open outbox file: the checks at opening, its rules, its sender. What rows mean is decided elsewhere."""

from __future__ import annotations

import os
import stat

import apsw

from outbox.bounds import Bounds
from outbox.errors import StoreBusy, StoreDamaged, StoreError, StoreHeld, StoreTooNew
from outbox.event import Limits
from outbox.store import schema, statements
from outbox.store.aside import is_being_replaced
from outbox.store.connection import Connection
from outbox.store.directory import StateDirectory, file_name
from outbox.store.faults import FAULTS, Misplaced, store_error
from outbox.store.group_commit import GroupCommit
from outbox.store.locks import OwnersLock, lifecycle_byte, owners_lock, sender_byte
from outbox.store.own_row import READ_NUMBERS, numbers_make_sense
from outbox.store.rules import decode_rules, encode_rules

BUSY_TIMEOUT_MS = 5_000
_JOURNAL_LIMIT_BYTES = 8 * 1024 * 1024
_FREE_PAGES_KEPT = 256  # 1 MiB
_PAGES_A_STEP = 2_000
_MOST_STEPS = 64
_LOG_KEPT_BYTES = 1024 * 1024


class OutboxFile(Connection):
    """The open file of one agent's outbox. Made by `open_outbox`."""

    def __init__(
        self, state: StateDirectory, path: str | os.PathLike[str], locks: OwnersLock, busy_timeout_ms: int
    ) -> None:
        """Open a file that is there, and check what it is before anything is written to it."""
        super().__init__(path, locks, busy_timeout_ms)
        self.state = state
        self.folder = self.file.rpartition("/")[0] or "."
        self._sender = sender_byte(self.name)
        self._rules_text = ""
        self._body_limit: int | None = None
        self.together = GroupCommit()
        self.limits, self.bounds = Limits(), Bounds()
        try:
            with self.mutex:
                version = self._check()
                if version < schema.VERSION:
                    self._migrate(version)
                self.agent, self.stream = self._identity()
        except BaseException:
            self.leave_as_it_is()
            raise

    def _check(self) -> int:
        db, name = self.db, self.name
        version = db.pragma("user_version")
        if db.pragma("application_id") != schema.APPLICATION_ID or version < 1:
            raise StoreDamaged(f"The file {name} is no outbox. It was left alone. Run: outbox doctor")
        if version > schema.HIGHEST_VERSION:
            raise StoreDamaged(
                f"The file {name} is damaged: it names the format {version}, which no release has. "
                "It was left alone. Run: outbox doctor"
            )
        if version > schema.VERSION:
            raise StoreTooNew(
                f"The file {name} was written by a newer release (format {version}; this one knows "
                f"{schema.VERSION}). It was not touched. Upgrade relay-outbox to read it."
            )
        if db.pragma("journal_mode") != "wal" and db.pragma("journal_mode", "wal") != "wal":
            raise StoreError(
                f"The file {name} cannot have a write-ahead log, without which events are not safe. "
                "Nothing was stored. Move the state directory to a local file system."
            )
        db.pragma("journal_size_limit", _JOURNAL_LIMIT_BYTES)
        return int(version)

    def _migrate(self, version: int) -> None:
        """Bring a file of an older release to this one's version, a commit a step; others may be faster."""
        for number in range(version, schema.VERSION):
            with self.transaction(durable=True, makes_way=True):
                if self.db.pragma("user_version") == number:
                    self._step(number)

    def _step(self, number: int) -> None:
        try:
            self.run(schema.MIGRATIONS[number - 1])
        except apsw.SQLError as error:  # of the step; no reason to set the file aside
            raise StoreError(
                f"The file {self.name} could not be brought to format {number + 1}: {error}. It was left as "
                "it was. Go back to the release before."
            ) from error
        self.run(f"PRAGMA user_version = {number + 1}")

    def _identity(self) -> tuple[str, str]:
        agent, stream, rules = self.one(statements.READ_IDENTITY)
        if not (type(agent) is type(stream) is type(rules) is str):
            raise StoreDamaged(
                f"The file {self.name} is damaged: it does not tell whose it is. It was left alone. "
                "Run: outbox doctor"
            )
        if file_name(agent) != self.name:
            raise Misplaced(self.name, agent, file_name(agent))
        if self.was_replaced:
            raise StoreBusy(f"The file {self.name} was just replaced. Nothing was stored; try again.")
        if not numbers_make_sense(self.one(READ_NUMBERS)):
            raise StoreDamaged(
                f"The file {self.name} is damaged: the numbers in its own row cannot be true. Nothing was "
                "stored; it was left alone. Run: outbox doctor"
            )
        self.learn_rules(rules)
        return agent, stream

    # Rules -------------------------------------------------------------------------------------------------

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
        self.limits = self.limits._replace(message_body_max_chars=max_chars or None)

    def set_rules(self, limits: Limits, bounds: Bounds) -> None:
        """Write the rules that producers follow; nothing happens when they stand there already."""
        text = encode_rules(limits, bounds)
        if text != self.one(statements.READ_RULES)[0]:
            with self.transaction(durable=False):
                self.run(statements.SET_RULES, text)
        self.learn_rules(text)

    # The sender --------------------------------------------------------------------------------------------

    def become_sender(self) -> None:
        """Take the one sender's place of this outbox.

        Raises StoreHeld while another process has it, StoreDamaged when its tables are not as they were made.
        """
        self.require_open()
        if not self._has_our_tables():
            raise StoreDamaged(
                f"The file {self.name} is damaged: its tables are not those of an outbox. It was left alone. "
                "Run: outbox doctor"
            )
        if not self.locks.try_exclusive(self._sender):
            raise StoreHeld(
                f"Another process delivers the events of {self.agent!r}. Nothing was changed; "
                "it goes on there."
            )

    def _has_our_tables(self) -> bool:
        from outbox.store.own_tables import has_our_tables  # noqa: PLC0415 - for senders; every hook would pay

        try:
            return has_our_tables(self.db)
        except FAULTS as error:
            raise store_error(error, self.path) from error

    def resign_sender(self) -> None:
        """Give the sender's place back; nothing happens in a forked child, which never had it."""
        if self.locks.holds(self._sender):
            self.locks.release(self._sender)

    @property
    def has_sender(self) -> bool:
        """Whether some process, this one included, is the sender right now."""
        self.require_open()
        return self.locks.holds(self._sender) or self.locks.held_elsewhere(self._sender)

    # Space -------------------------------------------------------------------------------------------------

    def give_space_back(self) -> None:
        """Return free pages to the file system in steps that others can come between, and cut the log.

        Up to 1 MiB of each stays for what comes next. The reserve is made again, if it was given up.
        """
        from outbox.store.reserve import keep_reserve  # noqa: PLC0415 - whoever only appends does without

        keep_reserve(self.state)
        if self._free_pages() > _FREE_PAGES_KEPT:
            for _ in range(_MOST_STEPS):
                with self.transaction(durable=False):
                    self.rows(f"PRAGMA incremental_vacuum({_PAGES_A_STEP})")
                if self._free_pages() <= _FREE_PAGES_KEPT:
                    break
            self.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        elif self.log_bytes() > _LOG_KEPT_BYTES:
            self.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def make_way(self) -> None:
        """Give up the reserve of the state directory, and copy the log into the file with what that frees."""
        from outbox.store.reserve import give_up_reserve  # noqa: PLC0415 - as above

        give_up_reserve(self.state)
        super().make_way()

    def _free_pages(self) -> int:
        return int(self.one("PRAGMA freelist_count")[0])


def open_outbox(
    state: StateDirectory, path: str | os.PathLike[str], *, busy_timeout_ms: int = BUSY_TIMEOUT_MS
) -> OutboxFile:
    """Open an existing outbox file after checking that it is one, of a version this release knows.

    Raises StoreDamaged (no outbox, or unreadable), StoreTooNew (left untouched), StoreBusy (locked for all of
    `busy_timeout_ms`), StoreError (I/O).
    """
    name = os.fspath(path).rpartition("/")[2]
    locks, byte = owners_lock(state.folder), lifecycle_byte(name)
    if not locks.take_shared(byte, busy_timeout_ms / 1_000):
        raise StoreBusy(f"The file {name} is just being replaced. Nothing was stored; try again.")
    try:
        _look_at(path, name)
        return OutboxFile(state, path, locks, busy_timeout_ms)
    except FAULTS as error:
        if is_being_replaced(path):  # hidden while it was opened (salvage.py)
            raise _replaced_now(name) from error
        raise store_error(error, path) from error
    finally:
        locks.give_shared(byte)


def _look_at(path: str | os.PathLike[str], name: str) -> None:
    try:
        found = os.lstat(path)
    except OSError as error:
        if is_being_replaced(path):
            raise _replaced_now(name) from error
        raise StoreError(f"There is no file {name}. Nothing was changed.") from error
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{name} is no regular file. It was left alone; nothing was stored for this agent.")
    if not found.st_size:
        raise StoreDamaged(f"The file {name} is empty. It was left alone. Run: outbox doctor")


def _replaced_now(name: str) -> StoreDamaged:
    return StoreDamaged(f"The damaged file {name} is just being replaced. Nothing was stored; try again.")
