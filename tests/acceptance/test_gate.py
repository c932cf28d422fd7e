"""What the gate keeps on disk of the relay: true whoever writes it last, and bounded."""

from __future__ import annotations

import random
import threading

from world import DAY_MS, HOUR_MS, URL, TestClock

from outbox.delivery.gate import Gate, Permit
from outbox.policy import Schedule
from outbox.store.relay_state import RelayState, read_facts

MESSAGES = "/api/messages"


def gate_on(state, clock=None):
    """A gate that keeps what it knows in this file."""
    return Gate(
        url=URL, schedule=Schedule(1_000, 60_000, 12), clock=clock or TestClock(), rng=random.Random(7),
        state=state,
    )  # fmt: skip


def test_what_was_known_last_is_on_disk(tmp_path):
    """One request fails while another one is accepted: the disk ends with what memory ends with."""

    class Slow(RelayState):
        """Lets the other thread do all it wants to before the closed gate is written."""

        def write(self, facts):
            if facts.get("gate", {}).get("reason"):
                other.start()
                other.join(0.5)
            super().write(facts)

    state = Slow(tmp_path / "relay.sqlite")
    gate = gate_on(state)
    fails, works = gate.admit(MESSAGES), gate.admit(MESSAGES)
    assert isinstance(fails, Permit)
    assert isinstance(works, Permit)

    def accept():
        gate.accepted(works, "token")
        gate.finish(works)

    other = threading.Thread(target=accept)
    gate.close(fails, "unreachable", "connection refused")
    gate.finish(fails)
    other.join(60)
    assert gate.relay.reason == ""
    assert read_facts(tmp_path / "relay.sqlite")["gate"]["reason"] == ""
    gate.close_state()


def test_tokens_of_long_ago_are_forgotten(tmp_path):
    """A token that changes each hour leaves no endless list of when it was good: two days are enough."""
    clock = TestClock()
    gate = gate_on(RelayState(tmp_path / "relay.sqlite"), clock)
    first = clock.wall_ms()
    for hour in range(24 * 7):
        permit = gate.admit(MESSAGES)
        assert isinstance(permit, Permit)
        gate.accepted(permit, f"token-{hour}")
        gate.finish(permit)
        clock.now_ms += HOUR_MS
    known = read_facts(tmp_path / "relay.sqlite")["accepts"]
    assert len(known) <= 49
    assert min(at_ms for moments in known.values() for at_ms in moments) > first + 4 * DAY_MS
    gate.close_state()


def test_an_answer_about_health_is_shared_however_long_it_took(tmp_path):
    """Whoever waited for it does not ask again: many agents at a relay that hangs wait once, not in turn."""
    clock, asked = TestClock(), []
    gate = gate_on(RelayState(tmp_path / "relay.sqlite"), clock)

    def hang():
        asked.append(clock.now_ms)
        clock.now_ms += 30_000
        return False

    assert [gate.ask_health(hang) for _ in range(3)] == [False] * 3
    assert len(asked) == 1
    clock.now_ms += 1_000
    assert not gate.ask_health(hang)
    assert len(asked) == 2
    gate.close_state()
