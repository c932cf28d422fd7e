"""Hook input as JSON: read strictly, compared by value, and changed string by string. Pure.

What is kept of a hook's JSON is its own text, so that a number of any size and every null travel along.
"""

from __future__ import annotations

import json
from json.decoder import scanstring  # type: ignore[attr-defined] # public, only its stub is missing

from outbox.blake2 import blake2b
from outbox.errors import UsageError
from outbox.json_text import dump, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_EXACT_DIGITS = 15  # a double holds that many (IEEE 754)
_MOST_DIGITS = 1_000  # int() takes time that grows with the square of them
_OTHERS = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
_BLANKS = str.maketrans("", "", " \t\r\n")


class Number(str):
    """The text of a number that neither an int nor a float holds exactly."""

    __slots__ = ()


def decoded(data: bytes) -> str:
    """The text of what a runner gave; a byte order mark goes, a byte that is no UTF-8 becomes U+FFFD."""
    return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")


def parsed(text: str) -> dict[str, Any]:
    """The one object that the text is (RFC 8259; of a name given twice the last value counts).

    Raises UsageError for anything else, NaN and Infinity included.
    """
    try:
        value = _decode(text)
    except RecursionError:
        raise UsageError("nested too deep to be read", code="too_deep") from None
    except ValueError as error:
        raise UsageError(f"not JSON: {error}" if text.strip() else "no input", code="not_json") from None
    if not isinstance(value, dict):
        raise UsageError(f"a JSON object is expected, not {_OTHERS.get(type(value), 'a number')}")
    return value


def digest(*values: object) -> str:
    """32 hex digits that stand for these JSON values: order of keys, blanks and escapes do not count.

    Raises UsageError for what is nested too deep.
    """
    try:
        return blake2b(_canonical(values).encode(), digest_size=16).hexdigest()
    except RecursionError:
        raise UsageError("nested too deep to be read", code="too_deep") from None


def json_text(value: object) -> str:
    """The value as compact JSON text; a number beyond ints and floats stands as a string."""
    return dump(value)


def with_strings(text: str, change: Callable[[str], str]) -> str:
    """The JSON text with each of its strings, names included, replaced by what `change` makes of it.

    A string that stays equal keeps its own text, and so does all else but the blanks between.
    """
    pieces, position = [], 0
    while (start := text.find('"', position)) >= 0:
        value, end = scanstring(text, start + 1)
        changed = change(value)
        pieces.append(text[position:start].translate(_BLANKS))
        pieces.append(text[start:end] if changed == value else quoted(changed))
        position = end
    pieces.append(text[position:].translate(_BLANKS))
    return "".join(pieces)


def string_sizes(text: str) -> list[int]:
    """How many characters of the JSON text each of its strings takes, quotes included."""
    sizes, position = [], 0
    while (start := text.find('"', position)) >= 0:
        position = scanstring(text, start + 1)[1]
        sizes.append(position - start)
    return sizes


def one_line(text: str) -> str:
    """The same without line ends between its parts: an event may become a line of an export."""
    if "\n" not in text and "\r" not in text:
        return text.strip()
    return with_strings(text, lambda string: string)


def at(value: object, path: str) -> Any:
    """What stands at `a/b/0/c` inside a JSON value; None when nothing does."""
    for step in path.split("/"):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _integer(text: str) -> object:
    return int(text) if len(text) <= _MOST_DIGITS else Number(text)


def _fraction(text: str) -> object:
    """1.50, 1.5 and 15e-1 are one value; digits that a float would lose are kept as text."""
    if len(text) > _EXACT_DIGITS:
        return Number(text)
    value = float(text)
    if value in (float("inf"), float("-inf")):
        return Number(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


_decode = json.JSONDecoder(parse_int=_integer, parse_float=_fraction, parse_constant=_no_number).decode
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), check_circular=False).encode
