"""A new outbox file from what a damaged one still tells: its rows, and a gap in the place of what is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw

from outbox.event import row_checksum, uuid7
from outbox.gap import GAP_KIND, Gap
from outbox.outcome import Reason, State
from outbox.store import rebuild_statements as sql
from outbox.store.create import make_file
from outbox.store.old_counters import OldCounters, believed
from outbox.store.row import Row, read_object, readable, sender_row
from outbox.store.soundness import Soundness, tries_make_sense
from outbox.store.statements import ADD_TOTAL
from outbox.store.wreck import Range, Wreck
from outbox.wire_text import Stamp, make_wire

_STATES = frozenset(map(str, State))
_REASONS = frozenset(map(str, Reason))
_MOST = 2**62
_NOT_TRIED = (0, 0, None, "[]", None)
_NOT_MATCHING = "the stored text does not match its checksum"
_WAS_IN_FLIGHT = "it was in flight when its file was found damaged"


@dataclass(slots=True)
class Rebuilt:
    """What became of the events of a damaged file. `lost` are those that were to be sent and are gone.

    `counted` says that the old counters could be read, so that `lost` is exact. `gap_seq` is where the relay
    is told of them, and of those of the gaps `told_again`, which were lost themselves.
    """

    counted: bool
    queued: int = 0
    lost: int = 0
    dead: int = 0
    dead_lost: int = 0
    outcome_unknown: int = 0
    damaged_rows: int = 0
    gap_seq: int | None = None
    told_again: tuple[str, ...] = ()

    @property
    def found(self) -> int:
        """How many of the waiting events could be read, in whatever state."""
        return self.queued + self.outcome_unknown + self.damaged_rows


@dataclass(frozen=True, slots=True)
class EarlierGap:
    """What the relay is to be told of an earlier damage of this file, unless it has been."""

    name: str
    seq: int
    count: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why an event is a dead letter."""

    reason: str
    failed_at_ms: int
    status: int | None = None
    code: str = ""
    detail: str = ""
    answer: str = ""
    path: str = ""


def rebuild(
    wreck: Wreck, draft: Path, agent: str, *, rules: str, earlier: Sequence[EarlierGap], now_ms: int
) -> Rebuilt:
    """Fill the empty file `draft` with what can be read; `rules` are used where the old ones cannot be.

    Events keep seq, key, times and wire text; an unsafe one that was in flight, or may have been, has an
    unknown outcome. Every counter agrees with its rows. Nothing is flushed.
    """
    stream = uuid7(now_ms, os.urandom(10))
    old = believed(wreck.own_row(), wreck.last_seq())
    make_file(draft, agent, stream, old.rules if old else rules, now_ms)
    db = apsw.Connection(str(draft), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        db.pragma("journal_mode", "OFF")
        db.pragma("synchronous", "OFF")
        db.execute("BEGIN")
        rebuilding = _Rebuilding(_Target(db, agent, stream, now_ms), wreck, old, earlier)
        rebuilding.run()
        db.execute("COMMIT")
        db.pragma("journal_mode", "WAL")
    finally:
        db.close()
    return rebuilding.result


class _Target:
    """The new file: how a row gets into it."""

    def __init__(self, db: apsw.Connection, agent: str, stream: str, now_ms: int) -> None:
        self.db, self.agent, self.now_ms = db, agent, now_ms
        self._stream = stream

    def put(self, row: Row, dedupe_key: str | None) -> bool:
        """Queue it; False when its seq or its key is there already."""
        self.db.execute(sql.PUT_EVENT, self._columns(row, dedupe_key))
        return bool(self.db.changes())

    def bury(
        self, row: Row, dedupe_key: str | None, verdict: _Verdict, tries: tuple[Any, ...] = _NOT_TRIED
    ) -> None:
        """Make it a dead letter."""
        values = (*self._columns(row, dedupe_key), *tries, *dataclasses.astuple(verdict))
        self.db.execute(sql.PUT_LETTER, values)

    def put_gap(self, seq: int, gap: Gap) -> None:
        """Tell the relay, in this place of the order."""
        key = uuid7(self.now_ms, os.urandom(10))
        text = make_wire("session-message", gap.message(self.agent), Stamp(self.now_ms, key)).text.encode()
        raw = (
            seq,
            b"",
            key.encode(),
            text,
            b"gap",
            self.now_ms,
            self.now_ms,
            b"",
            None,
            0,
            0,
            0,
            0,
            None,
            None,
        )
        self.put(sender_row("", (*raw, None))._replace(kind=GAP_KIND, sound=True), None)

    def one(self, statement: str, *args: Any) -> int:
        """The only number of a statement."""
        return int(str(self.db.execute(statement, args).fetchall()[0][0]))

    def _columns(self, row: Row, dedupe_key: str | None) -> tuple[Any, ...]:
        kind, key, at_ms, wire = row.kind, row.key, row.occurred_at_ms, row.wire_payload
        checksum = row_checksum(self._stream, row.seq, kind, key, at_ms, wire)
        extra = json.dumps(row.extra, separators=(",", ":")) if row.extra else None
        return (row.seq, kind, key, wire, row.shape, at_ms, row.accepted_at_ms, row.digest, dedupe_key, extra,
                checksum if row.sound else checksum ^ 1)  # fmt: skip


class _Rebuilding:
    """One rebuilding. Receipts and dead letters go first: they tell what is not lost."""

    def __init__(
        self, target: _Target, wreck: Wreck, old: OldCounters | None, earlier: Sequence[EarlierGap]
    ) -> None:
        self.result = Rebuilt(counted=old is not None)
        self._earlier = earlier
        self._target, self._wreck, self._old = target, wreck, old
        self._soundness = Soundness(wreck.streams, target.agent, mixed=wreck.mixed)
        self._last_seq = old.last_seq if old else wreck.last_seq()
        self._queued_bytes = 0
        self._open_gap_seq: int | None = None
        self._is_first = True
        self._letters: set[int] = set()

    def run(self) -> None:
        """Fill the new file."""
        for raw in self._wreck.from_both_ends(sql.READ_RECEIPTS):
            self._receipt(raw)
        for name, value in self._wreck.from_both_ends(sql.READ_TOTALS):
            if type(name) is bytes and name.isascii() and type(value) is int and 0 <= value < _MOST:
                self._target.db.execute(sql.PUT_TOTAL, (name.decode(), value))
        for raw in self._each("dead", sql.READ_LETTERS):
            self._letter(raw)
        for raw in self._each("events", sql.READ_EVENTS):
            self._event(raw)
        for raw in self._each("tries", sql.READ_TRIES):
            self._tries(raw)
        self._forget()
        self._tell_lost()
        self._count()

    def _each(self, table: str, statement: str) -> Iterator[tuple[Any, ...]]:
        through = self._old.last_seq if self._old else self._wreck.high_of(table)
        return self._wreck.by_seq(table, statement, 1, through)

    # Rows --------------------------------------------------------------------------------------------------

    def _receipt(self, raw: tuple[Any, ...]) -> None:
        key, seq, kind, digest, state, at_ms, result = raw
        with contextlib.suppress(UnicodeDecodeError, AttributeError):
            texts = key.decode(), kind.decode(), state.decode(), None if result is None else result.decode()
            if texts[2] in _STATES and type(seq) is type(at_ms) is int and type(digest) is bytes:
                row = (texts[0], seq, texts[1], digest, texts[2], at_ms, texts[3])
                self._target.db.execute(sql.PUT_RECEIPT, row)

    def _letter(self, raw: tuple[Any, ...]) -> None:
        row, dedupe_key = self._soundness.row(raw[:11])
        if not row.sound and self._wreck.grafted:
            return
        sends, attempts, first_try_at_ms, history, progress, reason, failed_at_ms, status, *texts = raw[11:]
        tries: tuple[Any, ...] = _NOT_TRIED
        if tries_make_sense(sends, attempts, 0, first_try_at_ms, history, progress):
            kept = None if progress is None else readable(progress)
            tries = (sends, attempts, first_try_at_ms, readable(history), kept)
        verdict = _Verdict(
            readable(reason) if row.sound else str(Reason.DAMAGED),
            failed_at_ms if type(failed_at_ms) is int else self._target.now_ms,
            status if type(status) is int else None,
            *map(readable, texts),
        )
        self._target.bury(row, dedupe_key, verdict, tries)
        self.result.dead += 1
        if readable(reason) in _REASONS:  # not so where a page of events stands among them
            self._letters.add(row.seq)

    def _event(self, raw: tuple[Any, ...]) -> None:
        row, dedupe_key = self._soundness.row(raw)
        if not row.sound and self._wreck.grafted:
            return  # it may be no event at all
        self._last_seq = max(self._last_seq, row.seq)
        target, now_ms = self._target, self._target.now_ms
        if self._is_over(row):
            return
        if row.kind == GAP_KIND:
            self._gap(row)
        elif not row.sound:
            target.bury(row, dedupe_key, _Verdict(str(Reason.DAMAGED), now_ms, detail=_NOT_MATCHING))
            self.result.damaged_rows += 1
        elif self._may_be_in_flight(row):
            verdict = _Verdict(str(Reason.OUTCOME_UNKNOWN), now_ms, detail=_WAS_IN_FLIGHT)
            target.bury(row, dedupe_key, verdict)
            self.result.outcome_unknown += 1
        elif target.put(row, dedupe_key):
            self.result.queued += 1
            self._queued_bytes += row.size_bytes
        self._is_first = self._is_first and row.kind == GAP_KIND

    def _is_over(self, row: Row) -> bool:
        """Whether it is a dead letter by now, or gone: it is there again from an older page."""
        if row.kind == GAP_KIND:
            return False
        over = (row.key, row.seq, row.digest)
        return row.seq in self._letters or bool(self._target.db.execute(sql.IS_OVER, over).fetchone())

    def _forget(self) -> None:
        """What goes again is no dead letter, and no receipt remembers it."""
        self._target.db.execute(sql.FORGET_LETTERS)
        self.result.dead -= self._target.db.changes()
        self._target.db.execute(sql.FORGET_RECEIPTS)

    def _gap(self, row: Row) -> None:
        if row.sound and self._target.put(row, None) and "firstSeq" in read_object(row.wire_payload):
            self._open_gap_seq = row.seq  # it grows on

    def _may_be_in_flight(self, row: Row) -> bool:
        """Whether it is unsafe and claimed; with the claim unreadable, a tool call at the head may be."""
        if self._old is None:
            return self._is_first and row.shape == "tool"
        return bool(self._old.claim_unsafe) and row.seq <= self._old.claimed_through

    def _tries(self, raw: tuple[Any, ...]) -> None:
        seq, *numbers, history, progress = raw
        if tries_make_sense(*raw[1:]) and numbers[3] is not None:
            kept = None if progress is None else readable(progress)
            self._target.db.execute(sql.PUT_TRIES, (seq, *numbers, readable(history), kept))

    # What is lost ------------------------------------------------------------------------------------------

    def _tell_lost(self) -> None:
        target, old, result = self._target, self._old, self.result
        if old is None:
            self._last_seq = max(self._last_seq, target.one(sql.LAST_REMEMBERED))
        holes = list(self._holes())
        if old is None:
            known = sum(target.one(sql.KNOWN_BETWEEN, *hole) for hole in holes)
            result.lost = max(0, sum(high - low + 1 for low, high in holes) - known)
        else:
            result.lost = max(0, old.waiting - result.found)
            result.dead_lost = max(0, old.dead - result.dead)
        again = [gap for gap in self._earlier if any(low <= gap.seq <= high for low, high in holes)]
        result.told_again = tuple(gap.name for gap in again)
        if result.lost or again:
            count = result.lost + sum(gap.count for gap in again)
            self._put_gap(holes or [(self._last_seq + 1, self._last_seq + 1)], count)

    def _put_gap(self, holes: list[Range], count: int) -> None:
        target, old = self._target, self._old
        seq = holes[0][0]
        while target.db.execute(sql.IS_TAKEN, (seq,)).fetchone():
            seq += 1
        self._last_seq = max(self._last_seq, seq)
        size_bytes = max(0, old.waiting_bytes - self._queued_bytes) if old else 0
        since_ms = old.created_at_ms if old else target.now_ms
        gap = Gap(holes[0][0], holes[-1][1], count, size_bytes, (), "damaged", since_ms, target.now_ms)
        target.put_gap(seq, gap)
        self.result.gap_seq = seq

    def _holes(self) -> Iterator[Range]:
        """Where rows could not be read, above what is known to be delivered: that went in order."""
        done = self._target.one(sql.DELIVERED_THROUGH)
        for low, high in self._wreck.unreadable.get("events", ()):
            if high > done and low <= self._last_seq:
                yield max(low, done + 1), min(high, self._last_seq)

    def _count(self) -> None:
        result, old, target = self.result, self._old, self._target
        for name, number in (
            ("dropped:damaged", result.lost),
            ("dropped_dead:damaged", result.dead_lost),
            (f"dead:{Reason.OUTCOME_UNKNOWN}", result.outcome_unknown),
            (f"dead:{Reason.DAMAGED}", result.damaged_rows),
        ):
            if number:
                target.db.execute(ADD_TOTAL, (name, number))
        target.db.execute(
            sql.COUNT_ROWS,
            (
                self._last_seq,
                old.generation + 1 if old else target.now_ms,  # a late settlement must not match it
                old.paused_at_ms if old else None,
                self._open_gap_seq,
                old.created_at_ms if old else target.now_ms,
                old.delivered if old else target.one(sql.COUNT_DELIVERED),
            ),
        )
        target.db.execute(sql.COUNT_ACCEPTED)
