"""What a relay can do to the outbox: answers of every ugliness through a real socket to the real client.

Each is an `Answer` and has a meaning; none raises, hangs, or brings the token anywhere.
"""

import random
import socket
import struct

import pytest
from mutations import ODD_VALUES, broken, hostile, is_safe
from peers import http_response, read_http_request, thread_server

from outbox.delivery.verdict import judge, judge_group
from relay_client import (
    Answer,
    Origin,
    RelayClient,
    Sort,
    read_archive_chunk,
    read_batch,
    read_health,
    read_preparation,
    read_single,
    read_spec,
    read_tool_call,
)

TOKEN = "tok-very-secret-7741"
ORIGIN = Origin("builder", "5f0c9a52-6c1e-7b1a-8a53-0d2f4b6c8e10", seq=7, attempt=1)
LIMIT_MS = 150
STATUSES = [*range(200, 210), 226, 299, 300, 301, 304, 308, *range(400, 430), 451, 499, *range(500, 512), 599]
ODD_LINES = [
    b"HTTP/1.1 000 Zero", b"HTTP/1.1 99 Low", b"HTTP/1.1 1000 High", b"HTTP/1.1 -1", b"HTTP/9.9 200 OK",
    b"HTTP/1.1 101 Switching Protocols", b"HTTP/1.1 100 Continue", b"HTTP/1.1 200", b"\x16\x03\x01", b"",
]  # fmt: skip
FIELDS = [
    b"retry-after: 5", b"retry-after: -5", b"retry-after: 1e9", b"retry-after: " + b"9" * 400,
    b"retry-after: Fri, 31 Dec 9999 23:59:59 GMT", b"retry-after: Sun, 06 Nov 1994 99:99:99 GMT",
    b"retry-after: \xff", b"location: http://elsewhere.invalid/?" + TOKEN.encode(), b"location: //\x1b[31m",
    b"location: " + b"x" * 9_000, b"content-type: text/html", b"content-type: application/problem+json",
    b"content-type: text/event-stream", b"content-type: application/json; charset=utf-16", b"content-type:",
    b"content-encoding: gzip", b"content-encoding: br, zstd", b"content-encoding: \xff",
    b'www-authenticate: Bearer error="invalid_token", error_description="' + TOKEN.encode() + b'"',
    b'www-authenticate: Bearer error="insufficient_scope', b'www-authenticate: ,,,="', b"set-cookie: a=b",
    b"mcp-session-id: \x7f\x01", b"mcp-session-id: " + b"s" * 5_000, b"connection: close", b"x: a\x00b",
    b"transfer-encoding: chunked", b"content-length: 3", b"content-length: 99999999999999999999", b": none",
    b"no colon", b" folded", b"x" * 70_000 + b": y",
]  # fmt: skip
BODIES = [
    {},
    {"error": {"code": "validation_failed", "message": TOKEN}},
    {"error": "text"},
    {"type": "about:blank", "title": "No", "status": 422, "detail": TOKEN},
    {"results": [{"status": 201, "id": "1"}, {"status": 422, "error": {"code": "no"}}]},
    {"archive": {"generation": 3}},
    {"jsonrpc": "2.0", "id": "request-1", "result": {"content": [{"type": "text", "text": TOKEN}]}},
    {"jsonrpc": "2.0", "id": "request-1", "error": {"code": -32601, "message": TOKEN}},
    {"jsonrpc": "2.0", "id": "request-1", "result": {"isError": True, "content": []}},
    {"x-outbox": {"batch": {"maxItems": 5, "maxBytes": 100}, "idempotencyWindowSeconds": 1}},
    {"status": "ok"},
]


@pytest.fixture
def chance(seed):
    """What is broken, and how."""
    return random.Random(seed)


def a_body(chance):
    """JSON, broken JSON, a page, an event stream, noise."""
    data = hostile(chance, chance.choice(BODIES))
    way = chance.randrange(6)
    if way == 0:
        lines = [b"data: " + part for part in data.split(b"\n")]
        noise = [
            b": comment",
            b"event: message",
            b"id: 1",
            b"retry: x",
            b"data:",
            b"data",
            b"\xff",
            b"",
            b"\r",
        ]
        return b"\n".join([*chance.choices(noise, k=4), *lines, *chance.choices([b"", b""], k=2), b""])
    if way == 1:
        return b"<html>" + TOKEN.encode() + data
    if way == 2:
        return chance.randbytes(chance.randrange(300))
    return data


def an_answer(chance):
    """The bytes of a whole answer, or what is none."""
    body = a_body(chance)
    fields = chance.sample(FIELDS, chance.choice([0, 0, 1, 1, 2, 3]))
    way = chance.randrange(10)
    if way == 0:
        return b"\r\n".join([chance.choice(ODD_LINES), *fields]) + b"\r\n\r\n" + body
    if way == 1:
        sizes = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part)
        head = b"HTTP/1.1 %d Chunked\r\ntransfer-encoding: chunked\r\n" % chance.choice(STATUSES)
        whole = head + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + sizes + b"0\r\n\r\n"
    else:
        whole = http_response(chance.choice(STATUSES), body, *fields)
    return broken(chance, whole) if way in {2, 3} else whole


class UglyRelay:
    """Answers each request with the next bytes of its list, in pieces, and ends the connection somehow."""

    def __init__(self, chance):
        self.answers, self.heads = [], []
        self._chance = chance

    def handle(self, connection):
        """One connection, one request."""
        found = read_http_request(connection)
        if found is None:
            return
        self.heads.append(found[0])
        data = self.answers.pop(0)
        at = self._chance.randrange(len(data) + 1)
        for piece in (data[:at], data[at:]):
            connection.sendall(piece)
        if self._chance.random() < 0.15:  # a reset in the place of an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def asked(client, chance):
    """One request of some sort, and the meaning of its answer."""
    limits = {"now_ms": 1_790_000_000_000, "max_retry_after_ms": 3_600_000}
    way = chance.randrange(5)
    if way == 0:
        answer = client.call_tool(
            b'{"name": "t", "arguments": {}}', tool="t", token=TOKEN, key="k", origin=ORIGIN,
            request_id="request-1", timeout_ms=LIMIT_MS,
        )  # fmt: skip
        return answer, [read_tool_call(answer, "request-1", **limits)]
    if way == 1:
        answer = client.discover_tools(token=TOKEN, request_id="request-1", timeout_ms=LIMIT_MS)
        return answer, [read_preparation(answer, **limits)]
    answer = client.post_event(
        "/api/messages", b"{}", token=TOKEN, key="k", origin=ORIGIN, timeout_ms=LIMIT_MS
    )
    return answer, [
        read_single(answer, **limits), read_archive_chunk(answer, **limits), read_batch(answer, 2, **limits),
    ]  # fmt: skip


def test_every_answer_has_a_meaning_and_none_holds_the_token(chance, rounds):
    """Over one real socket each; what comes back says nothing of the token, in no field."""
    ugly, sorts = UglyRelay(chance), set()
    with thread_server(ugly.handle) as server:
        client = RelayClient(f"http://127.0.0.1:{server.port}", trust_env=False)
        try:
            for _ in range(rounds(25) * 20):
                ugly.answers[:] = [an_answer(chance)] * 3
                answer, readings = asked(client, chance)
                assert isinstance(answer, Answer)
                assert isinstance(read_health(answer), bool)
                read_spec(answer)
                for reading in readings:
                    sorts.add(reading.sort)
                    judge(reading, unsafe=True, works=True)
                    judge_group(reading, works=False)
                    assert TOKEN not in repr(reading), reading
                    assert all(TOKEN not in repr(item) for item in reading.items or ())
                    assert 0 <= (reading.retry_after_ms or 0) <= 3_600_000
                    assert is_safe(reading.detail), reading
                assert TOKEN.encode() not in answer.body
        finally:
            client.close()
    assert len(sorts) > 12, sorts
    assert all(b"\r\nHost: 127.0.0.1" in head for head in ugly.heads)


def test_meanings_of_odd_values(chance, rounds):
    """Where JSON is read, whatever value stands in whatever place."""
    limits = {"now_ms": 0, "max_retry_after_ms": 3_600_000}
    for _ in range(rounds(30) * 100):
        body = hostile(chance, chance.choice([*BODIES, *[{"results": [one]} for one in ODD_VALUES[:6]]]))
        answer = Answer(chance.choice(STATUSES), headers={}, body=body)
        for reading in (read_single(answer, **limits), read_batch(answer, 2, **limits)):
            assert reading.sort in Sort
            assert is_safe(reading.detail)
        assert is_safe(read_tool_call(answer, "request-1", **limits).detail)
        read_spec(answer)
