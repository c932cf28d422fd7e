"""Where a text that is too long may be cut: between characters as a reader sees them, or between code points.

Characters are counted as code points; a half of a surrogate pair that stands alone is one.
"""

from __future__ import annotations

from collections.abc import Iterator

_MARKS = frozenset(("Mn", "Me", "Mc"))
# Belong to the character before them though no category says so (UAX #29, GB6 to GB9a): Thai and Lao SARA AM,
# Hangul vowels and finals, joiners, half-width sound marks, skin tones, tags.
_ALSO_EXTENDING = (
    (0x0E33, 0x0E33),
    (0x0EB3, 0x0EB3),
    (0x1160, 0x11FF),
    (0x200C, 0x200D),
    (0xD7B0, 0xD7FF),
    (0xFF9E, 0xFF9F),
    (0x1F3FB, 0x1F3FF),
    (0xE0020, 0xE007F),
)
_JOINER = "\u200d"


def cut_characters(text: str, max_chars: int) -> str:
    """The text cut to at most `max_chars` code points, a visible marker among them.

    No character is parted from its combining marks, variation selectors, skin tone or joined parts, no flag
    from its second half, no CR from its LF. Where the limit is too small for a sentence the marker is "…".
    """
    marker = f"… [cut by the outbox: {len(text):,} characters in all]"
    if len(marker) > max_chars // 2:
        marker = "…"
    end = max(max_chars - len(marker), 0)
    while 0 < end < len(text) and _is_inside_a_character(text, end):
        end -= 1
    return text[:end] + marker


def cut_utf8(text: str, max_bytes: int) -> tuple[str, int]:
    """The text cut to at most `max_bytes` of UTF-8, marker included, and how many bytes are gone."""
    data = text.encode("utf-8", "surrogatepass")
    marker = f"… [cut by the outbox: {len(data):,} bytes in all]"
    end = _code_point_start(data, max_bytes - len(marker.encode()))
    return data[:end].decode("utf-8", "surrogatepass") + marker, len(data) - end


def utf8_pieces(text: str, max_bytes: int) -> Iterator[str]:
    """The text in pieces of at most `max_bytes` of UTF-8, which joined are the text; "" is one piece."""
    data = text.encode("utf-8", "surrogatepass")
    start = 0
    while len(data) - start > max_bytes:
        end = _code_point_start(data, start + max_bytes)
        yield data[start:end].decode("utf-8", "surrogatepass")
        start = end
    yield data[start:].decode("utf-8", "surrogatepass")


def _code_point_start(data: bytes, at: int) -> int:
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _is_inside_a_character(text: str, at: int) -> bool:
    before, after = text[at - 1], text[at]
    if after.isascii():
        return before + after == "\r\n"
    import unicodedata  # noqa: PLC0415 - large, and most texts are cut nowhere

    if before == _JOINER or unicodedata.category(after) in _MARKS:
        return True
    if any(first <= ord(after) <= last for first, last in _ALSO_EXTENDING):
        return True
    if _is_high_half(before) and "\udc00" <= after <= "\udfff":
        return True
    return _is_regional(after) and _regionals_before(text, at) % 2 == 1


def _is_high_half(char: str) -> bool:
    return "\ud800" <= char <= "\udbff"


def _is_regional(char: str) -> bool:
    return "\U0001f1e6" <= char <= "\U0001f1ff"


def _regionals_before(text: str, at: int) -> int:
    start = at
    while start > 0 and _is_regional(text[start - 1]):
        start -= 1
    return at - start
