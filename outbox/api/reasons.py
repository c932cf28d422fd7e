"""The words for each reason why an event waits: what happened, what it means for it, what to do. Pure.

The tables at the end hold the sentences; `Telling` fills in their numbers, times and names.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from outbox.api.obstacle import Facts, Obstacle, Scope
from outbox.gap import GAP_KIND
from outbox.measures import age, count, local_time, number
from outbox.printable import printable
from outbox.store.inspect import OutboxStatus

_SECONDS_MATTER_MS = 10 * 60_000


def queue_line(status: OutboxStatus, now_ms: int) -> str:
    """How much waits, what is first, and since when."""
    agent, head, waiting = printable(status.agent), status.head, status.waiting
    if head is None:
        dead = f", {count(status.dead, 'dead letter')}" if status.dead else ""
        return f"{agent}: nothing waits; {number(status.delivered)} delivered{dead}."
    waited_ms = now_ms - head.accepted_at_ms
    since = local_time(head.accepted_at_ms, now_ms, seconds=waited_ms < _SECONDS_MATTER_MS)
    first = f"seq {number(head.seq)} ({printable(head.kind)}), since {since} ({age(waited_ms)})"
    if not waiting:
        return f"{agent}: only the notice of a gap waits, {first}."
    return (
        f"{agent}: 1 event waits, {first}."
        if waiting == 1
        else f"{agent}: {number(waiting)} events wait, first {first}."
    )


def nobody_sends(behind: Obstacle) -> list[str]:
    """No sender. What was in the way when there was one is worth knowing before a daemon is started."""
    lines = ["Nobody sends: no daemon serves this state directory, and no flush is under way."]
    if behind.scope is not Scope.NOTHING:
        lines.append(f"In the way when it was tried last: {behind.reason}{_detail(behind)}.")
    lines.append(
        "Nothing is lost: what waits is on disk, in order. To send it: outbox serve, or once: outbox flush"
    )
    return lines


def command_word(agent: str) -> str:
    """An agent's name as a person would type it after a command."""
    word = shlex.quote(printable(agent))
    return f"-- {word}" if agent.startswith("-") else word


class Telling:
    """The sentences about one outbox and what is in its way."""

    def __init__(
        self, status: OutboxStatus, facts: Facts, found: Obstacle, now_ms: int, max_attempts: int
    ) -> None:
        """`max_attempts` is the head's."""
        self._status = status
        self._head = status.head
        self._facts = facts
        self._found = found
        self._now_ms = now_ms
        self._max_attempts = max_attempts

    def lines(self) -> list[str]:
        """The sentences, without the one that tells how much waits."""
        table, otherwise = _TABLES[self._found.scope]
        parts = self._parts()
        filled = (template.format_map(parts).strip() for template in table.get(self._found.reason, otherwise))
        return [line for line in filled if line]

    def _parts(self) -> Mapping[str, str]:
        found = self._found
        return {
            "detail": _detail(found),
            "when": self._when(),
            "until": self._until(),
            "status": self._last_status(),
            "times": self._times(),
            "attempt": self._attempt(),
            "path": printable(found.path) or "its path",
            "url": printable((self._facts.get("gate") or {}).get("url", "")) or "relay.url",
            "source": printable((self._facts.get("auth") or {}).get("source", "")) or "relay.token_file",
            "run": self._run(),
            "agent": command_word(self._status.agent),
            "skip": self._skip(),
        }

    def _run(self) -> str:
        """How many dead letters in a row the path has made; of the worst path where the relay is meant."""
        paths = [fact for name, fact in self._facts.items() if name.startswith("path:") and fact]
        own = self._facts.get(f"path:{self._found.path}")
        runs = [fact.get("inARow", 0) for fact in ([own] if own else paths)]
        longest = max(runs, default=0)
        return count(longest, "event") if longest else "events"

    def _when(self) -> str:
        found = self._found
        if found.since_ms is None:
            return ""
        tries = [count(found.tries, "try", "tries")] if found.tries else []
        told = ", ".join([*tries, *filter(None, [self._next()])])
        return f", since {local_time(found.since_ms, self._now_ms)}" + (f" ({told})" if told else "")

    def _next(self) -> str:
        if self._status.in_flight:
            return "being tried right now"
        if self._found.next_try_at_ms is None:
            return ""
        wait_ms = self._found.next_try_at_ms - self._now_ms
        return f"next in {age(wait_ms)}" if wait_ms >= 1_000 else "next now"

    def _until(self) -> str:
        at_ms = self._found.next_try_at_ms
        if at_ms is None:
            return "later"
        return local_time(at_ms, self._now_ms, seconds=at_ms - self._now_ms < _SECONDS_MATTER_MS)

    def _last_status(self) -> str:
        history = self._head.history if self._head else ()
        return str(history[-1].get("status") or "an error") if history else "an error"

    def _times(self) -> str:
        attempts = self._head.attempts if self._head else 0
        return "once" if attempts == 1 else f"{number(attempts)} times"

    def _attempt(self) -> str:
        attempts = self._head.attempts if self._head else 0
        coming = self._next().removeprefix("next ").removeprefix("being tried ")
        return f"attempt {attempts + 1} of {self._max_attempts} {coming}".rstrip()

    def _skip(self) -> str:
        head = self._head
        if head is None or head.kind == GAP_KIND:
            return ""
        words = f"outbox skip {command_word(self._status.agent)} {head.seq}"
        return f"To set it aside now: {words} (it becomes a dead letter, and is kept)"


def _detail(found: Obstacle) -> str:
    text = printable(found.detail).strip().rstrip(".")
    return f": {text}" if text else ""


Sentences = tuple[str, ...]

_NOTHING: Mapping[str, Sentences] = {
    "empty": ("What is enqueued now goes out next.",),
    "in_flight": ("It is on its way: sent, and the relay's answer is waited for. Nothing is in the way.",),
    "ready": ("Nothing is in the way: it goes out now, or as soon as a sender is free.",),
}
_PAUSED = (
    "It is paused by a person{when}: events are accepted and kept, and none is sent.",
    "To go on: outbox resume {agent}",
)

_SAFE = "Nothing is lost and no attempt is counted while the relay is in trouble; delivery goes on by itself."
_MEND = (
    "Mend what it is asked for with ({source}): a changed file or setting is noticed. Then: outbox auth retry"
)
_RELAY: Mapping[str, Sentences] = {
    "unreachable": ("The relay does not answer{detail}{when}.", _SAFE),
    "unauthorized": (
        "The relay refuses the token{detail}{when}.",
        _SAFE,
        "Renew the token ({source}); another one there is noticed by itself.",
    ),
    "no_token": (
        "There is no token to send with{detail}{when}.",
        _SAFE,
        "Put it in its place ({source}); that is noticed by itself.",
    ),
    "token_recovery": (
        "No token can be had{detail}{when}.",
        _SAFE,
        "It is tried again by itself ({source}). To try at once: outbox auth retry",
    ),
    "token_stopped": (
        "No token can be had, and asking again is of no use{detail}{when}.",
        _SAFE,
        _MEND,
    ),
    "not_a_relay": (
        "What answers at {url} is no relay{detail}{when}.",
        _SAFE,
        "Check the address (relay.url); a login page or a proxy may stand in between.",
    ),
    "redirected": (
        "What answers at {url} redirects, and redirects are not followed{detail}{when}.",
        _SAFE,
        "Set relay.url to the address that takes the events itself.",
    ),
    "busy": ("The relay asks to wait{detail}{when}.", _SAFE),
    "gateway": ("A gateway answers in the relay's place{detail}{when}.", _SAFE),
    "failed": ("The relay fails on everything{detail}{when}.", _SAFE, "The cause is in the relay's own log."),
    "lost": ("The relay takes requests and gives no whole answer{detail}{when}.", _SAFE),
    "mass_rejection": (
        "The relay fails on everything{detail}{when}, and the last {run} became dead letters in a row.",
        "A broken relay must not empty the queue: what waits stays, and goes on once an event is accepted.",
        "To give it another chance at once: outbox resume",
    ),
}
_OTHER_RELAY = ("The relay is in trouble{detail}{when}.", _SAFE)

_BEHIND = (
    "Only events that go there wait, and those behind them; nothing is lost, and it is tried again by itself."
)
_CHECK_PATHS = "If the relay should have it: check relay.url and [relay.paths]. {skip}"
_PATH: Mapping[str, Sentences] = {
    "no_endpoint": ("The relay has no {path}{detail}{when}.", _BEHIND, _CHECK_PATHS),
    "not_a_relay": ("What answers at {path} is no relay{detail}{when}.", _BEHIND, _CHECK_PATHS),
    "redirected": (
        "The relay redirects {path}, and redirects are not followed{detail}{when}.",
        _BEHIND,
        _CHECK_PATHS,
    ),
}
_OTHER_PATH = ("The relay is in trouble at {path}{detail}{when}.", _BEHIND, "{skip}")

_ONLY_IT = "Only this agent waits; nothing is lost, no attempt is counted, and it goes on by itself."
_COUNTED = "After the last attempt it becomes a dead letter, and what is behind it goes on."
_AGENT: Mapping[str, Sentences] = {
    "retry_after": ("The relay asked this agent to wait until {until} (Retry-After){detail}.", _ONLY_IT),
    "busy": ("The relay asks this agent to wait{detail}{when}.", _ONLY_IT),
    "gateway": ("A gateway answered in the relay's place{detail}{when}.", _ONLY_IT),
    "in_progress": (
        "The relay is still at work on an earlier try of it{detail}{when}.",
        "It goes again with the same key, so that the relay holds it once. Nothing is to be done.",
    ),
    "forbidden": (
        "The relay refuses this agent (403){detail}{when}.",
        _ONLY_IT,
        "Give its token the right that it lacks: that is noticed by itself. {skip}",
    ),
    "unauthorized": (
        "The relay refuses this agent's token{detail}{when}.",
        _ONLY_IT,
        "Renew the token ({source}); that is noticed by itself. {skip}",
    ),
    "token_recovery": (
        "No token can be had for this agent{detail}{when}.",
        _ONLY_IT,
        "It is tried again by itself ({source}). To try at once: outbox auth retry",
    ),
    "token_stopped": (
        "No token can be had for this agent, and asking again is of no use{detail}{when}.",
        _ONLY_IT,
        _MEND,
    ),
    "failed": (
        "The relay answered {status} to it {times} while it worked for others{detail}; {attempt}.",
        _COUNTED,
        "{skip}",
    ),
    "lost": (
        "The relay took it and gave no whole answer, {times}, while it worked for others{detail}; {attempt}.",
        "It goes again with the same key. " + _COUNTED,
        "{skip}",
    ),
    "no_endpoint": (
        "The relay has no {path}, asked {times} while its other paths worked{detail}; {attempt}.",
        _COUNTED,
        "{skip}",
    ),
    "mass_rejection": (
        "The last {run} for {path} became dead letters in a row, so this one is kept back{detail}{when}.",
        "A broken relay must not empty the queue: it stays and is tried; all goes on once one is accepted.",
        "If the relay is right about them: outbox resume. {skip}",
    ),
}
_OTHER_AGENT = ("It is held{detail}{when}.", _ONLY_IT, "{skip}")

_TABLES: Mapping[Scope, tuple[Mapping[str, Sentences], Sentences]] = {
    Scope.NOTHING: (_NOTHING, ()),
    Scope.PERSON: ({}, _PAUSED),
    Scope.RELAY: (_RELAY, _OTHER_RELAY),
    Scope.PATH: (_PATH, _OTHER_PATH),
    Scope.AGENT: (_AGENT, _OTHER_AGENT),
}
