"""Reading JSON without losing how it was written: values to look at, and the raw text of their parts.

Strict RFC 8259: no NaN, no Infinity, no byte order mark, UTF-8 only. No I/O.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_INTEGER_DIGITS = 400


class Malformed(ValueError):
    """The text is not JSON; the message says where it goes wrong."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole JSON text, without the white space around it, and its value."""

    text: str
    value: Any


def _integer(digits: str) -> int | str:
    # A value is only looked at here and never written again, so a number too long to be any field of ours
    # may stay text: turning 100,000 digits into an int takes seconds.
    return int(digits) if len(digits) <= _LONGEST_INTEGER_DIGITS else digits


def _no_constant(name: str) -> Any:
    raise Malformed(f"{name} is no JSON number")


_decode = json.JSONDecoder(parse_int=_integer, parse_constant=_no_constant).raw_decode


def parse(body: bytes) -> Parsed:
    """Read the bytes of one JSON value.

    Raises:
        Malformed: they are no UTF-8, or not one JSON value.
    """
    try:
        text = body.decode("utf-8").strip(" \t\n\r")
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 at byte {error.start}") from None
    value, end = _value_at(text, 0)
    _expect_end(text, end)
    return Parsed(text, value)


def members(text: str) -> dict[str, str]:
    """Return the raw text of each member of a JSON object; of equal names the last one counts.

    Raises:
        Malformed: it is not a JSON object.
    """
    found: dict[str, str] = {}
    at = _expect(text, 0, "{")
    while text[at : at + 1] != "}":
        if found:
            at = _expect(text, at, ",")
        name, at = _value_at(text, at)
        if not isinstance(name, str):
            raise Malformed(f"a member's name is no string (before character {at})")
        at = _expect(text, _skip(text, at), ":")
        _, end = _value_at(text, at)
        found[name] = text[at:end]
        at = _skip(text, end)
    _expect_end(text, at + 1)
    return found


def elements(text: str) -> list[Parsed]:
    """Return each element of a JSON array.

    Raises:
        Malformed: it is not a JSON array.
    """
    found: list[Parsed] = []
    at = _expect(text, 0, "[")
    while text[at : at + 1] != "]":
        if found:
            at = _expect(text, at, ",")
        value, end = _value_at(text, at)
        found.append(Parsed(text[at:end], value))
        at = _skip(text, end)
    _expect_end(text, at + 1)
    return found


def _value_at(text: str, at: int) -> tuple[Any, int]:
    try:
        return _decode(text, at)
    except json.JSONDecodeError as error:
        raise Malformed(f"{error.msg} (at character {error.pos})") from None
    except RecursionError:
        raise Malformed("nested too deeply") from None


def _expect(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise Malformed(f"{sign!r} expected (at character {at})")
    return _skip(text, at + 1)


def _expect_end(text: str, at: int) -> None:
    if at != len(text):
        raise Malformed(f"more than one JSON value (at character {at})")


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at
