"""Self-resume, decided: whether a command that ended in a hand-off starts again, and how. Pure.

`decide` goes from a situation and an event to the next situation and what is to be done, in this order.
A hand-off is open from its announcement to the command's end; a restart settles from the new start until it
has proved itself. Moments are monotonic milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Via(StrEnum):
    """How the command starts again."""

    RESUME = "claude-resume"
    FRESH = "fresh-launch"


class Refusal(StrEnum):
    """Why a hand-off came to nothing."""

    SUPERSEDED = "superseded"  # another one was announced
    TIMEOUT = "timeout"
    STOPPING = "stopping"  # the sidecar was asked to end
    TOO_MANY = "too_many_restarts"
    FAILED = "restart_failed"


@dataclass(frozen=True, slots=True)
class Handoff:
    """One announcement. `number` tells it from every other, whatever the command id."""

    number: int
    command_id: str
    generation: int | None
    ends_at_ms: int


@dataclass(frozen=True, slots=True)
class Restart:
    """A start that a hand-off led to, and why in this way; `session_id` is the session to go on with."""

    handoff: Handoff
    via: Via
    reason: str
    session_id: str | None
    settles_at_ms: int


@dataclass(frozen=True, slots=True)
class Situation:
    """All that decisions rest on. `in_a_row` counts restarts without a long run between them."""

    handoff: Handoff | None = None
    restart: Restart | None = None
    is_compacted: bool = False
    session_id: str | None = None
    in_a_row: int = 0
    started_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decide. After a run of `long_run_ms` the counting of restarts begins anew."""

    settle_ms: int = 5_000
    max_restarts: int = 5
    long_run_ms: int = 600_000


# Events -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """A hand-off was announced."""

    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction was noted since the command's start."""


@dataclass(frozen=True, slots=True)
class SessionKnown:
    """A hook told which session the command is in."""

    session_id: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing but that it is later."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The command has ended; `how` says it in words. `is_stopping`: we were asked to end as well."""

    how: str
    succeeded: bool
    is_stopping: bool = False


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The command could not be started again."""

    why: str


Event = Announced | Compacted | SessionKnown | TimePassed | Exited | CannotStart

# Acts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the issuer that its hand-off came to nothing."""

    handoff: Handoff
    refusal: Refusal
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Publish the decision, and start the command again."""

    restart: Restart


@dataclass(frozen=True, slots=True)
class Recover:
    """Tell the issuer that the command works again, and send what waits."""

    restart: Restart
    session_id: str | None


@dataclass(frozen=True, slots=True)
class GoOffline:
    """Publish that nobody works here any more, and tell the issuer."""

    handoff: Handoff
    refusal: Refusal
    detail: str


@dataclass(frozen=True, slots=True)
class End:
    """The sidecar ends, as the command ended."""


Act = Refuse | Launch | Recover | GoOffline | End


def decide(now: Situation, event: Event, now_ms: int, rules: Rules) -> tuple[Situation, tuple[Act, ...]]:
    """What follows from an event. What time has brought about comes first, whatever the event is."""
    then, acts = _passed(now, now_ms, rules)
    match event:
        case Announced(handoff):
            then, more = _announced(then, handoff)
        case Compacted():
            then, more = replace(then, is_compacted=True), ()
        case SessionKnown(session_id):
            then, more = _in_session(then, session_id)
        case Exited():
            then, more = _exited(then, event, now_ms, rules)
        case CannotStart(why):
            then, more = _failed(then, why)
        case TimePassed():
            more = ()
    return then, (*acts, *more)


def next_moment_ms(now: Situation) -> int | None:
    """When time alone brings something about."""
    moments = [now.handoff.ends_at_ms] if now.handoff else []
    moments += [now.restart.settles_at_ms] if now.restart else []
    return min(moments, default=None)


_Next = tuple[Situation, tuple[Act, ...]]


def _passed(now: Situation, now_ms: int, rules: Rules) -> _Next:
    acts: list[Act] = []
    if now.handoff and now_ms >= now.handoff.ends_at_ms:
        acts.append(Refuse(now.handoff, Refusal.TIMEOUT))
        now = replace(now, handoff=None)
    if now.restart and now_ms >= now.restart.settles_at_ms:
        acts.append(Recover(now.restart, now.restart.session_id))
        now = replace(now, restart=None)
    if now.in_a_row and now_ms - now.started_at_ms >= rules.long_run_ms:
        now = replace(now, in_a_row=0)
    return now, tuple(acts)


def _announced(now: Situation, handoff: Handoff) -> _Next:
    before = [each for each in (now.handoff, now.restart and now.restart.handoff) if each]
    acts = tuple(Refuse(each, Refusal.SUPERSEDED) for each in before)
    return replace(now, handoff=handoff, restart=None), acts


def _in_session(now: Situation, session_id: str) -> _Next:
    acts = (Recover(now.restart, session_id),) if now.restart else ()
    return replace(now, session_id=session_id, restart=None), acts


def _exited(now: Situation, event: Exited, now_ms: int, rules: Rules) -> _Next:
    if now.restart and not event.succeeded and not event.is_stopping:
        return _failed(now, f"it ended with {event.how} right after its start")
    acts: tuple[Act, ...] = ()
    if now.restart and event.is_stopping:
        acts, now = (Refuse(now.restart.handoff, Refusal.STOPPING),), replace(now, restart=None)
    elif now.restart:  # it was quick, and did well
        acts, now = (Recover(now.restart, now.restart.session_id),), replace(now, restart=None)
    handoff = now.handoff
    if handoff is None:
        return now, (*acts, End())
    if event.is_stopping:
        return replace(now, handoff=None), (*acts, Refuse(handoff, Refusal.STOPPING), End())
    if now.in_a_row >= rules.max_restarts:
        detail = f"{now.in_a_row} restarts in a row"
        return replace(now, handoff=None), (*acts, GoOffline(handoff, Refusal.TOO_MANY, detail), End())
    restart = _restart(now, handoff, now_ms + rules.settle_ms)
    after = Situation(restart=restart, in_a_row=now.in_a_row + 1, started_at_ms=now_ms)
    return after, (*acts, Launch(restart))


def _restart(now: Situation, handoff: Handoff, settles_at_ms: int) -> Restart:
    if not now.is_compacted:
        return Restart(handoff, Via.FRESH, "no_compaction", None, settles_at_ms)
    if not now.session_id:
        return Restart(handoff, Via.FRESH, "no_session", None, settles_at_ms)
    return Restart(handoff, Via.RESUME, "compaction_noted", now.session_id, settles_at_ms)


def _failed(now: Situation, why: str) -> _Next:
    acts: list[Act] = []
    if now.restart:
        acts.append(GoOffline(now.restart.handoff, Refusal.FAILED, why))
    if now.handoff:
        acts.append(Refuse(now.handoff, Refusal.FAILED, why))
    return replace(now, restart=None, handoff=None), (*acts, End())
