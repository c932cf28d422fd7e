"""What people and metrics are told of an outbox: read from its file, by whoever asks, daemon or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outbox.outcome import Blocked
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.row import http_status, read_history, readable, whole


@dataclass(frozen=True, slots=True)
class Head:
    """The event that goes next. `history` is what went wrong so far, oldest first."""

    seq: int
    kind: str
    key: str
    accepted_at_ms: int
    sends: int
    attempts: int
    first_try_at_ms: int | None
    history: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """One agent's outbox. `waiting` includes what is in flight; gaps are not counted. Times are epoch ms."""

    agent: str
    stream: str
    waiting: int
    waiting_bytes: int
    in_flight: int
    dead: int
    dead_bytes: int
    accepted: int
    delivered: int
    dropped: int
    paused_at_ms: int | None
    blocked: Blocked | None
    head: Head | None
    sender: bool  # another process or this one sends from it


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter, as `dead list` shows it."""

    seq: int
    kind: str
    key: str
    occurred_at_ms: int
    reason: str
    status: int | None
    detail: str
    attempts: int
    failed_at_ms: int


def read_status(box: OutboxFile) -> OutboxStatus:
    """The counters of an outbox, its head, and why it waits: all of one moment."""
    with box.snapshot():
        row = box.one(sql.READ_OUTBOX)
        (agent, stream, waiting, waiting_bytes, dead, dead_bytes, accepted, delivered, dropped,
         claimed_through, paused_at_ms, reason, since_ms, next_ms, detail) = row  # fmt: skip
        in_flight = box.one(sql.IN_FLIGHT_FILL, claimed_through)[0] if claimed_through else 0
        head = _head(box)
    blocked = Blocked(reason, since_ms, next_ms, detail or "") if reason else None
    return OutboxStatus(
        agent, stream, waiting, waiting_bytes, in_flight, dead, dead_bytes, accepted, delivered, dropped,
        paused_at_ms, blocked, head, box.has_sender,
    )  # fmt: skip


def read_waiting(box: OutboxFile) -> int:
    """How many events wait or are in flight."""
    return int(box.one(sql.READ_WAITING)[0])


def _head(box: OutboxFile) -> Head | None:
    row = box.maybe(sql.HEAD_EVENT)
    if row is None:
        return None
    seq, kind, key, accepted_at_ms, sends, attempts, first_try_at_ms, history = row
    troubles = tuple(read_history(history))
    return Head(
        seq, readable(kind), readable(key), accepted_at_ms, sends, attempts, first_try_at_ms, troubles
    )


def dead_letters(box: OutboxFile) -> Iterator[DeadLetter]:
    """The dead letters of an outbox, oldest first."""
    for row in box.rows(sql.LIST_DEAD):
        yield listed_letter(row)


def listed_letter(raw: tuple[Any, ...]) -> DeadLetter:
    """A row of LIST_DEAD or CHOOSE_DEAD, as far as it can be read."""
    seq, kind, key, occurred_at_ms, reason, status, detail, attempts, failed_at_ms = raw
    return DeadLetter(
        whole(seq), readable(kind), readable(key), whole(occurred_at_ms), readable(reason),
        http_status(status), readable(detail), whole(attempts), whole(failed_at_ms),
    )  # fmt: skip


def totals(box: OutboxFile) -> dict[str, int]:
    """Totals by reason ("dead:rejected", "dropped:max_events", …) since the file was made."""
    return dict(box.rows(sql.READ_TOTALS))
