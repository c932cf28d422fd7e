"""Which request is plain: whatever is taken past the HTTP parser is what the parser would have read."""

import random

import h11
import pytest

from outbox.api.plain_event import plain_event

EVENT = b'{"kind": "insight", "payload": 1}'
HEAD = b"POST /v1/agents/builder/events HTTP/1.1\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(EVENT)
HOST = b"Host: localhost\r\n"
PLAIN = HEAD + HOST + LENGTH + b"\r\n" + EVENT

# What is put into heads and bodies by chance: what has fooled parsers before, and what is harmless.
PIECES = [
    b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:identity\r\n", b"Content-Length: 0\r\n", LENGTH,
    b"Content-Length: +33\r\n", b"Content-Length: 33, 33\r\n", b"Content-Length : 33\r\n", HOST,
    b"Host:\r\n", b" folded\r\n", b"\tfolded\r\n", b"X: \x00\r\n", b"X: \xe9\r\n", b"X:\x0b\r\n",
    b"X: a\rb\r\n", b"X: a\nY: b\r\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\x00", b":",
    b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b"Connection: close\r\n",
    b"Connection: keep-alive\r\n", b"Connection: keep-alive, Transfer-Encoding\r\n",
    b"Content-Type: application/json\r\n", b"Content-Type: text/plain\r\n", b"Accept: */*\r\n", b"{", b"[",
    b"0", b"X: " + b"y" * 9_000 + b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"/", b"%2f", b"?x=1",
    b"#", b"HTTP/1.0",
]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        PLAIN.replace(
            HOST, b"hOST:localhost\r\nContent-Type: Application/JSON ; charset=utf-8\r\nX-A: b\r\n"
        ),
        PLAIN.replace(HOST, HOST + b"Connection: Keep-Alive\r\nAccept: */*\r\n"),
        PLAIN.replace(b"builder", b"a%2Fb@c!"),
        PLAIN.replace(LENGTH, b"Content-Length:  0%d \r\n" % len(EVENT)),
    ],
)
def test_one_event_in_one_piece_is_plain(data):
    """As clients send it; the agent stays as the path has it."""
    event = plain_event(data)
    assert (event.body, event.missing_bytes) == (EVENT, 0)
    assert event.agent in {b"builder", b"a%2Fb@c!"}


@pytest.mark.parametrize("cut", [1, 10, len(EVENT)])
def test_a_body_that_is_not_there_yet(cut):
    """Its head is whole, and says how much comes."""
    assert plain_event(PLAIN[:-cut]).missing_bytes == cut


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(PLAIN[: -len(EVENT) - 1], id="half a head"),
        pytest.param(PLAIN + b"G", id="another request behind it"),
        pytest.param(PLAIN.replace(b"POST", b"PUT"), id="another method"),
        pytest.param(PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), id="an older version"),
        pytest.param(PLAIN.replace(b"/events", b"/events?x=1"), id="a query"),
        pytest.param(PLAIN.replace(b"builder", b""), id="no agent"),
        pytest.param(PLAIN.replace(b"builder", b"a/b"), id="a longer path"),
        pytest.param(PLAIN.replace(b"builder", b"a b"), id="a blank in the path"),
        pytest.param(PLAIN.replace(HOST, b""), id="no host"),
        pytest.param(PLAIN.replace(HOST, HOST + HOST), id="two hosts"),
        pytest.param(PLAIN.replace(LENGTH, b""), id="no length"),
        pytest.param(PLAIN.replace(LENGTH, LENGTH + LENGTH), id="two lengths"),
        pytest.param(PLAIN.replace(LENGTH, LENGTH.replace(b": ", b": +")), id="a length with a sign"),
        pytest.param(PLAIN.replace(LENGTH, LENGTH.replace(b": ", b" : ")), id="a blank behind a name"),
        pytest.param(PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked\r\n" + LENGTH), id="chunks too"),
        pytest.param(PLAIN.replace(HOST, HOST + b"Expect: 100-continue\r\n"), id="who waits for a word"),
        pytest.param(PLAIN.replace(HOST, HOST + b"Connection: close\r\n"), id="the last one"),
        pytest.param(PLAIN.replace(HOST, HOST + b"Content-Type: text/plain\r\n"), id="another type"),
        pytest.param(PLAIN.replace(HOST, HOST + b" folded\r\n"), id="a folded line"),
        pytest.param(PLAIN.replace(HOST, HOST[:-2] + b"\n"), id="a bare line feed"),
        pytest.param(PLAIN.replace(HOST, HOST[:-2] + b"\x00\r\n"), id="a NUL"),
        pytest.param(PLAIN.replace(HOST, HOST + b"X: " + b"y" * 9_000 + b"\r\n"), id="a large head"),
        pytest.param(PLAIN.replace(EVENT, b" " * len(EVENT)), id="nothing but blanks"),
        pytest.param(PLAIN.replace(EVENT, b"[" + EVENT[1:-1] + b"]"), id="an array"),
        pytest.param(PLAIN.replace(LENGTH, b"Content-Length: 65537\r\n"), id="a large body"),
    ],
)
def test_what_is_not_plain(data):
    """It goes to the parser, whatever that says of it."""
    assert plain_event(data) is None


def test_what_is_plain_is_read_the_same_by_the_parser():
    """By chance, with what has fooled parsers: same agent, same body, nothing behind it, and it goes on."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, plain = random.Random(seed), 0
    for _ in range(6_000):
        data = PLAIN
        for _ in range(chance.choice([1, 1, 2, 3])):
            at = chance.choice([len(HEAD), len(HEAD + HOST), chance.randrange(len(data) + 1)])
            data = data[:at] + chance.choice(PIECES) + data[at + chance.choice([0, 0, 0, 1, 5]) :]
        event = plain_event(data)
        if event is None or event.missing_bytes:
            continue
        plain += 1
        parser = h11.Connection(h11.SERVER)
        parser.receive_data(data)
        request, body, end = (parser.next_event() for _ in range(3))
        assert request.method == b"POST", data
        assert request.target == b"/v1/agents/%b/events" % event.agent, data
        assert list(request.headers) == event.fields, data
        assert bytes(body.data) == event.body, data
        assert isinstance(end, h11.EndOfMessage), data
        assert (parser.their_state, parser.trailing_data) == (h11.DONE, (b"", False)), data
    assert plain > 50
