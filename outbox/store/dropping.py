"""What a bound takes away: counted, remembered in a receipt, and, of waiting events, told in a gap."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from outbox.event import row_checksum, uuid7
from outbox.gap import GAP_KIND, Gap, Lost, decode, widen
from outbox.outcome import Act, State, move
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember
from outbox.store.row import own_key, readable, whole

Log = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Dropped:
    """One event that a bound removed, and the gap that tells of it."""

    seq: int
    key: str
    kind: str
    size_bytes: int
    gap_seq: int


class Going(NamedTuple):
    """A row that is removed, as far as it can be read: a damaged one goes as any other."""

    seq: int
    kind: str
    key: str
    digest: bytes
    size_bytes: int
    occurred_at_ms: int = 0
    accepted_at_ms: int = 0


def going(raw: tuple[Any, ...]) -> Going:
    """A row of OLDEST_WAITING, OLDEST_DEAD or FIND_COALESCED."""
    seq, kind, key, digest, size_bytes, *moments = raw
    digest = digest if isinstance(digest, bytes) else b""
    return Going(seq, readable(kind), own_key(key, seq), digest, size_bytes, *map(whole, moments))


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
    raw = box.maybe(sql.OLDEST_WAITING, claimed_through)
    if raw is None:
        return None
    row = going(raw)
    seq, kind, key, digest, size, occurred_at_ms, accepted_at_ms = row
    if accepted_before_ms is not None and accepted_at_ms >= accepted_before_ms:
        return None
    _log(box, "event", row, reason)
    remember(box, [(key, seq, kind, digest, str(move(State.WAITING, Act.DROP)), now_ms, None)])
    box.run(sql.DELETE_EVENT, seq)
    box.run(sql.DELETE_TRIES, seq)
    box.run(sql.COUNT_SETTLED, 1, size, 0)
    box.run(sql.COUNT_DROPPED, 1)
    box.run(sql.ADD_TOTAL, f"dropped:{reason}", 1)
    gap_seq = _tell(box, open_gap_seq, Lost(seq, kind, size, occurred_at_ms), reason, now_ms)
    return Dropped(seq, key, kind, size, gap_seq)


def drop_dead(box: OutboxFile, count: int, reason: str, now_ms: int) -> int:
    """Drop the oldest dead letters; returns the bytes freed. Inside a transaction."""
    rows = [going(raw) for raw in box.rows(sql.OLDEST_DEAD, count)]
    state = str(move(State.DEAD, Act.DROP))
    for row in rows:
        _log(box, "dead letter", row, reason)
    box.run_many(sql.DELETE_DEAD, [(row.seq,) for row in rows])
    freed = sum(row.size_bytes for row in rows)
    box.run(sql.COUNT_BURIED, -len(rows), -freed)
    box.run(sql.ADD_TOTAL, f"dropped_dead:{reason}", len(rows))
    remember(box, [(row.key, row.seq, row.kind, row.digest, state, now_ms, None) for row in rows])
    return freed


def _log(box: OutboxFile, what: str, row: Going, reason: str) -> None:
    """Said by whoever's process drops it, before it goes."""
    import logging  # noqa: PLC0415 - what drops nothing does not load it

    words = "dropping the oldest %s of %r: seq %d (%s, key %s), by the bound %s"
    logging.getLogger("outbox").warning(words, what, box.agent, row.seq, row.kind, row.key, reason)


def expire(
    box: OutboxFile,
    horizon_ms: int,
    *,
    now_ms: int,
    most: int = 1_000,
    log: Log | None = None,
) -> int:
    """Drop waiting events accepted before `horizon_ms`, oldest first, at most `most`; returns how many.

    A log line says so before the first one goes.
    """
    claimed_through = box.one(sql.READ_CLAIM)[1]
    raw = box.maybe(sql.OLDEST_WAITING, claimed_through)
    if raw is None or (oldest := going(raw)).accepted_at_ms >= horizon_ms:
        return 0
    if log is not None:
        log("expiring", {"agent": box.agent, "seq": oldest.seq, "reason": "max_age"})
    with box.transaction(durable=False):
        _, claimed_through, _, open_gap_seq = box.one(sql.READ_CLAIM)
        for count in range(most):
            gone = drop_waiting(
                box, claimed_through, open_gap_seq, "max_age", now_ms, accepted_before_ms=horizon_ms
            )
            if gone is None:
                return count
            open_gap_seq = gone.gap_seq
    return most


def _tell(box: OutboxFile, open_gap_seq: int | None, lost: Lost, reason: str, now_ms: int) -> int:
    """Widen the open gap, or open one, so that it stands where the first lost event was; returns its seq.

    An open gap whose row is damaged is left to the sender, which sets it aside: a new one tells what comes.
    """
    row = None if open_gap_seq is None else box.maybe(sql.READ_GAP, open_gap_seq)
    if row is None or _checksum(box, open_gap_seq, *row[:3]) != row[3]:
        return _open(box, widen(None, lost, reason), now_ms)
    key, occurred_at_ms, text, _ = row
    text = widen(decode(text), lost, reason).encode()
    seq = lost.seq if open_gap_seq is None else min(open_gap_seq, lost.seq)
    box.run(sql.CHANGE_GAP, seq, text, _checksum(box, seq, key, occurred_at_ms, text), open_gap_seq)
    if seq != open_gap_seq:
        box.run(sql.SET_OPEN_GAP, seq)
    return seq


def _open(box: OutboxFile, gap: Gap, now_ms: int) -> int:
    text, key, seq = gap.encode(), uuid7(now_ms, os.urandom(10)), gap.first_seq
    checksum = _checksum(box, seq, key, now_ms, text)
    box.run(
        sql.INSERT_EVENT, seq, GAP_KIND, key, text, "gap", now_ms, now_ms, b"", None, None, checksum
    )  # fmt: skip
    box.run(sql.SET_OPEN_GAP, seq)
    return seq


def _checksum(box: OutboxFile, seq: int | None, key: str, occurred_at_ms: int, text: bytes) -> int:
    return row_checksum(box.stream, seq or 0, GAP_KIND, key, occurred_at_ms, text)
