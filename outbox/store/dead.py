"""Dead letters: how an event becomes one, goes to the tail again, or is thrown away by a person."""

from __future__ import annotations

import json
from typing import Any

from outbox.errors import UsageError
from outbox.event import row_checksum
from outbox.gap import GAP_KIND
from outbox.outcome import Act, Bury, Reason, State, move
from outbox.store import statements as sql
from outbox.store.dropping import drop_dead
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember
from outbox.store.row import Row, longer_history, storable


def bury_row(box: OutboxFile, row: Row, bury: Bury, now_ms: int) -> None:
    """Move a row to the dead letters, and the oldest of them out when they are too many; in a transaction.

    A gap is no event: refused, it is counted and removed.
    """
    if row.kind == GAP_KIND:
        _delete(box, row.seq)
        box.run(sql.ADD_TOTAL, "gap_refused", 1)
        return
    _insert_dead(box, row, bury, now_ms)
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
    box.run(sql.DELETE_TRIES, seq)


def replay(box: OutboxFile, seq: int, now_ms: int) -> int:
    """Put a dead letter at the tail as it was, with its key, its time and its progress; returns its new seq.

    The event starts afresh: no attempts, no history. Durable when this returns. Raises UsageError when there
    is no such dead letter, or its stored text is damaged.
    """
    with box.transaction(durable=True):
        kind, key, wire, shape, occurred_at_ms, digest, dedupe_key, extra, reason, progress = _letter(
            box, seq
        )
        if reason == Reason.DAMAGED:
            raise UsageError(
                f"The stored text of dead letter {seq:,} of {box.agent!r} is damaged and cannot be sent so. "
                "Nothing was changed. Enqueue the event anew, and discard this one."
            )
        move(State.DEAD, Act.REPLAY)
        notes = f'{extra[:-1]},"replayedFrom":{seq}}}' if extra else f'{{"replayedFrom":{seq}}}'
        (new_seq,) = box.one(sql.COUNT_REPLAYED, len(wire))
        box.run(sql.DELETE_DEAD, seq)
        box.run(
            sql.INSERT_EVENT, new_seq, kind, key, wire, shape, occurred_at_ms, now_ms, digest, dedupe_key,
            notes, row_checksum(box.stream, new_seq, kind, key, occurred_at_ms, wire),
        )  # fmt: skip
        if progress is not None:
            box.run(sql.PUT_TRIES, new_seq, 0, 0, 0, now_ms, "[]", progress)
        box.run(sql.ADD_TOTAL, "replayed", 1)
    return int(new_seq)


def discard(box: OutboxFile, seq: int, now_ms: int) -> None:
    """Throw a dead letter away; its key stays known. Raises UsageError when there is no such dead letter."""
    with box.transaction(durable=True):
        kind, key, wire, _, _, digest, *_ = _letter(box, seq)
        box.run(sql.DELETE_DEAD, seq)
        box.run(sql.COUNT_BURIED, -1, -len(wire))
        box.run(sql.ADD_TOTAL, "discarded", 1)
        remember(box, [(key, seq, kind, digest, str(move(State.DEAD, Act.DISCARD)), now_ms, None)])


def _letter(box: OutboxFile, seq: int) -> tuple[Any, ...]:
    row = box.maybe(sql.DEAD_LETTER, seq)
    if row is None:
        raise UsageError(
            f"There is no dead letter {seq:,} of {box.agent!r}. Nothing was changed. See: outbox dead list"
        )
    return row
