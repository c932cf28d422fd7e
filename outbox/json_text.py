"""JSON as text: where its parts stand, and how to change one part while the rest keeps its own text.

Nothing in here makes a value into text again that came as text: numbers, escapes and key order stay as given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from json.decoder import scanstring  # type: ignore[attr-defined] # public, only its stub is missing
from json.encoder import encode_basestring

from outbox.errors import UsageError
from outbox.printable import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _Read = TypeVar("_Read")

Member = tuple[str, int, int, int]
"""One member of an object: its name, and where it starts, where its value starts, and where it ends."""

# Texts, compiled when first used: whoever hands over values, as a hook does, has no JSON text read in here.
_SIMPLE_NAME = r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*'
_AFTER_VALUE = r"[ \t\n\r]*([,}\]])[ \t\n\r]*"
_CONSTANT_OR_STRING = r'(?s)"[^"\\]*(?:\\.[^"\\]*)*"|(NaN|-?Infinity)'
_ESCAPED_LETTER = r"\\u00[4-7]"
_SURROGATES = "[\ud800-\udfff]"

_TIGHT_OBJECT = '{"'
_BLANKS = (" ", "\t", "\n", "\r")
_BLANK = b" \t\r"
_BRACKETS = b"[{]}"
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\x01\xff\xff")
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


class _NotANumberError(ValueError):
    """NaN or Infinity where a value should be: Python reads them, JSON has none (RFC 8259, section 6)."""


def _no_number(name: str) -> Any:
    raise _NotANumberError(name)


# Numbers stay text: nothing is computed with them, and 5000 digits or 1e400 must get through.
_decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_number)
_raw_decode = _decoder.raw_decode
_scan = _decoder.scan_once  # type: ignore[attr-defined] # as raw_decode, but says StopIteration for no value
_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def members(text: str) -> list[Member]:
    """The members, in order and with duplicates, of the one object that `text` consists of.

    Raises:
        UsageError: the text is not strict JSON (RFC 8259), with the column; or is nested too deep to be read.
    """
    return _reading(_members, text)


def elements(text: str) -> list[str]:
    """The texts of the elements of the one array that `text` consists of; raises UsageError as `members`."""
    return _reading(_elements, text)


def last_values(text: str) -> dict[str, str]:
    """The text of each member's value; of equal names the last one counts. Raises UsageError as `members`."""
    return {name: text[start:end] for name, _, start, end in members(text)}


def with_members(text: str, values: Mapping[str, str | None]) -> str:
    """The object with these members: in the place of all equally named ones, else at the end.

    The values are JSON texts; None removes the member. All others keep their text, duplicates among them too.
    """
    missing = dict(values)
    pieces = []
    for name, start, _, end in members(text):
        if name not in values:
            pieces.append(text[start:end])
        elif (value := missing.pop(name, None)) is not None:
            pieces.append(f"{quoted(name)}:{value}")
    pieces += [f"{quoted(name)}:{value}" for name, value in missing.items() if value is not None]
    return f"{{{','.join(pieces)}}}"


def may_name(text: str, first: str, second: str) -> bool:
    """Whether one of two quoted names of ASCII letters can name a member somewhere; False is certain."""
    named = first in text or second in text
    return named or ("\\u00" in text and re.search(_ESCAPED_LETTER, text) is not None)


def text_value(text: str) -> str | None:
    """The string that this JSON text is; None when it is another value."""
    return scanstring(text, 1)[0] if text.startswith('"') else None


def plain_value(text: str, name: str) -> Any:
    """The Python value of a JSON text; raises UsageError, with `name`, for too many digits."""
    if text.startswith('"'):
        return scanstring(text, 1)[0]
    try:
        return json.loads(text)
    except ValueError:
        raise UsageError(f"{name} has a number with too many digits") from None


def quoted(text: str) -> str:
    """A string as JSON; lone surrogates become escapes, so that the result can always be UTF-8."""
    string = encode_basestring(text)
    return string if string.isascii() else _escape_surrogates(string)


def dump(value: object, name: str = "payload") -> str:
    """Any JSON value as compact JSON text that can be UTF-8.

    Raises:
        UsageError: it holds something that is no JSON value; the message says where, `name` being its root.
    """
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _undumpable(value, name, error) from None
    return text if text.isascii() else _escape_surrogates(text)


def deeper_than(text: str, levels: int) -> bool:
    """Whether brackets stand inside each other more than `levels` deep; the text must be JSON."""
    if text.count("[") + text.count("{") <= levels:
        return False
    data = text.encode().replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(data.split(b'"')[::2])
    steps = memoryview(outside_strings.translate(_STEPS, _ALL_BUT_BRACKETS)).cast("b")
    return max(accumulate(steps), default=0) > levels


def split_lines(chunks: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | UsageError]]:
    """Lines of JSON text with their numbers, from 1; blank ones are counted and passed over.

    Only LF ends a line (U+2028 and U+0085 may stand in JSON strings); a CR before it and a byte order mark at
    the very start are dropped. A line longer than `max_line_bytes` is one UsageError, and never in memory.
    """
    lines = Lines(max_line_bytes)
    for chunk in chunks:
        yield from lines.feed(chunk)
    yield from lines.end()


class Lines:
    """`split_lines` for text that comes by and by."""

    def __init__(self, max_line_bytes: int) -> None:
        """At the start of the first line."""
        self._most = max_line_bytes
        self._number = 1
        self._held: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes | UsageError]]:
        """The lines that end in this chunk."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._held.append(part)
            yield from _line(self._number, self._held, self._size + len(part), self._most)
            self._number, self._held, self._size = self._number + 1, [], 0
        self._held.append(rest)
        self._size += len(rest)
        if self._size > self._most:
            self._held.clear()

    def end(self) -> Iterator[tuple[int, bytes | UsageError]]:
        """The last line, if it did not end."""
        return _line(self._number, self._held, self._size, self._most)


def _line(
    number: int, parts: list[bytes], size: int, max_bytes: int
) -> Iterator[tuple[int, bytes | UsageError]]:
    if size > max_bytes:
        yield number, UsageError(f"the line is longer than {max_bytes:,} bytes", code="too_large")
        return
    line = b"".join(parts)
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    line = line.removesuffix(b"\r")
    if line.strip(_BLANK):
        yield number, line


def _reading(read: Callable[[str], _Read], text: str) -> _Read:
    try:
        return read(text)
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:].rstrip(": ")
        reason = reason.removesuffix(" at").removesuffix(" starting")
        raise _not_json(reason, text, error.pos) from None
    except StopIteration as stop:
        raise _not_json("expecting value", text, stop.value) from None
    except _NotANumberError as error:
        position = next(found.start() for found in re.finditer(_CONSTANT_OR_STRING, text) if found[1])
        raise _not_json(f"{error} is no JSON number", text, position) from None
    except RecursionError:
        raise UsageError("nested too deep to be read", code="too_deep") from None


def _not_json(reason: str, text: str, position: int) -> UsageError:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    where = f"column {column}" if line == 1 else f"line {line}, column {column}"
    return UsageError(f"not JSON: {reason} ({where})", code="not_json")


def _members(text: str) -> list[Member]:
    found: list[Member] = []
    simple_name, after_value = _match(_SIMPLE_NAME), _match(_AFTER_VALUE)
    position = _opened(text, "{")
    if text.startswith("}", position):
        _closed(text, position + 1)
        return found
    while True:
        simple = simple_name(text, position)
        name, value = (simple[1], simple.end()) if simple else _name(text, position)
        _, end = _scan(text, value)
        found.append((name, position, value, end))
        mark = after_value(text, end)
        if mark is None or mark[1] == "]":
            raise json.JSONDecodeError("Expecting ',' or '}'", text, _skip_blanks(text, end))
        position = mark.end()
        if mark[1] == "}":
            _closed(text, position)
            return found


def _elements(text: str) -> list[str]:
    found: list[str] = []
    after_value = _match(_AFTER_VALUE)
    position = _opened(text, "[")
    if text.startswith("]", position):
        _closed(text, position + 1)
        return found
    while True:
        _, end = _scan(text, position)
        found.append(text[position:end])
        mark = after_value(text, end)
        if mark is None or mark[1] == "}":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, _skip_blanks(text, end))
        position = mark.end()
        if mark[1] == "]":
            _closed(text, position)
            return found


@cache
def _match(pattern: str) -> Callable[[str, int], re.Match[str] | None]:
    return re.compile(pattern).match


def _opened(text: str, bracket: str) -> int:
    if text.startswith(_TIGHT_OBJECT) and bracket == "{":
        return 1
    start = _skip_blanks(text, 0)
    if not text.startswith(bracket, start):
        _raw_decode(text, start)  # what is no JSON at all is said first
        raise UsageError(f"a JSON {'object' if bracket == '{' else 'array'} is expected")
    return _skip_blanks(text, start + 1)


def _name(text: str, position: int) -> tuple[str, int]:
    if not text.startswith('"', position):
        raise json.JSONDecodeError("Expecting a name in double quotes", text, position)
    name, end = scanstring(text, position + 1)
    colon = _skip_blanks(text, end)
    if not text.startswith(":", colon):
        raise json.JSONDecodeError("Expecting ':'", text, colon)
    return name, _skip_blanks(text, colon + 1)


def _closed(text: str, end: int) -> None:
    if end != len(text) and _skip_blanks(text, end) != len(text):
        raise json.JSONDecodeError("Extra data", text, _skip_blanks(text, end))


def _skip_blanks(text: str, position: int) -> int:
    while text.startswith(_BLANKS, position):
        position += 1
    return position


def _escape_surrogates(text: str) -> str:
    return re.sub(_SURROGATES, lambda found: f"\\u{ord(found[0]):04x}", text)


def _undumpable(value: object, name: str, error: Exception) -> UsageError:
    if isinstance(error, RecursionError):
        return UsageError(f"{name} is nested too deep, or holds itself", code="too_deep")
    try:
        where, what = next(_faults(value, name), (name, str(error)))
    except RecursionError:
        where, what = name, str(error)
    return UsageError(f"{where}: {what}", code="not_json")


def _faults(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key is not None and not isinstance(key, str | int | float):
                yield path, f"a key is a {type(key).__name__}, which is no JSON name"
            yield from _faults(item, f"{path}.{printable(key[:40]) if isinstance(key, str) else key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _faults(item, f"{path}[{index}]")
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):  # noqa: PLR0124 - NaN differs from itself
            yield path, f"{value} is no JSON number"
    elif value is not None and not isinstance(value, str | int):
        yield path, f"a {type(value).__name__} is no JSON value"
