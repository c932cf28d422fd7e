"""What the body of an answer says: whether it is JSON, and the error in it, in whichever form. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_JSON: Any = object()

REFUSAL_CODES = frozenset({"unknown_recipient", "validation_failed", "key_reused"})
KNOWN_CODES = REFUSAL_CODES | {"duplicate", "in_progress", "invalid_token", "insufficient_scope"}

_LONGEST_INTEGER_DIGITS = 400
_TITLE = re.compile(r"<title[^>]*>(.*?)</title", re.IGNORECASE | re.DOTALL)
_CHALLENGE = re.compile(r'\berror="([^"]*)"')
_CHALLENGE_TEXT = re.compile(r'\berror_description="([^"]*)"')
# Problem types that only repeat the status: "about:blank", links into RFC 9110, pages about status codes.
_TYPE_OF_STATUS = re.compile(r"blank|(?:section-)?[0-9.]+|rfc[0-9]+.*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """The relay's own words: its error code and its sentence, each "" without one."""

    code: str = ""
    message: str = ""


def parse_json(body: bytes | str) -> Any:
    """The JSON value of `body`, or NOT_JSON. An integer of more than 400 digits comes as its digits.

    Bytes are UTF-8 (RFC 8259, section 8.1), and nothing is guessed: in UTF-16 no token would be found.
    """
    try:
        text = body if isinstance(body, str) else body.decode("utf-8-sig", "surrogatepass")
        return _DECODER.decode(text)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return NOT_JSON


def is_empty(body: bytes) -> bool:
    """Whether there is nothing in it but white space."""
    return not body or body.isspace()


def error_of(value: Any) -> Any:
    """The top-level `error` of a JSON value; None without one. null, false and "" are none."""
    return (value.get("error") or None) if isinstance(value, dict) else None


def read_problem(body: bytes, value: Any, headers: Mapping[str, str]) -> Problem:
    """Read an error: problem+json (RFC 9457), `{"error": …}`, `{"code", "message"}`, a page, or plain text.

    `value` is `parse_json(body)`. Where the body has no code, that of a Bearer challenge counts (RFC 6750).
    """
    problem = _of_json(value) if value is not NOT_JSON else Problem(message=_of_text(body))
    challenge = headers.get("www-authenticate", "")
    if not problem.code and (found := _CHALLENGE.search(challenge)):
        described = _CHALLENGE_TEXT.search(challenge)
        return Problem(found[1], problem.message or (described[1] if described else ""))
    return problem


def _of_json(value: Any) -> Problem:
    if not isinstance(value, dict):
        return Problem(message=value if isinstance(value, str) else "")
    error = error_of(value)
    if isinstance(error, dict):
        return Problem(_code(error.get("code")), _first_text(error, "message", "detail", "title"))
    code = _code(value.get("code")) or _code_of_type(value.get("type"))
    if isinstance(error, str):
        described = _first_text(value, "error_description", "message", "detail")
        if error in KNOWN_CODES:
            return Problem(error, described)
        return Problem(code, f"{error}: {described}" if described else error)
    return Problem(code, _first_text(value, "detail", "message", "title"))


def _code(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return str(value)


def _code_of_type(value: Any) -> str:
    """The code in a problem's `type`: the last part of the URI, spelled as the contract spells codes."""
    if not isinstance(value, str):
        return ""
    last = re.split(r"[/#:]", value.rstrip("/#"))[-1]
    return "" if _TYPE_OF_STATUS.fullmatch(last) else last.lower().replace("-", "_")


def _first_text(value: Mapping[str, Any], *names: str) -> str:
    return next((text for name in names if isinstance(text := value.get(name), str) and text), "")


def _of_text(body: bytes) -> str:
    text = body.decode("utf-8", "replace").strip()
    if not text.startswith("<"):
        return text
    title = _TITLE.search(text)
    return f'an HTML page, "{" ".join(title[1].split())}"' if title else "an HTML page"


def _integer(digits: str) -> int | str:
    # Turning many thousand digits into an int takes seconds, and Python refuses beyond 4,300.
    return int(digits) if len(digits) <= _LONGEST_INTEGER_DIGITS else digits


_DECODER = json.JSONDecoder(parse_int=_integer)  # to make one costs more than to read a short answer
