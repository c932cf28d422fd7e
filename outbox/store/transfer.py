"""Taking in what another outbox held: events, gaps, dead letters and receipts, with their keys and times."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.errors import OutboxError, StoreFull, UsageError
from outbox.event import Accepted, row_checksum
from outbox.outcome import Act, State, move
from outbox.policy import Fill, Room, room_for
from outbox.record import Record, Remembered
from outbox.record_line import MOST_SEQ
from outbox.store import statements as sql
from outbox.store.enqueue import Receipt, extra_text, known, require_free_disk
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember

_MOST_TRIES = 10**9  # as with MOST_SEQ: a sender counts on from there
_CAN_COME_BACK = (str(State.DISCARDED), str(State.DROPPED))


class _Count:
    """The counters of the outbox, kept up to date through one call, and what is added to each."""

    __slots__ = ("_fill", "dead", "dead_bytes", "last_seq", "waiting", "waiting_bytes")

    def __init__(self, last_seq: int, fill: Fill) -> None:
        self._fill = fill
        self.last_seq = last_seq
        self.waiting = self.waiting_bytes = self.dead = self.dead_bytes = 0

    def fill(self) -> Fill:
        """How full the outbox is now."""
        before = self._fill
        return Fill(
            before.waiting + self.waiting,
            before.waiting_bytes + self.waiting_bytes,
            before.dead + self.dead,
            before.dead_bytes + self.dead_bytes,
        )

    def add(self, size_bytes: int, *, dead: bool) -> None:
        """Count one more."""
        if dead:
            self.dead += 1
            self.dead_bytes += size_bytes
        else:
            self.waiting += 1
            self.waiting_bytes += size_bytes


def take_in(
    box: OutboxFile, found: Sequence[Record | Remembered], *, now_ms: int
) -> list[Receipt | OutboxError]:
    """Take these in, in order, with one durable commit; a receipt or an error for each of them.

    Each stands behind what is there, under its own seq where that is free, else under the next. What is known
    already, by its key, is left as it is (`duplicate`); but a dead letter that was discarded or dropped here
    comes back. Nothing is coalesced, and nothing is dropped to make room: from the first that has none
    (StoreFull) on nothing more is taken, since it would overtake. `key_reused` concerns its own record alone.

    Raises StoreBusy, StoreFull or StoreError when nothing at all could be stored.
    """
    require_free_disk(box)
    with box.transaction(durable=True):
        row = box.one(sql.READ_FOR_ENQUEUE)
        box.learn_rules(row[0])
        count, claimed_through = _Count(row[1], Fill(*row[2:6])), row[6]
        results: list[Receipt | OutboxError] = []
        full: StoreFull | None = None
        for one in found:
            result = full or _take(box, count, one, claimed_through, now_ms)
            full = result if isinstance(result, StoreFull) else None
            results.append(result)
        added = count.waiting + count.dead
        box.run(sql.COUNT_ACCEPTED, count.last_seq, count.waiting, count.waiting_bytes, added)
        box.run(sql.COUNT_BURIED, count.dead, count.dead_bytes)
    return results


def _take(
    box: OutboxFile, count: _Count, one: Record | Remembered, claimed_through: int, now_ms: int
) -> Receipt | OutboxError:
    event = one.event if isinstance(one, Record) else _as_event(one)
    first = known(box, event, claimed_through)
    if first is not None and not _comes_back(one, first):
        return first
    if isinstance(one, Remembered):
        state = one.state
        remember(box, [(one.key, one.seq, one.kind, one.digest, state, one.at_ms, one.result)])
        count.last_seq = max(count.last_seq, _believed(one.seq))
        return Receipt(one.seq, one.key, duplicate=False, state=state)
    if not one.is_gap and (error := _no_room(box, count, one)):
        return error
    if first is not None:
        box.run(sql.UNCOUNT_RECEIPT, event.key)
        box.run(sql.DELETE_RECEIPT, event.key)
    count.last_seq = seq = max(count.last_seq + 1, _believed(one.seq))
    _insert(box, seq, one, now_ms)
    if not one.is_gap:
        count.add(len(event.wire_payload), dead=one.letter is not None)
    state = str(State.DEAD if one.letter else move(State.NEW, Act.ENQUEUE))
    return Receipt(seq, event.key, duplicate=False, state=state)


def _believed(seq: int) -> int:
    """Its own seq, or 0 for one that no outbox reaches."""
    return seq if seq <= MOST_SEQ else 0


def _as_event(receipt: Remembered) -> Accepted:
    """As far as a key is compared."""
    return Accepted(receipt.kind, receipt.key, b"", "object", 0, receipt.digest)


def _comes_back(one: Record | Remembered, first: Receipt | UsageError) -> bool:
    is_letter = isinstance(one, Record) and one.letter is not None
    return is_letter and isinstance(first, Receipt) and first.state in _CAN_COME_BACK


def _no_room(box: OutboxFile, count: _Count, record: Record) -> StoreFull | None:
    fill, size_bytes = count.fill(), len(record.event.wire_payload)
    too_many_dead = record.letter is not None and fill.dead >= box.bounds.max_dead
    if room_for(fill, size_bytes, box.bounds) is Room.THERE and not too_many_dead:
        return None
    bound = "bounds.max_dead" if too_many_dead else "bounds.max_events or bounds.max_bytes"
    return StoreFull(
        f"The outbox of {box.agent!r} is full ({fill.waiting:,} events and {fill.dead:,} dead letters, "
        f"{fill.size_bytes:,} bytes). Not taken; it stays where it is, and what was taken is kept. Let the "
        f"outbox drain or raise {bound}, and import again: what is known already is passed over."
    )


def _insert(box: OutboxFile, seq: int, record: Record, now_ms: int) -> None:
    event, tries, letter = record.event, record.tries, record.letter
    sends, attempts, crashes = (min(n, _MOST_TRIES) for n in (tries.sends, tries.attempts, tries.crashes))
    kind, key, wire, at_ms = event.kind, event.key, event.wire_payload, event.occurred_at_ms
    head = (seq, kind, key, wire, event.shape, at_ms, record.accepted_at_ms, event.digest, event.dedupe_key,
            extra_text(event), row_checksum(box.stream, seq, kind, key, at_ms, wire))  # fmt: skip
    if letter is not None:
        box.run(
            sql.INSERT_LETTER, *head, sends, attempts, tries.first_try_at_ms, tries.history, tries.progress,
            letter.reason, letter.failed_at_ms, letter.status, letter.code, letter.detail,
            letter.answer, letter.path,
        )  # fmt: skip
        return
    box.run(sql.INSERT_EVENT, *head)
    if tries.sends or tries.attempts or tries.progress is not None:
        first_try_at_ms = now_ms if tries.first_try_at_ms is None else tries.first_try_at_ms
        box.run(
            sql.PUT_TRIES, seq, sends, attempts, crashes, first_try_at_ms, tries.history, tries.progress,
        )  # fmt: skip
    if record.is_gap:
        _know_gap(box, seq, event, now_ms)


def _know_gap(box: OutboxFile, seq: int, event: Accepted, now_ms: int) -> None:
    """A gap leaves no receipt when it is delivered; taken in twice, it must be known all the same."""
    remember(box, [(event.key, seq, event.kind, event.digest, str(State.DELIVERED), now_ms, None)])
