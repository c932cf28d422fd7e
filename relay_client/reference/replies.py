"""What the relay answers: plain values, and the forms an error takes on the wire (RFC 9457, RFC 6750)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

JSON = "application/json"
PROBLEM_JSON = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP answer."""

    status: int
    body: bytes = b""
    media_type: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


def json_bytes(value: Any) -> bytes:
    """Return compact JSON in ASCII, so that whatever text is inside arrives as it is."""
    return json.dumps(value, separators=(",", ":")).encode()


def json_reply(status: int, value: Any) -> Reply:
    """Return an answer with a JSON body."""
    return Reply(status, json_bytes(value), JSON)


def title_of(status: int) -> str:
    """Return the usual phrase for a status, also for one nobody registered."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"Status {status}"


def problem(
    status: int, code: str, detail: str, *, headers: tuple[tuple[str, str], ...] = (), **members: Any
) -> Reply:
    """Return an error as RFC 9457 wants it, with the contract's `code` beside the standard members."""
    value = {"type": "about:blank", "title": title_of(status), "status": status, "detail": detail}
    return Reply(status, json_bytes({**value, "code": code, **members}), PROBLEM_JSON, headers)


def unauthorized(detail: str, *, presented: bool) -> Reply:
    """Return a 401; RFC 6750 3.1 names an error only where a token was presented."""
    challenge = 'Bearer realm="relay"' + (', error="invalid_token"' if presented else "")
    return problem(401, "invalid_token", detail, headers=(("WWW-Authenticate", challenge),))


def insufficient_scope(detail: str) -> Reply:
    """Return a 403: the token is good, but not for this."""
    challenge = 'Bearer realm="relay", error="insufficient_scope"'
    return problem(403, "insufficient_scope", detail, headers=(("WWW-Authenticate", challenge),))
