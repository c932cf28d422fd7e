"""What a relay wrote, made fit to keep and to show: no line breaks, terminal codes or turned-round text."""

from __future__ import annotations

import re

DETAIL_CHARS = 300
EXCERPT_BYTES = 2048

# A terminal's control sequences (ECMA-48: CSI, then the string ones that end in BEL or ST), whole. Each
# leaves a blank: a token that one was put into, and not found therefore, must not come together again.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[P\]X^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
# C0, DEL and C1, line and paragraph separators, and what changes the direction of text (UAX 9).
_UNSAFE = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
_UNSAFE_IN_LINE = re.compile(f"[\t\n{_UNSAFE}]+")
_UNSAFE_IN_TEXT = re.compile(f"[{_UNSAFE}]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def one_line(text: str, max_chars: int = DETAIL_CHARS) -> str:
    """`text` as one line of at most `max_chars` characters, an ellipsis where more was."""
    text = _SURROGATE.sub("\ufffd", _SEQUENCE.sub(" ", text[: max_chars * 20]))
    text = " ".join(_UNSAFE_IN_LINE.sub(" ", text).split())
    return text if len(text) <= max_chars else text[: max_chars - 1] + "\u2026"


def excerpt(body: bytes, max_bytes: int = EXCERPT_BYTES) -> str:
    """The start of `body` as text of at most `max_bytes` in UTF-8; lines stay, what is no text is marked."""
    text = _SEQUENCE.sub(" ", body[:max_bytes].decode("utf-8", "replace")).replace("\r\n", "\n")
    return cut_bytes(_UNSAFE_IN_TEXT.sub("\ufffd", text), max_bytes)


def cut_bytes(text: str, max_bytes: int) -> str:
    """The start of `text` that fits into `max_bytes` of UTF-8, never half a character."""
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")
