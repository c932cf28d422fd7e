"""What a person may do with an outbox while its sender is at work: pause, resume, skip."""

from __future__ import annotations

from outbox.errors import UsageError
from outbox.gap import GAP_KIND
from outbox.outcome import Act, Bury, Reason, State, Trouble, move
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.sending import bury_row, sender_row


def pause(box: OutboxFile, now_ms: int) -> None:
    """Nothing is sent from this outbox any more; what is in flight ends, and events are still accepted."""
    with box.transaction(durable=True):
        box.run(sql.SET_PAUSED, now_ms)


def resume(box: OutboxFile) -> None:
    """Go on, and forget the wait of the head."""
    with box.transaction(durable=True):
        box.run(sql.SET_PAUSED, None)
        box.run(sql.SET_BLOCKED, None, None, None, None)


def skip(box: OutboxFile, seq: int, now_ms: int) -> None:
    """Make a dead letter of a waiting event, so that what is behind it goes on; it can be replayed.

    Raises UsageError when no such event waits, or it is in flight.
    """
    with box.transaction(durable=True):
        _, claimed_through, _, _ = box.one(sql.READ_CLAIM)
        raw = box.maybe(sql.WAITING_ROW, seq)
        if raw is None:
            raise UsageError(f"No event {seq:,} waits in the outbox of {box.agent!r}. Nothing was changed.")
        row = sender_row(box.stream, raw)
        if seq <= claimed_through:
            raise UsageError(
                f"Event {seq:,} of {box.agent!r} is in flight right now. Nothing was changed; try again in a moment."
            )
        if row.kind == GAP_KIND:
            raise UsageError(f"Event {seq:,} of {box.agent!r} tells of a gap and cannot be skipped.")
        move(State.WAITING, Act.SKIP)
        trouble = Trouble(now_ms, str(Reason.SKIPPED), detail="set aside by a person")
        bury_row(box, row, Bury(seq, Reason.SKIPPED, row.attempts, trouble, row.progress), now_ms)
        box.run(sql.SET_BLOCKED, None, None, None, None)
