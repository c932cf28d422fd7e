"""Dead letters: how an event becomes one, goes to the tail again, or is thrown away by a person."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import apsw

from outbox.errors import StoreFull, UsageError
from outbox.event import Accepted, row_checksum
from outbox.gap import GAP_KIND
from outbox.outcome import Act, Bury, State, move
from outbox.policy import Fill, Room, room_for
from outbox.record import Record
from outbox.store import statements as sql
from outbox.store.dropping import drop_dead
from outbox.store.enqueue import extra_text
from outbox.store.faults import unmovable
from outbox.store.file import OutboxFile
from outbox.store.inspect import DeadLetter, listed_letter
from outbox.store.receipts import remember
from outbox.store.records import letter_of
from outbox.store.row import Row, longer_history, read_object, storable

_Done = TypeVar("_Done")


def bury_row(box: OutboxFile, row: Row, bury: Bury, now_ms: int) -> None:
    """Move a row to the dead letters, and the oldest of them out when they are too many; in a transaction.

    A gap is no event: refused, it is counted and removed. Raises StoreDamaged when the row cannot be moved:
    it would be the head for ever.
    """
    if row.kind == GAP_KIND:
        _delete(box, row.seq)
        box.run(sql.ADD_TOTAL, "gap_refused", 1)
        return
    try:
        _insert_dead(box, row, bury, now_ms)
    except apsw.ConstraintError as error:
        raise unmovable(box.name) from error
    _delete(box, row.seq)
    box.run(sql.COUNT_SETTLED, 1, row.size_bytes, 0)
    box.run(sql.COUNT_BURIED, 1, row.size_bytes)
    box.run(sql.ADD_TOTAL, f"dead:{bury.reason}", 1)
    over = box.one(sql.READ_DEAD_COUNT)[0] - box.bounds.max_dead
    if over > 0:
        drop_dead(box, over, "max_dead", now_ms)


def _insert_dead(box: OutboxFile, row: Row, bury: Bury, now_ms: int) -> None:
    trouble = bury.trouble
    progress = row.progress if bury.progress is None else storable(bury.progress)
    first_try_at_ms = row.first_try_at_ms
    if first_try_at_ms is None and bury.sent:
        first_try_at_ms = now_ms
    box.run(
        sql.BURY_EVENT, row.kind, row.key, row.shape, row.occurred_at_ms, row.accepted_at_ms, row.digest,
        json.dumps(row.extra, separators=(",", ":")) if row.extra else None, str(bury.reason), trouble.status,
        storable(trouble.code), storable(trouble.detail), storable(trouble.excerpt), trouble.path,
        row.sends + bury.sent, bury.attempts, first_try_at_ms, longer_history(row.history, trouble),
        progress, now_ms, row.seq,
    )  # fmt: skip


def _delete(box: OutboxFile, seq: int) -> None:
    box.run(sql.DELETE_EVENT, seq)
    if not box.db.changes():
        raise unmovable(box.name)
    box.run(sql.DELETE_TRIES, seq)


# Choosing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """Which dead letters a person means; what is None does not matter. Times are epoch ms, exclusive."""

    seqs: tuple[int, ...] | None = None
    reasons: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    failed_before_ms: int | None = None
    failed_after_ms: int | None = None


def chosen(box: OutboxFile, choice: Choice) -> list[DeadLetter]:
    """The dead letters that are meant, oldest first."""
    lists = [None if one is None else json.dumps(one) for one in (choice.seqs, choice.reasons, choice.kinds)]
    rows = box.rows(sql.CHOOSE_DEAD, *lists, choice.failed_before_ms, choice.failed_after_ms)
    return [listed_letter(row) for row in rows]


# Replay -----------------------------------------------------------------------------------------------------


def replay(box: OutboxFile, seq: int, now_ms: int) -> int:
    """Put a dead letter at the tail as it was, with its key, its time and its progress; returns its new seq.

    The event starts afresh: no attempts, no history, and what was refused of a batch goes again. Durable when
    this returns. Raises UsageError when there is no such dead letter, or its stored text is damaged.
    """
    with box.transaction(durable=True):
        return _replay(box, seq, now_ms)


def replay_each(box: OutboxFile, seqs: Sequence[int], now_ms: int) -> list[int | UsageError]:
    """`replay` of several with one durable commit, in this order: the new seq or an error for each."""
    with box.transaction(durable=True):
        return _each(seqs, lambda seq: _replay(box, seq, now_ms))


def replay_as(box: OutboxFile, seq: int, event: Accepted, progress: str | None, now_ms: int) -> int:
    """Put a dead letter at the tail as another event, with a new key and this progress; returns its seq.

    The old key stays known as `discarded`. Nothing is dropped for it. Durable when this returns.

    Raises:
        UsageError: there is no such dead letter.
        StoreFull: the event is larger than it was, and the bounds have no room for it.
    """
    with box.transaction(durable=True):
        letter = _letter(box, seq)
        _require_room(box, letter, len(event.wire_payload))
        new_seq = _to_the_tail(box, letter, event, progress, now_ms)
        state = str(move(State.DEAD, Act.DISCARD))
        old = letter.event
        remember(box, [(old.key, seq, old.kind, old.digest, state, now_ms, None)])
    return new_seq


def _replay(box: OutboxFile, seq: int, now_ms: int) -> int:
    letter = _letter(box, seq)
    if not letter.sound:
        raise UsageError(
            f"The stored text of dead letter {seq:,} of {box.agent!r} is damaged and cannot be sent so. "
            "Nothing was changed. Enqueue the event anew, and discard this one."
        )
    return _to_the_tail(box, letter, letter.event, letter.tries.progress, now_ms)


def _to_the_tail(box: OutboxFile, letter: Record, event: Accepted, progress: str | None, now_ms: int) -> int:
    move(State.DEAD, Act.REPLAY)
    event = event._replace(replayed_from=letter.seq)
    wire = event.wire_payload
    new_seq: int = box.one(sql.COUNT_REPLAYED, len(wire), len(letter.event.wire_payload))[0]
    box.run(sql.DELETE_DEAD, letter.seq)
    box.run(
        sql.INSERT_EVENT, new_seq, event.kind, event.key, wire, event.shape, event.occurred_at_ms, now_ms,
        event.digest, event.dedupe_key, extra_text(event),
        row_checksum(box.stream, new_seq, event.kind, event.key, event.occurred_at_ms, wire),
    )  # fmt: skip
    if progress is not None:
        box.run(sql.PUT_TRIES, new_seq, 0, 0, 0, now_ms, "[]", _without_refusals(progress))
    box.run(sql.ADD_TOTAL, "replayed", 1)
    return new_seq


def _without_refusals(progress: str) -> str:
    """What is stored at the relay stays so; the messages of a batch that it refused are tried again."""
    marks = read_object(progress)
    marks.pop("refused", None)
    return json.dumps(marks, separators=(",", ":"))


def _require_room(box: OutboxFile, letter: Record, size_bytes: int) -> None:
    old_bytes = len(letter.event.wire_payload)
    waiting, waiting_bytes, dead, dead_bytes = box.one(sql.READ_FILL)
    without = Fill(waiting, waiting_bytes, dead - 1, dead_bytes - old_bytes)
    if size_bytes > old_bytes and room_for(without, size_bytes, box.bounds) is not Room.THERE:
        raise StoreFull(
            f"The edited event has {size_bytes:,} bytes, {size_bytes - old_bytes:,} more than before, and "
            f"the outbox of {box.agent!r} has no room for them. Nothing was changed. Raise bounds.max_bytes, "
            "or let it drain: outbox status"
        )


# Discard ----------------------------------------------------------------------------------------------------


def discard(box: OutboxFile, seq: int, now_ms: int) -> None:
    """Throw a dead letter away; its key stays known. Raises UsageError when there is no such dead letter."""
    with box.transaction(durable=True):
        _discard(box, seq, now_ms)


def discard_each(box: OutboxFile, seqs: Sequence[int], now_ms: int) -> list[int | UsageError]:
    """`discard` of several with one durable commit: the seq or an error for each of them."""
    with box.transaction(durable=True):
        return _each(seqs, lambda seq: _discard(box, seq, now_ms))


def _discard(box: OutboxFile, seq: int, now_ms: int) -> int:
    event = _letter(box, seq).event
    box.run(sql.DELETE_DEAD, seq)
    box.run(sql.COUNT_BURIED, -1, -len(event.wire_payload))
    box.run(sql.ADD_TOTAL, "discarded", 1)
    state = str(move(State.DEAD, Act.DISCARD))
    remember(box, [(event.key, seq, event.kind, event.digest, state, now_ms, None)])
    return seq


def _each(seqs: Sequence[int], act: Callable[[int], _Done]) -> list[_Done | UsageError]:
    """Do it with each; an error of one, raised before anything is written, does not concern the others."""
    results: list[_Done | UsageError] = []
    for seq in seqs:
        try:
            results.append(act(seq))
        except UsageError as error:
            results.append(error)
    return results


def _letter(box: OutboxFile, seq: int) -> Record:
    letter = letter_of(box, seq)
    if letter is None:
        raise UsageError(
            f"There is no dead letter {seq:,} of {box.agent!r}. Nothing was changed. See: outbox dead list"
        )
    return letter
