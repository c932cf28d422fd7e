"""Slow, silent and half-closed clients of the local HTTP: each has its time, and keeps nobody waiting."""

import json
import socket
from types import SimpleNamespace

import pytest
from processes import ask

from outbox.api import patience, requests
from outbox.api.meter import Meter
from outbox.api.server import LocalServer
from outbox.event import Limits

SHORT_S = 0.2


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server in this process whose patience is short; the path of its socket."""
    monkeypatch.setattr(patience, "HEADERS_WITHIN_S", SHORT_S)
    monkeypatch.setattr(patience, "LINGER_S", SHORT_S)
    monkeypatch.setattr(requests, "SILENCE_S", SHORT_S)
    server = LocalServer(
        SimpleNamespace(limits=Limits(), meter=Meter(), hangs=lambda: ""), tmp_path / "o.sock"
    )
    server.start()
    yield tmp_path / "o.sock"
    server.stop()


def told(path, data, *, half_closed=False):
    """All that comes for these bytes, until the server closes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(path))
        client.sendall(data)
        if half_closed:
            client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65_536):
            answer += part
        return answer


HEAD = b"POST /v1/agents/a/events HTTP/1.1\r\nHost: localhost\r\n"


def test_headers_that_do_not_come(served):
    """The connection is closed, whether something came or nothing; others are answered meanwhile."""
    assert told(served, b"GET /livez HT") == b""
    assert told(served, b"") == b""
    assert ask(served, "GET", "/livez")[0] == 200


def test_a_body_that_stops(served):
    """408 with what it means, and the connection ends."""
    answer = told(served, HEAD + b"Content-Length: 100\r\n\r\n{")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["code"] == "too_slow"


def test_half_closed_in_its_middle(served):
    """Half a request gets no answer, and nothing of it is taken."""
    assert told(served, HEAD + b"Content-Length: 100\r\n\r\n{", half_closed=True) == b""


def test_half_closed_after_a_whole_request(served):
    """The answer comes, and then the end."""
    answer = told(served, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n", half_closed=True)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_refused_body_that_goes_on(served):
    """The answer can be read, and what still comes is not read for ever."""
    answer = told(served, HEAD + b"Content-Type: text/html\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 415 ")
