"""Answers of the local HTTP: JSON, and problem+json (RFC 9457) in the words of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from outbox.errors import OutboxError, StoreBusy, StoreClosed, StoreFull, Unavailable, UsageError

JSON = "application/json"
PROBLEM = "application/problem+json"

_OF_USAGE = {
    "unknown_agent": 404,
    "unknown_event": 404,
    "not_served": 404,
    "too_slow": 408,
    "too_large": 413,
    "media_type": 415,
}


def answer(value: Any, status: int = 200) -> Response:
    """A JSON value, in ASCII: whatever a text holds, lone surrogates too, it can be sent."""
    return Response(json.dumps(value).encode("ascii"), status, media_type=JSON)


def problem(
    status: int, code: str, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    """What went wrong: `code` is stable, `detail` is for a person."""
    title = HTTPStatus(status).phrase
    value = {"type": "about:blank", "title": title, "status": status, "code": code, "detail": detail, **more}
    return Response(json.dumps(value).encode("ascii"), status, headers, media_type=PROBLEM)


def problem_of(error: OutboxError) -> Response:
    """The answer to a request that failed as a whole."""
    return problem(status_of(error), error.code, str(error))


def fault(error: Exception) -> Response:
    """The answer to a request that met a fault of ours."""
    return problem(
        500,
        "fault",
        f"A fault of this program: {type(error).__name__}. What is on disk stays as it is. The log of the "
        "daemon says more.",
    )


def error_data(error: OutboxError) -> dict[str, Any]:
    """The result of one event, or one dead letter, of several."""
    return {"error": {"code": error.code, "message": str(error)}}


def status_of(error: OutboxError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, UsageError):
        return _OF_USAGE.get(error.code, 422)
    if isinstance(error, StoreFull):
        return 507
    return 503 if isinstance(error, StoreBusy | StoreClosed | Unavailable) else 500
