"""Which era of MCP an endpoint speaks, and whether an answer ends a session or an era. Pure.

Stateless is revision 2026-07-28; before it a session was opened with `initialize`. What is neither trouble of
the relay's nor proof of the stateless era points to sessions: such servers answer what they do not know as
they like.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relay_client.mcp import PROTOCOL_VERSION, SESSION_VERSIONS, answer_to
from relay_client.mcp_params import Mirror, mirrors_of
from relay_client.problem import KNOWN_CODES, NOT_JSON, is_empty, parse_json, read_problem
from relay_client.reading import Answer

REFUSALS = frozenset({"-32601", "-32602"})  # JSON-RPC: no such method; invalid params
HEADER_MISMATCH = "-32020"
MISSING_CAPABILITY = "-32021"
UNSUPPORTED_VERSION = "-32022"
OF_STATELESS = frozenset({HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION})
INTERNAL_ERROR = "-32603"

_TROUBLE = frozenset({401, 403, 408, 425, 429})  # 4xx that say nothing about what is spoken


class Era(enum.StrEnum):
    """How an endpoint is spoken to."""

    STATELESS = "stateless"
    SESSIONS = "sessions"


class Lesson(enum.Enum):
    """What the answer to a call teaches about the way it was sent; after all but NOTHING it did not run."""

    NOTHING = enum.auto()
    SESSION_GONE = enum.auto()  # the same call goes again in a new one
    OTHER_ERA = enum.auto()  # so it seems: it has to be found out again
    OTHER_FIELDS = enum.auto()  # the tool wants other arguments mirrored than was known


@dataclass(frozen=True, slots=True)
class ToolPage:
    """One page of `tools/list`: what each tool wants mirrored, and where the next page begins."""

    mirrors: Mapping[str, Mirror]
    next_cursor: str | None = None


def read_tool_page(answer: Answer) -> ToolPage | None:
    """The tools that an answer to `tools/list` names; None when it is no result."""
    message = message_of(answer)
    if message is None or "result" not in message:
        return None
    result = message["result"] if isinstance(message["result"], dict) else {}
    cursor = result.get("nextCursor")
    return ToolPage(mirrors_of(result.get("tools")), cursor if isinstance(cursor, str) and cursor else None)


def era_shown_by_list(answer: Answer) -> Era | None:
    """What the answer to a stateless `tools/list` points to; None: it is about the relay, not the era.

    SESSIONS has to be proven by `initialize`.
    """
    if read_tool_page(answer) is not None:
        return Era.STATELESS
    if code_of(answer) in OF_STATELESS:
        return Era.SESSIONS if speaks_sessions_only(answer) else None
    return Era.SESSIONS if is_no(answer) else None


def is_no(answer: Answer) -> bool:
    """Whether an answer to `tools/list` or `initialize` says that this is not spoken here.

    A 4xx that is no trouble, or a 2xx that is no result though it is JSON or empty. Everything else (5xx, a
    page, silence, Retry-After) says nothing of it.
    """
    if answer.status is None or _is_trouble(answer):
        return False
    if 400 <= answer.status < 500:
        return True
    plain = is_empty(answer.body) or parse_json(answer.body) is not NOT_JSON
    return 200 <= answer.status < 300 and plain and not answer.cut and code_of(answer) != INTERNAL_ERROR


def speaks_sessions_only(answer: Answer) -> bool:
    """Whether an answer lists the revisions that are spoken, and those with sessions are all we share."""
    message = message_of(answer)
    error = message.get("error") if message else None
    data = error.get("data") if isinstance(error, dict) else None
    listed = data.get("supported") if isinstance(data, dict) else None
    versions = listed if isinstance(listed, list) else []
    return PROTOCOL_VERSION not in versions and any(version in versions for version in SESSION_VERSIONS)


def lesson_of(answer: Answer, *, in_session: bool, worked: bool) -> Lesson:
    """What the answer to a call teaches; `worked` says whether a call was answered in this session before.

    A session is gone after a 404; or a 400 where it worked, unless that tells of a fault in the tool.
    """
    code = code_of(answer) if answer.status == 400 else ""
    if in_session:
        if answer.status == 404 or (answer.status == 400 and worked and code != INTERNAL_ERROR):
            return Lesson.SESSION_GONE
        return Lesson.OTHER_ERA if speaks_other_era(answer) or code in OF_STATELESS else Lesson.NOTHING
    if speaks_other_era(answer):
        return Lesson.OTHER_ERA
    return Lesson.OTHER_FIELDS if code == HEADER_MISMATCH else Lesson.NOTHING


def speaks_other_era(answer: Answer) -> bool:
    """Whether the answer to a call says that the endpoint speaks the other era (by now).

    Any 4xx but trouble and 409, unless the code in it shows that the request was understood.
    """
    if answer.status is None or not 400 <= answer.status < 500 or answer.status == 409 or _is_trouble(answer):
        return False
    code = code_of(answer)
    if code == UNSUPPORTED_VERSION and speaks_sessions_only(answer):
        return True
    return code not in REFUSALS | OF_STATELESS | {INTERNAL_ERROR} | KNOWN_CODES


def _is_trouble(answer: Answer) -> bool:
    return answer.status in _TROUBLE or "retry-after" in answer.headers


def code_of(answer: Answer) -> str:
    """The error code in an answer, of JSON-RPC or the relay's own; "" without one."""
    return read_problem(answer.body, parse_json(answer.body), {}).code


def message_of(answer: Answer) -> Mapping[str, Any] | None:
    """The JSON-RPC answer in it."""
    return None if answer.cut else answer_to(parse_json(answer.body), answer.request_id)
