"""How a message fits into what a payload may be: its longest strings are cut, each with a mark. Pure."""

from __future__ import annotations

from outbox.capture.hook_json import string_sizes, with_strings
from outbox.json_text import quoted
from outbox.text_cut import cut_characters

_BODY_SHARE = 4  # a body may fill a quarter; the rest is for the hook's JSON, which holds the same text
_MOST_TRIES = 8
_MOST_CHAR_BYTES = 6  # \u0000


def size_bytes(text: str) -> int:
    """How many bytes of UTF-8 a JSON text has."""
    return len(text) if text.isascii() else len(text.encode())


def fitting(body: str, hook: str, max_bytes: int) -> tuple[str, str, bool]:
    """Body and the hook's JSON text, together at most about `max_bytes` of JSON, and whether one was cut."""
    if len(body) + len(hook) <= max_bytes and size_bytes(quoted(body)) + size_bytes(hook) <= max_bytes:
        return body, hook, False
    body = _cut_string(body, max_bytes // _BODY_SHARE)
    return body, _cut_strings(hook, max_bytes - size_bytes(quoted(body))), True


def _cut_strings(text: str, max_bytes: int) -> str:
    """The JSON text with its longest strings cut to one length; where that fails, all of it as one string."""
    if size_bytes(text) <= max_bytes:
        return text
    sizes = string_sizes(text)
    most = _even_length(sizes, len(text), max_bytes)
    for _ in range(_MOST_TRIES):
        limit = most
        shorter = with_strings(text, lambda string: _cut_string(string, limit))  # noqa: B023 - used at once
        if size_bytes(shorter) <= max_bytes:
            return shorter
        most = most * 2 // 3
    return quoted(_cut_string(text, max_bytes))


def _even_length(sizes: list[int], whole: int, wanted: int) -> int:
    """The length to which the longest strings have to go for the whole to shrink to what is wanted."""
    too_much, count = whole - wanted, 0
    ordered = sorted(sizes, reverse=True)
    for index, size in enumerate(ordered):
        count, below = index + 1, ordered[index + 1] if index + 1 < len(ordered) else 0
        if too_much <= (size - below) * count:
            return max(0, size - -(-too_much // count))
        too_much -= (size - below) * count
    return 0


def _cut_string(string: str, max_bytes: int) -> str:
    """The string, cut so that as JSON it has at most `max_bytes`; a mark alone may have more."""
    if len(string) * _MOST_CHAR_BYTES < max_bytes:
        return string
    cut, keep = string[: max_bytes + 1], len(string)  # no character has less than a byte
    while (size := size_bytes(quoted(cut))) > max_bytes and keep:
        keep = min(keep - 1, len(cut) * max_bytes // size)
        cut = _cut_characters(string, keep)
    return cut


def _cut_characters(string: str, max_chars: int) -> str:
    """`cut_characters`; but what is ASCII stays so: all later work on millions of characters is quicker."""
    if not string.isascii():
        return cut_characters(string, max_chars)
    marker = f"... [cut by the outbox: {len(string):,} characters in all]"
    if len(marker) > max_chars // 2:
        marker = "..."
    end = max(max_chars - len(marker), 0)
    return string[: end - (string[end - 1 : end + 1] == "\r\n")] + marker
