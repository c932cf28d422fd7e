"""The send rate: how many events a second leave, all agents together, and each agent's place in the line.

Agents that have to wait stand in one line, which the engine keeps and lets in as many from as may send now:
nobody is passed by, however large another one's backlog is.
"""

from __future__ import annotations

import threading

from outbox.delivery.clock import Clock

RATE = "rate"
"""The tag of those who stand in the line; no path is called so, since each begins with a slash."""

_BURST_S = 0.25


class Rate:
    """`per_s` events a second, saved up for a quarter of a second, at least one. Thread-safe."""

    def __init__(self, per_s: int, clock: Clock) -> None:
        """What was saved up is there at the start."""
        self.per_s = per_s
        self._clock = clock
        self._most = max(1.0, per_s * _BURST_S)
        self._mutex = threading.Lock()
        self._saved = self._most
        self._counted_ms = clock.monotonic_ms()

    def slots(self) -> int:
        """How many events may leave now."""
        with self._mutex:
            self._count()
            return int(self._saved)

    def take(self, most: int) -> int:
        """Take leave for up to `most` events; how many it is for."""
        with self._mutex:
            self._count()
            taken = max(0, min(most, int(self._saved)))
            self._saved -= taken
            return taken

    def give_back(self, events: int) -> None:
        """Leave that was not used."""
        with self._mutex:
            self._saved = min(self._most, self._saved + events)

    def next_due_ms(self) -> int:
        """The monotonic moment from which one event may leave."""
        with self._mutex:
            self._count()
            missing = max(0.0, 1.0 - self._saved)
            return self._counted_ms + (round(missing * 1_000 / self.per_s + 0.5) if missing else 0)

    def _count(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._saved = min(self._most, self._saved + (now_ms - self._counted_ms) * self.per_s / 1_000)
        self._counted_ms = now_ms


class Place:
    """One agent's place in the line, over its turns. Whoever is let in has leave for one event."""

    def __init__(self, rate: Rate | None) -> None:
        """Not in the line; without a rate there is none."""
        self._rate = rate
        self._in_line = False
        self._leave_for = 0

    def enter(self) -> None:
        """A turn begins: whoever stood in the line was let in."""
        self._leave_for = int(self._in_line)
        self._in_line = False

    def may_send(self) -> bool:
        """Whether this turn may send; if not, it has to stand in the line."""
        self._in_line = self._rate is not None and not self._leave_for
        return not self._in_line

    def most(self, events: int) -> int:
        """How many of so many neighbouring events may travel together, now that one may."""
        if self._rate is None:
            return events
        self._leave_for += self._rate.take(events - self._leave_for)
        return self._leave_for

    def sent(self, events: int) -> None:
        """So many are on their way."""
        self._leave_for -= events

    def leave(self) -> None:
        """The turn ends: leave that was not used is given back."""
        if self._rate is not None and self._leave_for > 0:
            self._rate.give_back(self._leave_for)
        self._leave_for = 0
