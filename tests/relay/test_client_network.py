"""The client against servers that misbehave: every way an answer can fail to come, or take its time."""

import gzip
import os
import socket
import threading
import time
import tracemalloc
from collections import deque

import pytest
from peers import fake_relay, http_response, read_http_request, thread_server

from relay_client import Failure, RelayClient, Sort, read_single
from relay_client.connection import Connection
from relay_client.resolve import Resolver
from relay_client.sockets import Exchange

SIXTEEN_MIB = 16 * 1024 * 1024


def meaning(answer):
    """How the answer to one event is read."""
    return read_single(answer, now_ms=0, max_retry_after_ms=60_000).sort


def always(response):
    """A handler for `thread_server`: every request gets these bytes."""

    def handle(connection):
        while read_http_request(connection):
            connection.sendall(response)

    return handle


@pytest.mark.parametrize("case", ["H03", "H04", "H05", "H06", "H26", "H27"])
def test_an_answer_that_does_not_come_whole_is_lost(connect, post, case):
    """Closed, reset, cut, or no HTTP: lost after sending, and the next request is answered."""
    with fake_relay(case=case) as relay:
        client = connect(relay.url)
        answer = post(client)
        assert (answer.status, answer.failure, answer.sent) == (None, Failure.LOST, True)
        assert answer.detail
        assert meaning(post(client)) is Sort.ACCEPTED
        assert len(relay.requests()) == 2


def test_h07_a_dead_kept_connection_is_replaced_at_once(connect, post):
    """The relay closes idle connections without a word: each request finds a new one, and none fails."""
    closed = threading.Semaphore(0)

    def close_after_answering(connection):
        read_http_request(connection)
        connection.sendall(http_response())
        connection.shutdown(socket.SHUT_RDWR)
        closed.release()

    with thread_server(close_after_answering) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        for number in range(1, 5):
            assert post(client).status == 200
            assert closed.acquire(timeout=10)
            assert server.connections == number


def test_a_kept_connection_that_resets_before_a_byte_was_written_is_no_attempt(connect, post, monkeypatch):
    """Between the look at an idle connection and the first write it may end: a new one is opened at once."""
    monkeypatch.setattr("relay_client.connection.Connection.is_ended", lambda _idle: False)
    closed = threading.Semaphore(0)

    def reset_after_answering(connection):
        read_http_request(connection)
        connection.sendall(http_response())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.close()
        closed.release()

    with thread_server(reset_after_answering) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        for _ in range(3):
            answer = post(client)
            assert (answer.status, answer.detail) == (200, "")
            assert closed.acquire(timeout=10)


def test_connections_are_kept(connect, post):
    """One connection serves one request after another."""
    with thread_server(always(http_response())) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        for _ in range(5):
            assert post(client).status == 200
        assert server.connections == 1


class TakenMeanwhile(deque):
    """Idle connections, of which another thread takes the last one between two steps of whoever looks."""

    def __bool__(self):
        return True


def test_connections_are_closed_while_others_take_them(connect, post):
    """To close what is idle is no trouble where a request takes the last one at the same moment."""
    with thread_server(always(http_response())) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        assert post(client).status == 200
        client._transport._idle = TakenMeanwhile(client._transport._idle)
        client.close_idle()
        assert post(client).status == 200
        assert server.connections == 2


@pytest.mark.parametrize(
    "response",
    [
        http_response(200, b"", "connection: close"),
        http_response(200, b"").replace(b"/1.1", b"/1.0"),
        http_response(200, b"") + b"x",
        http_response(500, b"x" * 500_000),
    ],
    ids=["close", "1.0", "surplus", "not read to its end"],
)
def test_a_connection_that_cannot_serve_again_is_closed(connect, post, monkeypatch, response):
    """Even when the other end leaves it open and silent."""
    monkeypatch.setattr("relay_client.connection.Connection.is_ended", lambda _idle: False)
    with thread_server(always(response)) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        for number in (1, 2):
            assert post(client).status in {200, 500}
            assert server.connections == number


def test_h19_an_error_page_of_20_mib_is_read_in_part(connect, post):
    """64 KiB of it are kept, and the memory of the process does not grow by its size."""
    with fake_relay(case="H19") as relay:
        client = connect(relay.url)
        tracemalloc.start()
        answer = post(client)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (answer.status, answer.cut, len(answer.body)) == (500, True, 65_536)
        assert most_bytes < 1024 * 1024
        assert post(client).status == 200


def test_a_2xx_is_read_up_to_8_mib(connect, post):
    """Beyond that it is cut; of what is packed, the unpacked size counts."""
    plain, packed = b"x" * (9 * 1024 * 1024), gzip.compress(b" " * 64 * 1024 * 1024)
    for body, field in ((plain, "x: y"), (packed, "content-encoding: gzip")):
        with thread_server(always(http_response(200, body, field))) as server:
            answer = post(connect(f"http://127.0.0.1:{server.port}"))
            assert (answer.status, answer.cut, len(answer.body)) == (200, True, 8 * 1024 * 1024)


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP"])
def test_an_answer_packed_unasked_is_unpacked(connect, post, coding):
    """We ask for `identity`; what comes packed all the same is read."""
    response = http_response(200, gzip.compress(b'{"ok":true}'), f"content-encoding: {coding}")
    with thread_server(always(response)) as server:
        assert post(connect(f"http://127.0.0.1:{server.port}")).body == b'{"ok":true}'


def test_an_empty_answer_is_empty_whatever_it_is_said_to_be_packed_with(connect, post):
    """A relay may name a coding for nothing at all, as beside a 204: the event is stored, and not lost."""
    for response in (
        http_response(200, b"", "content-encoding: gzip"),
        b"HTTP/1.1 204 No Content\r\ncontent-encoding: gzip\r\n\r\n",
    ):
        with thread_server(always(response)) as server:
            assert meaning(post(connect(f"http://127.0.0.1:{server.port}"))) is Sort.ACCEPTED


@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(b"x" * 500)[:-9]], ids=["noise", "cut"])
def test_a_damaged_packed_answer_is_lost(connect, post, body):
    """Half of it is not an answer."""
    with thread_server(always(http_response(200, body, "content-encoding: gzip"))) as server:
        answer = post(connect(f"http://127.0.0.1:{server.port}"))
        assert answer.failure is Failure.LOST
        assert "unpacked" in answer.detail


def test_h20_one_limit_bounds_a_dripping_answer(connect, post):
    """A byte every now and then, in the header already, does not keep the request alive."""
    step = {"status": 200, "headers": [], "body": '{"ok":true}', "action": "drip", "every_s": 0.02}
    with fake_relay({"steps": [step]}) as relay:
        client = connect(relay.url, request_timeout_ms=200)
        answer = post(client)
        assert (answer.failure, answer.sent) == (Failure.LOST, True)
        assert answer.elapsed_ms >= 190
        assert meaning(post(client, timeout_ms=10_000)) is Sort.ACCEPTED


def test_one_limit_bounds_a_dripping_body(connect, post):
    """The same when the header came at once, and for an error."""

    def drip(connection):
        read_http_request(connection)
        connection.sendall(http_response(503, b"x" * 1000)[:-1000])
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    with thread_server(drip) as server:
        answer = post(connect(f"http://127.0.0.1:{server.port}"), timeout_ms=150)
        assert (answer.status, answer.failure) == (None, Failure.LOST)


def test_one_limit_bounds_a_request_that_is_not_read(connect, post):
    """A relay that takes no bytes holds the sender no longer than the limit."""
    done = threading.Event()
    with thread_server(lambda _connection: done.wait(30)) as server:
        answer = post(connect(f"http://127.0.0.1:{server.port}"), b" " * SIXTEEN_MIB, timeout_ms=200)
        assert (answer.failure, answer.sent) == (Failure.LOST, True)
        done.set()


def test_an_early_refusal_of_a_large_body_is_read(connect, post):
    """413 while we are still sending, and the connection closed: the answer counts."""

    def refuse(connection):
        connection.recv(1000)
        connection.sendall(http_response(413, b"", "connection: close"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with thread_server(refuse) as server:
        answer = post(connect(f"http://127.0.0.1:{server.port}"), b" " * SIXTEEN_MIB)
        assert meaning(answer) is Sort.TOO_LARGE


class BrokenPipe:
    """A stream whose peer refused early: nothing can be written any more, its answer is there."""

    def __init__(self, *, after_a_byte):
        self._after_a_byte = after_a_byte

    def write(self, _data, exchange, *, of_request):
        """Fail, after a byte or before."""
        exchange.sent = of_request and self._after_a_byte
        raise BrokenPipeError(32, "Broken pipe")

    def read(self, _exchange):
        """The answer."""
        return http_response(413, b"{}")


def test_an_answer_counts_although_not_all_could_be_written():
    """RFC 9112, 9.3: it is read, and the connection serves no other request."""
    exchange, connection = Exchange(time.monotonic() + 60), Connection(BrokenPipe(after_a_byte=True))
    assert connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"{}", exchange).status == 413
    assert list(connection.body(exchange)) == [b"{}"]
    assert not connection.can_be_kept


def test_an_answer_to_nothing_does_not_count():
    """When not even one byte could be written, what there is to read was not meant for us."""
    exchange, connection = Exchange(time.monotonic() + 60), Connection(BrokenPipe(after_a_byte=False))
    with pytest.raises(BrokenPipeError):
        connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"{}", exchange)


def test_the_callers_deadline_is_not_the_relays_fault(connect, post):
    """Cut off by the deadline, the answer is STOPPED; by the request's own limit, it is LOST."""
    done = threading.Event()
    with thread_server(lambda _connection: done.wait(30)) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        now = time.monotonic()
        assert post(client, timeout_ms=100, deadline=now + 60).failure is Failure.LOST
        stopped = post(client, timeout_ms=60_000, deadline=now + 0.3)
        assert (stopped.failure, stopped.sent) == (Failure.STOPPED, True)
        over = post(client, deadline=time.monotonic())
        assert (over.failure, over.sent) == (Failure.STOPPED, False)
        done.set()


def test_nothing_listens(connect, post):
    """Refused: not a byte left, and the words name the place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answer = post(connect(f"http://127.0.0.1:{port}"))
    assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
    assert answer.detail == f"connection refused at 127.0.0.1:{port}"


def test_a_connection_that_is_not_taken(connect, post):
    """The connect limit ends it early; within the caller's deadline it is unreachable."""
    with full_listener() as port:
        answer = post(connect(f"http://127.0.0.1:{port}", connect_timeout_ms=100), timeout_ms=60_000)
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert answer.detail == f"no connection to 127.0.0.1:{port} in time"


def test_an_unknown_name(connect, post):
    """A name that cannot be looked up: unreachable, in words."""
    answer = post(connect("http://relay.invalid:4850"))
    assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
    assert "the name cannot be looked up" in answer.detail
    assert "relay.invalid:4850" in answer.detail


def test_a_lookup_that_hangs_is_bounded_and_asked_once(connect, post, monkeypatch):
    """The system's resolver knows no limit: the request goes on without it, and no thread is added to it."""
    answered, lookups = threading.Event(), []

    def hang(host, port):
        lookups.append((host, port))
        answered.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    resolver = Resolver(hang)
    monkeypatch.setattr("relay_client.transport.Resolver", lambda: resolver)
    with thread_server(always(http_response())) as server:
        client = connect(f"http://slow.example:{server.port}")
        for _ in range(2):
            answer = post(client, timeout_ms=50)
            assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert lookups == [("slow.example", server.port)]
        answered.set()
        assert post(client).status == 200


def test_a_name_is_looked_up_for_each_connection():
    """An answer is used by those who waited for it and not kept: addresses change."""
    lookups = []

    def lookup(host, port):
        lookups.append(host)
        return [(host, port)]

    resolver = Resolver(lookup)
    wait_until(lambda: resolver.addresses("relay.example", 80, 10) and len(lookups) == 2)


def test_a_lookup_without_threads(monkeypatch):
    """At the end of the interpreter no thread starts any more: the name is looked up in place."""
    resolver = Resolver(lambda host, port: [(host, port)])

    def refuse(_thread):
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert resolver.addresses("relay.example", 80, 1) == [("relay.example", 80)]
    assert resolver.addresses("relay.example", 81, 1) == [("relay.example", 81)]


def test_the_next_address_is_tried_within_the_same_attempt(connect, post, monkeypatch):
    """One address takes no connections at all; the next one gets its share of the time."""
    with full_listener() as dead, thread_server(always(http_response())) as server:
        addresses = [(socket.AF_INET, 1, 6, "", ("127.0.0.1", port)) for port in (dead, server.port)]
        monkeypatch.setattr(
            "relay_client.transport.Resolver", lambda: Resolver(lambda _host, _port: addresses)
        )
        assert post(connect("http://two.example", connect_timeout_ms=400)).status == 200


@pytest.mark.parametrize("where", ["reading", "connecting", "looking up", "sending"])
def test_abort_ends_requests_of_other_threads_at_once(connect, post, monkeypatch, where):
    """Wherever they are blocked; and nothing goes out afterwards."""
    blocked, done = threading.Event(), threading.Event()

    def hang(connection):
        if where == "reading":
            read_http_request(connection)
        connection.recv(0 if where == "reading" else 1)
        blocked.set()
        done.wait(30)

    def lookup(_host, port):
        if where == "looking up":
            blocked.set()
            done.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr("relay_client.transport.Resolver", lambda: Resolver(lookup))
    with full_listener() as full, thread_server(hang) as server:
        port = full if where == "connecting" else server.port
        client = connect(f"http://relay.example:{port}", connect_timeout_ms=30_000)
        body = b" " * SIXTEEN_MIB if where == "sending" else b"{}"
        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(client, body)))
        thread.start()
        if where == "connecting":
            wait_until(lambda: client._transport._sockets._live)
        else:
            assert blocked.wait(10)
        client.abort()
        thread.join(10)
        assert not thread.is_alive()
        [answer] = answers
        assert (answer.failure, answer.sent) == (Failure.STOPPED, where in {"reading", "sending"})
        later = post(client)
        assert (later.failure, later.sent) == (Failure.STOPPED, False)
        done.set()


def test_abort_reaches_those_that_wait_for_a_connection(connect, post):
    """A request that waits for its turn ends with the one it waits for."""
    taken, done, answers = threading.Event(), threading.Event(), []

    def hold(connection):
        read_http_request(connection)
        taken.set()
        done.wait(30)

    with thread_server(hold) as server:
        client = connect(f"http://127.0.0.1:{server.port}", max_connections=1)
        threads = [threading.Thread(target=lambda: answers.append(post(client))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert taken.wait(10)
        client.abort()
        for thread in threads:
            thread.join(10)
        assert sorted(answer.sent for answer in answers) == [False, False, True]
        assert {answer.failure for answer in answers} == {Failure.STOPPED}
        done.set()


def test_many_threads_share_a_small_pool(connect, post):
    """Each request gets its own answer, over no more connections than allowed."""

    def echo(connection):
        while request := read_http_request(connection):
            connection.sendall(http_response(200, request[1]))

    answers = {}

    def work(client, name):
        answers[name] = [post(client, b'"%d-%d"' % (name, number)).body for number in range(20)]

    with thread_server(echo) as server:
        client = connect(f"http://127.0.0.1:{server.port}", max_connections=3)
        threads = [threading.Thread(target=work, args=(client, name)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == {name: [b'"%d-%d"' % (name, number) for number in range(20)] for name in range(8)}
        assert server.connections <= 3


def test_no_free_connection_is_not_the_relays_fault(connect, post):
    """A pool too small for its threads: the request was stopped by us, unsent."""
    taken, done = threading.Event(), threading.Event()

    def hold(connection):
        read_http_request(connection)
        taken.set()
        done.wait(30)
        connection.sendall(http_response())

    with thread_server(hold) as server:
        client = connect(f"http://127.0.0.1:{server.port}", max_connections=1)
        thread = threading.Thread(target=post, args=(client,))
        thread.start()
        assert taken.wait(10)
        answer = post(client, timeout_ms=50)
        assert (answer.failure, answer.sent) == (Failure.STOPPED, False)
        done.set()
        thread.join(10)


def test_redirects_are_not_followed_and_leak_nothing(connect, post):
    """H09, H10: one request to the relay, and none to where it points."""
    with thread_server(always(http_response())) as other:
        target = f"http://127.0.0.1:{other.port}/messages"
        steps = [
            {"status": 307, "headers": [["location", target]], "body": ""},
            {"status": 302, "headers": [["location", "/login"]], "body": ""},
        ]
        with fake_relay({"steps": steps}) as relay:
            client = connect(relay.url)
            first, second = post(client), post(client)
            assert [meaning(first), meaning(second)] == [Sort.REDIRECTED] * 2
            assert [request["method"] for request in relay.requests()] == ["POST", "POST"]
        assert other.connections == 0


def test_h22_interim_answers_are_passed_over(connect, post):
    """Only the final status counts."""
    with fake_relay(case="H22") as relay:
        assert post(connect(relay.url)).status == 503


def test_h23_an_error_with_terminal_codes(connect, post):
    """What was read is whole; its reading is one clean line."""
    with fake_relay(case="H23") as relay:
        answer = post(connect(relay.url), b'{"text":"event 0"}')
        reading = read_single(answer, now_ms=0, max_retry_after_ms=0)
        assert (reading.sort, reading.detail) == (Sort.REFUSED, "bad INFO outbox: all delivered")


def test_set_cookie_is_not_remembered(connect, post):
    """No request depends on the one before."""
    heads = []

    def answer(connection):
        while request := read_http_request(connection):
            heads.append(request[0].lower())
            connection.sendall(http_response(200, b"", "set-cookie: a=b"))

    with thread_server(answer) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        post(client)
        post(client)
    assert not any(b"cookie" in head for head in heads)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_opens_its_own_connection(connect, post):
    """The parent's connection stays the parent's: no byte of the child gets between its requests."""
    ports = []

    def answer(connection):
        while read_http_request(connection):
            ports.append(connection.getpeername()[1])
            connection.sendall(http_response())

    with thread_server(answer) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        assert post(client).status == 200
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if post(client).status == 200 else 1
                client.close()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert post(client).status == 200
        assert ports[0] == ports[2] != ports[1]


def test_close_leaves_no_socket(post):
    """After `close` nothing is open; a ResourceWarning would fail the test."""
    with thread_server(always(http_response())) as server:
        client = RelayClient(f"http://127.0.0.1:{server.port}", trust_env=False)
        post(client)
        client.close()
        assert not client._transport._sockets._live


class full_listener:  # noqa: N801 - reads as a function
    """A port where connections are neither taken nor refused: its backlog is full."""

    def __enter__(self):
        """Fill it."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        port = self._listener.getsockname()[1]
        self._waiting = []
        for _ in range(3):
            waiting = socket.socket()
            waiting.settimeout(0)
            waiting.connect_ex(("127.0.0.1", port))
            self._waiting.append(waiting)
        return port

    def __exit__(self, *_):
        """Close it all."""
        for each in [*self._waiting, self._listener]:
            each.close()


def wait_until(condition):
    """Return as soon as `condition()` is true."""
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.002)
