"""Server-sent events: the same out of any pieces, by the rules of the HTML standard, and bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_client.body import read_message
from relay_client.sse import EventStream, EventTooLarge, ServerEvent

SIZES = st.lists(st.integers(1, 9), max_size=60)


def events(data, sizes=()):
    """All events of a stream fed in pieces of `sizes`, and then the rest."""
    stream, found = EventStream(1_000_000), []
    for size in sizes:
        found += stream.feed(data[:size])
        data = data[size:]
    return found + list(stream.feed(data))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"data: a\n\n", [ServerEvent("a")]),
        (b"data:a\n\n", [ServerEvent("a")]),
        (b"data:  a\n\n", [ServerEvent(" a")]),
        (b"data: a\ndata: b\n\n", [ServerEvent("a\nb")]),
        (b"data: a\r\ndata: b\r\n\r\n", [ServerEvent("a\nb")]),
        (b"data: a\rdata: b\r\r", [ServerEvent("a\nb")]),
        (b"data: a\n\ndata: b\n\n", [ServerEvent("a"), ServerEvent("b")]),
        (b"data\n\n", [ServerEvent("")]),
        (b"data:\n\n", [ServerEvent("")]),
        (b"data:\ndata:\n\n", [ServerEvent("\n")]),
        (b": ping\n\n", []),
        (b":\n\n\n\n", []),
        (b"id: 1\nretry: 5\n\n", []),
        (b"event: note\n\ndata: a\n\n", [ServerEvent("a")]),
        (b"event: note\ndata: a\n\ndata: b\n\n", [ServerEvent("a", "note"), ServerEvent("b")]),
        (b"Data: a\n data: b\n\n", []),
        (b"data: a", []),
        (b"data: a\n", []),
        (b"\xef\xbb\xbfdata: a\n\n", [ServerEvent("a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [ServerEvent("a")]),
        (b"data: \xff\xe2\x82\xac\n\n", [ServerEvent("\ufffd\u20ac")]),
        (b"data: a\x00b: c\n\n", [ServerEvent("a\x00b: c")]),
        (b"", []),
    ],
)
@pytest.mark.parametrize("sizes", [(), (1,) * 60])
def test_the_standards_rules(data, found, sizes):
    """Fields, line ends, comments, empty events, the byte order mark, and what the end cuts off."""
    assert events(data, sizes) == found


LINES = st.sampled_from(
    [b"data: x", b"data:", b"data: \xe2\x82\xac", b": c", b"event: e", b"id: 1", b"", b"junk"]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=30), SIZES)
def test_any_pieces_give_the_same_events(lines, sizes):
    """Wherever the stream is cut: within a line end, a character, or the byte order mark."""
    data = b"\xef\xbb\xbf" + b"".join(line + end for line, end in lines)
    assert events(data, sizes) == events(data)


@given(st.binary(max_size=200), SIZES)
def test_any_bytes_give_the_same_events(data, sizes):
    """Noise too."""
    assert events(data, sizes) == events(data)


@pytest.mark.parametrize("data", [b"data: " + b"x" * 200, b"x" * 200, b"data: x\n" * 60, b"data\n" * 200])
def test_an_event_without_end_is_refused(data):
    """Neither a line nor an event can make the reader hold more than it was told to."""
    with pytest.raises(EventTooLarge):
        list(EventStream(100).feed(data))


def test_a_long_stream_of_small_events_is_read():
    """The bound is for one event."""
    assert len(list(EventStream(100).feed(b"data: x\n\n" * 1000))) == 1000


def test_the_answer_is_found_and_nothing_is_read_after_it():
    """Comments, empty events, notes and other answers are passed over; the rest is not asked for."""

    def stream():
        yield b": ping\n\nid: 0\ndata:\n\n"
        yield b'data: {"jsonrpc":"2.0","method":"notifications/progress"}\n\n'
        yield b'data: {"jsonrpc":"2.0","id":"other","result":{}}\n\ndata: no JSON\n\ndata: 7\n\n'
        yield b'data: {"jsonrpc":"2.0","id":"mine",\ndata: "result":{}}\n\n'
        raise AssertionError("read on after the answer")

    text = b'{"jsonrpc":"2.0","id":"mine",\n"result":{}}'
    assert read_message(stream(), "mine", 1000) == (text, False)


def test_a_stream_without_the_answer():
    """Nothing is made up; and a too large event is told apart."""
    assert read_message([b": ping\n\n"], "mine", 1000) == (b"", False)
    assert read_message([b"data: " + b"x" * 2000], "mine", 1000) == (b"", True)
