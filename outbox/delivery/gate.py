"""The gate: what is known of the relay, shared by all agents and kept over restarts in STATE/relay.sqlite.

It decides whether a request may go out now, who probes a closed relay, and whether an event may be blamed. It
knows no event and sends nothing itself.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outbox.delivery.clock import Clock
from outbox.delivery.relay_facts import FactsOnDisk, PathFacts, Valve
from outbox.outcome import Reason
from outbox.policy import (
    HOUR_MS,
    MINUTE_MS,
    Budget,
    Schedule,
    backoff_ms,
    is_spent,
    is_stuck,
    spend,
    verdict_wait_ms,
)
from outbox.store.relay_state import RelayState
from relay_client import Capabilities

_FLUSH_INTERVAL_MS = 150
_HEALTH_FRESH_MS = 1_000
_LEARNED_FOR_MS = HOUR_MS
_UNCLEAR_ANSWERS = 3
_ENOUGH_DOUBLINGS = 16  # concurrency doubles with each acceptance
_AUTH_STATES = {"no_token": "missing", "unauthorized": "refused"}


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to send one request; given back with `finish`."""

    path: str
    probe: bool
    path_probe: bool
    ask_health: bool = False  # in place of an unsafe request: the relay has not shown yet that it works


@dataclass(frozen=True, slots=True)
class Wait:
    """Why not now. `tag` names what is waited for: "" the relay, else the path. Times are epoch ms."""

    tag: str
    reason: str
    detail: str = ""
    since_ms: int = 0
    next_try_at_ms: int | None = None


def _unheard(event: str, fields: dict[str, Any]) -> None:
    """Nobody listens."""


class Gate:
    """Thread-safe. `schedule` paces the probes; `most` bounds the requests under way at once."""

    def __init__(
        self,
        *,
        url: str,
        schedule: Schedule,
        clock: Clock,
        rng: random.Random,
        state: RelayState | None = None,
        most: int = 32,
        max_stuck_ms: int = 24 * HOUR_MS,
    ) -> None:
        """Take over what the state directory knows of this relay; another URL starts afresh."""
        self._url = url
        self._schedule = schedule
        self._clock = clock
        self._rng = rng
        self._state = state
        self._most = most
        self._max_stuck_ms = max_stuck_ms
        self._mutex = threading.RLock()
        self._health_mutex = threading.Lock()
        self._saving = threading.Lock()  # so that what was known last is written last
        self._disk = FactsOnDisk(clock)
        self._relay = Valve()
        self._paths: dict[str, PathFacts] = {}
        self._accepts: Counter[str] = Counter()
        self._accepted_at: dict[str, set[int]] = {}  # by token; wall clock, coarse
        self._in_flight = 0
        self._allowed = most
        self._needs_proof = False
        self._proven = False  # by health, while the relay is closed
        self._hurry = False
        self._health: tuple[int, bool] | None = None
        self._dirty: set[str] = set()
        self.is_known = False  # this relay was served from here before
        self.capabilities = Capabilities()
        self._spec_due_ms = 0  # monotonic
        self.refused_token = ""  # the name of the token that was refused last
        self.token_from = ""  # where a token that is only read comes from; others have notes of their own
        self._auth = self._auth_detail = ""
        self.on_change: Callable[[str, dict[str, Any]], None] = _unheard
        self._load()

    # Leave to send -----------------------------------------------------------------------------------------

    def admit(self, path: str, *, unsafe: bool = False) -> Permit | Wait:
        """Leave to send one request to `path` now, or what to wait for."""
        with self._mutex:
            facts = self._facts(path)
            if wait := self._refusal("", self._relay) or self._refusal(path, facts.valve):
                return wait
            if self._in_flight >= self._allowed:
                return Wait("", "in_turn")
            unproven = self._needs_proof or (bool(self._relay.reason) and not self._proven)
            health = unsafe and unproven
            if unsafe and not health:
                self._proven = False
            probe, path_probe = bool(self._relay.reason), bool(facts.valve.reason) and not health
            self._relay.probing = self._relay.probing or probe
            facts.valve.probing = facts.valve.probing or path_probe
            self._in_flight += 1
            return Permit(path, probe, path_probe, health)

    def _refusal(self, tag: str, valve: Valve) -> Wait | None:
        if not valve.reason:
            return None
        remaining = valve.next_ms - self._clock.monotonic_ms()
        if remaining <= 0 and not valve.probing:
            return None
        next_at = self._clock.wall_ms() + max(0, remaining)
        return Wait(tag, valve.reason, valve.detail, valve.since_ms, next_at)

    def is_shut(self, path: str) -> bool:
        """Whether the relay or this path got into trouble, so that who has leave to send should ask anew."""
        return bool(self._relay.reason or self._facts(path).valve.reason)

    def slots(self, tag: str) -> int:
        """How many of those who wait for `tag` may ask again now."""
        with self._mutex:
            if self._refusal("", self._relay) or (tag and self._refusal(tag, self._facts(tag).valve)):
                return 0
            if self._relay.reason or (tag and self._facts(tag).valve.reason):
                return min(1, self._allowed - self._in_flight)
            return self._allowed - self._in_flight

    def next_due_ms(self, tag: str) -> int | None:
        """The monotonic moment from which `tag` may be tried again; None when nothing but an event tells."""
        with self._mutex:
            due = [
                valve.next_ms
                for valve in (self._relay, *([self._facts(tag).valve] if tag else []))
                if valve.reason and not valve.probing
            ]
            return max(due, default=None)

    # What came back ----------------------------------------------------------------------------------------

    def accepted(self, permit: Permit, token: str, events: int = 1) -> None:
        """Events were accepted: the relay works, this path works, and its budget is whole again."""
        with self._mutex:
            name = permit.path
            facts = self._facts(name)
            self._accepts[token] += events
            facts.accepts += events
            self._note_acceptance(token)
            if not facts.accepted or facts.dead_end or facts.budget.in_a_row or facts.unclear:
                self._dirty.add(f"path:{name}")
            facts.accepted, facts.dead_end, facts.unclear = True, False, 0
            facts.budget = Budget()
            self._needs_proof = False
            self._note_auth("ok")
            self._allowed = min(self._most, self._allowed << min(events, _ENOUGH_DOUBLINGS))
            self._open(self._relay, "")
            self._open(facts.valve, name)

    def works(self, permit: Permit) -> None:
        """The relay gave a relay's answer (a refusal too): it and the path are there."""
        with self._mutex:
            self._open(self._relay, "")
            self._open(self._facts(permit.path).valve, permit.path)

    def close(self, permit: Permit, reason: str, detail: str, *, next_ms: int | None = None) -> None:
        """The relay is in trouble: nobody sends but one probe at a time, by backoff, or at `next_ms`."""
        with self._mutex:
            self._note_auth(_AUTH_STATES.get(reason, self._auth), detail)
            if self._shut(self._relay, "", reason, detail, again=permit.probe, next_ms=next_ms):
                self._allowed = 1
                self._needs_proof = True

    def hold_path(self, permit: Permit, reason: str, detail: str) -> None:
        """This path is in trouble; the others are not concerned."""
        with self._mutex:
            valve = self._facts(permit.path).valve
            self._shut(valve, permit.path, reason, detail, again=permit.path_probe)

    def finish(self, permit: Permit) -> None:
        """Give the permit back; exactly once, after the reports."""
        with self._mutex:
            self._in_flight -= 1
            if permit.probe:
                self._relay.probing = False
            if permit.path_probe:
                self._facts(permit.path).valve.probing = False
        self.save()

    def retry_now(self) -> None:
        """Try everything that is closed at once: something outside was mended, or a person asked."""
        with self._mutex:
            for valve in (self._relay, *(facts.valve for facts in self._paths.values())):
                valve.next_ms = self._clock.monotonic_ms()

    def hurry(self, on: bool = True) -> None:
        """While flushing, closed valves are tried every 150 ms instead of by backoff."""
        self._hurry = on
        if on:
            self.retry_now()

    # Evidence and blame ------------------------------------------------------------------------------------

    def accept_count(self, token: str) -> int:
        """How many events were accepted under this token since the start; growth is evidence."""
        return self._accepts[token]

    def other_path_count(self, path: str) -> int:
        """How many events were accepted on other paths than this one since the start."""
        with self._mutex:
            return sum(facts.accepts for name, facts in self._paths.items() if name != path)

    def ask_health(self, ask: Callable[[], bool]) -> bool:
        """Whether the relay answers health; asked by one thread, whose answer is good for a second."""
        with self._health_mutex:
            if self._health is None or self._clock.monotonic_ms() - self._health[0] >= _HEALTH_FRESH_MS:
                works = ask()
                self._health = (self._clock.monotonic_ms(), works)
            return self._health[1]

    def proven_by_health(self) -> None:
        """Health was answered: one unsafe event may go; it is the probe of a relay that is still closed."""
        with self._mutex:
            self._needs_proof = False
            self._proven = bool(self._relay.reason)
            self._relay.next_ms = min(self._relay.next_ms, self._clock.monotonic_ms())

    def verdict_wait_ms(self, path: str, reason: Reason) -> int:
        """How long a dead letter for this reason on this path has to wait; 0: the budget allows it now."""
        with self._mutex:
            return verdict_wait_ms(self._facts(path).budget, reason, self._clock.monotonic_ms())

    def budget_spent(self, path: str) -> bool:
        """Whether three dead letters in a row came from this path: its heads then go alone."""
        with self._mutex:
            return is_spent(self._facts(path).budget)

    def spend(self, path: str) -> None:
        """A dead letter was made."""
        with self._mutex:
            facts = self._facts(path)
            facts.budget = spend(facts.budget, self._clock.monotonic_ms())
            self._dirty.add(f"path:{path}")

    def make_dead_end(self, path: str) -> None:
        """Events of this path are dead letters at once for an hour; a path that ever worked never is one."""
        with self._mutex:
            facts = self._facts(path)
            if not facts.accepted:
                facts.dead_end = True
                facts.dead_end_until_ms = self._clock.monotonic_ms() + HOUR_MS
                self._open(facts.valve, path)
                self._dirty.add(f"path:{path}")

    def is_dead_end(self, path: str) -> bool:
        """Whether events of this path are dead letters without being sent."""
        with self._mutex:
            facts = self._facts(path)
            return facts.dead_end and self._clock.monotonic_ms() < facts.dead_end_until_ms

    def was_dead_end(self, path: str) -> bool:
        """Whether this path is a known dead end that is being tried once more."""
        return self._facts(path).dead_end

    def forgive(self, path: str | None = None) -> None:
        """A person said go on: budgets and dead ends start afresh."""
        with self._mutex:
            for name in [path] if path else list(self._paths):
                facts = self._facts(name)
                facts.budget, facts.dead_end, facts.off_until_ms = Budget(), False, 0
                self._dirty.add(f"path:{name}")
            self.retry_now()
        self.save()

    def is_stuck(self, first_try_at_ms: int | None, token: str) -> bool:
        """Whether a head with this first try has waited for too long while others were accepted all along."""
        with self._mutex:
            moments = self._accepted_at.get(token, set())
            return is_stuck(first_try_at_ms, self._clock.wall_ms(), self._max_stuck_ms, moments)

    def _note_acceptance(self, token: str) -> None:
        """Remember it to an eighth of `max_stuck`, twice as far back: enough to see its quarters."""
        now_ms, moments = self._clock.wall_ms(), self._accepted_at.setdefault(token, set())
        coarse_ms = max(1, self._max_stuck_ms // 8)
        at_ms = now_ms // coarse_ms * coarse_ms
        if at_ms not in moments:
            moments.add(at_ms)
            self._forget_acceptances_before(now_ms - 2 * self._max_stuck_ms)
            self._dirty.add("accepts")

    def _forget_acceptances_before(self, since_ms: int) -> None:
        """Also those of tokens that are used no more."""
        for token, moments in list(self._accepted_at.items()):
            moments -= {at_ms for at_ms in moments if at_ms <= since_ms}
            if not moments:
                del self._accepted_at[token]

    # Batches -----------------------------------------------------------------------------------------------

    def batches_off(self, path: str) -> bool:
        """Whether this relay takes no batches (asked again after an hour)."""
        with self._mutex:
            return self._clock.monotonic_ms() < self._facts(path).off_until_ms

    def turn_batches_off(self, path: str) -> None:
        """The batch path is not there."""
        with self._mutex:
            facts = self._facts(path)
            facts.off_until_ms, facts.unclear = self._clock.monotonic_ms() + _LEARNED_FOR_MS, 0
            self._dirty.add(f"path:{path}")

    def unclear_batch(self, path: str) -> None:
        """A batch answer could not be read; the third one in a row turns batches off."""
        with self._mutex:
            facts = self._facts(path)
            facts.unclear += 1
            if facts.unclear >= _UNCLEAR_ANSWERS:
                self.turn_batches_off(path)

    def learn_bytes(self, path: str, size_bytes: int) -> None:
        """A body of `size_bytes` was too large: keep below half of it for an hour."""
        with self._mutex:
            facts = self._facts(path)
            facts.learned_bytes = max(1_024, size_bytes // 2)
            facts.learned_until_ms = self._clock.monotonic_ms() + _LEARNED_FOR_MS
            self._dirty.add(f"path:{path}")

    def most_bytes(self, path: str, default_bytes: int) -> int:
        """The largest body that this path is known to take."""
        with self._mutex:
            facts = self._facts(path)
            if facts.learned_bytes is None or self._clock.monotonic_ms() >= facts.learned_until_ms:
                return default_bytes
            return min(default_bytes, facts.learned_bytes)

    def spec_is_due(self) -> bool:
        """Whether the caller should ask for the relay's capabilities now; True for one caller an hour."""
        with self._mutex:
            now = self._clock.monotonic_ms()
            if self._relay.reason or now < self._spec_due_ms:
                return False
            self._spec_due_ms = now + HOUR_MS
            return True

    def learn_capabilities(self, found: Capabilities | None, *, reached: bool) -> None:
        """Take over what the relay says of itself; one that was not reached is asked again in a minute."""
        with self._mutex:
            if found is not None:
                self.capabilities = found
            if not reached:
                self._spec_due_ms = self._clock.monotonic_ms() + MINUTE_MS

    # What people see ---------------------------------------------------------------------------------------

    @property
    def relay(self) -> Valve:
        """The relay's valve, to look at."""
        return self._relay

    def trouble(self, path: str = "") -> str:
        """What is in the way of the relay, or of one of its paths; "" when nothing is."""
        with self._mutex:
            facts = self._paths.get(path)
            valve = facts.valve if facts and not self._relay.reason else self._relay
            return f"{valve.reason}: {valve.detail}".rstrip(": ")

    def save(self) -> None:
        """Write what changed to STATE/relay.sqlite."""
        if not self._dirty:
            return
        with self._saving:
            with self._mutex:
                facts = {name: self._encode(name) for name in self._dirty}
                self._dirty.clear()
            if self._state is not None:
                self._state.write(facts)

    def close_state(self) -> None:
        """Write what is left to write, and close the file."""
        self.save()
        with self._saving:
            if self._state is not None:
                self._state.close()
                self._state = None

    def _note_auth(self, state: str, detail: str = "") -> None:
        if self.token_from and state != self._auth:
            self._auth, self._auth_detail = state, detail if state != "ok" else ""
            self._dirty.add("auth")

    # Inside ------------------------------------------------------------------------------------------------

    def _facts(self, path: str) -> PathFacts:
        return self._paths.setdefault(path, PathFacts())

    def _open(self, valve: Valve, path: str) -> None:
        if not valve.reason:
            return
        waited_ms = self._clock.wall_ms() - valve.since_ms
        fields = {"reason": valve.reason, "tries": valve.failures, "closed_for_ms": waited_ms}
        valve.reason, valve.detail, valve.failures, valve.probing = "", "", 0, False
        if not path:
            self._allowed = 1
        self._changed(path, "path_opened" if path else "gate_opened", fields)

    def _shut(
        self, valve: Valve, path: str, reason: str, detail: str, *, again: bool, next_ms: int | None = None
    ) -> bool:
        """Close a valve or lengthen its wait; False when somebody else had closed it meanwhile."""
        newly = not valve.reason
        if not newly and not again:
            return False
        if newly:
            valve.since_ms = self._clock.wall_ms()
        valve.failures += 1
        wait_ms = backoff_ms(self._schedule, valve.failures, self._rng.random())
        if self._hurry:
            wait_ms = _FLUSH_INTERVAL_MS
        if next_ms is not None:
            wait_ms = max(1, next_ms - self._clock.monotonic_ms())
        valve.next_ms = self._clock.monotonic_ms() + wait_ms
        told = newly or valve.reason != reason
        valve.reason, valve.detail = reason, detail
        fields = {"level": "warning", "reason": reason, "detail": detail, "retry_in_ms": wait_ms}
        self._changed(path, "path_held" if path else "gate_closed", fields if told else None)
        return True

    def _changed(self, path: str, event: str, fields: dict[str, Any] | None) -> None:
        self._dirty.add(f"path:{path}" if path else "gate")
        if fields is not None:
            self.on_change(event, {"path": path, **fields} if path else fields)

    def _encode(self, name: str) -> Any:
        if name == "accepts":
            return {token: sorted(moments) for token, moments in self._accepted_at.items()}
        if name == "auth":
            return {"source": self.token_from, "state": self._auth, "detail": self._auth_detail}
        if name == "gate":
            return {"url": self._url, **self._disk.valve(self._relay)}
        return self._disk.path(self._facts(name.removeprefix("path:")))

    def _load(self) -> None:
        facts = self._state.read() if self._state else {}
        gate = facts.get("gate")
        if not isinstance(gate, dict) or gate.get("url") != self._url:
            self._dirty.add("gate")
            if self._state and facts:
                self._state.write(dict.fromkeys(facts))
            self.save()  # whoever asks for the status learns at once which relay it is
            return
        self.is_known = True
        self._relay = self._disk.read_valve(gate)
        self._needs_proof = bool(self._relay.reason)
        if self._relay.reason:
            self._allowed = 1
        self._accepted_at = self._disk.read_acceptances(facts.get("accepts"))
        for name, raw in facts.items():
            if name.startswith("path:"):
                self._paths[name.removeprefix("path:")] = self._disk.read_path(raw)
