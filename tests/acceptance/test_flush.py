"""The flush, as command and from host programs: with a daemon, without one, and with one that dies."""

import contextlib
import errno
import json
import select
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from peers import fake_relay
from processes import (
    DaemonProcess,
    UnixConnection,
    dead_of,
    deliveries,
    numbers,
    outbox_command,
    program,
    put,
    status_of,
    wait_for,
)

from outbox import Outbox
from outbox.daemon.companion import Companion
from outbox.settings import load
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess

TOKEN = "tok-daemon"
BY_HAND_ONLY = {"delivery.backoff_initial_s": "3600", "delivery.backoff_max_s": "3600"}
HANGS = {"steps": [{"action": "hang", "repeat": "forever"}]}
NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there

AT_EXIT = """
import atexit, sys
from outbox import Outbox

outbox = Outbox.open("builder")

def last():
    result = outbox.flush(timeout_s=float(sys.argv[1]))
    print(result.delivered, result.left, result.dead, *result.in_the_way.values(), flush=True)

atexit.register(last)
outbox.enqueue("session-message", {"n": 1})
"""


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


@pytest.fixture
def relay(tmp_path):
    """The reference relay."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        yield relay


def to(url, **more):
    """The settings of a flush that delivers by itself."""
    return {"relay.url": url, "relay.token": TOKEN, **more}


def flush(state, timeout_s, settings=(), *words):
    """`outbox flush --json`: the exit status and what it says. A hanging request's own limit is 30 s."""
    done = outbox_command(
        state, "flush", "--json", "--timeout", str(timeout_s), *words, settings=settings, timeout_s=20
    )
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)


def interpreters():
    """This Python, and every later one here that has what the outbox needs."""
    found = [sys.executable]
    for name in ("python3.12", "python3.13", "python3.14"):
        path = shutil.which(name)
        asked = [path, "-c", "import apsw, httpx, structlog"]
        if path and subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            found.append(path)
    return found


# Without a daemon ------------------------------------------------------------------------------------------


def test_it_delivers_by_itself(state, relay):
    """Every agent's events go out, in order, and a second flush finds nothing left."""
    for agent in ("a", "b", "c"):
        put(state, agent, *range(5))
    assert flush(state, 20, to(relay.url)) == (0, {"delivered": 15, "left": 0, "dead": 0})
    assert all(numbers(relay, agent) == list(range(5)) for agent in ("a", "b", "c"))
    assert flush(state, 20, to(relay.url)) == (0, {"delivered": 0, "left": 0, "dead": 0})


def test_where_to_can_be_said_on_the_command_line(state, relay, tmp_path):
    """As it was said to `outbox serve`: nothing else has to be set."""
    put(state, "a", 1)
    (tmp_path / "token").write_text(TOKEN, "utf-8")
    words = ("--relay", relay.url, "--token-file", str(tmp_path / "token"))
    assert flush(state, 20, {}, *words) == (0, {"delivered": 1, "left": 0, "dead": 0})


def test_only_one_agent(state, relay):
    """With --agent the events of others stay where they are."""
    put(state, "a", 0)
    put(state, "b", 1)
    assert flush(state, 20, to(relay.url), "--agent", "a")[0] == 0
    assert (numbers(relay), status_of(state, "b").waiting) == ([0], 1)


def test_the_relay_is_down(state):
    """Exit 3 at the deadline, with everything left and nothing counted."""
    put(state, "builder", 0, 1, 2)
    assert flush(state, 1, to(NOBODY)) == (3, {"delivered": 0, "left": 3, "dead": 0})
    status = status_of(state, "builder")
    assert (status.waiting, status.in_flight, status.head.attempts, status.sender) == (3, 0, 0, False)


def test_the_cause_is_named_where_one_path_is_in_the_way(state):
    """A wrong address: a person reads why, and where to read more."""
    put(state, "a", 1)
    missing = {"steps": [{"status": 404, "when": {"method": "POST"}, "repeat": "forever"}]}
    with fake_relay(missing) as relay:
        settings = to(relay.url)
        told = outbox_command(state, "flush", "--timeout", "4", settings=settings, timeout_s=60)
    assert told.returncode == 3
    assert b"no_endpoint" in told.stdout
    assert b"More: outbox why a" in told.stdout


def test_the_relay_is_busy(state):
    """P04: an outage uses up no attempts, however often a flush tries."""
    put(state, "builder", 0, 1, 2, 3)
    with fake_relay({"steps": [{"status": 503, "repeat": "forever"}]}) as relay:
        settings = to(relay.url, **{"delivery.max_attempts": "5"})
        assert flush(state, 8, settings)[0] == 3
        assert len(deliveries(relay)) > 5
    status = status_of(state, "builder")
    assert (status.waiting, status.dead, status.head.attempts) == (4, 0, 0)


def test_a_request_that_hangs(state):
    """P15: at the deadline it is cut off, long before the request's own limit; the event waits as it was."""
    put(state, "builder", 0)
    with fake_relay(HANGS) as relay:
        assert flush(state, 4, to(relay.url)) == (3, {"delivered": 0, "left": 1, "dead": 0})
        assert len(deliveries(relay)) == 1
    status = status_of(state, "builder")
    assert (status.in_flight, status.head.attempts) == (0, 0)


def test_it_goes_on_as_soon_as_the_relay_is_back(state, relay):
    """A flush does not wait for a backoff: it tries until its deadline, and ends when all is through."""
    put(state, "builder", 0, 1)
    relay.kill()
    words = ["flush", "--json", "--timeout", "60"]
    settings = {**to(relay.url), **BY_HAND_ONLY}
    run = f"import sys; from outbox.cli import main; sys.exit(main({words}))"
    with program(state, run, settings=settings) as flushing:
        wait_for((state / "relay.sqlite").exists)
        relay.start()
        said, trouble = flushing.communicate(timeout=40)
    assert (json.loads(said), trouble) == ({"delivered": 2, "left": 0, "dead": 0}, "")


def test_a_retry_after_is_kept_to(state):
    """What the relay asked to wait for longer than the flush is not asked again, and not waited for."""
    busy = {"status": 503, "headers": [["Retry-After", "600"]], "repeat": "forever"}
    with fake_relay({"steps": [busy]}) as relay:
        with program(state, AT_EXIT, "15", settings=to(relay.url)) as host:
            said, trouble = host.communicate(timeout=14)
        assert trouble == ""
        assert said.startswith("0 1 0 retry_after")
        assert len(deliveries(relay)) == 1
    assert status_of(state, "builder").head.attempts == 0


def test_a_retry_after_is_kept_to_by_the_next_flush(state):
    """It stands on disk: a flush in another process does not ask again either."""
    put(state, "builder", 0)
    busy = {"status": 503, "headers": [["Retry-After", "600"]], "repeat": "forever"}
    with fake_relay({"steps": [busy]}) as relay:
        assert flush(state, 15, to(relay.url))[0] == 3
        assert flush(state, 15, to(relay.url))[0] == 3
        assert len(deliveries(relay)) == 1


def test_at_most_one_attempt_for_each_event(state, relay):
    """An event that fails while the relay works is tried once by a flush, and once more by the next."""
    relay.add_faults({"match": {"path": "/api/messages"}, "action": {"status": 500}})
    put(state, "builder", 0)
    for attempts in (1, 2):
        assert flush(state, 15, to(relay.url)) == (3, {"delivered": 0, "left": 1, "dead": 0})
        assert status_of(state, "builder").head.attempts == attempts
    assert [request["attempt"] for request in relay.requests() if request["path"] == "/api/messages"] == [
        "1",
        "2",
    ]


# From a host program ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("python", interpreters(), ids=lambda path: Path(path).name)
class TestAtExit:
    """`Outbox.flush()` from `atexit`, where no thread can be started any more."""

    def test_it_delivers(self, state, relay, python):
        """The event of a program that is about to end arrives; the relay is named, and its name looked up."""
        url = relay.url.replace("127.0.0.1", "localhost")
        with program(state, AT_EXIT, "20", settings=to(url), python=python) as host:
            assert host.communicate(timeout=30) == ("1 0 0\n", "")
        assert numbers(relay) == [1]

    def test_the_relay_hangs(self, state, python):
        """P15: the program ends at its own deadline, with the event on disk."""
        with fake_relay(HANGS) as relay:
            with program(state, AT_EXIT, "1", settings=to(relay.url), python=python) as host:
                said, trouble = host.communicate(timeout=20)
            assert (said[:5], trouble) == ("0 1 0", "")
            assert len(deliveries(relay)) == 1
        assert status_of(state, "builder").head.attempts == 0

    def test_the_relay_is_down(self, state, python):
        """The result says what stands in the way; nothing is raised."""
        with program(state, AT_EXIT, "0.5", settings=to(NOBODY), python=python) as host:
            said, trouble = host.communicate(timeout=20)
        assert said.startswith("0 1 0 unreachable: ")
        assert trouble == ""

    def test_through_the_daemon(self, state, relay, python):
        """Where a daemon runs the program needs no relay of its own."""
        with DaemonProcess(state, relay.url), program(state, AT_EXIT, "20", python=python) as host:
            said, trouble = host.communicate(timeout=30)
        # the daemon, which the event had woken, may have been faster than the flush
        assert (said[1:], trouble) == (" 0 0\n", "")
        assert numbers(relay) == [1]


# Through the daemon ----------------------------------------------------------------------------------------


def test_through_the_daemon(state, relay):
    """The daemon that waits for a far-off next try sends at once, and the command knows no relay."""
    relay.kill()
    with DaemonProcess(state, relay.url, BY_HAND_ONLY) as daemon:
        put(state, "a", 0, 1)
        put(state, "b", 2)
        wait_for(lambda: daemon.said("gate_closed"))
        relay.start()
        assert flush(state, 20) == (0, {"delivered": 3, "left": 0, "dead": 0})
    assert sorted(numbers(relay)) == [0, 1, 2]


def test_the_daemon_hears_of_an_event_by_the_flush_itself(state, relay):
    """A flush leaves nothing out that a lost wake-up kept from the daemon, nor an agent's first event."""
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "3600"}):
        StateDirectory(state).wake_socket.unlink()
        put(state, "builder", 0)
        assert flush(state, 20) == (0, {"delivered": 1, "left": 0, "dead": 0})


def test_a_flush_through_the_daemon_cuts_nothing_off(state, relay):
    """At the flush's deadline the daemon's request goes on, also one that is unsafe to repeat."""
    relay.add_faults({"match": {"path": "/api/spec"}, "action": {"status": 404}})
    relay.add_faults({"match": {"bodyContains": '"tools/call"'}, "action": {"delayS": 6}})
    with DaemonProcess(state, relay.url) as daemon:
        with Outbox.open("builder", state_dir=state) as outbox:
            outbox.enqueue("mcp-tool-call", {"tool": "note_add", "arguments": {"n": 1}})
        wait_for(relay.events)  # kept already; the answer is on its way
        assert daemon.ask("POST", "/v1/flush", {"timeoutS": 0.2})[1]["left"] == 1
        wait_for(lambda: not status_of(state, "builder").waiting)
    assert dead_of(state, "builder") == []
    assert len(relay.events()) == 1


def test_flushes_join(state, relay):
    """One that has to wait keeps no other one waiting; it is answered when the daemon stops."""
    relay.add_faults({"match": {"agent": "slow"}, "action": {"hang": 600}})
    with DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "0"}) as daemon:
        put(state, "slow", 0)
        waiting = UnixConnection(state / "outbox.sock")
        waiting.request("POST", "/v1/flush", json.dumps({"agent": "slow", "timeoutS": 600}))
        put(state, "quick", 1)
        assert flush(state, 15, (), "--agent", "quick")[0] == 0
        assert numbers(relay) == [1]
        assert not select.select([waiting.sock], [], [], 0)[0]
        assert daemon.stop() == 0
        answer = waiting.getresponse()
        assert (answer.status, json.loads(answer.read())["left"]) == (200, 1)
        waiting.close()


FLUSH = """
from outbox import Outbox
with Outbox.open("builder") as outbox:
    print("open", flush=True)
    result = outbox.flush(timeout_s=40)
    print(result.delivered, result.left, result.dead)
"""


def test_the_end_of_another_flush_takes_no_deadline_from_the_last_one(state, tmp_path):
    """A sidecar's last flush stays one when a caller's flush ends meanwhile; nothing outlasts it."""
    put(state, "builder", 0)
    settings = load({"relay.url": NOBODY}, environ={}, config_path=None)
    with contextlib.ExitStack() as others, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "sidecar.sock"))
        listening.listen()
        with Companion(settings, StateDirectory(state), "builder", "test", listening).running() as companion:
            others.enter_context(companion._hurried())
            seen = []

            def look():
                others.close()
                delivery = companion.engine.delivery
                seen.append((delivery.flushing, delivery.deadline is not None))
                return True

            companion.last_flush(60, look)
    assert seen == [(True, True)]


@pytest.mark.parametrize(
    "trouble", [OSError(errno.EMFILE, "too many open files"), RuntimeError("can't start new thread")]
)
def test_a_sidecar_that_cannot_serve_a_caller_goes_on_looking(state, relay, tmp_path, monkeypatch, trouble):
    """No descriptor, or no thread, is free: what hooks write into the file is found and sent all the same."""
    settings = load({"relay.url": relay.url, "relay.token": TOKEN}, environ={}, config_path=None)
    refused = threading.Event()

    def refuse(_companion):
        refused.set()
        raise trouble

    monkeypatch.setattr(Companion, "_serve_if_asked", refuse)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "sidecar.sock"))
        listening.listen()
        directory = StateDirectory(state).create(allow_network_fs=True)
        with Companion(settings, directory, "builder", "test", listening).running():
            assert refused.wait(60)
            put(state, "builder", 0)
            wait_for(lambda: numbers(relay) == [0])


def test_the_daemon_dies_during_a_flush(state, relay):
    """The flush goes on by itself."""
    relay.add_faults({"match": {"agent": "builder"}, "action": {"hang": 600}})
    with DaemonProcess(state, relay.url) as daemon:
        put(state, "builder", 0, 1)
        with program(state, FLUSH, settings=to(relay.url)) as host:
            assert host.stdout.readline() == "open\n"
            wait_for(lambda: status_of(state, "builder").in_flight)
            relay.clear_faults()
            daemon.kill()
            said, trouble = host.communicate(timeout=40)
    assert (said, trouble) == ("2 0 0\n", "")
    assert numbers(relay) == [0, 1]


def test_enqueue_needs_no_daemon(state, relay):
    """An event is taken with no daemon, with one, and while one is being killed; all arrive, in order."""
    daemon = DaemonProcess(state, relay.url)
    receipts = []
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.end)
        outbox = stack.enter_context(Outbox.open("builder", state_dir=state))
        for act in (lambda: None, daemon.launch, lambda: None, daemon.kill, lambda: None, daemon.start):
            act()
            for n in range(len(receipts), len(receipts) + 20):
                receipts.append(outbox.enqueue("session-message", {"n": n}))  # noqa: PERF401 - one by one
        wait_for(lambda: numbers(relay) == list(range(120)))
    assert [receipt.seq for receipt in receipts] == list(range(1, 121))
