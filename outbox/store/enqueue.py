"""Acceptance: dedupe, coalesce, bounds and the insert, in one durable commit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from outbox.bounds import Bounds
from outbox.errors import OutboxError, StoreFull, UsageError
from outbox.event import Accepted
from outbox.outcome import Act, State, move
from outbox.policy import Fill, Room, room_for
from outbox.store import statements as sql
from outbox.store.dropping import drop_dead, drop_waiting
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember
from outbox.event import row_checksum, uuid7


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a producer gets once its event is on disk.

    `state` is "waiting", or for a duplicate where the first one is by now: waiting, in_flight, delivered, dead,
    tool_error, replaced, dropped or discarded.
    """

    seq: int
    idempotency_key: str
    duplicate: bool
    state: str


@dataclass(slots=True)
class _Counters:
    last_seq: int
    waiting: int
    waiting_bytes: int
    dead: int
    dead_bytes: int
    claimed_through: int
    open_gap_seq: int | None
    added: int = 0
    added_bytes: int = 0


def enqueue(box: OutboxFile, events: Sequence[Accepted], *, now_ms: int) -> list[Receipt | OutboxError]:
    """Take the events, in order, with one durable commit; one receipt or error for each of them.

    An error concerns its own event alone: `key_reused` (UsageError) or StoreFull. Raises StoreBusy, StoreFull or
    StoreError when nothing at all could be stored.
    """
    _refuse_on_full_disk(box, box.bounds)
    results: list[Receipt | OutboxError] = []
    with box.transaction(durable=True):
        rules, *counters = box.one(sql.READ_FOR_ENQUEUE)
        box.learn_rules(rules)
        state = _Counters(*counters)
        for event in events:
            try:
                results.append(_take(box, state, event, now_ms))
            except (UsageError, StoreFull) as error:
                results.append(error)
        if state.added:
            box.run(sql.COUNT_ACCEPTED, state.last_seq, state.added, state.added_bytes, state.added)
    return results


def _take(box: OutboxFile, state: _Counters, event: Accepted, now_ms: int) -> Receipt:
    if event.key_given and (known := _known(box, event, state.claimed_through)):
        return known
    if event.dedupe_key is not None:
        _coalesce(box, state, event.dedupe_key, now_ms)
    _make_room(box, state, len(event.wire_payload), now_ms)
    move(State.NEW, Act.ENQUEUE)
    state.last_seq += 1
    size = len(event.wire_payload)
    box.run(
        sql.INSERT_EVENT,
        state.last_seq,
        event.kind,
        event.key,
        event.wire_payload,
        event.shape,
        event.occurred_at_ms,
        now_ms,
        event.digest,
        event.dedupe_key,
        _extra(event),
        row_checksum(
            box.stream, state.last_seq, event.kind, event.key, event.occurred_at_ms, event.wire_payload
        ),
    )
    state.waiting += 1
    state.waiting_bytes += size
    state.added += 1
    state.added_bytes += size
    return Receipt(state.last_seq, event.key, duplicate=False, state=State.WAITING)


def _extra(event: Accepted) -> str | None:
    extra = {
        "tool": event.tool,
        "scoped": event.scoped or None,
        "retry": event.retry and json.loads(event.retry),
        "correlation": event.correlation and json.loads(event.correlation),
        "traceparent": event.traceparent,
        "tracestate": event.tracestate,
        "notes": dict(event.notes) or None,
        "replayedFrom": event.replayed_from,
    }
    present = {name: value for name, value in extra.items() if value is not None}
    return json.dumps(present, separators=(",", ":")) if present else None


def _known(box: OutboxFile, event: Accepted, claimed_through: int) -> Receipt | None:
    """The receipt of the first event with this key, where one is remembered."""
    if row := box.maybe(sql.FIND_WAITING_KEY, event.key):
        seq, kind, digest = row
        state = State.IN_FLIGHT if seq <= claimed_through else State.WAITING
    elif row := box.maybe(sql.FIND_DEAD_KEY, event.key):
        (seq, kind, digest), state = row, State.DEAD
    elif row := box.maybe(sql.FIND_RECEIPT, event.key):
        seq, kind, digest, state = row
    else:
        return None
    if (kind, digest) != (event.kind, event.digest):
        raise UsageError(
            f"The idempotency key {event.key!r} was already used for another event (seq {seq:,}). "
            "Not taken; the first one is kept. Give each event a key of its own.",
            code="key_reused",
        )
    return Receipt(seq, event.key, duplicate=True, state=str(state))


def _coalesce(box: OutboxFile, state: _Counters, dedupe_key: str, now_ms: int) -> None:
    for seq, kind, key, digest, size in box.rows(sql.FIND_COALESCED, dedupe_key, state.claimed_through):
        remember(box, key, seq, kind, digest, move(State.WAITING, Act.COALESCE), now_ms)
        box.run(sql.DELETE_EVENT, seq)
        box.run(sql.DELETE_TRIES, seq)
        box.run(sql.COUNT_SETTLED, 1, size, 0)
        box.run(sql.ADD_TOTAL, "coalesced", 1)
        state.waiting -= 1
        state.waiting_bytes -= size


def _make_room(box: OutboxFile, state: _Counters, size: int, now_ms: int) -> None:
    fill = Fill(state.waiting, state.waiting_bytes, state.dead, state.dead_bytes)
    room = room_for(fill, size, box.bounds)
    if room is Room.THERE:
        return
    if room is Room.REFUSED:
        box.run(sql.ADD_TOTAL, "refused:full", 1)
        raise StoreFull(
            f"The outbox of {box.agent!r} is full ({state.waiting:,} events, "
            f"{state.waiting_bytes + state.dead_bytes:,} bytes). Not taken; what waits is kept. "
            "Raise bounds.max_events or bounds.max_bytes, or let it drain: outbox status"
        )
    reason = "max_events" if fill.events >= box.bounds.max_events else "max_bytes"
    while room_for(fill, size, box.bounds) is Room.BY_DROPPING:
        if fill.dead:
            freed = drop_dead(box, 1, reason, now_ms)
            state.dead, state.dead_bytes = state.dead - 1, state.dead_bytes - freed
        else:
            dropped = drop_waiting(box, state.claimed_through, state.open_gap_seq, reason, now_ms)
            if dropped is None:
                raise StoreFull(
                    f"The outbox of {box.agent!r} is full and all of it is in flight. Not taken; try again soon."
                )
            state.waiting, state.waiting_bytes = state.waiting - 1, state.waiting_bytes - dropped.size_bytes
            state.open_gap_seq = dropped.gap_seq
        fill = Fill(state.waiting, state.waiting_bytes, state.dead, state.dead_bytes)


def _refuse_on_full_disk(box: OutboxFile, bounds: Bounds) -> None:
    disk = os.statvfs(box.path.parent)
    free = disk.f_bavail * disk.f_frsize
    if free < bounds.min_free_disk_bytes:
        raise StoreFull(
            f"Only {free:,} bytes are free below {str(box.state.path)!r}; {bounds.min_free_disk_bytes:,} are to stay "
            "free. Not taken; what waits is kept and goes on being delivered. Make space, or lower "
            "bounds.min_free_disk_bytes."
        )


__all__ = ["Receipt", "enqueue", "uuid7"]
