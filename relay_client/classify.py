"""What an answer means: the outcome table of docs/relay-contract.md, from values to values.

Pure, and no judgement of events: what a meaning costs an event is the caller's decision. How to read it: a
`read_…` function picks the rules for one sort of call; `_sort_of_error` is the table they share.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from relay_client.clean import cut_bytes, excerpt, one_line
from relay_client.mcp import answer_to
from relay_client.mcp_era import (
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    MISSING_CAPABILITY,
    OF_STATELESS,
    REFUSALS,
    UNSUPPORTED_VERSION,
)
from relay_client.problem import (
    NOT_JSON,
    REFUSAL_CODES,
    Problem,
    error_of,
    is_empty,
    parse_json,
    read_problem,
)
from relay_client.reading import Answer, Capabilities, Failure, Reading, Sort
from relay_client.retry_after import parse_retry_after

RESULT_BYTES = 16 * 1024

_BY_STATUS: Mapping[int, Sort] = {
    400: Sort.REFUSED,
    401: Sort.UNAUTHORIZED,
    403: Sort.FORBIDDEN,
    404: Sort.NO_ENDPOINT,
    405: Sort.NO_ENDPOINT,
    408: Sort.BUSY,
    410: Sort.REFUSED,
    413: Sort.TOO_LARGE,
    415: Sort.REFUSED,
    421: Sort.BUSY,
    422: Sort.REFUSED,
    423: Sort.BUSY,
    425: Sort.BUSY,
    429: Sort.BUSY,
    501: Sort.NO_ENDPOINT,
    502: Sort.GATEWAY,
    503: Sort.BUSY,
    504: Sort.GATEWAY,
}
_BY_CODE_IN_2XX: Mapping[str, Sort] = {
    **dict.fromkeys(REFUSAL_CODES, Sort.REFUSED),
    "duplicate": Sort.DUPLICATE,
    "in_progress": Sort.IN_PROGRESS,
    "invalid_token": Sort.UNAUTHORIZED,
    "insufficient_scope": Sort.FORBIDDEN,
}
_RPC_REFUSALS = REFUSALS | {MISSING_CAPABILITY}
_RPC_FAILURES = frozenset({HEADER_MISMATCH, UNSUPPORTED_VERSION, INTERNAL_ERROR})
_OF_AN_EVENT = frozenset({
    Sort.ACCEPTED, Sort.TOOL_ERROR, Sort.REFUSED, Sort.TOO_LARGE, Sort.CONFLICT, Sort.DUPLICATE,
    Sort.IN_PROGRESS,
})  # fmt: skip


class _Heard(NamedTuple):
    """One whole answer, taken apart once."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool
    value: Any
    problem: Problem
    retry_after_ms: int | None

    @property
    def accepts(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_json_or_empty(self) -> bool:
        return not self.cut and (is_empty(self.body) or self.value is not NOT_JSON)


def read_single(answer: Answer, *, now_ms: int, max_retry_after_ms: int) -> Reading:
    """What the answer to one event means.

    A 2xx whose JSON has a top-level `error` is no acceptance: it is read by the code in it where the contract
    knows the code (a refusal, `duplicate`, `in_progress`, `invalid_token`, `insufficient_scope`), and is
    FAILED otherwise. `"error": null`, `false` and `""` are no error.
    """
    if answer.status is None:
        return _without_answer(answer)
    heard = _hear(answer, answer.status, now_ms, max_retry_after_ms)
    return _single(heard)


def read_batch(answer: Answer, count: int, *, now_ms: int, max_retry_after_ms: int) -> Reading:
    """What the answer to a request of `count` messages means.

    ITEMS with one reading a message; ACCEPTED when all were stored; UNCLEAR_BATCH when it cannot be told for
    each one. TOO_LARGE, CONFLICT and REFUSED speak of the batch as a whole: the caller splits it. A top-level
    `error` beside `results` is no acceptance of any.
    """
    if answer.status is None:
        return _without_answer(answer)
    heard = _hear(answer, answer.status, now_ms, max_retry_after_ms)
    if not heard.accepts:
        sort = _sort_of_error(heard)
        if heard.status == 409 and sort is not Sort.IN_PROGRESS:
            sort = Sort.CONFLICT
        return _reading(heard, sort)
    if not heard.is_json_or_empty:
        return _reading(heard, Sort.UNCLEAR_BATCH, "the answer is neither JSON nor empty")
    if error_of(heard.value) is not None or not _has_results(heard.value):
        return _single(heard)
    return _items(heard, count, now_ms, max_retry_after_ms)


def read_archive_chunk(answer: Answer, *, now_ms: int, max_retry_after_ms: int) -> Reading:
    """As `read_single`; `generation` is the archive's, which a 409 for a known key tells too."""
    reading = read_single(answer, now_ms=now_ms, max_retry_after_ms=max_retry_after_ms)
    if reading.sort not in {Sort.ACCEPTED, Sort.DUPLICATE}:
        return reading
    value = parse_json(answer.body)
    archive = value.get("archive") if isinstance(value, dict) else None
    generation = archive.get("generation") if isinstance(archive, dict) else None
    return reading._replace(generation=generation if _is_count(generation) else None)


def read_tool_call(answer: Answer, request_id: str, *, now_ms: int, max_retry_after_ms: int) -> Reading:
    """What the answer to an MCP `tools/call` means; `code` is the JSON-RPC error code as text.

    ACCEPTED and TOOL_ERROR carry the result. LOST is also a 2xx without a readable result: the tool may have
    run. FAILED with -32020 or -32022 is the caller's to mend (other header fields, another version); -32021
    asks for a capability that nobody here has: REFUSED. NO_ENDPOINT is also a 4xx without a JSON-RPC code:
    the endpoint does not speak this era, unless the answer's `era_holds` says that it does.
    """
    if answer.status is None:
        return _without_answer(answer)
    heard = _hear(answer, answer.status, now_ms, max_retry_after_ms)
    message = answer_to(heard.value, request_id)
    if message is not None and "result" not in message:
        heard = heard._replace(problem=read_problem(b"", message, heard.headers))
    if heard.accepts:
        return _tool_answer(heard, message)
    sort = _sort_of_error(heard)
    if sort in {Sort.UNAUTHORIZED, Sort.FORBIDDEN, Sort.BUSY, Sort.REDIRECTED}:
        return _reading(heard, sort)
    code = heard.problem.code
    if answer.status == 400 and code in OF_STATELESS:
        return _reading(heard, _sort_of_rpc_error(code) or sort)._replace(not_run=True)
    return _reading(heard, _sort_of_rpc_error(code) or (sort if answer.era_holds else _of_era(heard, sort)))


def read_preparation(answer: Answer, *, now_ms: int, max_retry_after_ms: int) -> Reading:
    """What it means that this answer to `tools/list`, `initialize` or its like stands before a tool call.

    As `read_tool_call`, but it speaks of no event: what would be a refusal, or settle one, is NO_ENDPOINT.
    """
    read = read_tool_call(answer, answer.request_id, now_ms=now_ms, max_retry_after_ms=max_retry_after_ms)
    unreadable = read.sort is Sort.LOST and answer.status is not None and not answer.cut
    if unreadable or read.sort in _OF_AN_EVENT:
        detail = "no revision of MCP that is known here" if read.sort is Sort.ACCEPTED else read.detail
        read = read._replace(sort=Sort.NO_ENDPOINT, detail=one_line(detail), result=None)
    return read._replace(not_run=True)


def read_health(answer: Answer) -> bool:
    """Whether the relay says that it works: any 2xx with a JSON or empty body."""
    if answer.status is None or not 200 <= answer.status < 300 or answer.cut:
        return False
    return is_empty(answer.body) or parse_json(answer.body) is not NOT_JSON


def read_spec(answer: Answer) -> Capabilities | None:
    """What the relay's OpenAPI document says about it; None when there is no such document to read.

    A value that is missing or makes no sense is the contract's default.
    """
    if answer.status is None or not 200 <= answer.status < 300 or answer.cut:
        return None
    document = parse_json(answer.body)
    if not isinstance(document, dict):
        return None
    said = document.get("x-outbox")
    said = said if isinstance(said, dict) else {}
    batch = said.get("batch")
    batch = batch if isinstance(batch, dict) else {}
    usual = Capabilities()
    window_s = said.get("idempotencyWindowSeconds")
    return Capabilities(
        batch_max_items=_count_or(batch.get("maxItems"), usual.batch_max_items),
        batch_max_bytes=_count_or(batch.get("maxBytes"), usual.batch_max_bytes),
        idempotency_window_s=window_s if _is_count(window_s) else usual.idempotency_window_s,
        mcp_idempotency=said.get("mcpIdempotency") is True,
    )


def _hear(answer: Answer, status: int, now_ms: int, max_retry_after_ms: int) -> _Heard:
    value = NOT_JSON if answer.cut else parse_json(answer.body)
    wants_reading = status >= 300 or error_of(value) is not None or value is NOT_JSON
    return _Heard(
        status=status,
        headers=answer.headers,
        body=answer.body,
        cut=answer.cut,
        value=value,
        problem=read_problem(answer.body, value, answer.headers) if wants_reading else Problem(),
        retry_after_ms=parse_retry_after(answer.headers.get("retry-after", ""), now_ms, max_retry_after_ms)
        if status >= 400
        else None,
    )


def _single(heard: _Heard) -> Reading:
    if not heard.accepts:
        return _reading(heard, _sort_of_error(heard))
    if not heard.is_json_or_empty:
        return _reading(heard, Sort.NOT_A_RELAY)
    if error_of(heard.value) is not None:
        return _reading(heard, _BY_CODE_IN_2XX.get(heard.problem.code, Sort.FAILED))
    return _accepted(heard.status)


@functools.cache
def _accepted(status: int) -> Reading:
    return Reading(Sort.ACCEPTED, status)


def _sort_of_error(heard: _Heard) -> Sort:
    """The table, for everything that is no 2xx."""
    status, code = heard.status, heard.problem.code
    waits = heard.retry_after_ms is not None
    if 300 <= status < 400:
        return Sort.REDIRECTED
    if status in {401, 403}:
        return _BY_STATUS[status]
    if status == 409:
        return _sort_of_conflict(code, waits=waits, cut=heard.cut)
    if waits:
        return Sort.BUSY
    if status == 404 and code == "unknown_recipient":
        return Sort.REFUSED
    return _BY_STATUS.get(status, Sort.FAILED)


def _sort_of_conflict(code: str, *, waits: bool, cut: bool) -> Sort:
    if waits or code == "in_progress":
        return Sort.IN_PROGRESS
    if cut:  # the code may stand in what was not read: neither stored nor refused can be told
        return Sort.FAILED
    return Sort.DUPLICATE if code in {"", "duplicate"} else Sort.REFUSED


def _items(heard: _Heard, count: int, now_ms: int, max_retry_after_ms: int) -> Reading:
    results = heard.value["results"]
    if not isinstance(results, list) or len(results) != count:
        told = len(results) if isinstance(results, list) else "no list of"
        return _reading(heard, Sort.UNCLEAR_BATCH, f"{told} results for {count} messages")
    items = [_item(result, now_ms, max_retry_after_ms) for result in results]
    if None in items:
        return _reading(heard, Sort.UNCLEAR_BATCH, f"result {items.index(None)} has no status")
    return Reading(Sort.ITEMS, heard.status, items=tuple(item for item in items if item))


def _item(result: Any, now_ms: int, max_retry_after_ms: int) -> Reading | None:
    """One result of a batch, read like an answer of its own; None when it says no status."""
    status = result.get("status") if isinstance(result, dict) else None
    if not isinstance(status, int) or isinstance(status, bool) or not 100 <= status <= 999:
        return None
    if 200 <= status < 300 and error_of(result) is None:
        return _accepted(status)
    wait = result.get("retryAfter", result.get("retry_after", ""))
    headers = {"retry-after": str(wait)} if isinstance(wait, str | int) else {}
    body = json.dumps(result, separators=(",", ":")).encode()
    return _single(_hear(Answer(status, headers, body), status, now_ms, max_retry_after_ms))


def _tool_answer(heard: _Heard, message: Mapping[str, Any] | None) -> Reading:
    if message is None:
        if not heard.cut and not is_empty(heard.body) and heard.value is NOT_JSON:
            return _reading(heard, Sort.NOT_A_RELAY)
        return _reading(heard, Sort.LOST, "the answer is too large" if heard.cut else "no result")
    if "result" not in message:
        return _reading(heard, _sort_of_rpc_error(heard.problem.code) or Sort.FAILED)
    result = message["result"]
    kind = result.get("resultType", "complete") if isinstance(result, dict) else None
    if kind == "input_required":
        asks = _reading(heard, Sort.REFUSED, "the tool asks for input, and there is nobody to answer")
        return asks._replace(code="input_required")
    if kind != "complete":
        return _reading(heard, Sort.LOST, "no result that this revision of the protocol knows")
    text = cut_bytes(json.dumps(result, ensure_ascii=False, separators=(",", ":")), RESULT_BYTES)
    if result.get("isError") is True:
        said_no = _reading(heard, Sort.TOOL_ERROR, _tool_text(result) or "the tool said no")
        return said_no._replace(result=text)
    return Reading(Sort.ACCEPTED, heard.status, result=text)


def _tool_text(result: Mapping[str, Any]) -> str:
    """The first text of a tool's result."""
    content = result.get("content")
    blocks = content if isinstance(content, list) else []
    texts = (block.get("text") for block in blocks if isinstance(block, dict))
    return next((text for text in texts if isinstance(text, str)), "")


def _sort_of_rpc_error(code: str) -> Sort | None:
    if code in _RPC_REFUSALS or code in REFUSAL_CODES:
        return Sort.REFUSED
    return Sort.FAILED if code in _RPC_FAILURES else None


def _of_era(heard: _Heard, sort: Sort) -> Sort:
    """A 4xx that shows no understanding of MCP is the endpoint's era, not the call."""
    of_era = heard.status < 500 and heard.status != 409 and sort in {Sort.REFUSED, Sort.FAILED}
    return Sort.NO_ENDPOINT if of_era else sort


def _has_results(value: Any) -> bool:
    return isinstance(value, dict) and "results" in value


def _without_answer(answer: Answer) -> Reading:
    unreachable = answer.failure is Failure.UNREACHABLE or not answer.sent
    return Reading(Sort.UNREACHABLE if unreachable else Sort.LOST, detail=one_line(answer.detail))


def _reading(heard: _Heard, sort: Sort, detail: str = "") -> Reading:
    return Reading(
        sort,
        heard.status,
        code=one_line(heard.problem.code, 100),
        detail=one_line(detail or _detail(heard, sort)),
        excerpt=excerpt(heard.body),
        retry_after_ms=heard.retry_after_ms,
    )


def _detail(heard: _Heard, sort: Sort) -> str:
    if sort is Sort.REDIRECTED:
        return _where_to(heard)
    if sort is Sort.NOT_A_RELAY:
        return (
            "the answer is too large" if heard.cut else f"the answer is no JSON but {heard.problem.message}"
        )
    said = [text for text in (heard.problem.code, heard.problem.message) if text]
    return ": ".join(said) or _phrase(heard.status)


def _where_to(heard: _Heard) -> str:
    """The target's origin only: a redirect to a login page carries what it likes in its query."""
    location = heard.headers.get("location", "")
    try:
        parts = urlsplit(location)
        origin = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "redirected to an address that cannot be read"
    if parts.hostname and parts.scheme:
        return f"redirected to {origin}"
    return "redirected within the same address" if location else _phrase(heard.status)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"status {status}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count_or(value: Any, usual: int) -> int:
    return value if _is_count(value) and value > 0 else usual
