"""What a bound takes away: counted, remembered in a receipt, and, of waiting events, told in a gap."""

from __future__ import annotations

import os
from dataclasses import dataclass

from outbox.gap import GAP_KIND, Gap, Lost, decode, widen
from outbox.outcome import Act, State, move
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember
from outbox.event import row_checksum, uuid7


@dataclass(frozen=True, slots=True)
class Dropped:
    """One event that a bound removed, and the gap that tells of it."""

    seq: int
    key: str
    kind: str
    size_bytes: int
    gap_seq: int


def drop_waiting(
    box: OutboxFile,
    claimed_through: int,
    open_gap_seq: int | None,
    reason: str,
    now_ms: int,
    *,
    accepted_before_ms: int | None = None,
) -> Dropped | None:
    """Drop the oldest waiting event that is not in flight; None when there is none. Inside a transaction.

    With `accepted_before_ms` only an event accepted before that moment goes.
    """
    row = box.maybe(sql.OLDEST_WAITING + " LIMIT 1", claimed_through)
    if row is None:
        return None
    seq, kind, key, digest, size, occurred_at_ms, accepted_at_ms = row
    if accepted_before_ms is not None and accepted_at_ms >= accepted_before_ms:
        return None
    remember(box, key, seq, kind, digest, move(State.WAITING, Act.DROP), now_ms)
    box.run(sql.DELETE_EVENT, seq)
    box.run(sql.DELETE_TRIES, seq)
    box.run(sql.COUNT_SETTLED, 1, size, 0)
    box.run(sql.COUNT_DROPPED, 1)
    box.run(sql.ADD_TOTAL, f"dropped:{reason}", 1)
    gap_seq = _tell(box, open_gap_seq, Lost(seq, kind, size, occurred_at_ms), reason, now_ms)
    return Dropped(seq, key, kind, size, gap_seq)


def drop_dead(box: OutboxFile, count: int, reason: str, now_ms: int) -> int:
    """Drop the oldest dead letters; returns the bytes freed. Inside a transaction."""
    rows = box.rows(sql.OLDEST_DEAD + " LIMIT ?", count)
    for seq, kind, key, digest, _ in rows:
        remember(box, key, seq, kind, digest, move(State.DEAD, Act.DROP), now_ms)
        box.run(sql.DELETE_DEAD, seq)
    freed: int = sum(row[4] for row in rows)
    box.run(sql.COUNT_BURIED, -len(rows), -freed)
    box.run(sql.ADD_TOTAL, f"dropped_dead:{reason}", len(rows))
    return freed


def _tell(box: OutboxFile, open_gap_seq: int | None, lost: Lost, reason: str, now_ms: int) -> int:
    """Widen the open gap, or open one in the place of the lost event."""
    if open_gap_seq is not None:
        gap = widen(decode(box.one(sql.READ_GAP, open_gap_seq)[0]), lost, reason)
        _write_gap(box, open_gap_seq, gap)
        return open_gap_seq
    gap = widen(None, lost, reason)
    text = gap.encode()
    key = uuid7(now_ms, os.urandom(10))
    box.run(
        sql.INSERT_EVENT, lost.seq, GAP_KIND, key, text, "gap", now_ms, now_ms, b"", None, None,
        row_checksum(box.stream, lost.seq, GAP_KIND, key, now_ms, text),
    )  # fmt: skip
    box.run(sql.SET_OPEN_GAP, lost.seq)
    return lost.seq


def _write_gap(box: OutboxFile, seq: int, gap: Gap) -> None:
    key, occurred_at_ms = box.one("SELECT key, occurred_at_ms FROM events WHERE seq = ?", seq)
    text = gap.encode()
    box.run(
        sql.CHANGE_GAP, text, row_checksum(box.stream, seq, GAP_KIND, key, occurred_at_ms, text), seq
    )

