"""How the demo goes: a session is told to the outbox, the relay dies and comes back, and all is read back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox.api.explain import Explanation
from outbox.api.obstacle import Scope
from outbox.api.report import overview
from outbox.demo.check import Sent, by_kind, faults
from outbox.demo.session import AGENT, DemoEvent
from outbox.demo.stage import Stage
from outbox.library import Outbox
from outbox.store.directory import StateDirectory

_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast it goes: before which events, counted from 0, the relay dies and comes back, and the waits."""

    between_s: float = 0.33
    kill_before: int = 14
    revive_before: int = 30
    arrive_within_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to see at one moment: the events, oldest first, and how far they have come.

    All up to seq `delivered_through` are delivered, since delivery is in order. `why` is "" while nothing is
    in the way of the next one.
    """

    relay_url: str
    relay_runs: bool
    events: Sequence[tuple[int, DemoEvent]]
    delivered: int
    waiting: int
    delivered_through: int
    why: str


@dataclass(frozen=True, slots=True)
class Ending:
    """What the relay holds in the end, how many were sent to it again, and what is wrong, if anything."""

    held: int
    kinds: str
    repeats: int
    faults: Sequence[str]


class View(Protocol):
    """Who watches."""

    def tell(self, *lines: str) -> None:
        """Something happened."""

    def show(self, scene: Scene) -> None:
        """A moment has passed; called several times a second."""


class Interrupted(Exception):
    """The person asked to stop."""

    def __init__(self, accepted: int, waiting: int) -> None:
        super().__init__("interrupted")
        self.accepted = accepted
        self.waiting = waiting


class Play:
    """One performance on a stage. `asked_to_stop` is looked at between steps."""

    def __init__(self, stage: Stage, outbox: Outbox, view: View, asked_to_stop: Callable[[], bool]) -> None:
        self._stage = stage
        self._state = StateDirectory(stage.state_dir)
        self._outbox = outbox
        self._view = view
        self._asked_to_stop = asked_to_stop
        self._events: list[tuple[int, DemoEvent]] = []
        self._sent: list[Sent] = []

    def perform(self, events: Sequence[DemoEvent], pace: Pace) -> Ending:
        """Send the events, with the outage between; wait until all are delivered; read back and compare.

        Raises Interrupted when asked to stop, Unavailable when the relay does not come back.
        """
        for place, event in enumerate(events):
            if place == pace.kill_before:
                self._kill_relay()
            if place == pace.revive_before:
                self._revive_relay()
            self._send(event)
            self._look_for(pace.between_s)
        self._view.tell(
            f"The session is over, {len(events)} events are accepted; now the last have to arrive."
        )
        self._look_for(pace.arrive_within_s, until_all_arrived=True)
        return self._read_back()

    def _send(self, event: DemoEvent) -> None:
        receipt = self._outbox.enqueue(event.kind, event.payload)
        self._sent.append(Sent(receipt.seq, receipt.idempotency_key, event.kind, event.payload))
        self._events.append((receipt.seq, event))

    def _kill_relay(self) -> None:
        pid = self._stage.relay.pid
        self._stage.relay.kill()
        self._view.tell(
            f"The relay was killed (kill -9 {pid}), as in an outage. "
            "Events are accepted as before, and wait on disk."
        )

    def _revive_relay(self) -> None:
        self._stage.start_relay()
        self._view.tell(
            f"The relay is back (pid {self._stage.relay.pid}, same port, same file). "
            f"{self._look().waiting} events wait for the daemon's next try."
        )

    def _look_for(self, seconds: float, *, until_all_arrived: bool = False) -> None:
        """Let time pass, and show it."""
        deadline = time.monotonic() + seconds
        while True:
            scene = self._look()
            self._view.show(scene)
            if self._asked_to_stop():
                raise Interrupted(len(self._sent), scene.waiting)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (until_all_arrived and not scene.waiting):
                return
            time.sleep(min(left_s, _LOOK_EVERY_S))

    def _look(self) -> Scene:
        now_ms = time.time_ns() // 1_000_000
        seen = overview(self._state, now_ms)
        why = next((line.why for line in seen.outboxes if line.why), None)
        status = self._outbox.status()
        newest = self._events[-1][0] if self._events else 0
        return Scene(
            relay_url=self._stage.relay.url,
            relay_runs=self._stage.relay.pid is not None,
            events=tuple(self._events),
            delivered=status.delivered,
            waiting=status.waiting,
            delivered_through=status.head.seq - 1 if status.head else newest,
            why=in_the_way(why, now_ms),
        )

    def _read_back(self) -> Ending:
        relay = self._stage.relay
        held, summary = relay.events(AGENT), relay.summary().get(AGENT)
        repeats = 0 if summary is None else summary["duplicates"]
        return Ending(len(held), by_kind(held), repeats, faults(self._sent, held, summary))


def in_the_way(why: Explanation | None, now_ms: int) -> str:
    """What stands in the way of the next event and when it is tried again, "" when nothing does."""
    if why is None or why.scope is Scope.NOTHING:
        return ""
    if why.next_try_at_ms is None:
        return why.detail or why.reason
    wait_s = math.ceil(max(0, why.next_try_at_ms - now_ms) / 1000)
    return f"{why.detail or why.reason}; next try {f'in {wait_s} s' if wait_s else 'now'}"
