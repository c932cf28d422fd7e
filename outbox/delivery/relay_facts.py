"""What is known of a relay and its paths, and how it stands in STATE/relay.sqlite as small JSON objects.

In memory waits are monotonic; on disk they are wall-clock moments, read with care: a clock may have jumped,
and another release may have written them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outbox.delivery.clock import Clock
from outbox.policy import HOUR_MS, Budget


@dataclass(slots=True)
class Valve:
    """One thing that can be closed: the relay, or one of its paths. `reason` is "" while it is open."""

    reason: str = ""
    detail: str = ""
    since_ms: int = 0  # wall clock
    failures: int = 0
    next_ms: int = 0  # monotonic: when it may be tried again
    probing: bool = False


@dataclass(slots=True)
class PathFacts:
    """What is known of one path."""

    valve: Valve = field(default_factory=Valve)
    accepted: bool = False  # it accepted something, ever
    accepts: int = 0  # in this process
    budget: Budget = field(default_factory=Budget)  # last_ms is monotonic
    dead_end_until_ms: int = 0  # monotonic; until then its events are dead letters at once
    dead_end: bool = False
    learned_bytes: int | None = None
    learned_until_ms: int = 0  # monotonic; then a larger body is tried again
    unclear: int = 0
    off_until_ms: int = 0  # monotonic; batches only


class FactsOnDisk:
    """Writes and reads facts; a fact that cannot be read counts as nothing known."""

    def __init__(self, clock: Clock) -> None:
        """`clock` joins monotonic and wall-clock moments."""
        self._clock = clock

    def valve(self, valve: Valve) -> dict[str, Any]:
        """A valve as it stands on disk."""
        return {
            "reason": valve.reason,
            "detail": valve.detail,
            "since": valve.since_ms,
            "failures": valve.failures,
            "nextTryAt": self._wall_of(valve.next_ms) if valve.reason else None,
        }

    def path(self, facts: PathFacts) -> dict[str, Any]:
        """A path as it stands on disk."""
        return {
            **self.valve(facts.valve),
            "accepted": facts.accepted,
            "inARow": facts.budget.in_a_row,
            "lastDeadAt": self._wall_of(facts.budget.last_ms),
            "deadEnd": facts.dead_end,
            "deadEndUntil": self._wall_of(facts.dead_end_until_ms),
            "learnedBytes": facts.learned_bytes,
            "learnedUntil": self._wall_of(facts.learned_until_ms),
            "offUntil": self._wall_of(facts.off_until_ms),
        }

    def read_valve(self, raw: Any) -> Valve:
        """A valve as it was; it may be tried at once, since a restart is a new chance."""
        if not isinstance(raw, dict):
            return Valve()
        return Valve(
            reason=str(raw.get("reason") or ""),
            detail=str(raw.get("detail") or ""),
            since_ms=_whole(raw.get("since")),
            failures=_whole(raw.get("failures")),
            next_ms=self._clock.monotonic_ms(),
        )

    def read_path(self, raw: Any) -> PathFacts:
        """A path as it was; nothing lies further ahead than it could have been put."""
        facts = PathFacts(valve=self.read_valve(raw))
        if isinstance(raw, dict):
            now = self._clock.monotonic_ms()
            facts.accepted = raw.get("accepted") is True
            facts.dead_end = raw.get("deadEnd") is True
            last_ms = min(now, self._monotonic_of(_whole(raw.get("lastDeadAt"))))
            facts.budget = Budget(_whole(raw.get("inARow")), last_ms)
            facts.dead_end_until_ms = self._within_an_hour(raw.get("deadEndUntil"))
            facts.off_until_ms = self._within_an_hour(raw.get("offUntil"))
            facts.learned_until_ms = self._within_an_hour(raw.get("learnedUntil"))
            facts.learned_bytes = _whole(raw.get("learnedBytes")) or None
        return facts

    def read_acceptances(self, raw: Any) -> dict[str, set[int]]:
        """When something was accepted, coarsely, by token; epoch milliseconds."""
        if not isinstance(raw, dict):
            return {}
        return {
            str(token): {at_ms for at_ms in moments if isinstance(at_ms, int)}
            for token, moments in raw.items()
            if isinstance(moments, list)
        }

    def _within_an_hour(self, wall_ms: Any) -> int:
        return min(self._clock.monotonic_ms() + HOUR_MS, self._monotonic_of(_whole(wall_ms)))

    def _wall_of(self, monotonic_ms: int) -> int:
        return self._clock.wall_ms() + monotonic_ms - self._clock.monotonic_ms()

    def _monotonic_of(self, wall_ms: int) -> int:
        return self._clock.monotonic_ms() + wall_ms - self._clock.wall_ms()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
