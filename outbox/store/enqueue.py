"""Acceptance: dedupe, coalesce, bounds and the insert, in one durable commit."""

from __future__ import annotations

import os
from collections.abc import Sequence

from outbox.bounds import Bounds, fits
from outbox.errors import OutboxError, StoreFull, UsageError
from outbox.event import Accepted, row_checksum
from outbox.json_text import dump, quoted
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.group_commit import Interrupted
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from outbox.outcome import State

# What `move(State.NEW, Act.ENQUEUE)` gives: a test holds it to that, and no hook has to load the table.
ACCEPTED = "waiting"


class Receipt(NamedTuple):
    """What a producer gets once its event is on disk.

    `state` is "waiting", or for a duplicate where the first one is by now: waiting, in_flight, delivered,
    dead, tool_error, replaced, dropped or discarded. An event that a later one of the same call replaced, or
    that a bound dropped for one, says so too.
    """

    seq: int
    idempotency_key: str
    duplicate: bool
    state: str


class Book:
    """The counters of the outbox, kept up to date through one call; `added` is written when it ends."""

    __slots__ = (
        "added", "added_bytes", "claimed_through", "dead", "dead_bytes", "gone", "last_seq", "open_gap_seq",
        "waiting", "waiting_bytes",
    )  # fmt: skip

    last_seq: int
    waiting: int
    waiting_bytes: int
    dead: int
    dead_bytes: int
    claimed_through: int
    open_gap_seq: int | None

    def __init__(self, row: tuple[Any, ...]) -> None:
        (_, self.last_seq, self.waiting, self.waiting_bytes, self.dead, self.dead_bytes, self.claimed_through,
         self.open_gap_seq) = row  # fmt: skip
        self.added = self.added_bytes = 0
        self.gone: dict[int, State] = {}

    def fits(self, size_bytes: int, bounds: Bounds) -> bool:
        """Whether one more event goes in as things are."""
        events, held_bytes = self.waiting + self.dead, self.waiting_bytes + self.dead_bytes
        return fits(events, held_bytes, size_bytes, bounds)

    def take(self, size_bytes: int) -> int:
        """Count one more event; returns its seq."""
        self.last_seq += 1
        self.waiting += 1
        self.waiting_bytes += size_bytes
        self.added += 1
        self.added_bytes += size_bytes
        return self.last_seq

    def lose(self, seq: int, size_bytes: int, state: State) -> None:
        """Count one less: it is in `state` now."""
        self.waiting -= 1
        self.waiting_bytes -= size_bytes
        self.gone[seq] = state


def enqueue(box: OutboxFile, events: Sequence[Accepted], *, now_ms: int) -> list[Receipt | OutboxError]:
    """Take the events, in order, with one durable commit; one receipt or error for each of them.

    An error concerns its own event alone, and leaves what was there as it was: `key_reused` (UsageError) or
    StoreFull. Raises StoreBusy, StoreFull or StoreError when nothing at all could be stored.
    """
    require_free_disk(box)
    with box.transaction(durable=True):
        row = box.ask(sql.READ_FOR_ENQUEUE)
        box.learn_rules(row[0])
        book = Book(row)
        results = [_take(box, book, event, now_ms) for event in events]
        if book.added:
            box.run(sql.COUNT_ACCEPTED, book.last_seq, book.added, book.added_bytes, book.added)
    return [_as_it_is_now(result, book) for result in results] if book.gone else results


def enqueue_together(
    box: OutboxFile, events: Sequence[Accepted], *, now_ms: int
) -> list[Receipt | OutboxError]:
    """`enqueue`, in one commit with what other threads want to store just now."""
    try:
        return box.together.submit(events, lambda taken: enqueue(box, taken, now_ms=now_ms))
    except Interrupted:
        return _unless_stored(box, events, now_ms)


def _unless_stored(box: OutboxFile, events: Sequence[Accepted], now_ms: int) -> list[Receipt | OutboxError]:
    """`enqueue`, for events that may be there already: their keys tell."""
    results = enqueue(box, [event._replace(key_given=True) for event in events], now_ms=now_ms)
    return [
        result if event.key_given or not isinstance(result, Receipt) else result._replace(duplicate=False)
        for event, result in zip(events, results, strict=True)
    ]


def _as_it_is_now(result: Receipt | OutboxError, book: Book) -> Receipt | OutboxError:
    if isinstance(result, Receipt) and result.seq in book.gone:
        return result._replace(state=str(book.gone[result.seq]))
    return result


def _take(box: OutboxFile, book: Book, event: Accepted, now_ms: int) -> Receipt | OutboxError:
    if event.key_given and (first := known(box, event, book.claimed_through)):
        return first
    wire = event.wire_payload
    if event.dedupe_key is not None or not book.fits(len(wire), box.bounds):
        from outbox.store.making_room import make_room  # noqa: PLC0415 - seldom needed, and every hook pays

        refusal = make_room(box, book, event, now_ms)
        if refusal is not None:
            return refusal
    seq = book.take(len(wire))
    box.execute(
        sql.INSERT_EVENT,
        (
            seq,
            event.kind,
            event.key,
            wire,
            event.shape,
            event.occurred_at_ms,
            now_ms,
            event.digest,
            event.dedupe_key,
            extra_text(event),
            row_checksum(box.stream, seq, event.kind, event.key, event.occurred_at_ms, wire),
        ),
    )
    return Receipt(seq, event.key, duplicate=False, state=ACCEPTED)


def extra_text(event: Accepted) -> str | None:
    """What else belongs to the event, as JSON, or None. What is JSON already is joined as text."""
    parts: list[str] = []
    if event.tool is not None:
        parts.append(f'"tool":{quoted(event.tool)}')
    if event.traceparent is not None:
        parts.append(f'"traceparent":{quoted(event.traceparent)}')
    if event.tracestate is not None:
        parts.append(f'"tracestate":{quoted(event.tracestate)}')
    if event.scoped:
        parts.append('"scoped":true')
    if event.retry is not None:
        parts.append(f'"retry":{event.retry}')
    if event.correlation is not None:
        parts.append(f'"correlation":{event.correlation}')
    if event.notes:
        parts.append(f'"notes":{dump(dict(event.notes))}')
    if event.replayed_from is not None:
        parts.append(f'"replayedFrom":{event.replayed_from}')
    return f"{{{','.join(parts)}}}" if parts else None


def known(box: OutboxFile, event: Accepted, claimed_through: int) -> Receipt | UsageError | None:
    """The receipt of the first event with this key, if it is remembered; a refusal if it was another."""
    found = _first_of(box, event.key, claimed_through)
    if found is None:
        return None
    seq, kind, digest, state = found
    if (kind, digest) != (event.kind, event.digest):
        return UsageError(
            f"The idempotency key {event.key!r} was already used for another event (seq {seq:,}). "
            "Not taken; the first one is kept. Give each event a key of its own.",
            code="key_reused",
        )
    return Receipt(seq, event.key, duplicate=True, state=state)


def _first_of(box: OutboxFile, key: str, claimed_through: int) -> tuple[Any, ...] | None:
    """Seq, kind, digest and state of the event that has this key, if one is remembered."""
    if row := box.maybe(sql.FIND_WAITING_KEY, key):
        states = _states()
        return (*row, str(states.IN_FLIGHT if row[0] <= claimed_through else states.WAITING))
    if row := box.maybe(sql.FIND_DEAD_KEY, key):
        return (*row, str(_states().DEAD))
    return box.maybe(sql.FIND_RECEIPT, key)


def _states() -> type[State]:
    from outbox.outcome import State  # noqa: PLC0415 - most events are new, and need no table of states

    return State


def require_free_disk(box: OutboxFile) -> None:
    """Raise StoreFull when less disk is free than is to stay so: nothing more is accepted then."""
    least = box.bounds.min_free_disk_bytes
    if not least:
        return
    try:
        disk = os.statvfs(box.folder)
    except OSError:
        return  # the folder is gone: the transaction says so
    free = disk.f_bavail * disk.f_frsize
    if free < least:
        raise StoreFull(
            f"Only {free:,} bytes are free below {box.state.folder!r}; {least:,} are to stay so. Not "
            "taken; what waits is kept and goes on being delivered. Make space, or lower "
            "bounds.min_free_disk_bytes."
        )
