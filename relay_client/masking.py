"""A token that a server repeats, taken out of what it said, however JSON spells it there. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

SHORTEST_TOKEN = 8
"""A shorter token is not looked for: it would be found in words that have nothing to do with it."""

_MARK = b"[token]"


def without_token(body: bytes, token: str | None) -> bytes:
    r"""`body` with `[token]` in the token's place, also where its characters are escapes.

    Many servers write `/` as `\/`, and any character may stand as `\u0041` (RFC 8259, section 7): read as
    JSON, such a text would be the token again.
    """
    if token is None or len(token) < SHORTEST_TOKEN:
        return body
    body = body.replace(token.encode(), _MARK)
    return _spelled(token).sub(_MARK, body) if b"\\" in body else body


def without_token_text(text: str, token: str | None) -> str:
    """The same for text."""
    return without_token(text.encode("utf-8", "surrogatepass"), token).decode("utf-8", "surrogatepass")


@lru_cache(maxsize=8)
def _spelled(token: str) -> re.Pattern[bytes]:
    return re.compile(b"".join(_character(ord(one)) for one in token))


def _character(code: int) -> bytes:
    hexadecimal = b"".join(b"[%c%c]" % (ord(one), ord(one.upper())) for one in f"{code:04x}")
    short = rb"|\\/" if code == ord("/") else rb""
    return rb"(?:%b|\\u%b%b)" % (re.escape(chr(code).encode()), hexadecimal, short)
