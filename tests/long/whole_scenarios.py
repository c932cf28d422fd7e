"""The process cases that take minutes, whole and in real time: `make long`. The others: tests/acceptance.

Times are measured here, since this runs alone and not with every change.
"""

import contextlib
import json
import time
from pathlib import Path

import pytest
from moved_clock import MovedClock
from peers import fake_relay
from processes import DaemonProcess, dead_of, deliveries, numbers, put, status_of, wait_for

from outbox import Outbox
from outbox.settings import KEYS
from outbox.store.directory import StateDirectory
from outbox.store.relay_state import read_facts
from relay_client.reference.process import RelayProcess

TOKEN = "tok-daemon"
AGENT = "builder"
CASES = {
    case["case"]: case.get("check", {})
    for case in json.loads(
        (Path(__file__).parent.parent / "cases/process/scenarios.json").read_text("utf-8")
    )["cases"]
}
DEFAULT_BACKOFF = {"delivery.backoff_initial_s": "1", "delivery.backoff_max_s": "60"}
TEN_MINUTES_S = 600
GIVEN_BACK_WITHIN_S = 180


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


@pytest.fixture
def absent(tmp_path):
    """A relay whose address is known, and that does not listen before it is started."""
    relay = RelayProcess(tmp_path / "relay.sqlite", [TOKEN])
    with relay:
        pass
    yield relay
    relay.stop()


def gate_of(state):
    """What the state directory knows of the gate."""
    return read_facts(StateDirectory(state).relay_state).get("gate", {})


def test_a_clock_set_back_by_an_hour(state, absent, tmp_path):
    """P08: with the next try 25 s away or more, it comes within 60 s of real time; occurredAt stays."""
    clock = MovedClock(tmp_path)
    with DaemonProcess(state, absent.url, DEFAULT_BACKOFF, environ=clock.environ) as daemon:
        accepted_from_ms = time.time_ns() // 1_000_000
        put(state, AGENT, 0)
        accepted_to_ms = time.time_ns() // 1_000_000
        wait_for(lambda: (gate_of(state).get("nextTryAt") or 0) / 1_000 - time.time() > 25, 300)
        clock.set_back(3_600)
        absent.start()
        wait_for(lambda: numbers(absent) == [0], CASES["P08"]["within_s"])
        wait_for(lambda: daemon.said("clock_stepped"))
        (event,) = absent.events()
        assert accepted_from_ms <= json.loads(event["body"])["occurredAt"] <= accepted_to_ms


def test_ten_thousand_events_of_20_kb(state, absent):
    """P16: 200 MB gather while the relay is down; minutes after they left the files take less than 20 MB."""
    with DaemonProcess(state, absent.url, DEFAULT_BACKOFF) as daemon:
        with Outbox.open(AGENT, state_dir=state) as outbox:
            for n in range(10_000):
                outbox.enqueue("session-message", {"n": n, "body": "x" * 20_000})
        assert taken_bytes(state) > 200_000_000
        absent.start()
        wait_for(lambda: not status_of(state, AGENT).waiting, 600)
        wait_for(lambda: taken_bytes(state) < 20_000_000, GIVEN_BACK_WITHIN_S)
        assert daemon.stop() == 0
    assert absent.summary()[AGENT]["count"] == 10_000
    assert absent.summary()[AGENT]["inOrder"]


def taken_bytes(state):
    """What all files of the state directory take."""
    return sum(path.stat().st_size for path in state.rglob("*") if path.is_file())


def test_ten_minutes_with_nobody_listening(state, absent):
    """P17: 100 events, less than 60 lines; the first says what is wrong, one that delivery works again."""
    with DaemonProcess(state, absent.url, DEFAULT_BACKOFF) as daemon:
        for n in range(10):
            put(state, f"agent-{n}", *range(10))
        time.sleep(TEN_MINUTES_S)
        absent.start()
        wait_for(lambda: len(absent.events()) == 100, 90)
        assert daemon.stop() == 0
        lines = daemon.lines()
        (closed,), (opened,) = daemon.said("gate_closed"), daemon.said("gate_opened")
    least, most = CASES["P17"]["log_lines"]
    assert least <= len(lines) < most
    assert "warning event=gate_closed" in lines[1]
    assert "connection refused" in closed["detail"]
    assert int(opened["closed_for_ms"]) >= TEN_MINUTES_S * 1_000


@contextlib.contextmanager
def settings(monkeypatch, **values):
    """What `Outbox.flush` finds in the environment."""
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setenv(KEYS[name.replace("__", ".")].variable, value)
        yield


def test_a_flush_of_ten_seconds_during_an_outage(state, monkeypatch):
    """P04: four events with five attempts, 503 to all: all are still there, and no attempt was counted."""
    low, high = CASES["P04"]["flush_s"]
    unavailable = {"steps": [{"status": 503, "repeat": "forever"}]}
    with fake_relay(unavailable) as relay, Outbox.open(AGENT, state_dir=state) as outbox:
        put(state, AGENT, 0, 1, 2, 3)
        given = {"relay__url": relay.url, "relay__token": TOKEN, "delivery__max_attempts": "5"}
        with settings(monkeypatch, **given):
            began = time.monotonic()
            flushed = outbox.flush(timeout_s=10)
            assert low <= time.monotonic() - began <= high
        assert (flushed.delivered, flushed.left, flushed.dead) == (0, 4, 0)
        assert len(deliveries(relay)) > 5
    assert status_of(state, AGENT).head.attempts == 0
    assert dead_of(state, AGENT) == []


def test_a_flush_of_three_seconds_while_a_request_hangs(state, monkeypatch):
    """P15: it takes three seconds, four at most."""
    low, high = CASES["P15"]["flush_s"]
    hangs = {"steps": [{"action": "hang", "repeat": "forever"}]}
    with fake_relay(hangs) as relay, Outbox.open(AGENT, state_dir=state) as outbox:
        put(state, AGENT, 0)
        with settings(monkeypatch, relay__url=relay.url, relay__token=TOKEN):
            began = time.monotonic()
            assert outbox.flush(timeout_s=low).left == 1
            assert low <= time.monotonic() - began <= high
