"""What a person should be told of without having asked: decided from two looks at an outbox. Pure.

Who is told, and how often, is notify.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outbox.api.explain import Explanation
from outbox.api.obstacle import Scope
from outbox.gap import GAP_KIND
from outbox.measures import count
from outbox.store.inspect import DeadLetter, OutboxStatus

_MOST_LINES = 20
_BY_A_PERSON = "skipped"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing to look at. `agent` is None when it concerns more than one."""

    alarm: str  # dead_letter, gap, head_stuck, damaged_file, auth_stopped, …
    agent: str | None
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of one outbox: its status, its totals by reason, its dead letters if there are any."""

    status: OutboxStatus
    totals: Mapping[str, int]
    letters: Sequence[DeadLetter]


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered of an outbox between looks. `head_since_ms` is monotonic."""

    dead: bool
    dropped: Mapping[str, int]
    head_seq: int | None
    head_since_ms: int


def news(before: Known | None, look: Look, *, began_ms: int, now_ms: int) -> tuple[Known, list[Alarm]]:
    """What is new since the last look, and what to remember; `now_ms` is monotonic.

    At the first look dead letters from before `began_ms` (epoch) are old, and so are gaps that were told.
    """
    dropped = _by_reason(look.totals, "dropped:")
    head = look.status.head
    known = Known(look.status.dead > 0, dropped, head.seq if head else None, now_ms)
    if before is None:
        had_dead = any(letter.failed_at_ms < began_ms for letter in look.letters)
        untold = head is not None and head.kind == GAP_KIND
        before = replace(known, dead=had_dead, dropped={} if untold else dropped)
    if before.head_seq == known.head_seq:
        known = replace(known, head_since_ms=before.head_since_ms)
    return known, [*_dead(before, look), *_gap(before, known, look.status)]


def _dead(before: Known, look: Look) -> list[Alarm]:
    """The first dead letter of an agent; one that a person set aside is no news to anybody."""
    first = next((letter for letter in look.letters if letter.reason != _BY_A_PERSON), None)
    if before.dead or first is None:
        return []
    agent = look.status.agent
    detail = f": {first.detail}" if first.detail else ""
    text = (
        f"{agent}: event {first.seq:,} ({first.kind}) became a dead letter, {first.reason}{detail}. It is "
        "kept, and what is behind it goes on. See: outbox dead list"
    )
    return [Alarm("dead_letter", agent, first.reason, text)]


def _gap(before: Known, known: Known, status: OutboxStatus) -> list[Alarm]:
    alarms = []
    for reason, total in known.dropped.items():
        lost = total - before.dropped.get(reason, 0)
        if lost > 0:
            text = (
                f"{status.agent}: {count(lost, 'event')} will not be delivered ({reason}). The relay is told "
                "in their place of the order. See: outbox status, and [bounds] in the configuration"
            )
            alarms.append(Alarm("gap", status.agent, reason, text))
    return alarms


def matter_of(status: OutboxStatus, why: Explanation) -> str:
    """What holds a head up. What holds the relay or a path is one matter, however many agents wait for it."""
    shared = why.scope is Scope.RELAY or why.scope is Scope.PATH
    return f"{why.reason} {why.path}" if shared else f"agent {status.agent}"


def stuck(waiting: Sequence[OutboxStatus], why: Explanation) -> Alarm:
    """The alarm about heads that do not get on, all for the same reason."""
    if why.scope is Scope.RELAY or why.scope is Scope.PATH:
        agents = f"{count(len(waiting), 'agent waits', 'agents wait')} for the relay."
        return Alarm("head_stuck", None, why.reason, " ".join((agents, *why.lines[1:])))
    return Alarm("head_stuck", waiting[0].agent, why.reason, " ".join(why.lines))


def token_stopped(before: str, auth: Mapping[str, Any]) -> list[Alarm]:
    """The alarm when asking for tokens was given up since it stood at `before`; once for each time."""
    if auth.get("state") != "stopped" or before == "stopped":
        return []
    text = (
        f"No token can be had: {auth.get('detail') or 'it was refused'}. Nobody asks again; events wait on "
        "disk, and none is lost. Mend what it is asked for with, then: outbox auth retry"
    )
    return [Alarm("auth_stopped", None, "token_stopped", text)]


def message(alarms: Sequence[Alarm], more: int, **about: str) -> dict[str, Any]:
    """What is handed to the command and posted: `text` for people, the rest for programs."""
    lines = [alarm.text for alarm in alarms[:_MOST_LINES]]
    untold = more + len(alarms) - len(lines)
    if untold:
        lines.append(f"And {untold:,} more. See: outbox status")
    each = [
        {"alarm": alarm.alarm, "agent": alarm.agent, "reason": alarm.reason, "text": alarm.text}
        for alarm in alarms
    ]
    return {"text": "\n".join(lines), **about, "alarms": each, "more": more}


def _by_reason(totals: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in totals.items() if name.startswith(prefix)}
