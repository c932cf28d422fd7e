"""Text from elsewhere, made safe to print: one line, nothing that steers a terminal or turns the order.

What a relay, a producer or an environment wrote goes through here before a person sees it.
"""

from __future__ import annotations

import re

MASK = "********"

# C0, DEL and C1; the line ends U+2028 and U+2029; marks, embeddings, overrides and isolates of bidirectional
# text (UAX 9); interlinear marks; the byte order mark; lone surrogates, which no stream can encode.
# A text: most processes print nothing from elsewhere, and need not compile it.
_UNPRINTABLE = (
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    r"""`text` with each such character written as an escape (`\n`, `\x1b`, `\u202e`); all else as it was."""
    return re.sub(_UNPRINTABLE, _escape, text)


def has_unprintable(text: str) -> bool:
    """Whether `printable` would change anything."""
    return re.search(_UNPRINTABLE, text) is not None


def quoted(text: str) -> str:
    """`text` in double quotes on one line, as a person would write it in a file of configuration."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
