"""The process cases P01 to P17 with their right values, as far as test_daemon.py does not hold them.

Real processes and signals; what takes minutes passes on the clock of world.py, and whole in `make long`.
"""

import contextlib
import json
import re
import resource
import signal
import socket
from pathlib import Path

import pytest
from moved_clock import MovedClock
from peers import fake_relay
from processes import (
    LINE,
    DaemonProcess,
    dead_of,
    deliveries,
    numbers,
    outbox_command,
    program,
    put,
    status_of,
    wait_for,
)
from world import HOUR_MS, MINUTE_MS, Lose, Refuse, World, answer

from outbox import Outbox, StoreBusy
from outbox.daemon.compose import idle_files
from outbox.settings import load
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
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
BY_HAND_ONLY = {"delivery.backoff_initial_s": "3600", "delivery.backoff_max_s": "3600"}
HANGS = {"action": "hang", "repeat": "forever"}
NOBODY = "nobody listens"


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


@pytest.fixture
def relay(tmp_path):
    """A relay that answers 200."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        yield relay


@pytest.fixture
def absent(tmp_path):
    """A relay whose address is known, and that does not listen before it is started."""
    relay = RelayProcess(tmp_path / "absent.sqlite", [TOKEN])
    with relay:
        pass
    yield relay
    relay.stop()


def test_every_case_is_held():
    """P01 to P17: each is named by a test of these two files, so that a new one cannot be forgotten."""
    here = Path(__file__)
    text = here.read_text("utf-8") + here.with_name("test_daemon.py").read_text("utf-8")
    named = set(re.findall(r'"""(P\d\d)\b', text))
    assert named == set(CASES)


# Stopping, and going on ------------------------------------------------------------------------------------


@contextlib.contextmanager
def troubled(step):
    """A relay that answers everything like this, or an address at which nobody listens."""
    if step == NOBODY:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", list
        return
    with fake_relay({"steps": [step]}) as fake:
        yield fake.url, lambda: deliveries(fake)


ASKS_TO_WAIT = {"status": 503, "headers": [["Retry-After", "600"]], "repeat": "forever"}
LATE = {"status": 201, "delay_s": 3, "repeat": "forever"}


@pytest.mark.parametrize(
    ("case", "step", "events", "again"),
    [
        ("P01", NOBODY, 3, False),
        ("P02", LATE, 1, False),
        ("P05", ASKS_TO_WAIT, 1, False),
        ("P14", HANGS, 1, True),
    ],
)
def test_stopped_in_trouble_and_started_again(state, relay, case, step, events, again):
    """With the default settings it ends in time and with 0; at another relay everything left arrives once."""
    check = CASES[case]
    with troubled(step) as (url, seen), DaemonProcess(state, url, DEFAULT_BACKOFF) as daemon:
        keys = [receipt.idempotency_key for receipt in put(state, AGENT, *range(events))]
        wait_for(lambda: seen() or daemon.said("gate_closed"))
        if step == ASKS_TO_WAIT:
            wait_for(lambda: status_of(state, AGENT).blocked)
        daemon.send(signal.SIGTERM)
        if again:
            wait_for(lambda: daemon.said("stopping"))
            daemon.send(signal.SIGTERM)
        assert daemon.ended(timeout_s=check.get("exit_s", 10)) == 0
        left = status_of(state, AGENT)
        assert (left.waiting, left.in_flight) == (check.get("pending", 0 if step == LATE else events), 0)
        assert left.head is None or left.head.attempts <= 1
        told = [json.loads(request["body"]) for request in seen()]

        daemon.url = relay.url
        daemon.start()
        wait_for(lambda: not status_of(state, AGENT).waiting)
        told += [json.loads(event["body"]) for event in relay.events()]
    assert [event["timesSeen"] for event in relay.events()] == [1] * left.waiting
    assert sorted({body["idempotencyKey"] for body in told}) == sorted(keys)
    assert len({(body["idempotencyKey"], body["occurredAt"]) for body in told}) == len(keys)
    assert dead_of(state, AGENT) == []


def test_killed_between_the_answer_and_the_removal(state):
    """P03: what the relay stored without saying so comes again with the same key, body and time."""
    with (
        fake_relay({"steps": [{"action": "close"}]}) as relay,
        DaemonProcess(state, relay.url, BY_HAND_ONLY) as daemon,
    ):
        (receipt,) = put(state, AGENT, 0)
        wait_for(lambda: deliveries(relay))
        daemon.kill()
        assert status_of(state, AGENT).waiting == 1
        daemon.start()
        wait_for(lambda: not status_of(state, AGENT).waiting)
        sent = deliveries(relay)
    least, most = CASES["P03"]["requests"]
    assert least <= len(sent) <= most
    assert len({request["body"] for request in sent}) == 1
    assert json.loads(sent[0]["body"])["idempotencyKey"] == receipt.idempotency_key


# The final flush -------------------------------------------------------------------------------------------


def test_a_flush_during_an_outage_uses_up_no_attempts(state, relay):
    """P04: forced tries set nothing aside, even where one that counted would be the last."""
    once = {"delivery.max_attempts": "1"}
    for path in ("/api/messages", "/api/messages/batch"):
        relay.add_faults({"match": {"path": path}, "action": {"status": 503}})
    with DaemonProcess(state, relay.url, {**BY_HAND_ONLY, **once}) as daemon:
        put(state, AGENT, 0, 1, 2, 3)
        flushed = outbox_command(state, "flush", "--json", "--timeout", "3")
        assert (flushed.returncode, flushed.stderr) == (3, b"")
        assert json.loads(flushed.stdout) == {"delivered": 0, "left": CASES["P04"]["pending"], "dead": 0}
        assert len([request for request in relay.requests() if request["method"] == "POST"]) > 1
        left = status_of(state, AGENT)
        assert (left.waiting, left.head.attempts) == (CASES["P04"]["pending"], 0)
        assert len(dead_of(state, AGENT)) == CASES["P04"]["set_aside"]

        relay.clear_faults()
        daemon.kill()
        daemon.start()
        wait_for(lambda: numbers(relay) == [0, 1, 2, 3])


def test_a_flush_ends_while_a_request_hangs(state, relay):
    """P15: it returns when its time is over, not when the request's is; the event waits as it was."""
    least, most = CASES["P15"]["flush_s"]
    never = {"relay.request_timeout_s": "600"}
    with fake_relay({"steps": [HANGS]}) as hangs, DaemonProcess(state, hangs.url, never) as daemon:
        put(state, AGENT, 0)
        flushed = outbox_command(state, "flush", "--json", "--timeout", str(least), timeout_s=most + 40)
        assert json.loads(flushed.stdout) == {"delivered": 0, "left": 1, "dead": 0}
        assert len(deliveries(hangs)) == 1
        daemon.kill()
        daemon.url = relay.url
        daemon.start()
        wait_for(lambda: numbers(relay) == [0])


# The clock -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(lambda _: answer(503), id="503"),
        pytest.param(lambda _: answer(503, retry_after="30"), id="503 with Retry-After"),
        pytest.param(lambda _: answer(500), id="500"),
        pytest.param("refuse", id="refused"),
        pytest.param("lose", id="lost"),
    ],
)
@pytest.mark.parametrize("by_ms", [-HOUR_MS, HOUR_MS], ids=["back", "ahead"])
def test_a_clock_that_is_set_stalls_nothing(tmp_path, trouble, restarted, by_ms):
    """P08: the head that waits for its next try goes within a minute, with the times it was accepted at."""

    def behave(request):
        if trouble == "refuse":
            raise Refuse
        if trouble == "lose":
            raise Lose
        return trouble(request)

    with World(tmp_path, behave=behave, health=lambda: 200 if callable(trouble) else 0) as world:
        world.enqueue(AGENT, 3)
        world.run(2 * MINUTE_MS)
        assert world.numbers(AGENT) == []
        world.clock.offset_ms += by_ms
        if restarted:
            world.restart()
        world.relay.behave = lambda request: None
        began_ms = world.clock.now_ms
        world.run(10 * MINUTE_MS, until=lambda: len(world.numbers(AGENT)) == 3)
        assert world.numbers(AGENT) == [0, 1, 2]
        assert world.clock.now_ms - began_ms <= CASES["P08"]["within_s"] * 1_000
        assert len({times_of(message) for one in world.relay.requests for message in one.messages}) == 3
        assert world.dead() == []


def times_of(message):
    """What must be the same each time an event is sent."""
    return message["idempotencyKey"], message["occurredAt"]


def test_a_daemon_whose_clock_is_set_back(state, absent, tmp_path):
    """P08: a real daemon notices, says so, and goes on; what waits keeps its time."""
    clock, quick = MovedClock(tmp_path), {"daemon.poll_interval_s": "0.2"}
    with DaemonProcess(state, absent.url, quick, environ=clock.environ) as daemon:
        put(state, AGENT, 0)
        wait_for(lambda: daemon.said("gate_closed"))
        before = kept_times(state, AGENT)
        clock.set_back(3_600)
        wait_for(lambda: daemon.said("clock_stepped"))
        absent.start()
        wait_for(lambda: numbers(absent) == [0], CASES["P08"]["within_s"])
        assert [json.loads(event["body"])["occurredAt"] for event in absent.events()] == before


def kept_times(state, agent):
    """When the waiting events of an agent happened."""
    directory = StateDirectory(state)
    with contextlib.closing(open_outbox(directory, directory.outbox_path(agent))) as box:
        return [at_ms for (at_ms,) in box.rows("SELECT occurred_at_ms FROM events ORDER BY seq")]


# Many agents -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def descriptors(most):
    """Whoever is started meanwhile may open so many at once, as under `ulimit -n`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_in(daemon):
    """How many descriptors the daemon has open."""
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def test_300_agents_with_256_descriptors(state, relay):
    """P09: all arrive, nothing wants for a descriptor, and they go down again when all is quiet."""
    agents = [f"agent-{n}" for n in range(CASES["P09"]["arrives"])]
    for agent in agents:
        put(state, agent, 0)
    daemon = DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "0.2"})
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.end)
        with descriptors(256):
            daemon.start()
        wait_for(lambda: len(relay.summary()) == len(agents), 60)
        wait_for(lambda: open_in(daemon) < 30, 60)
        put(state, agents[0], 1)
        wait_for(lambda: numbers(relay, agents[0]) == [0, 1])
        assert daemon.stop() == 0
        assert [line for line in daemon.lines() if " info " not in line or "file_trouble" in line] == []
    assert {event["timesSeen"] for event in relay.events()} == {1}


def test_a_folder_that_cannot_be_read_for_a_while(state, relay):
    """As when no descriptor is free for looking into it: the daemon says so once, and goes on afterwards."""
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "0.05"}) as daemon:
        away = (state / "agents").rename(state / "away")
        (state / "agents").write_text("no folder")
        wait_for(lambda: daemon.said("file_trouble"))
        (state / "agents").unlink()
        away.rename(state / "agents")
        put(state, AGENT, 0)
        wait_for(lambda: numbers(relay) == [0])
        assert len(daemon.said("file_trouble")) == 1
        assert daemon.stop() == 0


@pytest.mark.parametrize(("descriptors", "files"), [(256, 21), (1_024, 64), (20_000, 64), (100, 1), (0, 1)])
def test_open_files_fit_into_the_descriptors(descriptors, files):
    """P09: each of 32 workers may use a file and a connection beside those that are kept open."""
    assert idle_files(load({}, environ={}), descriptors) == files


# Bounds and locks ------------------------------------------------------------------------------------------


def test_a_bound_is_reached_while_the_relay_is_down(state, absent):
    """P10: the newest five wait; three are counted, told to the relay by kind, known by key."""
    settings = {**BY_HAND_ONLY, "bounds.max_events": "5"}
    with DaemonProcess(state, absent.url, settings) as daemon:
        receipts = put(state, AGENT, 0)
        wait_for(lambda: daemon.said("gate_closed"))
        receipts += put(state, AGENT, *range(1, 8))
        (told,) = json.loads(outbox_command(state, "status", "--json").stdout)["agents"]
        assert (told["waiting"], told["dropped"]) == (5, CASES["P10"]["dropped"])
        assert [asked_again(state, receipt, n) for n, receipt in enumerate(receipts)] == [
            *["dropped"] * 3, *["waiting"] * 5,
        ]  # fmt: skip
        daemon.kill()
        absent.start()
        daemon.start()
        wait_for(lambda: not status_of(state, AGENT).waiting)
        gap, *events = [json.loads(event["body"]) for event in absent.events()]
    assert [body["n"] for body in events] == CASES["P10"]["arrives"]
    assert (gap["kind"], gap["payload"]["count"]) == ("outbox-gap", CASES["P10"]["dropped"])
    assert (gap["payload"]["kinds"], gap["payload"]["reason"]) == ({"session-message": 3}, "max_events")


def asked_again(state, receipt, n):
    """What became of an event, told to whoever hands it over with its key once more."""
    payload = {"from": AGENT, "body": f"{n}", "n": n}
    with Outbox.open(AGENT, state_dir=state) as outbox:
        again = outbox.enqueue("session-message", payload, idempotency_key=receipt.idempotency_key)
    assert again.duplicate
    return again.state


HOLD = """
import sys, apsw
held = apsw.Connection(sys.argv[1])
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
held.execute("ROLLBACK")
"""


def test_another_program_holds_the_lock(state, relay):
    """P11: the call fails as busy and stores nothing, others are served, and afterwards all goes on."""
    with DaemonProcess(state, relay.url):
        put(state, AGENT, 0)
        wait_for(lambda: numbers(relay) == [0])
        with program(state, HOLD, str(StateDirectory(state).outbox_path(AGENT))) as holder:
            assert holder.stdout.readline() == "held\n"
            put(state, "another", 1)
            wait_for(lambda: numbers(relay, "another") == [1])
            with pytest.raises(StoreBusy, match="Nothing was stored"):
                put(state, AGENT, 2)
            assert status_of(state, AGENT).waiting == 0
        put(state, AGENT, 3)
        wait_for(lambda: numbers(relay, AGENT) == [0, 3])
    assert status_of(state, AGENT).accepted == 2 + CASES["P11"]["lost"]


# Space -----------------------------------------------------------------------------------------------------


def taken_bytes(state):
    """What the agents' files take."""
    return sum(path.stat().st_size for path in (state / "agents").iterdir())


def big(numbers):
    """Events of 20 kB each."""
    return [{"kind": "session-message", "payload": {"n": n, "body": "x" * 20_000}} for n in numbers]


def test_space_is_given_back_after_an_outage(state, absent):
    """P16, a tenth of it: 20 MB have gathered; once all is delivered the files take less than 2 MB."""
    with Outbox.open(AGENT, state_dir=state) as outbox:
        for start in range(0, 1_000, 100):
            outbox.enqueue_many(big(range(start, start + 100)))
    with DaemonProcess(state, absent.url, {"daemon.poll_interval_s": "0.2"}) as daemon:
        wait_for(lambda: daemon.said("gate_closed"))
        assert taken_bytes(state) > 20_000_000
        absent.start()
        wait_for(lambda: not status_of(state, AGENT).waiting, 40)
        wait_for(lambda: taken_bytes(state) < 2_000_000)
        assert daemon.stop() == 0
    assert absent.summary()[AGENT]["count"] == 1_000


def test_space_is_given_back_by_an_agent_that_had_rested_just_before(tmp_path):
    """P16: what was put in order a moment before is so again a minute later, with nobody asking for it."""
    with World(tmp_path / "state") as world:
        world.enqueue(AGENT, 1)
        world.run(1_000)
        for start in range(0, 1_000, 100):
            world.enqueue(AGENT, 100, first=start, body="x" * 20_000)
        assert taken_bytes(tmp_path / "state") > 20_000_000
        world.run(5 * MINUTE_MS)
        assert len(world.numbers(AGENT)) == 1_001
        assert taken_bytes(tmp_path / "state") < 2_000_000


# The log ---------------------------------------------------------------------------------------------------


def lines_of(world):
    """What a daemon would have logged at the level info."""
    return [(event, fields) for event, fields in world.events if fields.get("level") != "debug"]


@pytest.mark.parametrize(
    "behave",
    [
        pytest.param("refuse", id="nobody listens"),
        pytest.param(lambda _: answer(503), id="503"),
        pytest.param(lambda _: answer(429, retry_after="20"), id="429"),
        pytest.param(lambda _: answer(401), id="401"),
    ],
)
def test_ten_minutes_of_an_outage_are_quiet(tmp_path, behave):
    """P17: the first line says what is wrong, one that it works again, and there are less than 60 of them."""

    def trouble(request):
        if behave == "refuse":
            raise Refuse
        return behave(request)

    with World(tmp_path, behave=trouble, health=lambda: 0) as world:
        for n in range(20):
            world.enqueue(f"agent-{n}", 5)
        world.run(10 * MINUTE_MS)
        world.relay.behave, world.relay.health = lambda request: None, lambda: 200
        world.run(10 * MINUTE_MS)
        assert len(world.relay.keys) == 100
        least, most = CASES["P17"]["log_lines"]
        assert least <= len(lines_of(world)) < most
        event, fields = lines_of(world)[0]
        assert event in {"gate_closed", "held"}
        assert fields["reason"]
        opened = [event for event, _ in lines_of(world) if event == "gate_opened"]
        assert len(opened) == len([event for event, _ in lines_of(world) if event == "gate_closed"])


def test_the_log_of_an_outage(state, absent):
    """P17, a sixtieth of it: a hundred events, nobody listens, then somebody does: a handful of lines."""
    sixtieth = {"delivery.backoff_initial_s": "0.017", "delivery.backoff_max_s": "1"}
    with DaemonProcess(state, absent.url, sixtieth) as daemon:
        for n in range(10):
            put(state, f"agent-{n}", *range(10))
        wait_for(lambda: tries_of(state) >= 10, 40)
        absent.start()
        wait_for(lambda: len(absent.events()) == 100)
        assert daemon.stop() == 0
        lines = daemon.lines()
        assert [line for line in lines if not LINE.fullmatch(line)] == []
        closed, opened = daemon.said("gate_closed"), daemon.said("gate_opened")
    least, most = CASES["P17"]["log_lines"]
    assert least <= len(lines) < most
    assert "event=serving" in lines[0]
    assert "warning event=gate_closed" in lines[1]
    assert "connection refused" in closed[0]["detail"]
    assert len(closed) == len(opened) >= 1


def tries_of(state):
    """How often the closed gate was tried, as the state directory knows it."""
    return read_facts(StateDirectory(state).relay_state).get("gate", {}).get("failures", 0)
