"""What a person does: pause, resume, skip, dead list, stop, flush; with no daemon or a pretended one."""

import contextlib
import json
import os
import socket
import threading

import pytest
from command_line import command, in_process

from outbox import Outbox, Unavailable
from outbox.api.client import LocalClient
from outbox.cli.resume import forgiven
from outbox.store.directory import StateDirectory
from outbox.store.locks import DAEMON_BYTE, owners_lock
from outbox.store.relay_state import RelayState, read_facts
from outbox.store.wake import bind_wake_socket


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)


@pytest.fixture
def state(tmp_path):
    """A state directory with two agents, who have three and one event."""
    state = StateDirectory(tmp_path / "state")
    for agent, count in (("builder", 3), ("reviewer", 1)):
        with Outbox.open(agent, state_dir=state.path) as outbox:
            for n in range(count):
                outbox.enqueue(
                    "insight", {"n": n}, occurred_at_ms=1_790_000_000_000 + n, idempotency_key=f"k{n}"
                )
    return state


@pytest.fixture
def damaged(state):
    """The file of a third agent, which is none."""
    path = state.outbox_path("damaged")
    path.write_bytes(b"no database at all " * 400)
    return path


@contextlib.contextmanager
def pretended_daemon(state, answer, *, leaves=True):
    """Holds the daemon's lock, and answers each request on the local socket; gives what it was asked."""
    lock, asked = owners_lock(state.path), []
    assert lock.try_exclusive(DAEMON_BYTE)
    path = state.path / "outbox.sock"
    told = {"pid": 4711, "version": "0.1.0", "startedAtMs": 1, "socket": str(path)}
    state.daemon_file.write_text(json.dumps(told), "utf-8")

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    head, _, body = connection.recv(65_536).partition(b"\r\n\r\n")
                    while not body and b"content-length: 0" not in head.lower() and head.startswith(b"POST"):
                        body = connection.recv(65_536)
                    asked.append((head.split(b" ")[1].decode(), json.loads(body) if body else None))
                    connection.sendall(answer)
                if leaves and asked[-1][0] == "/v1/stop":
                    lock.release(DAEMON_BYTE)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            lock.release(DAEMON_BYTE)


def http(status, body):
    """One answer, after which the connection ends."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(text), text)


def reason_of(capsys, agent):
    """Why an agent's events wait."""
    return json.loads(command(capsys, "why", agent, "--json")[1])["reason"]


def test_pause_and_resume_one(capsys, state):
    """One agent is paused, the other is not; each act says how it is undone or what comes next."""
    status, told, errors = command(capsys, "pause", "builder")
    assert (status, errors) == (0, "")
    assert told.endswith("To go on: outbox resume builder\n")
    assert (reason_of(capsys, "builder"), reason_of(capsys, "reviewer")) == ("paused", "no_daemon")
    status, told, errors = command(capsys, "resume", "builder")
    assert (status, errors) == (0, "")
    assert told.startswith("builder goes on; ")
    assert "No daemon runs" in told
    assert reason_of(capsys, "builder") == "no_daemon"


def test_pause_and_resume_all(capsys, state):
    """Without a name all agents are meant."""
    assert json.loads(command(capsys, "pause", "--json")[1]) == {"paused": ["builder", "reviewer"]}
    assert {reason_of(capsys, "builder"), reason_of(capsys, "reviewer")} == {"paused"}
    assert command(capsys, "pause")[1].startswith("2 agents paused")
    assert json.loads(command(capsys, "resume", "--json")[1]) == {"resumed": ["builder", "reviewer"]}
    assert command(capsys, "resume")[1].startswith("2 agents go on")


@pytest.mark.parametrize("words", [["pause"], ["resume"], ["dead", "list"]])
def test_a_damaged_file_stops_nobody_else(capsys, state, damaged, words):
    """The others are done, the file is named on stderr, exit 5; the file itself is left as it is."""
    before = damaged.read_bytes()
    status, told, errors = command(capsys, *words)
    assert status == 5
    assert told
    assert damaged.name in errors
    assert damaged.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["pause", "nobody"],
        ["resume", "nobody"],
        ["skip", "nobody", "1"],
        ["dead", "list", "--agent", "nobody"],
    ],
)
def test_an_agent_that_is_not_there(capsys, state, words):
    """Exit 2, and no file is made for a slip of the hand."""
    status, told, errors = command(capsys, *words)
    assert (status, told) == (2, "")
    assert "no outbox of 'nobody'" in errors
    assert not state.outbox_path("nobody").exists()


@pytest.mark.parametrize("words", [["pause", "builder"], ["resume", "builder"], ["skip", "builder", "1"]])
def test_a_change_wakes_the_daemon(capsys, state, words):
    """The datagram names the file."""
    with bind_wake_socket(state.wake_socket) as receiver:
        receiver.settimeout(10)
        assert command(capsys, *words)[0] == 0
        assert receiver.recv(1_000).decode() == state.outbox_path("builder").name


def test_skip(capsys, state):
    """The event is a dead letter, what is behind it is the head; numbers may be written as messages do."""
    assert command(capsys, "skip", "builder", "1")[0] == 0
    assert json.loads(command(capsys, "skip", "builder", "2", "--json")[1]) == {
        "agent": "builder", "seq": 2, "state": "dead",
    }  # fmt: skip
    assert "first seq" not in command(capsys, "why", "builder")[1]
    assert "seq 3 (insight)" in command(capsys, "why", "builder")[1]
    status, told, errors = command(capsys, "skip", "builder", "10,234")
    assert (status, told) == (2, "")
    assert "No event 10,234 waits" in errors
    assert command(capsys, "skip", "builder", "-1")[0] == 2


def test_the_dead_letters(capsys, state):
    """One line of data each, oldest first; a table for people; of one agent where it is named."""
    assert command(capsys, "dead", "list") == (0, "No dead letters.\n", "")
    assert command(capsys, "dead", "list", "--json") == (0, "", "")
    for agent, seq in (("builder", "1"), ("builder", "2"), ("reviewer", "1")):
        command(capsys, "skip", agent, seq)
    lines = [json.loads(line) for line in command(capsys, "dead", "list", "--json")[1].splitlines()]
    assert [(line["agent"], line["seq"]) for line in lines] == [
        ("builder", 1),
        ("builder", 2),
        ("reviewer", 1),
    ]
    assert lines[1] | {"failedAt": 0} == {
        "agent": "builder",
        "seq": 2,
        "kind": "insight",
        "idempotencyKey": "k1",
        "occurredAt": 1_790_000_000_001,
        "reason": "skipped",
        "status": None,
        "detail": "set aside by a person",
        "attempts": 0,
        "failedAt": 0,
    }
    assert lines[1]["failedAt"] > 1_790_000_000_000
    told = command(capsys, "dead", "list", "--agent", "reviewer")[1]
    assert told.splitlines()[0].split()[:4] == ["agent", "seq", "kind", "reason"]
    assert told.splitlines()[-1].startswith("1 dead letter of reviewer")
    assert "builder" not in told


def test_what_a_person_forgives(capsys, state):
    """Without a daemon, `resume` lets budgets and dead ends of paths start afresh; all else stays known."""
    path = {
        "reason": "",
        "inARow": 5,
        "deadEnd": True,
        "offUntil": 9,
        "learnedBytes": 1_000,
        "accepted": True,
    }
    facts = {"gate": {"url": "u", "reason": "unreachable"}, "path:/api/messages": path}
    assert forgiven(facts) == {"path:/api/messages": path | {"inARow": 0, "deadEnd": False, "offUntil": 0}}
    relay_state = RelayState(state.relay_state)
    relay_state.write(facts)
    relay_state.close()
    command(capsys, "resume", "builder")
    assert read_facts(state.relay_state) == facts | forgiven(facts)


def test_resume_tells_the_daemon(capsys, state):
    """A daemon remembers waits of its own: it is asked, and a refusal is not kept quiet."""
    command(capsys, "pause", "builder")
    with pretended_daemon(state, http(200, {"resumed": 1})) as asked:
        status, told, errors = command(capsys, "resume", "builder")
    assert (status, errors) == (0, "")
    assert "No daemon" not in told
    assert asked == [("/v1/resume", {"agent": "builder"})]
    (state.path / "outbox.sock").unlink()
    with pretended_daemon(state, http(500, b"")):
        assert command(capsys, "resume")[0] == 69


def test_stop(capsys, state):
    """It asks, and waits until the lock is free; with none there it says so; both are 0."""
    assert command(capsys, "stop")[0] == 0
    assert json.loads(command(capsys, "stop", "--json")[1]) == {"stopped": False, "pid": None}
    with pretended_daemon(state, http(202, {"stopping": True})) as asked:
        status, told, errors = command(capsys, "stop")
    assert (status, errors) == (0, "")
    assert told.startswith("The daemon (pid 4711) has stopped.")
    assert asked == [("/v1/stop", {})]


@pytest.mark.parametrize(
    ("answer", "said"), [(http(202, {}), "still at work"), (b"SSH-2.0 hello\r\n", "does not answer at")]
)
def test_a_daemon_that_does_not_stop(capsys, state, answer, said):
    """At the deadline: 69, its pid, and what to do."""
    with pretended_daemon(state, answer, leaves=False):
        status, told, errors = command(capsys, "stop", "--timeout", "0.2")
    assert (status, told) == (69, "")
    assert said in errors
    assert "kill 4711" in errors


def test_flush_without_a_relay(capsys, state):
    """Said as what it is, exit 2."""
    status, told, errors = command(capsys, "flush")
    assert (status, told) == (2, "")
    assert "no relay is set" in errors


def test_flush_of_nothing(capsys, monkeypatch, tmp_path):
    """An agent that never had an event has nothing left: exit 0, and nothing is made."""
    monkeypatch.setenv("OUTBOX_RELAY_URL", "http://127.0.0.1:9")
    assert command(capsys, "flush") == (0, "0 delivered, nothing left.\n", "")
    assert json.loads(command(capsys, "flush", "--agent", "new", "--json")[1]) == {
        "delivered": 0, "left": 0, "dead": 0,
    }  # fmt: skip
    assert not (tmp_path / "state").exists()


def test_flush_through_the_daemon(capsys, state, monkeypatch):
    """The daemon's report becomes data or lines: who is done, what is in the way of the others, exit 3."""
    report = {
        "delivered": 412,
        "left": 2,
        "dead": 1,
        "inTheWay": {"reviewer": "retry_after: slow"},
        "agents": {"builder": [410, 0], "reviewer": [2, 2]},
    }
    monkeypatch.setenv("OUTBOX_DAEMON_FLUSH_TIMEOUT_S", "3")
    with pretended_daemon(state, http(200, report)) as asked:
        status, told, errors = command(capsys, "flush", "--timeout", "7")
        data = command(capsys, "flush", "--agent", "reviewer", "--json")
    assert (status, errors) == (3, "")
    assert [(path, given["agent"]) for path, given in asked] == [
        ("/v1/flush", None),
        ("/v1/flush", "reviewer"),
    ]
    limits = [given["timeoutS"] for _, given in asked]  # what is left of the time when the daemon is asked
    assert 0 < limits[0] <= 7
    assert 0 < limits[1] <= 3
    lines = told.splitlines()
    assert lines[0].split() == ["builder", "410/410", "done"]
    assert lines[1].split() == ["reviewer", "2/4", "retry_after:", "slow"]
    assert lines[2] == (
        "412 delivered, 2 left on disk. 1 new dead letter: outbox dead list. The daemon goes on. "
        "More: outbox why reviewer"
    )
    assert (data[0], json.loads(data[1])) == (3, {"delivered": 412, "left": 2, "dead": 1})


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "ten", "3601"])
def test_a_timeout_that_is_none(capsys, state, seconds):
    """Exit 2, with the value."""
    status, _, errors = command(capsys, "flush", f"--timeout={seconds}")
    assert status == 2
    assert seconds in errors


def test_the_client_of_the_local_socket(tmp_path):
    """Values go and come as JSON; an answer without one is None; the path may be longer than usual names."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    state = StateDirectory(deep).create(allow_network_fs=True)
    here = os.open(deep, os.O_RDONLY)
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"/proc/self/fd/{here}/outbox.sock")
    finally:
        os.close(here)
    listener.listen()

    def serve():
        for answer in (http(200, {"a": ["é"]}), http(503, b"<html>")):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    client = LocalClient(state.path / "outbox.sock")
    assert client.get("/v1/status") == (200, {"a": ["é"]})
    assert client.get("/v1/status") == (503, None)
    thread.join(10)
    listener.close()


@pytest.mark.parametrize("case", ["no socket", "nobody listens", "silence", "no HTTP"])
def test_a_daemon_that_cannot_be_asked(tmp_path, case):
    """Unavailable, in one line that names the socket; never another exception, and never a wait for ever."""
    path = tmp_path / "outbox.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        if case != "no socket":
            listener.bind(str(path))
        if case in {"silence", "no HTTP"}:
            listener.listen()
        if case == "no HTTP":
            threading.Thread(target=lambda: _say(listener, b"\x00" * 70_000), daemon=True).start()
        with pytest.raises(Unavailable, match=r"outbox\.sock") as caught:
            LocalClient(path).post("/v1/stop", {}, 0.2 if case == "silence" else 10)
    assert "\n" not in str(caught.value)


def _say(listener, data):
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(65_536)
        connection.sendall(data)
