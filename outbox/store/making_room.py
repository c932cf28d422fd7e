"""Room for one more event: what it replaces, and what a bound drops for it, in the same commit."""

from __future__ import annotations

from outbox.errors import StoreFull
from outbox.event import Accepted
from outbox.outcome import Act, State, move
from outbox.policy import Fill, Room, room_for
from outbox.store import statements as sql
from outbox.store.dropping import Going, drop_dead, drop_waiting, going
from outbox.store.enqueue import Book
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember


def make_room(box: OutboxFile, book: Book, event: Accepted, now_ms: int) -> StoreFull | None:
    """Remove what the event replaces and what has to make room for it; a refused event removes nothing."""
    replaced: list[Going] = []
    if event.dedupe_key is not None:
        found = box.rows(sql.FIND_COALESCED, event.dedupe_key, book.claimed_through)
        replaced = [going(raw) for raw in found]
    size = len(event.wire_payload)
    fill = Fill(
        book.waiting - len(replaced),
        book.waiting_bytes - sum(row.size_bytes for row in replaced),
        book.dead,
        book.dead_bytes,
    )
    room = room_for(fill, size, box.bounds)
    if room is not Room.THERE:
        room = room_for(fill, size, box.bounds, in_flight=_in_flight(box, book))
    if room is Room.REFUSED:
        box.run(sql.ADD_TOTAL, "refused:full", 1)
        return _full(box, book, size)
    _coalesce(box, book, replaced, now_ms)
    if room is Room.BY_DROPPING:
        _drop_oldest(box, book, event, now_ms)
    return None


def _in_flight(box: OutboxFile, book: Book) -> Fill:
    events, size_bytes = 0, 0
    if book.claimed_through:
        events, size_bytes = box.one(sql.IN_FLIGHT_FILL, book.claimed_through)
    return Fill(events, size_bytes, 0, 0)


def _coalesce(box: OutboxFile, book: Book, replaced: list[Going], now_ms: int) -> None:
    for row in replaced:
        state = move(State.WAITING, Act.COALESCE)
        remember(box, [(row.key, row.seq, row.kind, row.digest, str(state), now_ms, None)])
        box.run(sql.DELETE_EVENT, row.seq)
        box.run(sql.DELETE_TRIES, row.seq)
        box.run(sql.COUNT_SETTLED, 1, row.size_bytes, 0)
        box.run(sql.ADD_TOTAL, "coalesced", 1)
        book.lose(row.seq, row.size_bytes, state)


def _drop_oldest(box: OutboxFile, book: Book, event: Accepted, now_ms: int) -> None:
    """Drop the oldest dead letters, then the oldest waiting events, until the event fits."""
    while not book.fits(len(event.wire_payload), box.bounds):
        full = book.waiting + book.dead >= box.bounds.max_events
        reason = "max_events" if full else "max_bytes"
        if book.dead:
            freed = drop_dead(box, 1, reason, now_ms)
            book.dead, book.dead_bytes = book.dead - 1, book.dead_bytes - freed
            continue
        dropped = drop_waiting(box, book.claimed_through, book.open_gap_seq, reason, now_ms)
        if dropped is None:
            return  # the counters were wrong: better one event too many than none ever again
        book.lose(dropped.seq, dropped.size_bytes, State.DROPPED)
        book.open_gap_seq = dropped.gap_seq


def _full(box: OutboxFile, book: Book, size: int) -> StoreFull:
    return StoreFull(
        f"The outbox of {box.agent!r} is full ({book.waiting:,} events and {book.dead:,} dead letters, "
        f"{book.waiting_bytes + book.dead_bytes:,} bytes; this event has {size:,}). Not taken; what waits is "
        "kept. Raise bounds.max_events or bounds.max_bytes, or let it drain: outbox status"
    )
