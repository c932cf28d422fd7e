"""A stream of lines over the local HTTP: each is answered after its commit, in order."""

import json
import socket
import threading
import time

import pytest
from processes import DaemonProcess, UnixConnection, ask, status_of, wait_for

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there
EVENTS = "/v1/agents/builder/events"
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.fixture
def state(tmp_path):
    """A place for the events."""
    return tmp_path / "state"


@pytest.fixture
def daemon(state):
    """A daemon whose relay is away: what it takes stays where it is."""
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}) as daemon:
        yield daemon


def line(number, size=0):
    """One event as a line."""
    payload = {"n": number, **({"text": "x" * size} if size else {})}
    return (
        json.dumps({"kind": "insight", "payload": payload, "idempotencyKey": f"k{number}"}).encode() + b"\n"
    )


class Stream:
    """A request whose body is sent by and by, and whose answer is read meanwhile."""

    def __init__(self, path):
        self.connection = UnixConnection(path, timeout_s=30)
        self.connection.putrequest("POST", EVENTS)
        self.connection.putheader("Transfer-Encoding", "chunked")
        self.connection.putheader("Content-Type", LINES["Content-Type"])
        self.connection.endheaders()
        self._answer = None

    def send(self, data):
        """One chunk."""
        self.connection.sock.sendall(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end(self):
        """The body is whole."""
        self.connection.sock.sendall(b"0\r\n\r\n")

    @property
    def answer(self):
        """The response, whose lines can be read as they come."""
        if self._answer is None:
            self._answer = self.connection.getresponse()
        return self._answer

    def told(self):
        """The next result."""
        return json.loads(self.answer.readline())


def test_each_line_is_answered_while_the_request_goes_on(state, daemon):
    """Whoever waits for an answer before the next line gets it, in order."""
    stream = Stream(state / "outbox.sock")
    for number in range(1, 21):
        stream.send(line(number))
        assert (stream.told() | {"state": ""})["line"] == number
    stream.end()
    assert stream.answer.read() == b""
    stream.connection.close()
    assert status_of(state, "builder").waiting == 20


def test_the_answer_comes_after_the_commit(state, daemon):
    """Killed the moment the answer is there, the daemon has left the event on disk."""
    for number in range(1, 6):
        stream = Stream(state / "outbox.sock")
        stream.send(line(number))
        told = stream.told()
        daemon.kill()
        assert (told["line"], told["idempotencyKey"]) == (1, f"k{number}")
        assert status_of(state, "builder").waiting == number
        stream.connection.close()
        daemon.start()


def test_a_trickle_keeps_its_order(state, daemon):
    """A megabyte in small pieces, cut anywhere, with bad lines between: answers and seqs in order."""
    body = b"".join(
        line(number, 900) + (b"{no\n" if number % 100 == 0 else b"") for number in range(1, 1_001)
    )
    stream = Stream(state / "outbox.sock")

    def trickle():
        for start in range(0, len(body), 10_007):
            stream.send(body[start : start + 10_007])
            time.sleep(0.005)  # the pace is what is tested: about a megabyte a second
        stream.end()

    thread = threading.Thread(target=trickle)
    thread.start()
    results = [json.loads(text) for text in stream.answer.read().splitlines()]
    thread.join()
    stream.connection.close()
    taken = [result for result in results if "seq" in result]
    assert [result["line"] for result in results] == list(range(1, 1_011))
    assert [(one["seq"], one["idempotencyKey"]) for one in taken] == [(n, f"k{n}") for n in range(1, 1_001)]


def test_who_sends_all_before_reading_is_not_stuck(state, daemon):
    """Answers are kept for a client that reads late: no deadlock of two full sockets."""
    body = b"".join(map(line, range(40_000)))
    connection = UnixConnection(state / "outbox.sock", timeout_s=60)
    connection.request("POST", EVENTS, body, LINES)
    last = connection.getresponse().read().splitlines()[-1]
    connection.close()
    assert json.loads(last)["line"] == 40_000


def test_a_client_that_is_gone(state, daemon):
    """What was whole before it went is taken; a line cut in its middle is not."""
    stream = Stream(state / "outbox.sock")
    stream.send(line(1) + line(2)[:20])
    assert stream.told()["seq"] == 1
    stream.connection.sock.shutdown(socket.SHUT_RDWR)
    stream.connection.close()
    wait_for(lambda: daemon.ask("GET", "/livez")[0] == 200)
    assert status_of(state, "builder").waiting == 1


def test_a_client_that_ends_its_side_first(state, daemon):
    """After a whole request a half-closed connection still gets its answer."""
    body = json.dumps({"kind": "insight", "payload": {}}).encode()
    head = f"POST {EVENTS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = UnixConnection(state / "outbox.sock", timeout_s=30)
    connection.connect()
    connection.sock.sendall(head.encode() + body)
    connection.sock.shutdown(socket.SHUT_WR)
    answer = b""
    while part := connection.sock.recv(65_536):
        answer += part
    connection.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"seq": 1' in answer


def test_a_line_that_is_too_long_is_refused_alone(state, daemon):
    """It is bounded as one event is, and never kept whole; the next line is taken."""
    stream = Stream(state / "outbox.sock")
    stream.send(line(1))
    for _ in range(10):
        stream.send(b"x" * 2**20)
    stream.send(b"\n" + line(3))
    stream.end()
    first, second, third = (json.loads(text) for text in stream.answer.read().splitlines())
    stream.connection.close()
    assert (first["seq"], second["error"]["code"], third["seq"]) == (1, "too_large", 2)
    assert (second["line"], third["line"]) == (2, 3)


def test_when_the_store_refuses_everything_the_answer_ends(state):
    """What was read gets the reason; what is behind it was not taken, and would not overtake."""
    with DaemonProcess(state, NOBODY, {"bounds.min_free_disk_bytes": "900 TiB"}) as daemon:
        body = b"".join(map(line, range(5)))
        connection = UnixConnection(state / "outbox.sock")
        connection.request("POST", EVENTS, body, LINES)
        results = [json.loads(text) for text in connection.getresponse().read().splitlines()]
        connection.close()
        assert {result["error"]["code"] for result in results} == {"full"}
        assert daemon.ask("GET", "/readyz")[0] == 503
        assert 'outbox_refused_total{reason="full"} ' in metrics(daemon)


def metrics(daemon):
    """What Prometheus reads."""
    connection = UnixConnection(daemon.state.path / "outbox.sock")
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_streams_hold_no_threads(state, daemon):
    """More open streams than there are threads: others are still answered, and each of them goes on."""
    streams = [Stream(state / "outbox.sock") for _ in range(100)]
    for number, stream in enumerate(streams):
        stream.send(line(number)[:10])
    assert ask(state / "outbox.sock", "POST", EVENTS, {"kind": "insight", "payload": 1})[0] == 200
    for number, stream in enumerate(streams):
        stream.send(line(number)[10:])
        assert stream.told()["line"] == 1
    for stream in streams:
        stream.connection.close()
    assert status_of(state, "builder").waiting == 101
