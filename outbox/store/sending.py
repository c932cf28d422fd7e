"""What a sender does with an outbox: claim a head run, settle it, recover the claim of a sender that died.

A claim is a range: every event up to `claimed_through`, under a generation. A settlement carries the
generation; a sender that lost its claim changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outbox.errors import StoreHeld
from outbox.event import row_checksum
from outbox.gap import GAP_KIND
from outbox.gap import decode as decode_gap
from outbox.outcome import Ack, Act, Blocked, Bury, Reason, Release, Settlement, State, Trouble, move
from outbox.store import statements as sql
from outbox.store.dead import bury_row
from outbox.store.faults import unmovable
from outbox.store.file import OutboxFile
from outbox.store.receipts import remember
from outbox.store.row import CRASHED, Row, longer_history, sender_row, storable
from outbox.wire_text import Stamp, make_wire

_CRASHES_FOR_BLAME = 3


@dataclass(frozen=True, slots=True)
class Claim:
    """A head run handed to the sender."""

    generation: int
    rows: tuple[Row, ...]
    unsafe: bool = False


def head(box: OutboxFile) -> Row | None:
    """The event that goes next, without claiming it."""
    raw = box.maybe(sql.HEAD_ROWS, 1)
    return None if raw is None else sender_row(box.stream, raw)


def claim(
    box: OutboxFile,
    choose: Callable[[Iterator[Row]], list[Row]],
    *,
    unsafe: bool,
    now_ms: int,  # noqa: ARG001 - every act of a sender is given its moment; nothing is written with it yet
    most: int = 1_000,
) -> Claim | None:
    """Claim the head run that `choose` takes from the rows in order (at most `most`); None if it takes none.

    An unsafe claim is on disk (FULL) when this returns: no byte of the request has left before. A gap in the
    run stops growing and gets its wire text. Raises StoreHeld while another claim is out.
    """
    with box.transaction(durable=unsafe, makes_way=True):
        generation, claimed_through, _, open_gap_seq = box.one(sql.READ_CLAIM)
        if claimed_through:
            raise StoreHeld(
                f"Events of {box.agent!r} are in flight already. Nothing was changed; their sender has to "
                "settle first."
            )
        with contextlib.closing(box.each(sql.HEAD_ROWS, most)) as raws:
            rows = choose(sender_row(box.stream, raw) for raw in raws)
        if not rows:
            return None
        if rows[-1].seq < 1:  # no event has such a number: it is read where nothing is
            raise unmovable(box.name)
        move(State.WAITING, Act.CLAIM)
        if open_gap_seq is not None and open_gap_seq <= rows[-1].seq:
            rows = [_frozen(box, row) if row.seq == open_gap_seq else row for row in rows]
            box.run(sql.SET_OPEN_GAP, None)
        box.run(sql.OPEN_CLAIM, rows[-1].seq, int(unsafe))
    return Claim(generation + 1, tuple(rows), unsafe)


def _frozen(box: OutboxFile, row: Row) -> Row:
    """The open gap with its wire text; it does not grow any more. A damaged one is left to be set aside."""
    if not row.sound:
        return row
    message = decode_gap(row.wire_payload).message(box.agent)
    text = make_wire("session-message", message, Stamp(row.occurred_at_ms, row.key)).text.encode()
    checksum = row_checksum(box.stream, row.seq, row.kind, row.key, row.occurred_at_ms, text)
    box.run(sql.CHANGE_GAP, row.seq, text, checksum, row.seq)
    return row._replace(wire_payload=text)


def settle(
    box: OutboxFile,
    taken: Claim,
    settlements: Sequence[Settlement],
    *,
    now_ms: int,
    blocked: Blocked | None = None,
) -> None:
    """Apply what became of a claim, in one transaction (NORMAL: if lost, it is a repeat with the same key).

    A row of the claim without a settlement waits again as it was. A claim settled before is left alone.
    Raises StoreHeld when another sender has taken over since (nothing is changed then).
    """
    rows = {row.seq: row for row in taken.rows}
    with box.transaction(durable=False):
        generation, claimed_through, *_ = box.one(sql.READ_CLAIM)
        if generation != taken.generation:
            raise StoreHeld(f"Another sender took over the outbox of {box.agent!r}. Nothing was changed.")
        if not claimed_through:
            return
        _acknowledge(box, [(rows[s.seq], s) for s in settlements if isinstance(s, Ack)], now_ms)
        for settlement in settlements:
            row = rows[settlement.seq]
            if isinstance(settlement, Release):
                _release(box, row, settlement, now_ms)
            elif isinstance(settlement, Bury):
                move(State.IN_FLIGHT, Act.BURY)
                bury_row(box, row, settlement, now_ms)
        box.run(sql.CLOSE_CLAIM)
        write_blocked(box, blocked)


def _acknowledge(box: OutboxFile, acks: list[tuple[Row, Ack]], now_ms: int) -> None:
    if not acks:
        return
    delivered, tool_error = move(State.IN_FLIGHT, Act.ACK), move(State.IN_FLIGHT, Act.TOOL_SAID_NO)
    changes = box.db.total_changes()
    box.run_many(sql.DELETE_EVENT, [(row.seq,) for row, _ in acks])
    if box.db.total_changes() - changes < len(acks):
        raise unmovable(box.name)
    box.run_many(sql.DELETE_TRIES, [(row.seq,) for row, _ in acks if row.first_try_at_ms is not None])
    events = [(row, ack) for row, ack in acks if row.kind != GAP_KIND]
    remember(
        box,
        [
            (
                row.key, row.seq, row.kind, row.digest, str(tool_error if ack.tool_error else delivered),
                now_ms, None if ack.result is None else storable(ack.result),
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
    unchanged = release.attempts == row.attempts and release.progress == row.progress
    if not release.sent and release.trouble is None and unchanged:
        return
    box.run(
        sql.PUT_TRIES,
        row.seq,
        row.sends + release.sent,
        release.attempts,
        row.crashes,
        now_ms if row.first_try_at_ms is None else row.first_try_at_ms,
        longer_history(row.history, release.trouble),
        None if release.progress is None else storable(release.progress),
    )


def recover(box: OutboxFile, *, now_ms: int) -> list[int]:
    """Take over what a dead sender left in flight; returns the seqs of unsafe events, now dead letters.

    Every claimed row counts one crash; from the third on each counts as an attempt. A row of an unsafe claim
    has an unknown outcome and is never sent again by itself.
    """
    unknown: list[int] = []
    with box.transaction(durable=True, makes_way=True):
        _, claimed_through, unsafe, _ = box.one(sql.READ_CLAIM)
        if not claimed_through:
            return unknown
        for (seq,) in box.rows(sql.CLAIMED_SEQS, claimed_through):
            row = sender_row(box.stream, box.one(sql.WAITING_ROW, seq))
            trouble = Trouble(now_ms, CRASHED, detail="the sender died while this was in flight")
            if unsafe:
                move(State.IN_FLIGHT, Act.BURY)
                bury_row(box, row, Bury(seq, Reason.OUTCOME_UNKNOWN, row.attempts, trouble), now_ms)
                unknown.append(seq)
            else:
                _note_crash(box, row, trouble)
        box.run(sql.TAKE_OVER)
    return unknown


def _note_crash(box: OutboxFile, row: Row, trouble: Trouble) -> None:
    move(State.IN_FLIGHT, Act.RELEASE)
    crashes = row.crashes + 1
    box.run(
        sql.PUT_TRIES,
        row.seq,
        row.sends + 1,
        row.attempts + (crashes >= _CRASHES_FOR_BLAME),
        crashes,
        trouble.at_ms if row.first_try_at_ms is None else row.first_try_at_ms,
        longer_history(row.history, trouble),
        row.progress,
    )


def write_blocked(box: OutboxFile, blocked: Blocked | None) -> None:
    """Keep why the head waits (or that nothing is in the way); in a transaction."""
    if blocked is None:
        box.run(sql.SET_BLOCKED, None, None, None, None)
    else:
        detail = storable(blocked.detail)
        box.run(sql.SET_BLOCKED, blocked.reason, blocked.since_ms, blocked.next_try_at_ms, detail)


def clear_blocked(box: OutboxFile) -> None:
    """Nothing stands in the way any more; writes only when something did."""
    if box.maybe(sql.IS_BLOCKED):
        note_blocked(box, None)


def note_blocked(box: OutboxFile, blocked: Blocked | None) -> None:
    """`write_blocked` as a transaction of its own."""
    with box.transaction(durable=False):
        write_blocked(box, blocked)
