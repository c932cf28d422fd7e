"""All that is known of an event, waiting, dead or gone: read to show it, to replay it, to move it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from typing import Any

from outbox.event import Accepted
from outbox.gap import decode as decode_gap
from outbox.json_text import dump
from outbox.outcome import Reason, State
from outbox.record import Letter, Record, Remembered, Tries
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.row import Row, http_status, readable, sender_row, whole
from outbox.wire_text import Stamp, make_wire

_PAGE = 500
_REASONS = frozenset(map(str, Reason))


@dataclass(frozen=True, slots=True)
class Listed:
    """One event that waits or is in flight, as `list` shows it. Times are epoch ms."""

    seq: int
    kind: str
    key: str
    occurred_at_ms: int
    accepted_at_ms: int
    size_bytes: int
    sends: int
    attempts: int
    in_flight: bool


@dataclass(frozen=True, slots=True)
class Found:
    """An event that was looked for, and its state now."""

    state: str
    record: Record | Remembered


@dataclass(frozen=True, slots=True)
class About:
    """An outbox itself: its file's id, since when a person paused it, how many events wait or are dead."""

    stream: str
    paused_at_ms: int | None
    events: int


def about(box: OutboxFile) -> About:
    """What an export says of the outbox itself."""
    stream, paused_at_ms, *_, events = box.one(sql.READ_FOR_EXPORT)
    return About(stream, paused_at_ms, events)


def listed(
    box: OutboxFile, *, kind: str | None = None, state: str | None = None, after: int = 0
) -> Iterator[Listed]:
    """What waits or is in flight behind the seq `after`, in order; of one kind or one of both states only."""
    while True:
        with box.snapshot():
            claimed_through = box.one(sql.READ_CLAIM)[1]
            through = claimed_through if state == State.IN_FLIGHT else 2**63 - 1
            after = max(after, claimed_through) if state == State.WAITING else after
            page = box.rows(sql.LIST_EVENTS, after, through, kind, _PAGE)
        yield from (_listed(raw, claimed_through) for raw in page)
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def _listed(raw: tuple[Any, ...], claimed_through: int) -> Listed:
    _, kind, key, *numbers = raw
    seq, occurred_at_ms, accepted_at_ms, size_bytes, sends, attempts = map(whole, (raw[0], *numbers))
    return Listed(
        seq, readable(kind), readable(key), occurred_at_ms, accepted_at_ms, size_bytes, sends, attempts,
        in_flight=seq <= claimed_through,
    )  # fmt: skip


def find(box: OutboxFile, word: str) -> Found | None:
    """The event with this seq, or else with this key, whether it waits, is dead or is only remembered."""
    with box.snapshot():
        seq = int(word) if word.isascii() and word.isdigit() and len(word) < 19 else None
        found = (
            None
            if seq is None
            else _find(box, seq, sql.WHOLE_EVENT, sql.WHOLE_LETTER, sql.READ_RECEIPT_OF_SEQ)
        )
        return found or _find(box, word, sql.WHOLE_EVENT_OF_KEY, sql.WHOLE_LETTER_OF_KEY, sql.READ_RECEIPT)


def _find(box: OutboxFile, which: int | str, events: str, letters: str, receipts: str) -> Found | None:
    if raw := box.maybe(events, which):
        record = _waiting(box.stream, raw)
        in_flight = record.seq <= box.one(sql.READ_CLAIM)[1]
        return Found(str(State.IN_FLIGHT if in_flight else State.WAITING), record)
    if raw := box.maybe(letters, which):
        return Found(str(State.DEAD), _dead(box.stream, raw))
    raw = box.maybe(receipts, which)
    receipt = _remembered(raw) if raw else None
    return Found(receipt.state, receipt) if receipt else None


def letter_of(box: OutboxFile, seq: int) -> Record | None:
    """The dead letter of this seq."""
    raw = box.maybe(sql.WHOLE_LETTER, seq)
    return None if raw is None else _dead(box.stream, raw)


def everything(box: OutboxFile) -> Iterator[Record | Remembered]:
    """All of an outbox, to be taken in elsewhere: events, gaps and dead letters in order, then receipts.

    One by one, inside a snapshot. What cannot go on elsewhere as it is becomes a dead letter: a damaged row,
    and an unsafe call in flight, which nobody may repeat (`outcome_unknown`). Damaged gaps and receipts are
    left out.
    """
    _, _, claimed_through, unsafe, open_gap_seq, _ = box.one(sql.READ_FOR_EXPORT)
    waiting = (_waiting(box.stream, raw) for raw in box.each(sql.WHOLE_EVENTS))
    dead = (_dead(box.stream, raw) for raw in box.each(sql.WHOLE_LETTERS))
    for record in merge(waiting, dead, key=lambda record: record.seq):
        if record.is_gap and record.sound:
            yield _frozen(record, box.agent) if record.seq == open_gap_seq else record
        elif not record.is_gap:
            in_flight = record.letter is None and record.seq <= claimed_through
            yield _as_it_may_go(record, unsafe=bool(unsafe) and in_flight)
    yield from filter(None, map(_remembered, box.each(sql.READ_RECEIPTS)))


def _remembered(raw: tuple[Any, ...]) -> Remembered | None:
    """A receipt; None for one that damage has touched."""
    sound = [type(value) for value in raw[:6]] == [str, int, str, bytes, str, int]
    return Remembered(*raw) if sound else None


def dead_records(box: OutboxFile, seqs: frozenset[int]) -> Iterator[Record]:
    """These dead letters, oldest first, one by one, inside a snapshot."""
    for raw in box.each(sql.WHOLE_LETTERS):
        if raw[1] in seqs:
            yield _as_it_may_go(_dead(box.stream, raw), unsafe=False)


def _as_it_may_go(record: Record, *, unsafe: bool) -> Record:
    if not record.sound:
        return _damaged(record)
    if record.letter is not None and record.letter.reason not in _REASONS:
        letter = dataclasses.replace(record.letter, reason=str(Reason.OUTCOME_UNKNOWN))
        return dataclasses.replace(record, letter=letter)
    if not unsafe:
        return record
    detail = "it was in flight when it was moved; whether it had its effect is not known"
    letter = Letter(str(Reason.OUTCOME_UNKNOWN), record.accepted_at_ms, detail=detail)
    return dataclasses.replace(record, letter=letter)


def _damaged(record: Record) -> Record:
    """What is left of a row that is not what was stored: its numbers may be anything."""
    event = record.event._replace(occurred_at_ms=max(0, record.event.occurred_at_ms))
    at_ms = max(0, record.accepted_at_ms)
    found = Letter(str(Reason.DAMAGED), at_ms, detail="the stored text does not match its checksum")
    letter = record.letter or found
    letter = dataclasses.replace(letter, reason=str(Reason.DAMAGED))
    tries = Tries(history=record.tries.history)
    return Record(event, record.seq, at_ms, tries, letter, sound=False)


def _frozen(record: Record, agent: str) -> Record:
    """A gap that still grows, with the text that tells of it as it stands."""
    event = record.event
    message = decode_gap(event.wire_payload).message(agent)
    text = make_wire("session-message", message, Stamp(event.occurred_at_ms, event.key)).text.encode()
    return dataclasses.replace(record, event=event._replace(wire_payload=text))


def _waiting(stream: str, raw: tuple[Any, ...]) -> Record:
    row = sender_row(stream, raw[1:])
    return Record(_event(row, raw[0]), row.seq, row.accepted_at_ms, _tries(row), sound=row.sound)


def _dead(stream: str, raw: tuple[Any, ...]) -> Record:
    row = sender_row(stream, raw[1:17])
    reason, failed_at_ms, status, *texts = raw[17:]
    letter = Letter(readable(reason), max(0, whole(failed_at_ms)), http_status(status), *map(readable, texts))
    sound = row.sound and letter.reason != Reason.DAMAGED
    return Record(_event(row, raw[0]), row.seq, row.accepted_at_ms, _tries(row), letter, sound)


def _tries(row: Row) -> Tries:
    first_try_at_ms = None if row.first_try_at_ms == -1 else row.first_try_at_ms
    return Tries(row.sends, row.attempts, row.crashes, first_try_at_ms, row.history, row.progress)


def _event(row: Row, dedupe_key: bytes | None) -> Accepted:
    extra = row.extra
    return Accepted(
        row.kind,
        row.key,
        row.wire_payload,
        row.shape,
        row.occurred_at_ms,
        row.digest,
        "append" if dedupe_key is None else "coalesce",
        None if dedupe_key is None else readable(dedupe_key),
        bool(extra.get("scoped")),
        extra.get("tool"),
        _text(extra.get("retry")),
        _text(extra.get("correlation")),
        extra.get("traceparent"),
        extra.get("tracestate"),
        extra.get("notes") or {},
        replayed_from=extra.get("replayedFrom"),
    )


def _text(value: object) -> str | None:
    return None if value is None else dump(value)
