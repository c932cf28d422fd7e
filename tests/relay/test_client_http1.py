"""HTTP/1.1 by hand, held against h11: the same responses, however they are cut up and whatever is broken."""

import random

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_client.http1 import MAX_HEAD_BYTES, HeadReader, NotHttp, body_reader, request_head

FRAMING = {b"content-length", b"transfer-encoding"}
PIECES = st.lists(st.integers(1, 40), max_size=30)


def read(data, sizes=(), *, ends=True):
    """The response in `data`, fed in pieces of `sizes`: (status, fields, body, whether it can be kept)."""
    pieces = list(_cut(data, sizes)) + ([b""] if ends else [])
    feed = iter(pieces)
    reader, head = HeadReader(), None
    while head is None:
        head = reader.feed(next(feed))
    rest = body_reader(head)
    body = rest.feed(reader.rest) if reader.rest else b""
    while not rest.done:
        body += rest.feed(next(feed))
    rest.surplus = rest.surplus or any(feed)
    return head.status, _without_framing(head.fields), body, head.keeps and not rest.surplus


def h11_reads(data):
    """What h11 makes of it, in the same form; None when it refuses."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    head, body = None, b""
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
                return None
    except h11.RemoteProtocolError:
        return None
    fields = [(name.lower(), value) for name, value in head.headers.raw_items()]
    framed = status_without_body(head.status_code) or FRAMING & {name.lower() for name, _ in fields}
    kept = bool(framed) and connection.their_state is h11.DONE and not connection.trailing_data[0]
    return head.status_code, _without_framing(fields), body, kept


def status_without_body(status):
    """Whether a response of this status ends with its head."""
    return status in {204, 304}


def chunked(body, sizes):
    """`body` in chunks, as `Transfer-Encoding: chunked` has it, with an extension and a trailer."""
    pieces = [piece for piece in _cut(body, sizes) if piece]
    return b"".join(b"%X;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nx: y\r\n\r\n"


@st.composite
def responses(draw):
    """Well-formed responses of every framing."""
    status = draw(st.sampled_from([200, 201, 204, 304, 404, 503, 599]))
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.0"]))
    body = draw(st.binary(max_size=200))
    fields = [b"Content-Type: text/plain", b"X-Empty:", b"x-y:\t padded \t"]
    framing = draw(st.sampled_from(["length", "chunked", "end"]))
    if status_without_body(status):
        body = payload = b""
    elif framing == "length" or version == b"1.0":
        fields.append(b"content-LENGTH: %d" % len(body))
        payload = body
    elif framing == "chunked":
        fields.append(b"Transfer-Encoding: Chunked")
        payload = chunked(body, draw(PIECES))
    else:
        payload = body
    fields += draw(
        st.lists(st.sampled_from([b"Connection: close", b"Connection: Keep-Alive, x"]), max_size=1)
    )
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"]))
    start = b"HTTP/%b %d Some Words" % (version, status)
    return interim + b"\r\n".join([start, *draw(st.permutations(fields))]) + b"\r\n\r\n" + payload


@given(responses(), PIECES)
def test_a_response_is_read_as_h11_reads_it(data, sizes):
    """Status, fields, body and whether the connection may be kept, from pieces of any size."""
    status, fields, body, kept = h11_reads(data)
    assert read(data, sizes) == read(data) == (status, fields, body, kept)


def test_a_broken_response_is_never_read_differently():
    """With bytes changed, cut, doubled or put in: refused, or read exactly as h11 reads it."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    whole = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\nx: y\r\n\r\n" + b"hello, world",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"hello, world", [5, 3]),
        b"HTTP/1.0 404 Not Found\r\nx: y\r\n\r\nhello",
    ]
    read_by_both = 0
    for _ in range(6_000):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randrange(3)] = bytes(
                chance.choices(b"\r\n 0159aF:;,\t\x00\xff-", k=chance.randrange(3))
            )
        ours = _or_none(bytes(data))
        if ours is not None:
            theirs = h11_reads(bytes(data))
            if theirs is not None:
                assert ours[:3] == theirs[:3], bytes(data)
                read_by_both += 1
    assert read_by_both > 500


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-other\r\n",
        b"HTTP/1.1 2OO OK\r\n\r\n",
        b"HTTP/1.1 099 Low\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nblank before : colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: no name\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0x1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\nxy",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 5000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
    ],
)
@pytest.mark.parametrize("sizes", [(), (1,) * 200])
def test_what_is_no_response_is_refused(data, sizes):
    """No status, no readable length, two lengths, broken chunks, endless heads, or too little of it."""
    with pytest.raises(NotHttp):
        read(data, sizes)


def test_noise_is_refused_before_the_line_ends():
    """A peer that speaks something else and then waits is found out at its first bytes."""
    with pytest.raises(NotHttp):
        HeadReader().feed(b"\x16\x03\x01")


def test_two_framings_end_the_connection():
    """RFC 9112, 6.1: length and chunks together are read as chunks, and the connection ends."""
    data = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(
        b"hello", []
    )
    assert read(data)[2:] == (b"hello", False)


def test_bare_line_feeds_and_folded_lines_are_read():
    """Old servers: the lines are told apart all the same."""
    status, fields, body, kept = read(b"HTTP/1.1 200 OK\nx: a\n\tb\ncontent-length: 2\n\nhi")
    assert (status, body, kept) == (200, b"hi", True)
    assert fields == [(b"x", b"a b")]


def test_more_than_the_body_makes_a_connection_useless():
    """What follows was asked for by nobody."""
    assert read(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK")[2:] == (b"hi", False)


def test_a_request_cannot_be_broken_out_of():
    """A value with a line end is refused, and not shown: it may be a token."""
    with pytest.raises(ValueError, match="Authorization") as refused:
        request_head(b"POST", b"/", [(b"Authorization", b"Bearer secret\r\nx: y")])
    assert "secret" not in str(refused.value)
    for name in (b"", b"a b", b"a:", b"a\n"):
        with pytest.raises(ValueError, match="cannot be sent"):
            request_head(b"POST", b"/", [(name, b"x")])


def _without_framing(fields):
    """All fields but the two that h11 spells anew."""
    return [(name, value) for name, value in fields if name.lower() not in FRAMING]


def _or_none(data):
    try:
        return read(data)
    except NotHttp:
        return None


def _cut(data, sizes):
    for size in sizes:
        if not data:
            return
        yield data[:size]
        data = data[size:]
    if data:
        yield data
