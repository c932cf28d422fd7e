"""What a sender does with an outbox: claim a head run, settle it, recover the claim of a sender that died.

A claim is a range: every event up to `claimed_through`, under a generation. A settlement carries the generation;
a sender that lost its claim changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outbox.errors import StoreHeld
from outbox.event import row_checksum
from outbox.gap import GAP_KIND
from outbox.gap import decode as decode_gap
from outbox.outcome import Ack, Act, Blocked, Bury, Reason, Release, Settlement, State, Trouble, move
from outbox.store import statements as sql
from outbox.store.dropping import drop_dead, drop_waiting
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember_many
from outbox.wire_text import Stamp, make_wire

_HISTORY_LENGTH = 20
_CRASHES_FOR_BLAME = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One event as its sender sees it."""

    seq: int
    kind: str
    key: str
    wire_payload: bytes
    shape: str
    occurred_at_ms: int
    accepted_at_ms: int
    digest: bytes
    extra: dict[str, Any]
    sound: bool  # the checksum matches
    sends: int
    attempts: int
    crashes: int
    first_try_at_ms: int | None
    history: str
    progress: str | None

    @property
    def size_bytes(self) -> int:
        """The length of its wire text."""
        return len(self.wire_payload)


@dataclass(frozen=True, slots=True)
class Claim:
    """A head run handed to the sender."""

    generation: int
    rows: tuple[Row, ...]
    unsafe: bool = False


def head(box: OutboxFile) -> Row | None:
    """The event that goes next, without claiming it."""
    for raw in box.rows(sql.HEAD_ROWS, 1):
        return sender_row(box.stream, raw)
    return None


def claim(
    box: OutboxFile, choose: Callable[[Iterator[Row]], list[Row]], *, unsafe: bool, now_ms: int, most: int = 1_000
) -> Claim | None:
    """Claim the head run that `choose` takes from the rows in order (at most `most`); None when it takes none.

    An unsafe claim is on disk (FULL) when this returns: no byte of the request has left before. A gap in the run
    stops growing and gets its wire text.
    """
    with box.transaction(durable=unsafe):
        generation, claimed_through, _, open_gap_seq = box.one(sql.READ_CLAIM)
        if claimed_through:
            raise StoreHeld(f"Events of {box.agent!r} are in flight already; their sender has to settle first.")
        rows = choose(sender_row(box.stream, raw) for raw in box.each(sql.HEAD_ROWS, most))
        if not rows:
            return None
        if open_gap_seq is not None and open_gap_seq <= rows[-1].seq:
            rows = [_frozen(box, row) if row.seq == open_gap_seq else row for row in rows]
        move(State.WAITING, Act.CLAIM)
        box.run(sql.OPEN_CLAIM, rows[-1].seq, int(unsafe))
    return Claim(generation + 1, tuple(rows), unsafe)


def _frozen(box: OutboxFile, row: Row) -> Row:
    """The open gap with its wire text; it does not grow any more."""
    message = decode_gap(row.wire_payload).message(box.agent)
    text = make_wire("session-message", message, Stamp(row.occurred_at_ms, row.key)).text.encode()
    checksum = row_checksum(box.stream, row.seq, row.kind, row.key, row.occurred_at_ms, text)
    box.run(sql.CHANGE_GAP, text, checksum, row.seq)
    box.run(sql.SET_OPEN_GAP, None)
    return dataclasses.replace(row, wire_payload=text)


def settle(
    box: OutboxFile,
    taken: Claim,
    settlements: Sequence[Settlement],
    *,
    now_ms: int,
    blocked: Blocked | None = None,
) -> None:
    """Apply what became of a claim, in one transaction (NORMAL: a lost one is only a repeat with the same key).

    Raises StoreHeld when another sender has taken over since (nothing is changed then).
    """
    rows = {row.seq: row for row in taken.rows}
    with box.transaction(durable=False):
        generation, *_ = box.one(sql.READ_CLAIM)
        if generation != taken.generation:
            raise StoreHeld(f"Another sender took over the outbox of {box.agent!r}. Nothing was changed.")
        _acknowledge(box, [(rows[s.seq], s) for s in settlements if isinstance(s, Ack)], now_ms)
        for settlement in settlements:
            row = rows[settlement.seq]
            if isinstance(settlement, Release):
                _release(box, row, settlement, now_ms)
            elif isinstance(settlement, Bury):
                _bury(box, row, settlement, now_ms)
        box.run(sql.CLOSE_CLAIM)
        write_blocked(box, blocked)


def _acknowledge(box: OutboxFile, acks: list[tuple[Row, Ack]], now_ms: int) -> None:
    if not acks:
        return
    move(State.IN_FLIGHT, Act.ACK)
    box.run_many(sql.DELETE_EVENT, [(row.seq,) for row, _ in acks])
    box.run_many(sql.DELETE_TRIES, [(row.seq,) for row, _ in acks if row.history])
    events = [(row, ack) for row, ack in acks if row.kind != GAP_KIND]
    remember_many(
        box,
        [
            (
                row.key, row.seq, row.kind, row.digest,
                str(State.TOOL_ERROR if ack.tool_error else State.DELIVERED), now_ms, ack.result,
            )
            for row, ack in events
        ],
    )  # fmt: skip
    refused = sum(ack.tool_error for _, ack in events)
    if refused:
        box.run(sql.ADD_TOTAL, "tool_error", refused)
    size = sum(row.size_bytes for row, _ in events)
    box.run(sql.COUNT_SETTLED, len(events), size, len(events) - refused)


def _release(box: OutboxFile, row: Row, release: Release, now_ms: int) -> None:
    move(State.IN_FLIGHT, Act.RELEASE)
    if not release.sent and release.trouble is None and release.progress == row.progress:
        return
    box.run(
        sql.PUT_TRIES,
        row.seq,
        row.sends + release.sent,
        release.attempts,
        row.crashes,
        now_ms if row.first_try_at_ms is None else row.first_try_at_ms,
        _longer(row.history, release.trouble),
        release.progress,
    )


def _bury(box: OutboxFile, row: Row, bury: Bury, now_ms: int) -> None:
    move(State.IN_FLIGHT, Act.BURY)
    if row.kind == GAP_KIND:
        box.run(sql.DELETE_EVENT, row.seq)
        box.run(sql.DELETE_TRIES, row.seq)
        box.run(sql.ADD_TOTAL, "gap_refused", 1)
        return
    bury_row(box, row, bury, now_ms)


def bury_row(box: OutboxFile, row: Row, bury: Bury, now_ms: int) -> None:
    """Move a row to the dead letters, and the oldest of them out when they are too many; in a transaction."""
    trouble = bury.trouble
    box.run(
        sql.BURY_EVENT, str(bury.reason), trouble.status, trouble.code, trouble.detail, trouble.excerpt,
        trouble.path, row.sends + 1, bury.attempts, row.first_try_at_ms, _longer(row.history, trouble),
        bury.progress if bury.progress is not None else row.progress, now_ms, row.seq,
    )  # fmt: skip
    box.run(sql.DELETE_EVENT, row.seq)
    box.run(sql.DELETE_TRIES, row.seq)
    box.run(sql.COUNT_SETTLED, 1, row.size_bytes, 0)
    box.run(sql.COUNT_BURIED, 1, row.size_bytes)
    box.run(sql.ADD_TOTAL, f"dead:{bury.reason}", 1)
    dead = box.one("SELECT dead FROM outbox")[0]
    if dead > box.bounds.max_dead:
        drop_dead(box, dead - box.bounds.max_dead, "max_dead", now_ms)


def recover(box: OutboxFile, *, now_ms: int) -> list[int]:
    """Take over what a dead sender left in flight; returns the seqs of unsafe events that are now dead letters.

    Every claimed row counts one crash; from the third on each counts as an attempt. A row of an unsafe claim has
    an unknown outcome and is never sent again by itself.
    """
    with box.transaction(durable=True):
        _, claimed_through, unsafe, _ = box.one(sql.READ_CLAIM)
        if not claimed_through:
            return []
        unknown: list[int] = []
        for raw in box.rows(sql.CLAIMED_ROWS, claimed_through):
            row = sender_row(box.stream, raw)
            crashes = row.crashes + 1
            trouble = Trouble(now_ms, "crashed", detail="the sender died while this was in flight")
            if unsafe:
                bury_row(box, row, Bury(row.seq, Reason.OUTCOME_UNKNOWN, row.attempts, trouble), now_ms)
                unknown.append(row.seq)
                continue
            box.run(
                sql.PUT_TRIES, row.seq, row.sends + 1, row.attempts + (crashes >= _CRASHES_FOR_BLAME), crashes,
                now_ms if row.first_try_at_ms is None else row.first_try_at_ms,
                _longer(row.history, trouble), row.progress,
            )  # fmt: skip
        box.run("UPDATE outbox SET generation = generation + 1")
        box.run(sql.CLOSE_CLAIM)
    return unknown


def expire(
    box: OutboxFile,
    horizon_ms: int,
    *,
    now_ms: int,
    most: int = 1_000,
    log: Callable[[str, dict[str, Any]], None] = lambda event, fields: None,
) -> int:
    """Drop waiting events accepted before `horizon_ms`, oldest first, at most `most`; returns how many.

    A log line says so before the first one goes.
    """
    oldest = box.maybe(sql.OLDEST_WAITING + " LIMIT 1", 0)
    if oldest is None or oldest[6] >= horizon_ms:
        return 0
    log("expiring", {"agent": box.agent, "seq": oldest[0], "reason": "max_age"})
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


def write_blocked(box: OutboxFile, blocked: Blocked | None) -> None:
    """Keep why the head waits (or that nothing is in the way); in a transaction."""
    if blocked is None:
        box.run(sql.SET_BLOCKED, None, None, None, None)
    else:
        box.run(
            sql.SET_BLOCKED, blocked.reason, blocked.since_ms, blocked.next_try_at_ms, blocked.detail
        )


def note_blocked(box: OutboxFile, blocked: Blocked | None) -> None:
    """`write_blocked` as a transaction of its own."""
    with box.transaction(durable=False):
        write_blocked(box, blocked)


def _longer(history: str, trouble: Trouble | None) -> str:
    if trouble is None:
        return history or "[]"
    entries: list[dict[str, object]] = json.loads(history) if history else []
    fields = dataclasses.asdict(trouble)
    fields.pop("excerpt")
    entries.append({name: value for name, value in fields.items() if value not in (None, "")})
    return json.dumps(entries[-_HISTORY_LENGTH:], separators=(",", ":"))


def sender_row(stream: str, raw: tuple[Any, ...]) -> Row:
    """A row of HEAD_ROWS and its like, with its checksum compared."""
    (seq, kind, key, wire, shape, occurred_at_ms, accepted_at_ms, digest, extra, checksum,
     sends, attempts, crashes, first_try_at_ms, history, progress) = raw  # fmt: skip
    if not isinstance(wire, bytes):
        wire = str(wire).encode("utf-8", "replace")
    sound = checksum == row_checksum(stream, seq, kind, key, occurred_at_ms, wire)
    return Row(
        seq, kind, key, wire, shape, occurred_at_ms, accepted_at_ms, digest,
        json.loads(extra) if extra else {}, sound, sends, attempts, crashes, first_try_at_ms, history or "",
        progress,
    )  # fmt: skip
