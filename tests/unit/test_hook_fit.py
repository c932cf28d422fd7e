"""What of a message is cut when it is larger than a payload may be."""

import json
import random

import pytest

from outbox.capture.hook_fit import fitting, size_bytes
from outbox.capture.hook_json import string_sizes, with_strings
from outbox.json_text import quoted


def whole_bytes(body, hook):
    """What the two take in a payload."""
    return size_bytes(quoted(body)) + size_bytes(hook)


def test_what_fits_is_not_touched():
    """To the last byte."""
    hook = json.dumps({"a": "x" * 50})
    most = whole_bytes("body", hook)
    assert fitting("body", hook, most) == ("body", hook, False)
    assert fitting("body", hook, most - 1)[2] is True


@pytest.mark.parametrize("letter", ["x", "é", "🍐", "\0", '"', "\ud800", "\r\n"])
def test_the_longest_strings_are_cut_and_marked(letter):
    """All else stays: short strings, numbers, the names and their order."""
    call = {"name": "short", "long": letter * 5_000, "n": 12345678901234567890, "longer": letter * 9_000}
    body, hook, was_cut = fitting(letter * 5_000, json.dumps(call), 4_000)
    assert was_cut
    assert whole_bytes(body, hook) <= 4_000
    value = json.loads(hook)
    assert list(value) == list(call)
    assert (value["name"], value["n"]) == (call["name"], call["n"])
    for text, length in ((value["long"], 5_000), (value["longer"], 9_000), (body, 5_000)):
        assert text.startswith(letter)
        assert f"[cut by the outbox: {length * len(letter):,} characters in all]" in text


def test_many_small_strings_are_cut_as_one():
    """Where no string is long, the JSON stands there as a string that is cut."""
    call = json.dumps({str(n): n for n in range(3_000)})
    body, hook, was_cut = fitting("b", call, 8_000)
    assert (body, was_cut) == ("b", True)
    assert whole_bytes(body, hook) <= 8_000
    assert json.loads(hook).startswith(call[:5_000])


def test_random_calls_fit():
    """Whatever a call consists of, and whatever the limit is."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(100):
        strings = [
            chance.choice('a"é\0🍐\n') * chance.randrange(2_000) for _ in range(chance.randrange(1, 9))
        ]
        call = json.dumps(dict(enumerate(strings)), ensure_ascii=chance.choice([True, False]))
        most = chance.randrange(1_200, 9_000)
        body, hook, was_cut = fitting(chance.choice(strings), call, most)
        assert whole_bytes(body, hook) <= most
        json.loads(hook)
        assert was_cut or hook == call


def test_a_text_is_walked_string_by_string():
    """Names and values, escapes and all; what is between loses its blanks only."""
    text = '{ "a\\"b" :\n[1.50, "", "\\ud83d"], "c": null}'
    assert string_sizes(text) == [6, 2, 8, 3]
    assert with_strings(text, lambda string: string) == '{"a\\"b":[1.50,"","\\ud83d"],"c":null}'
    assert with_strings(text, lambda string: string or "x") == '{"a\\"b":[1.50,"x","\\ud83d"],"c":null}'
