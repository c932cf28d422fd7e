"""The daemon's local socket over real HTTP: events are on disk before the answer, errors name their line."""

import json
import select
import socket
import stat
from http.client import HTTPConnection
from urllib.parse import quote

import pytest
from peers import fake_relay
from processes import DaemonProcess, UnixConnection, ask, numbers, outbox_command, status_of, wait_for

from outbox import Outbox
from relay_client.reference.process import RelayProcess

TOKEN = "tok-daemon"
NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there
EVENTS = "/v1/agents/builder/events"


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


@pytest.fixture
def relay(tmp_path):
    """The reference relay."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        yield relay


@pytest.fixture
def daemon(state):
    """A daemon whose relay is away: what it takes stays where it is."""
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """A daemon for all who leave nothing behind."""
    with DaemonProcess(tmp_path_factory.mktemp("idle") / "state", NOBODY) as daemon:
        yield daemon


def told(path, body, kind):
    """The status and the text of the answer to a stream of lines."""
    connection = UnixConnection(path)
    try:
        connection.request("POST", EVENTS, body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def message(n, **more):
    """One event as JSON has it."""
    return {"kind": "session-message", "payload": {"n": n}, **more}


# Events ----------------------------------------------------------------------------------------------------


def test_one_event(state, daemon):
    """The receipt of one event; it is on disk when the answer comes, and survives kill -9."""
    status, receipt = daemon.ask("POST", EVENTS, message(1, idempotencyKey="k-1"))
    daemon.kill()
    assert (status, receipt) == (
        200,
        {"seq": 1, "idempotencyKey": "k-1", "duplicate": False, "state": "waiting"},
    )
    assert status_of(state, "builder").waiting == 1


def test_a_known_key(daemon):
    """The same event again gives the first one's receipt; another one under its key is refused."""
    daemon.ask("POST", EVENTS, message(1, idempotencyKey="k-1"))
    status, receipt = daemon.ask("POST", EVENTS, message(1, idempotencyKey="k-1"))
    assert (status, receipt["seq"], receipt["duplicate"]) == (200, 1, True)
    status, answer = daemon.ask("POST", EVENTS, message(2, idempotencyKey="k-1"))
    assert (status, answer["code"]) == (422, "key_reused")


def test_an_array(state, daemon):
    """One result for each element, in order; those that cannot be taken do not stop the others."""
    status, answer = daemon.ask("POST", EVENTS, [message(0), {"kind": "no-such"}, 7, message(1)])
    assert (status, answer["accepted"], answer["refused"]) == (200, 2, 2)
    assert [result.get("seq") for result in answer["results"]] == [1, None, None, 2]
    assert all(result["error"]["message"] for result in answer["results"][1:3])
    assert status_of(state, "builder").waiting == 2
    assert daemon.ask("POST", EVENTS, [])[1] == {"results": [], "accepted": 0, "refused": 0}


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/jsonl; charset=utf-8"])
def test_lines(state, daemon, kind):
    """NDJSON: each result names its line, blank lines are passed over, bad ones are refused alone."""
    lines = [json.dumps(message(0)), "", "{nonsense", '{"kind": "session-message"}', json.dumps(message(1))]
    body = "\n".join(lines).encode() + b"\n\xff\xfe\n"
    status, text = told(state / "outbox.sock", body, kind)
    results = [json.loads(line) for line in text.splitlines()]
    assert status == 200
    assert [(result["line"], result.get("seq")) for result in results] == [
        (1, 1),
        (3, None),
        (4, None),
        (5, 2),
        (6, None),
    ]
    assert "payload" in results[2]["error"]["message"]
    assert status_of(state, "builder").waiting == 2


def test_they_are_delivered(state, relay):
    """What comes by the socket goes out as given, without a wake-up from outside."""
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "3600"}) as daemon:
        daemon.ask("POST", EVENTS, message(0, occurredAt=1_790_000_000_000))
        daemon.ask("POST", EVENTS, [message(1), message(2)])
        wait_for(lambda: numbers(relay) == [0, 1, 2])
    assert relay.events()[0]["occurredAt"] == 1_790_000_000_000


@pytest.mark.parametrize("agent", ["a/b", "100%25", "..", "ü b", "events", "x/events", "?q=1#f", "a%2Fb"])
def test_an_agent_is_exactly_what_the_path_names(state, daemon, agent):
    """The name is decoded once, whatever stands in it."""
    status, _ = daemon.ask("POST", f"/v1/agents/{quote(agent, safe='')}/events", message(0))
    assert status == 200
    assert [each["agent"] for each in daemon.ask("GET", "/v1/status")[1]["agents"]] == [agent]
    assert status_of(state, agent).waiting == 1


@pytest.mark.parametrize("name", ["a%00b", "%ff", "x" * 513, ""])
def test_an_agent_that_cannot_be_one(idle, name):
    """A name that no agent can have is refused, with nothing on disk."""
    status, answer = idle.ask("POST", f"/v1/agents/{name}/events", message(0))
    assert (status, answer["code"]) == (422, "usage")
    assert not list(idle.state.outbox_files())


# What cannot be taken --------------------------------------------------------------------------------------


NO_EVENTS = [b"", b"{", b"nonsense", b'{"kind":"insight","payload":NaN}', b"[1", b"[\xff]", b"7", b"\xff"]


@pytest.mark.parametrize("body", NO_EVENTS)
def test_what_is_no_event(idle, body):
    """One line says why, and nothing is stored, not even an outbox; the daemon goes on."""
    status, answer = idle.ask("POST", EVENTS, body)
    assert status == 422
    assert answer["detail"]
    assert "\n" not in answer["detail"]
    assert not list(idle.state.outbox_files())


def test_an_event_that_is_too_large(daemon):
    """Above the limit of an event it is refused with its size; the one behind it is taken."""
    large = message(0) | {"payload": {"text": "x" * 9_000_000}}
    status, answer = daemon.ask("POST", EVENTS, large)
    assert (status, answer["code"]) == (413, "too_large")
    assert "8,388,608" in answer["detail"]
    results = daemon.ask("POST", EVENTS, [large, message(1)])[1]["results"]
    assert [result.get("seq") for result in results] == [None, 1]


def test_a_request_without_end(state, daemon):
    """A body beyond 64 MiB is refused while it comes, and not kept in memory."""
    connection = UnixConnection(state / "outbox.sock")
    piece, sent = b" " * 2**20, 0
    connection.putrequest("POST", EVENTS)
    connection.putheader("Content-Length", str(2**40))
    connection.endheaders()
    while sent < 200 and not select.select([connection.sock], [], [], 0)[0]:
        connection.send(piece)
        sent += 1
    answer = connection.sock.recv(65_536)
    connection.close()
    assert b" 413 " in answer.splitlines()[0]
    assert sent >= 64
    assert daemon.ask("POST", EVENTS, message(0))[0] == 200


def test_no_room(state):
    """A full outbox that refuses says so: 507, with nothing stored."""
    settings = {"bounds.max_events": "2", "bounds.overflow": "refuse"}
    with DaemonProcess(state, NOBODY, {**settings, "daemon.flush_timeout_s": "0.1"}) as daemon:
        answer = daemon.ask("POST", EVENTS, [message(0), message(1), message(2)])[1]
        assert (answer["accepted"], answer["results"][2]["error"]["code"]) == (2, "full")
        status, answer = daemon.ask("POST", EVENTS, message(3))
        assert (status, answer["code"]) == (507, "full")
    assert status_of(state, "builder").waiting == 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("DELETE", EVENTS, 405), ("GET", "/v1/flush", 405), ("GET", "/", 404), ("POST", "/v2/status", 404)],
)
def test_what_is_not_served(idle, method, path, status):
    """Another path or method gets an answer in the same form."""
    got, answer = idle.ask(method, path)
    assert (got, answer["code"]) == (status, "not_served")


# Acts ------------------------------------------------------------------------------------------------------


def test_status(daemon):
    """As `outbox status --json` has it."""
    daemon.ask("POST", EVENTS, message(0))
    status, answer = daemon.ask("GET", "/v1/status")
    assert status == 200
    assert [(each["agent"], each["waiting"]) for each in answer["agents"]] == [("builder", 1)]
    assert answer["daemon"]["pid"] == daemon.process.pid


def test_the_status_knows_the_paths_of_the_settings(state):
    """A head whose own path is held is told so, also where the settings name another path for its kind."""
    missing = {"status": 404, "body": "{}", "when": {"target_contains": "/notes"}, "repeat": "forever"}
    unwell = {"status": 404, "when": {"target_contains": "/api/health", "method": "GET"}, "repeat": "forever"}
    settings = {"relay.paths.insights": "/notes"}
    with (
        fake_relay({"steps": [missing, unwell], "events": []}) as relay,
        DaemonProcess(state, relay.url, settings) as daemon,
        Outbox.open("builder", state_dir=state) as box,
    ):
        box.enqueue("insight", {"n": 1})
        wait_for(lambda: daemon.said("path_held"))
        (agent,) = daemon.ask("GET", "/v1/status")[1]["agents"]
        assert agent["blocked"]["reason"] == "no_endpoint"


def test_flush(state, relay):
    """It answers when nothing is left, with what it did for each agent."""
    with DaemonProcess(state, relay.url) as daemon:
        daemon.ask("POST", EVENTS, [message(n) for n in range(10)])
        status, answer = daemon.ask("POST", "/v1/flush", {"timeoutS": 20})
        assert (status, answer["left"], answer["dead"], answer["inTheWay"]) == (200, 0, 0, {})
        assert numbers(relay) == list(range(10))


def test_a_flush_that_cannot(daemon):
    """What is left, and what stands in the way."""
    daemon.ask("POST", EVENTS, message(0))
    status, answer = daemon.ask("POST", "/v1/flush", {"agent": "builder", "timeoutS": 0.3})
    assert (status, answer["delivered"], answer["left"]) == (200, 0, 1)
    assert answer["agents"] == {"builder": [0, 1]}
    assert answer["inTheWay"]["builder"].startswith("unreachable")


@pytest.mark.parametrize("act", ["flush", "pause", "resume"])
def test_an_act_on_an_unknown_agent(idle, act):
    """404, with nothing made."""
    status, answer = idle.ask("POST", f"/v1/{act}", {"agent": "nobody"})
    assert (status, answer["code"]) == (404, "unknown_agent")
    assert not list(idle.state.outbox_files())


NO_ACTS = [b"[]", b"{", b'{"agent":7}', b'{"timeoutS":-1}', b'{"timeoutS":true}', b"\xff"]


@pytest.mark.parametrize("body", NO_ACTS)
def test_an_act_that_is_not_understood(idle, body):
    """422, and the daemon goes on."""
    assert idle.ask("POST", "/v1/flush", body)[0] == 422
    assert idle.ask("GET", "/v1/status")[0] == 200


def test_pause_and_resume(state, relay):
    """A paused agent's events wait, others' go on; resumed, they go out at once."""
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "3600"}) as daemon:
        with Outbox.open("builder", state_dir=state):
            pass
        assert daemon.ask("POST", "/v1/pause", {"agent": "builder"}) == (200, {"paused": 1})
        daemon.ask("POST", EVENTS, message(0))
        daemon.ask("POST", "/v1/agents/other/events", message(1))
        wait_for(lambda: numbers(relay) == [1])
        assert status_of(state, "builder").paused_at_ms is not None
        assert daemon.ask("POST", "/v1/flush", {"timeoutS": 20})[1]["inTheWay"] == {
            "builder": "paused by a person (outbox resume)"
        }
        assert daemon.ask("POST", "/v1/resume", {}) == (200, {"resumed": 2})
        wait_for(lambda: numbers(relay) == [1, 0])


def test_stop(state):
    """Stop as on SIGTERM; asked a second time, it does not wait for its last flush."""
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "60"}) as patient:
        patient.ask("POST", EVENTS, message(0))
        pid = patient.process.pid
        assert patient.ask("POST", "/v1/stop", {}) == (202, {"stopping": True, "pid": pid})
        wait_for(lambda: patient.said("stopping"))
        assert patient.said("stopping")[0]["asked_by"] == "local socket"
        assert patient.ask("POST", EVENTS, message(1))[0] == 200
        assert patient.ask("POST", "/v1/stop", {})[0] == 202
        assert patient.ended(timeout_s=10) == 0
        assert patient.said("stopped")[-1]["left"] == "2"
    assert status_of(state, "builder").waiting == 2


# The socket itself -----------------------------------------------------------------------------------------


def test_only_its_user_may_open_it(daemon, state):
    """Mode 0600."""
    assert stat.filemode((state / "outbox.sock").lstat().st_mode) == "srw-------"


def test_a_socket_elsewhere(state, tmp_path):
    """With --socket it lies there, also far down; commands find it."""
    place = tmp_path / ("folder-" * 20) / "o.sock"
    place.parent.mkdir()
    flags = ["--socket", str(place)]
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}, flags=flags) as daemon:
        assert ask(place, "POST", EVENTS, message(0))[0] == 200
        assert not (state / "outbox.sock").exists()
        assert outbox_command(state, "stop").returncode == 0
        assert daemon.ended() == 0
    assert not place.exists()


def test_a_leftover_is_replaced(state):
    """After kill -9 the dead daemon's socket is in nobody's way."""
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}) as daemon:
        daemon.kill()
        assert (state / "outbox.sock").exists()
        daemon.start()
        assert daemon.ask("GET", "/v1/status")[0] == 200


@pytest.mark.parametrize("there", ["file", "listener", "no folder"])
def test_a_place_that_is_taken(state, tmp_path, there):
    """What lies there is not removed: the start fails with one line, exit 2, and leaves no lock behind."""
    place = tmp_path / "taken" / "o.sock"
    if there != "no folder":
        place.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        if there == "file":
            place.write_text("precious")
        if there == "listener":
            listener.bind(str(place))
            listener.listen()
        daemon = DaemonProcess(state, NOBODY, flags=["--socket", str(place)])
        try:
            assert daemon.launch().ended() == 2
            (line,) = daemon.lines()
        finally:
            daemon.end()
    assert str(place) in line
    assert there != "file" or place.read_text() == "precious"
    assert not (state / "daemon.json").exists()


def test_many_connections(state, relay):
    """Connections that are kept open and say nothing keep nobody waiting, nor the stop."""
    with DaemonProcess(state, relay.url) as daemon:
        idle = [UnixConnection(state / "outbox.sock") for _ in range(50)]
        for connection in idle:
            connection.connect()
        kept: HTTPConnection = idle[0]
        kept.request("GET", "/v1/status")
        assert kept.getresponse().read()
        assert daemon.ask("POST", EVENTS, message(0))[0] == 200
        wait_for(lambda: numbers(relay) == [0])
        assert daemon.stop(timeout_s=10) == 0
        for connection in idle:
            connection.close()
    assert numbers(relay) == [0]
