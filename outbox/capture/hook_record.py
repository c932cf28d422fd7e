"""A call of a hook onto the disk: one durable append, and what else it causes. Prints nothing."""

from __future__ import annotations

import os
import time

from outbox.bounds import REFUSE, fits
from outbox.capture.hook_call import Call, Message, key_of, message_of, session_of
from outbox.capture.hook_session import SessionNotes, insight_payload
from outbox.errors import OutboxError, StoreClosed, StoreDamaged, StoreFull
from outbox.event import Draft, Limits, accept, uuid7
from outbox.event_checks import check_payload
from outbox.store.enqueue import enqueue
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.wake import wake_daemon
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.capture.hook_redact import Redaction
    from outbox.store.directory import StateDirectory


_COMPACTIONS = frozenset(("PreCompact", "PostCompact"))


class Desk(NamedTuple):
    """Where calls are recorded, whose they are, and how long a locked file is waited for.

    `body_max_chars` overrides the rules of the outbox (0: never cut); None leaves them as they are.
    """

    state: StateDirectory
    agent: str
    wait_ms: int
    body_max_chars: int | None = None


def record(desk: Desk, call: Call, redaction: Redaction, started_ms: int) -> bool:
    """Put the call on disk: when this returns it survives kill -9 and power loss; False when it was there.

    Raises UsageError (it cannot be taken) or StoreError: nothing was stored, of a message and its insight
    neither.
    """
    notes = SessionNotes(f"{desk.state.folder}/hooks/sessions", call.runner.name, call.session or "")
    box = _opened(desk)
    try:
        message = message_of(
            call,
            agent=desk.agent,
            key=key_of(call, _size(call.transcript)),
            started_ms=started_ms,
            redaction=redaction,
            limits=box.limits,
        )
        is_new = _store(desk, box, _drafts(desk, call, message, notes, redaction, box.limits))
    finally:
        box.close()
    if is_new and call.session:
        notes.add(call.rule.role, message.occurred_at_ms, sum(redaction.counts.values()))
    wake_daemon(f"{desk.state.folder}/wake.sock", box.name)
    _afterwards(desk, call, notes)
    return is_new


def _afterwards(desk: Desk, call: Call, notes: SessionNotes) -> None:
    """What a call causes beside its events, once these are on disk. The one place for it."""
    if call.runner.name == "claude-code" and os.environ.get("OUTBOX_SIDECAR"):
        _tell_sidecar(desk, call)
    if call.rule.ends:
        from outbox.capture.hook_flush import leave_flush_behind  # noqa: PLC0415 - most calls do without

        notes.forget_old(_now_ms())
        leave_flush_behind(desk.state, desk.agent)


def _tell_sidecar(desk: Desk, call: Call) -> None:
    """Under `outbox run --self-resume`: which session can be resumed, and that it was compacted."""
    from outbox.sidecar.handoff import note_compaction, note_session  # noqa: PLC0415 - most calls do without

    note_session(desk.state, desk.agent, call.session or "")
    if call.event in _COMPACTIONS:
        note_compaction(desk.state, desk.agent)


def _drafts(  # noqa: PLR0917 - the parts of a pair
    desk: Desk, call: Call, message: Message, notes: SessionNotes, redaction: Redaction, limits: Limits
) -> list[Draft]:
    """The message, and behind it the insight of a session's end."""
    if not call.rule.ends:
        return [_draft("session-message", message.payload, message.key, message, limits)]
    key = message.key or uuid7(_now_ms(), os.urandom(10))
    tally = notes.tally(call.rule.role, message.occurred_at_ms, sum(redaction.counts.values()))
    session = session_of(call.runner, message.value)
    insight = insight_payload(desk.agent, call.runner.name, session, message.reason, tally)
    return [
        _draft("session-message", message.payload, key, message, limits),
        _draft("insight", insight, f"{key}:insight", message, limits),
    ]


def _draft(kind: str, payload: str, key: str | None, message: Message, limits: Limits) -> Draft:
    check_payload(kind, payload, key, limits.max_payload_bytes, limits.max_nesting)
    return Draft(kind, payload, occurred_at_ms=message.occurred_at_ms, idempotency_key=key)


def _store(desk: Desk, box: OutboxFile, drafts: Sequence[Draft]) -> bool:
    """Commit them together; whether they were new."""
    now_ms = _now_ms()
    accepted = [
        accept(
            draft,
            limits=box.limits,
            agent=desk.agent,
            now_ms=now_ms,
            new_key=draft.idempotency_key or uuid7(now_ms, os.urandom(10)),
        )
        for draft in drafts
    ]
    if len(drafts) > 1:
        _require_room(box, [len(event.wire_payload) for event in accepted])
    try:
        results = enqueue(box, accepted, now_ms=now_ms)
    except (StoreClosed, StoreDamaged) as error:  # replaced meanwhile, or to be: once more
        box.close()
        if isinstance(error, StoreDamaged):
            _set_aside(desk)
        box = _opened(desk)
        try:
            results = enqueue(box, accepted, now_ms=now_ms)
        finally:
            box.close()
    # A key holds a digest of the call, so whoever used it before said the same in another order of keys.
    for result in results:
        if isinstance(result, OutboxError) and result.code != "key_reused":
            raise result
    return any(not isinstance(result, OutboxError) and not result.duplicate for result in results)


def _require_room(box: OutboxFile, sizes: Sequence[int]) -> None:
    """Both or none: where a full outbox refuses, it must not take the first alone."""
    if box.bounds.overflow != REFUSE:
        return
    from outbox.store.inspect import read_status  # noqa: PLC0415 - most calls do without

    status = read_status(box)
    events, held = status.waiting + status.dead, status.waiting_bytes + status.dead_bytes
    if not fits(events + len(sizes) - 1, held + sum(sizes[:-1]), sizes[-1], box.bounds):
        raise StoreFull(
            f"The outbox of {box.agent!r} has no room for a session's end with its insight. None was taken; "
            "what waits is kept. Raise bounds.max_events or bounds.max_bytes, or let it drain: outbox status"
        )


def _opened(desk: Desk) -> OutboxFile:
    """The agent's file, made when it is not there; a damaged one is set aside."""
    path = desk.state.outbox_file(desk.agent)
    if not os.path.lexists(path):
        from outbox.library import read_rules  # noqa: PLC0415 - once for each agent
        from outbox.store.create import create_outbox  # noqa: PLC0415 - as above

        create_outbox(desk.state, desk.agent, *read_rules(desk.state), _now_ms())
    try:
        box = open_outbox(desk.state, path, busy_timeout_ms=desk.wait_ms)
    except StoreDamaged:
        _set_aside(desk)
        box = open_outbox(desk.state, path, busy_timeout_ms=desk.wait_ms)
    if desk.body_max_chars is not None:
        box.override_body_limit(desk.body_max_chars)
    return box


def _set_aside(desk: Desk) -> None:
    from outbox.library import mend  # noqa: PLC0415 - the rare case

    mend(desk.state, desk.agent)


def _size(path: str | None) -> int | None:
    """How large a transcript is; None where there is none. It is never opened."""
    if path is None:
        return None
    try:
        return os.stat(path).st_size  # noqa: PTH116 - whatever a runner gives, a NUL in it included
    except (OSError, ValueError):
        return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
