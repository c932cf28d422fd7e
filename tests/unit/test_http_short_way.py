"""The short way of a plain event: what shares a commit, and connections that do odd things in the middle."""

import json
import socket
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
from processes import wait_for

from outbox.api import short_way
from outbox.api.meter import Meter
from outbox.api.server import LocalServer
from outbox.errors import StoreFull, UsageError
from outbox.event import Limits
from outbox.store.enqueue import Receipt


class Store:
    """Commits when it is let, and knows what each commit held and which thread did it."""

    def __init__(self):
        self.commits, self.threads = [], set()
        self.limits, self.meter = Limits(), Meter()
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.held, self.full_of = set(), set()
        self.error = None

    def hangs(self):
        """Never."""
        return ""

    def enqueue(self, agent, drafts):
        """One commit; of a held agent only when it is let."""
        self.begun.release()
        if agent in self.held:
            assert self.may_go_on.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        self.commits.append((agent, [draft.kind for draft in drafts]))
        self.threads.add(threading.current_thread().name)
        return [
            StoreFull("Nothing fits. Not taken.")
            if draft.kind in self.full_of
            else Receipt(at, 'k"1', duplicate=False, state="waiting")
            for at, draft in enumerate(drafts, 1)
        ]


@pytest.fixture
def store():
    """What the server hands events to."""
    return Store()


@pytest.fixture
def server(store, tmp_path):
    """A server in this process."""
    server = LocalServer(store, tmp_path / "o.sock")
    server.start()
    yield SimpleNamespace(path=tmp_path / "o.sock", stop=server.stop, own=server)
    for _ in range(100):
        store.may_go_on.release()
    server.stop()


@pytest.fixture
def connected(server):
    """A function that connects."""
    opened = []

    def connect():
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(60)
        client.connect(str(server.path))
        opened.append(client)
        return client

    yield connect
    for client in opened:
        client.close()


def request(agent="a", kind="insight", fields=""):
    """One plain event."""
    body = json.dumps({"kind": kind, "payload": {}})
    head = f"POST /v1/agents/{agent}/events HTTP/1.1\r\nHost: localhost\r\n{fields}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def answered(client):
    """Status, fields and value of the next answer."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += client.recv(1)
    lines = answer.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:-2])
    body = b""
    while len(body) < int(fields["content-length"]):
        body += client.recv(1)
    return int(lines[0].split()[1]), fields, json.loads(body)


def short(store):
    """Whether all commits came by the short way."""
    return all(name.startswith("events-") for name in store.threads)


def test_a_lone_event_goes_at_once(store, connected):
    """The answer is that of the long way, field by field, but for the moment."""
    client = connected()
    client.sendall(request())
    status, fields, value = answered(client)
    assert short(store)
    client.sendall(request(fields="Expect: nothing\r\n"))
    status_long, fields_long, value_long = answered(client)
    assert not short(store)
    assert (status, value) == (status_long, value_long) == (200, value)
    assert value == {"seq": 1, "idempotencyKey": 'k"1', "duplicate": False, "state": "waiting"}
    assert fields.keys() == fields_long.keys() == {"date", "content-length", "content-type"}
    assert fields["content-type"] == fields_long["content-type"] == "application/json"


def test_a_time_without_threads(store, connected, monkeypatch):
    """No worker can be started: the client hears of it, and the agent's next event is stored."""
    start, refusing = threading.Thread.start, [True]

    def start_or_not(thread):
        if thread.name.startswith("events-") and refusing and refusing.pop():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    client = connected()
    client.sendall(request())
    status, _, value = answered(client)
    assert (status, value["code"]) == (503, "unavailable")
    client.sendall(request())
    assert answered(client)[0] == 200


def test_what_comes_while_a_commit_runs_shares_the_next(store, server, connected):
    """One commit for all who wait, and each has its own answer."""
    store.held = {"a"}
    first, others = connected(), [connected() for _ in range(8)]
    first.sendall(request())
    assert store.begun.acquire(timeout=60)
    for client in others:
        client.sendall(request(kind="session-message"))
    wait_for(lambda: len(server.own._gathering._next[b"a"]) == len(others), 60)
    store.may_go_on.release()
    assert answered(first)[0] == 200
    store.may_go_on.release()
    assert sorted(answered(client)[2]["seq"] for client in others) == list(range(1, 9))
    assert store.commits == [("a", ["insight"]), ("a", ["session-message"] * 8)]
    assert short(store)


def test_an_agent_whose_file_is_locked_holds_up_no_other(store, connected):
    """A commit that takes long is its own agent's alone."""
    store.held = {"a"}
    slow, quick = connected(), connected()
    slow.sendall(request())
    assert store.begun.acquire(timeout=60)
    for _ in range(3):
        quick.sendall(request("b"))
        assert answered(quick)[0] == 200
    store.may_go_on.release()
    assert answered(slow)[0] == 200


def test_a_refusal_is_its_own_events_alone(store, server, connected):
    """What shares a commit with a bad event is taken; what is refused is counted where it is."""
    store.held, store.full_of = {"a"}, {"session-message"}
    first, *others = (connected() for _ in range(5))
    bad, unknown, full, good = others
    first.sendall(request())
    assert store.begun.acquire(timeout=60)
    bad.sendall(request().replace(b"{}", b"{,"))
    unknown.sendall(request(kind="insigt"))
    full.sendall(request(kind="session-message"))
    good.sendall(request())
    wait_for(lambda: len(server.own._gathering._next[b"a"]) == 4, 60)
    store.may_go_on.release()
    store.may_go_on.release()
    told = [(status, value.get("code", "")) for status, _, value in map(answered, others)]
    assert told == [(422, "not_json"), (422, "unknown_kind"), (507, "full"), (200, "")]
    assert store.meter.read().refused == {"not_json": 1, "unknown_kind": 1}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StoreFull("Nothing fits."), 507, "full"),
        (UsageError("Not here."), 422, "usage"),
        (ValueError(), 500, "fault"),
    ],
)
def test_a_store_that_takes_nothing(store, connected, error, status, code):
    """Each gets the reason, as problem+json, and the connection goes on."""
    store.error = error
    client = connected()
    for _ in range(2):
        client.sendall(request())
        said, fields, value = answered(client)
        assert (said, fields["content-type"], value["code"]) == (status, "application/problem+json", code)


@pytest.mark.parametrize("agent", ["%ff", "%00", "x" * 600])
def test_a_name_that_no_agent_has(store, connected, agent):
    """Refused before anything is stored."""
    client = connected()
    client.sendall(request(agent))
    assert answered(client)[0] == 422
    assert store.commits == []


def test_head_and_body_in_two_pieces(store, connected, monkeypatch):
    """As Python's own client sends them: the body is waited for, and joined."""
    monkeypatch.setattr(short_way, "BODY_WITHIN_S", 600.0)
    client, data = connected(), request()
    for cut in range(len(data) - 30, len(data)):
        client.sendall(data[:cut])
        client.sendall(data[cut:])
        assert answered(client)[0] == 200
    assert len(store.commits) == 30
    assert short(store)


def test_a_body_that_comes_late(store, connected, monkeypatch):
    """It has gone the long way meanwhile, and is taken all the same."""
    monkeypatch.setattr(short_way, "BODY_WITHIN_S", 0.01)
    client, data = connected(), request()
    client.sendall(data[:-5])
    threading.Event().wait(0.1)  # late is what is tested
    client.sendall(data[-5:])
    assert answered(client)[0] == 200
    client.sendall(request())
    assert answered(client)[0] == 200
    assert not short(store)


def test_requests_that_come_before_the_answer(store, connected):
    """Pipelined, in pieces that end anywhere, plain and not: answered in order."""
    client = connected()
    kinds = ["insight", "session-message"] * 40
    data = b"".join(
        request(kind=kind, fields="" if at % 3 else "Expect: nothing\r\n") for at, kind in enumerate(kinds)
    )
    for start in range(0, len(data), 171):
        client.sendall(data[start : start + 171])
    assert [answered(client)[0] for _ in kinds] == [200] * len(kinds)
    assert [kind for _, some in store.commits for kind in some] == kinds


def test_a_request_behind_one_that_is_under_way(store, connected):
    """It waits, whatever it is, and has its answer behind the first one's."""
    store.held = {"a"}
    client = connected()
    client.sendall(request())
    assert store.begun.acquire(timeout=60)
    client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    store.may_go_on.release()
    assert answered(client)[2]["seq"] == 1
    assert answered(client)[2]["alive"]


def test_a_client_that_ends_its_side_under_way(store, connected):
    """The answer comes, and then the end."""
    store.held = {"a"}
    client = connected()
    client.sendall(request())
    assert store.begun.acquire(timeout=60)
    client.shutdown(socket.SHUT_WR)
    store.may_go_on.release()
    assert answered(client)[0] == 200
    assert client.recv(1) == b""


def test_a_client_that_ends_its_side_in_a_body(store, connected, monkeypatch):
    """Half a request has no answer, and nothing of it is taken."""
    monkeypatch.setattr(short_way, "BODY_WITHIN_S", 600.0)
    client = connected()
    client.sendall(request()[:-1])
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    assert store.commits == []


def test_a_client_that_is_gone(store, connected):
    """Its event is taken, nobody is told, and the next one is served."""
    store.held = {"a"}
    with closing(connected()) as client:
        client.sendall(request())
        assert store.begun.acquire(timeout=60)
    other = connected()
    store.may_go_on.release()
    store.may_go_on.release()
    other.sendall(request())
    assert answered(other)[0] == 200
    assert len(store.commits) == 2


def test_what_is_under_way_at_the_end_is_answered(store, server, connected):
    """The server ends after it, and closes the connection."""
    store.held = {"a"}
    client, idle = connected(), connected()
    client.sendall(request())
    assert store.begun.acquire(timeout=60)
    ends = threading.Thread(target=server.stop)
    ends.start()
    assert idle.recv(1) == b""  # idle ones are closed first
    store.may_go_on.release()
    assert answered(client)[0] == 200
    assert client.recv(1) == b""
    ends.join(60)


def test_an_idle_connection_ends(store, server, connected):
    """After its answer it has the time that every connection has between two requests."""
    server.own._servers[0][0].config.timeout_keep_alive = 0.1
    client = connected()
    client.sendall(request())
    assert answered(client)[0] == 200
    assert client.recv(1) == b""
