"""One request as the relay reads it: its bytes, and what the contract's headers say.

No I/O: reading the socket is the app's part, judging a body belongs to the calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from relay_client.reference import json_text

_COUNT = re.compile(r"[0-9]{1,18}")
_QUOTED_KEY = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')


class Invalid(ValueError):
    """A field or header is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One request. `headers` have lower-case names; `body` is whole; `content` is what it says as JSON."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    content: json_text.Parsed | json_text.Malformed

    @property
    def value(self) -> Any:
        """The body's JSON value, None where it is no JSON."""
        return None if isinstance(self.content, json_text.Malformed) else self.content.value

    def parsed(self) -> json_text.Parsed:
        """Return the body's text and value.

        Raises:
            Malformed: the body is no JSON.
        """
        if isinstance(self.content, json_text.Malformed):
            raise self.content
        return self.content

    @property
    def agent(self) -> str:
        """Whose events these are, decoded; "" when the header is absent."""
        return unquote_to_bytes(self.headers.get("outbox-agent", "")).decode("utf-8", "replace")

    @property
    def stream(self) -> str | None:
        """The UUID of the outbox file they come from."""
        return self.headers.get("outbox-stream")

    @property
    def token(self) -> str | None:
        """The bearer token (RFC 6750 2.1), None without one."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" and token.strip() else None

    def count(self, header: str) -> int | None:
        """Return the whole number a header holds, None without the header.

        Raises:
            Invalid: it is no whole number.
        """
        value = self.headers.get(header.lower())
        if value is None:
            return None
        if not _COUNT.fullmatch(value):
            raise Invalid(f"{header}: must be a whole number")
        return int(value)

    def header_key(self) -> str | None:
        """Return the `Idempotency-Key`, as a structured-field string (RFC 9651 3.3.3) or bare.

        Raises:
            Invalid: it starts with a quote and is no such string.
        """
        value = self.headers.get("idempotency-key")
        if value is None or not value.startswith('"'):
            return value
        quoted = _QUOTED_KEY.fullmatch(value)
        if quoted is None:
            raise Invalid("Idempotency-Key: must be a quoted string (RFC 9651) or bare")
        return re.sub(r"\\(.)", r"\1", quoted.group(1))


def is_key(value: object) -> bool:
    """Tell whether a value can be an idempotency key: 1 to 512 visible ASCII characters."""
    return isinstance(value, str) and 1 <= len(value) <= 512 and all("!" <= sign <= "~" for sign in value)
