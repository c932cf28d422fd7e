"""Lines, spans and nesting of JSON text."""

import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.errors import UsageError
from outbox.json_text import deeper_than, elements, last_values, members, split_lines, with_members

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
BOM = b"\xef\xbb\xbf"


def in_chunks(data: bytes, size: int) -> list[bytes]:
    """The data as it might come through a pipe."""
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_end_at_lf_and_keep_their_numbers(size):
    """CR LF ends one too; blank lines count but are passed over; the last line needs no end."""
    data = BOM + b"1\r\n\n \t\r\n2\n" + "\u2028\u0085\v\f".encode() + b"\n\r\n3"
    assert list(split_lines(in_chunks(data, size), 100)) == [
        (1, b"1"),
        (4, b"2"),
        (5, "\u2028\u0085\v\f".encode()),
        (7, b"3"),
    ]


@pytest.mark.parametrize("data", [b"", b"\n", BOM, BOM + b"\r\n", b" "])
def test_nothing_is_no_line(data):
    """Empty input holds no events, with a byte order mark too."""
    assert list(split_lines([data], 100)) == []


def test_a_byte_order_mark_is_dropped_at_the_very_start_only():
    """Elsewhere it is what somebody wrote."""
    assert list(split_lines([b"\n", BOM, b"1\n"], 100)) == [(2, BOM + b"1")]


@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_line_too_long_is_refused_by_number_and_the_next_arrives(size):
    """The limit is inclusive; what is behind the long line is whole."""
    data = b"12345\n123456\n12345\n1234567890"
    (first, _), (second, refusal), (third, line), (fourth, last) = split_lines(in_chunks(data, size), 5)
    assert (first, second, third, fourth, line) == (1, 2, 3, 4, b"12345")
    for error in (refusal, last):
        assert isinstance(error, UsageError)
        assert error.code == "too_large"
        assert str(error) == "the line is longer than 5 bytes"


def test_a_line_too_long_is_never_held_in_memory():
    """64 MiB without a line end cost no more than the limit and a chunk."""
    chunk = b"x" * 65_536
    tracemalloc.start()
    lines = list(split_lines((chunk for _ in range(1024)), 100_000))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines) == 1
    assert peak_bytes < 1_000_000


@UNHURRIED
@given(st.lists(st.binary(max_size=8).filter(lambda line: b"\n" not in line)), st.integers(1, 5))
def test_how_the_bytes_arrive_changes_nothing(lines, size):
    """The same lines come out of chunks of any size."""
    data = b"\n".join(lines)
    bytewise, whole = [
        [(number, str(found)) for number, found in split_lines(chunks, 6)]
        for chunks in (in_chunks(data, size), [data])
    ]
    assert bytewise == whole


def test_members_stand_where_they_say():
    """Names are read, values are spans, duplicates are all there."""
    text = ' { "a" :1e400 , "\\u0061":[ {"b":2} ],"c" : "x}" } '
    found = [(name, text[start:value].strip(), text[value:end]) for name, start, value, end in members(text)]
    assert found == [
        ("a", '"a" :', "1e400"),
        ("a", '"\\u0061":', '[ {"b":2} ]'),
        ("c", '"c" :', '"x}"'),
    ]
    assert last_values(text) == {"a": '[ {"b":2} ]', "c": '"x}"'}
    assert members(" { } ") == []


def test_elements_are_the_texts_of_an_array():
    """Each with its own text, without the blanks around it."""
    assert elements(' [ 1.0 ,"a,b", [ ] ,{"x": 1}] ') == ["1.0", '"a,b"', "[ ]", '{"x": 1}']
    assert elements("[ ]") == []


@pytest.mark.parametrize("text", ["[1,]", "[1}", "[1 2]", "[1", "[", "[1] 2", "{}", "[NaN]", ""])
def test_what_is_no_array_has_no_elements(text):
    """Broken text and other values are refused."""
    with pytest.raises(UsageError):
        elements(text)


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({}, '{"a": 1,"b":2,"a":3}'),
        ({"a": "9"}, '{"a":9,"b":2}'),
        ({"a": None}, '{"b":2}'),
        ({"c": "[]", "d": None}, '{"a": 1,"b":2,"a":3,"c":[]}'),
        ({"a": None, "b": None}, "{}"),
    ],
)
def test_members_are_replaced_removed_or_added(values, changed):
    """A new value stands where the first of that name stood; what is not named keeps its text."""
    assert with_members('{"a": 1, "b":2, "a":3}', values) == changed


JSON_VALUES = st.recursive(
    st.none() | st.text(alphabet='[]{}"\\a', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=30,
)


def depth(value) -> int:
    """How many lists and objects stand inside each other."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, items), default=0)
    return 0


@UNHURRIED
@given(JSON_VALUES)
def test_depth_is_counted_outside_strings(value):
    """The count agrees with a walk through the value, whatever brackets its strings hold."""
    levels = depth(value)
    text = json.dumps(value)
    assert not deeper_than(text, levels)
    assert levels == 0 or deeper_than(text, levels - 1)
