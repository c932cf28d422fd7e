"""Slicing JSON: what is cut out is what was written, whatever stands around it."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relay_client.reference import json_text

SPACE = st.text(" \t\n\r", max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
TEXTS = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    VALUES,
    st.sampled_from([None, 0, 1, "\t"]),
    st.booleans(),
)


def joined(opening, parts, closing, space):
    """The parts with their signs, and some white space wherever it may stand."""
    return opening + f"{space},{space}".join(f"{space}{part}{space}" for part in parts) + space + closing


@settings(deadline=None)
@given(st.lists(TEXTS), SPACE)
def test_the_elements_of_an_array_are_cut_out_as_written(texts, space):
    """Each element's text and value, in order."""
    found = json_text.elements(joined("[", texts, "]", space))
    assert [part.text for part in found] == texts
    assert [part.value for part in found] == [json.loads(text) for text in texts]


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(), TEXTS)), SPACE)
def test_the_members_of_an_object_are_cut_out_as_written(pairs, space):
    """Each member's text under its name; of equal names the last one counts, as for every reader."""
    parts = [f"{json.dumps(name)}{space}:{space}{text}" for name, text in pairs]
    assert json_text.members(joined("{", parts, "}", space)) == dict(pairs)


@settings(deadline=None)
@given(
    TEXTS,
    st.integers(min_value=0),
    st.sampled_from(["", ",", "]", "}", '"', "\\", "0", " ", "\u00a0", "\x00"]),
)
@example("[1]", 2, ",")
@example('{"a":1}', 6, ",")
def test_a_text_is_taken_exactly_when_it_is_json(text, at, change):
    """A text with something put in, or a sign taken out, is JSON here when it is to the standard library."""
    place = at % (len(text) + 1)
    changed = text[:place] + change + text[place + (not change) :]
    try:
        wanted = json.loads(changed)
    except json.JSONDecodeError:
        for read in (lambda: json_text.parse(changed.encode()), lambda: whole(changed)):
            with pytest.raises(json_text.Malformed):
                read()
    else:
        assert json_text.parse(changed.encode()).value == wanted
        assert whole(changed.strip(" \t\n\r")) is None


def whole(text):
    """Walk through an object or an array; other values have no parts."""
    if text.startswith("["):
        json_text.elements(text)
    elif text.startswith("{"):
        json_text.members(text)
    else:
        json_text.parse(text.encode())


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a":-Infinity}', "\ufeff{}", "[" * 100_000, "", " "])
def test_what_some_readers_take_is_refused(text):
    """Strict JSON only, and no way to exhaust the stack."""
    with pytest.raises(json_text.Malformed):
        json_text.parse(text.encode())


def test_a_number_of_any_length_is_no_trouble():
    """100,000 digits are read at once; only their text is kept."""
    digits = "9" * 100_000
    assert json_text.parse(f"[{digits}]".encode()).value == [digits]
    assert json_text.elements(f"[{digits}]")[0].text == digits


def test_bytes_that_are_no_utf_8_are_refused_by_their_place():
    """The message says where."""
    with pytest.raises(json_text.Malformed, match="byte 1"):
        json_text.parse(b'"\xff"')
