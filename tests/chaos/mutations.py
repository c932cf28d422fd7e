"""Texts and bytes as nobody should send them: broken copies of good ones, by a seed that is printed."""

import json
import random
import unicodedata

UGLY = [
    b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf", b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b" ",
    b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b"\\udc00\\ud800", b",", b":", b"null",
    b"NaN", b"-Infinity", b"1e400", b"-0", b"0x1", b"9" * 400, b"0." + b"1" * 300, b"[" * 600, b'{"a":' * 600,
    b"../../etc/passwd", b"/", b"..", b"%00", b"%2e%2e%2f", b"\x1b[31m", b"\xe2\x80\xa8", b"%s %d {0}", b"\t",
]  # fmt: skip
ODD_VALUES = [
    None, True, False, 0, -1, 2**63, -(2**63) - 1, 10**400, 0.5, 1e308, "", "\0", "\n", "\ud800", "x" * 3_000,
    "../../up", "/abs", "\x1b[2J", [], {}, [[]], {"": ""}, [None], {"a": {"b": [1]}}, "9", "NaN", "\uff12",
]  # fmt: skip


_STEERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def is_safe(text: str) -> bool:
    """Whether a terminal shows this on its line as it stands: nothing steers it or turns the order round."""
    return not any(
        unicodedata.category(one) in {"Cc", "Zl", "Zp", "Cs"} or unicodedata.bidirectional(one) in _STEERING
        for one in text
    )


def broken(chance: random.Random, data: bytes) -> bytes:
    """A copy with one to four places changed, cut, doubled or filled with something ugly."""
    copy = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(copy) + 1)
        through = min(len(copy), at + chance.choice([0, 0, 1, 2, 8, 40]))
        way = chance.randrange(5)
        if way == 0:
            del copy[at:through]
        elif way == 1:
            copy[at:at] = copy[at:through]
        elif way == 2:
            copy[at:through] = chance.choice(UGLY)
        elif way == 3:
            copy[at:through] = chance.randbytes(through - at)
        elif chance.random() < 0.2:
            del copy[at:]
    return bytes(copy)


def with_odd_values(chance: random.Random, value: object) -> object:
    """A copy of a JSON value with some of its parts put for odd ones, left out, or under other names."""
    if chance.random() < 0.12:
        return chance.choice(ODD_VALUES)
    if isinstance(value, dict):
        copy = {name: with_odd_values(chance, part) for name, part in value.items() if chance.random() > 0.06}
        if chance.random() < 0.1:
            copy[chance.choice(["", "\0", "kind", "payload", "__proto__", "x" * 200])] = chance.choice(
                ODD_VALUES
            )
        return copy
    if isinstance(value, list):
        return [with_odd_values(chance, part) for part in value] * chance.choice([1, 1, 1, 0, 2])
    return value


def odd_json(chance: random.Random, value: object) -> bytes:
    """JSON text with odd values; now and then what Python says and JSON does not."""
    return json.dumps(with_odd_values(chance, value), ensure_ascii=chance.random() < 0.8).encode(
        "utf-8", "surrogatepass"
    )


def hostile(chance: random.Random, value: object) -> bytes:
    """JSON that is odd, broken, or both."""
    data = odd_json(chance, value) if chance.random() < 0.6 else json.dumps(value).encode()
    return broken(chance, data) if chance.random() < 0.6 else data
