"""The daemon's local HTTP, by raw bytes over the Unix socket and TCP: what no client should send.

Whatever comes, the daemon lives, answers the next one, and has on disk what it said it took, and no more.
"""

import contextlib
import json
import random
import re
import socket
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from mutations import broken, hostile, is_safe
from processes import DaemonProcess, UnixConnection, wait_for
from runs import opened

from outbox.store.directory import file_name
from outbox.store.file import open_outbox
from outbox.store.verify import verify_counters

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there
SECRET = "tok-very-secret-7741"
EVENT = {"kind": "session-message", "payload": {"from": "a", "body": "x"}}
EVENTS = "/v1/agents/builder/events"
PATHS = [
    EVENTS, "/v1/agents/%2e%2e%2f%2e%2e%2fup/events", "/v1/agents/../../up/events", "/v1/agents/%00/events",
    "/v1/agents/%ff/events", "/v1/agents//events", "/v1/status", "/v1/flush", "/livez", "/readyz", "/metrics",
    "/v1/pause", "/v1/dead", "*", "http://elsewhere.invalid/v1/status", "/%", "/" * 3_000,
]  # fmt: skip
METHODS = ["POST", "POST", "POST", "GET", "HEAD", "PUT", "DELETE", "OPTIONS", "CONNECT", "x" * 40, ""]
FIELDS = [
    "Content-Type: application/json", "Content-Type: application/x-ndjson", "Content-Type: text/plain",
    "Content-Type: multipart/form-data; boundary=x", "Expect: 100-continue", "Upgrade: websocket",
    "Connection: Upgrade", "Connection: close", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip",
    "Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Host: a\x00b",
    "Host: evil.invalid", "Host: localhost", "Origin: http://evil.invalid", "X: " + "y" * 70_000, "No colon",
    f"Authorization: Bearer {SECRET}", "Authorization: Bearer \xff", "Content-Encoding: gzip", " folded",
]  # fmt: skip
NAMES = [
    "..",
    "../up",
    "/abs",
    "a/b",
    "a%2fb",
    "\\",
    ".",
    " ",
    "\n",
    "\x7f",
    "é",
    "e\u0301",
    "A",
    "a",
    "%",
    "?#",
]
HALF = [
    b"",
    b"P",
    b"POST /v1/agents/builder/events HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /v1/agents/builder/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
]


@pytest.fixture
def chance(seed):
    """What is broken, and how."""
    return random.Random(seed)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon that can deliver nothing, and listens on TCP too."""
    state = tmp_path_factory.mktemp("hostile") / "state"
    settings = {"daemon.flush_timeout_s": "0.1", "relay.token": SECRET, "bounds.min_free_disk_bytes": "0"}
    with DaemonProcess(state, NOBODY, settings, flags=["--http", "127.0.0.1:0"]) as daemon:
        daemon.address = daemon.said("serving")[-1]["http"]
        yield daemon


def a_request(chance):
    """One request, whole, odd or broken."""
    path, method = chance.choice(PATHS), chance.choice(METHODS)
    if chance.random() < 0.4:
        path, method = EVENTS, "POST"
    body = (
        hostile(chance, EVENT) if chance.random() < 0.8 else b"\n".join(hostile(chance, EVENT) for _ in "abc")
    )
    fields = ["Host: localhost", f"Content-Length: {len(body)}"] if chance.random() < 0.8 else []
    fields += chance.sample(FIELDS, chance.choice([0, 1, 1, 2]))
    chance.shuffle(fields)
    head = "\r\n".join([f"{method} {path} HTTP/{chance.choice(['1.1', '1.1', '1.0', '2', 'x'])}", *fields])
    whole = head.encode("latin-1") + b"\r\n\r\n" + body
    return broken(chance, whole) if chance.random() < 0.4 else whole


def connected(daemon, over):
    """A connection by the Unix socket, or by TCP."""
    if over == "tcp":
        host, _, port = daemon.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=20)
    connection = UnixConnection(daemon.state.path / "outbox.sock")
    connection.connect()
    return connection.sock


def said_to(daemon, over, data, chance):
    """Send bytes in pieces, end our side or go; what came back, bounded in time."""
    with connected(daemon, over) as sock, contextlib.suppress(OSError):
        at = chance.randrange(len(data) + 1)
        sock.sendall(data[:at])
        if chance.random() < 0.2:
            return b""  # gone in the middle
        sock.sendall(data[at:])
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := sock.recv(65_536):
            answer += piece
        return answer
    return b""


def receipts_in(answer):
    """The seqs and keys of the events that an answer says are on disk."""
    pattern = rb'"seq": ?(\d+), ?"idempotencyKey": ?"([^"]+)", ?"duplicate": ?false'
    return {(int(seq), key.decode()) for seq, key in re.findall(pattern, answer)}


def outboxes(daemon):
    """What each outbox holds; each is its agent's own, with true counters."""
    held = {}
    for path in daemon.state.outbox_files():
        with contextlib.closing(open_outbox(daemon.state, path)) as box:
            assert path.name == file_name(box.agent)
            assert verify_counters(box) == []
            held[box.agent] = set(box.rows("SELECT seq, key FROM events"))
    return held


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_requests_of_every_ugliness(daemon, chance, over, rounds):
    """Broken, pipelined, cut, half closed: each is answered or closed, and what is receipted is on disk."""
    receipted = set()
    for _ in range(rounds(20) * 20):
        data = b"".join(a_request(chance) for _ in range(chance.choice([1, 1, 1, 2, 5])))
        answer = said_to(daemon, over, data, chance)
        receipted |= receipts_in(answer)
        assert b"Traceback" not in answer
        assert SECRET.encode() not in answer
        assert not answer or answer.startswith(b"HTTP/1.1 ")
        assert b"HTTP/1.1 500" not in answer, (data, answer)
    held = outboxes(daemon)
    assert receipted <= set().union(*held.values())
    assert over == "unix" or not receipted, "an event was taken over TCP without the token"
    assert over == "tcp" or receipted
    assert daemon.ask("GET", "/livez")[0] == 200


def test_agents_named_in_a_path_are_exactly_that_agent(daemon, chance, rounds):
    """Whatever the name is made of, the event lies in its own outbox, below the state directory."""
    before = set(daemon.state.path.parent.iterdir())
    for _ in range(rounds(20)):
        agent = "".join(chance.choices(NAMES, k=chance.randrange(1, 4)))
        status, answer = daemon.ask("POST", f"/v1/agents/{quote(agent, safe='')}/events", EVENT)
        assert status == 200, (agent, answer)
        with opened(daemon.state.path, agent) as box:
            assert box.maybe("SELECT 1 FROM events WHERE key = ?", answer["idempotencyKey"])
    assert set(daemon.state.path.parent.iterdir()) == before


def test_many_who_say_nothing_keep_nobody_out(daemon):
    """Connections that send a byte, half a head or half a body and wait: the next client is served."""
    with contextlib.ExitStack() as stack:
        for over in ("unix", "tcp"):
            for start in HALF * 15:
                stack.enter_context(sock := connected(daemon, over))
                sock.sendall(start)
        assert daemon.ask("POST", EVENTS, EVENT)[0] == 200
        assert daemon.ask("GET", "/livez")[0] == 200


def test_who_reads_no_answer_keeps_nobody_out(daemon):
    """A client that asks a thousand times and reads nothing does not hold up the others."""
    with connected(daemon, "unix") as sock:
        asked = threading.Thread(target=_ask_for_ever, args=(sock,), daemon=True)
        asked.start()
        for _ in range(5):
            assert daemon.ask("POST", EVENTS, EVENT)[0] == 200
        sock.shutdown(socket.SHUT_RDWR)
        asked.join(20)
    assert not asked.is_alive()


def _ask_for_ever(sock):
    with contextlib.suppress(OSError):
        for _ in range(1_000):
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)


@pytest.mark.parametrize("over", ["unix", "tcp"])
@pytest.mark.parametrize("path", [EVENTS, "/v1/flush"])
def test_a_client_that_goes_in_the_middle_is_no_fault(daemon, over, path):
    """Nothing of its request is done, and the log does not speak of a fault of ours."""
    before = outboxes(daemon).get("builder", set())
    with connected(daemon, over) as sock:
        token = (daemon.state.path / "http-token").read_text().strip()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        sock.sendall(head.encode() + b"Content-Length: 900\r\n\r\n" + json.dumps(EVENT).encode())
    assert daemon.ask("GET", "/livez")[0] == 200
    assert outboxes(daemon).get("builder", set()) == before
    assert_no_fault(daemon)


def test_a_head_request_whose_body_is_no_http(daemon):
    """Its answer has no body to say so in: the connection ends, and nothing is a fault of ours."""
    with connected(daemon, "unix") as sock:
        sock.sendall(b"HEAD /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(65_536):
                pass
    assert daemon.ask("GET", "/livez")[0] == 200
    assert_no_fault(daemon)


@pytest.mark.parametrize("lines", [0, 1])
def test_a_stream_that_turns_into_something_else(daemon, lines):
    """What was taken before is on disk and receipted; the rest ends the connection, and is no fault."""
    line = json.dumps(EVENT).encode() + b"\n"
    with connected(daemon, "unix") as sock:
        head = f"POST {EVENTS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\n"
        sock.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = b""
        if lines:
            sock.sendall(b"%x\r\n%b\r\n" % (len(line), line))
            while b'"seq"' not in answer:
                answer += sock.recv(65_536)
        sock.sendall(b"no chunk\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65_536):
                answer += piece
    assert len(receipts_in(answer)) == lines
    assert receipts_in(answer) <= outboxes(daemon).get("builder", set())
    assert daemon.ask("GET", "/livez")[0] == 200
    assert_no_fault(daemon)


def assert_no_fault(daemon):
    """No line of the log is a traceback or a fault, holds the token, or steers a terminal."""
    assert daemon.said("fault") == []
    assert [
        line for line in daemon.lines() if "Traceback" in line or SECRET in line or not is_safe(line)
    ] == []


def test_the_log_tells_of_no_fault(daemon, chance):
    """After more of it: no line is a traceback or holds the token; connections are given back."""
    for _ in range(30):
        said_to(daemon, "unix", a_request(chance), chance)
    assert_no_fault(daemon)
    assert wait_for(lambda: _sockets(daemon) < 15, 60)
    assert json.dumps(daemon.ask("GET", "/v1/status")[1])


def _sockets(daemon):
    """How many sockets it has open: connections, and those it listens on."""
    found = 0
    for link in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(link.readlink()).startswith("socket:")
    return found
