"""What a person may do with an outbox while its sender is at work: pause, resume, skip.

What a person does with dead letters stands in dead.py.
"""

from __future__ import annotations

from outbox.errors import UsageError
from outbox.gap import GAP_KIND
from outbox.outcome import Act, Bury, Reason, State, Trouble, move
from outbox.store import statements as sql
from outbox.store.dead import bury_row
from outbox.store.file import OutboxFile
from outbox.store.row import sender_row
from outbox.store.sending import write_blocked


def is_paused(box: OutboxFile) -> bool:
    """Whether a person paused this outbox."""
    return box.one(sql.READ_PAUSED)[0] is not None


def pause(box: OutboxFile, now_ms: int) -> None:
    """Nothing is sent from this outbox any more; what is in flight ends, and events are still accepted."""
    with box.transaction(durable=True):
        box.run(sql.SET_PAUSED, now_ms)


def resume(box: OutboxFile) -> None:
    """Go on, and forget the wait of the head."""
    with box.transaction(durable=True):
        box.run(sql.SET_PAUSED, None)
        write_blocked(box, None)


def skip(box: OutboxFile, seq: int, now_ms: int) -> None:
    """Make a dead letter of a waiting event, so that what is behind it goes on; it can be replayed.

    Raises UsageError when no such event waits, or it is in flight.
    """
    with box.transaction(durable=True):
        raw = box.maybe(sql.WAITING_ROW, seq)
        if raw is None:
            raise UsageError(f"No event {seq:,} waits in the outbox of {box.agent!r}. Nothing was changed.")
        if seq <= box.one(sql.READ_CLAIM)[1]:
            raise UsageError(
                f"Event {seq:,} of {box.agent!r} is in flight right now. Nothing was changed; try again in a "
                "moment."
            )
        row = sender_row(box.stream, raw)
        if row.kind == GAP_KIND:
            raise UsageError(
                f"Event {seq:,} of {box.agent!r} tells the relay what was dropped, and goes out by itself. "
                "Nothing was changed."
            )
        move(State.WAITING, Act.SKIP)
        if seq == box.one(sql.HEAD_SEQ)[0]:
            write_blocked(box, None)
        reason = Reason.SKIPPED if row.sound else Reason.DAMAGED
        trouble = Trouble(now_ms, str(Reason.SKIPPED), detail="set aside by a person")
        bury_row(box, row, Bury(seq, reason, row.attempts, trouble, row.progress, sent=False), now_ms)
