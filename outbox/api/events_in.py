"""Events come in: one, an array, or a stream of lines, each line answered once it is on disk.

A stream is read as it comes: while one commit runs the next lines gather, and share the next one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outbox.api.problems import answer, error_data
from outbox.api.requests import JSON_TYPES, agent_in, media_type, whole_body
from outbox.api.served import Served
from outbox.errors import OutboxError, StoreError, StoreFull, UsageError
from outbox.event import Draft, Limits, parse_event
from outbox.json_text import Lines, elements
from outbox.store.enqueue import Receipt

LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")

_MOST_ARRAY_BYTES = 64 * 1024 * 1024
_ENVELOPE_BYTES = 1024 * 1024  # what may stand beside a payload
_STREAM_SILENCE_S = 600.0
_MOST_AT_ONCE = 1_000  # lines in one commit

Line = tuple[int, bytes | UsageError]
Found = tuple[dict[str, Any], Draft | OutboxError]


async def take_events(daemon: Served, request: Request) -> Response:
    """Take what the body holds for the agent of the path; raises OutboxError when none of it was taken."""
    agent, of = agent_in(request), media_type(request)
    if of in LINES:
        return LineAnswers(daemon, agent)
    if of not in JSON_TYPES:
        raise UsageError(
            f"A body of the type {of!r} is not read here. Nothing was stored. Send one event or an array as "
            "application/json, or an event a line as application/x-ndjson.",
            code="media_type",
        )
    one_bytes = daemon.limits.max_payload_bytes + _ENVELOPE_BYTES
    body = await whole_body(
        request, lambda start: one_bytes if start.lstrip()[:1] not in {b"", b"["} else _MOST_ARRAY_BYTES
    )
    return await run_in_threadpool(_take, daemon, agent, body)


def _take(daemon: Served, agent: str, body: bytes) -> Response:
    """The receipt of one event, or the results of an array, after the commit."""
    limits = daemon.limits
    if body.lstrip()[:1] != b"[":
        try:
            (result,) = daemon.enqueue(agent, [parse_event(body, limits)])
        except OutboxError as error:
            daemon.meter.refuse(error.code)
            raise
        if isinstance(result, OutboxError):
            _count(daemon, result)
            raise result
        return answer(receipt_data(result))
    found: list[Found] = [({}, _parsed(text, limits)) for text in _elements(body)]
    try:
        results = list(_stored(daemon, agent, found))
    except OutboxError as error:
        daemon.meter.refuse(error.code, len(found))
        raise
    refused = sum("error" in result for result in results)
    return answer({"results": results, "accepted": len(results) - refused, "refused": refused})


def _stored(daemon: Served, agent: str, found: Sequence[Found]) -> Iterator[dict[str, Any]]:
    """Put the drafts among these on disk with one commit; the result of each of them, in order."""
    drafts = [draft for _, draft in found if isinstance(draft, Draft)]
    stored = iter(daemon.enqueue(agent, drafts) if drafts else ())
    for place, draft in found:
        result = next(stored) if isinstance(draft, Draft) else draft
        if isinstance(result, OutboxError):
            _count(daemon, result)
            yield place | error_data(result)
        else:
            yield place | receipt_data(result)


def _count(daemon: Served, error: OutboxError) -> None:
    """A full outbox counts in its own file what it refuses."""
    if not isinstance(error, StoreFull):
        daemon.meter.refuse(error.code)


def receipt_data(receipt: Receipt) -> dict[str, Any]:
    """A receipt as data."""
    return {
        "seq": receipt.seq,
        "idempotencyKey": receipt.idempotency_key,
        "duplicate": receipt.duplicate,
        "state": receipt.state,
    }


def _elements(body: bytes) -> list[str]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The request is not UTF-8 (byte {error.start + 1:,}). Nothing was stored.", code="not_json"
        ) from error
    return elements(text.strip())


def _parsed(text: bytes | str, limits: Limits) -> Draft | UsageError:
    try:
        return parse_event(text, limits)
    except UsageError as error:
        return error


# A stream ---------------------------------------------------------------------------------------------------


class LineAnswers(Response):
    """Reads the lines of the request while it answers them, in order; ends with the request, or its client.

    A line has its answer after its commit. When the store refuses everything, the lines that were read get
    that error and the answer ends: what is behind them was not taken.
    """

    def __init__(self, daemon: Served, agent: str) -> None:
        """Nothing is read yet."""
        super().__init__(media_type=LINES[0])
        self._daemon = daemon
        self._agent = agent
        self._goes_on = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """Until the end of the request."""
        headers = [(b"content-type", LINES[0].encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lines = Lines(self._daemon.limits.max_payload_bytes + _ENVELOPE_BYTES)
        more = True
        while more and self._goes_on:
            try:
                message = await asyncio.wait_for(receive(), _STREAM_SILENCE_S)
            except TimeoutError:
                break
            if message["type"] == "http.disconnect":
                return
            more = message.get("more_body", False)
            found = list(lines.feed(message.get("body", b"")))
            if not more:
                found += lines.end()
            for start in range(0, len(found), _MOST_AT_ONCE):
                some = found[start : start + _MOST_AT_ONCE]
                text, self._goes_on = await run_in_threadpool(self._answers, some)
                await send({"type": "http.response.body", "body": text, "more_body": True})
                if not self._goes_on:
                    break
        await send({"type": "http.response.body", "body": b""})

    def _answers(self, lines: Sequence[Line]) -> tuple[bytes, bool]:
        """The answers to these lines, once they are on disk, and whether to go on."""
        goes_on, limits = True, self._daemon.limits
        found: list[Found] = [
            ({"line": number}, line if isinstance(line, UsageError) else _parsed(line, limits))
            for number, line in lines
        ]
        try:
            results = list(_stored(self._daemon, self._agent, found))
        except OutboxError as error:
            goes_on = False
            self._daemon.meter.refuse(error.code, len(found))
            results = [
                place | error_data(draft if isinstance(draft, OutboxError) else error)
                for place, draft in found
            ]
        except Exception as error:  # noqa: BLE001 - the answer has begun: it must end with what is known
            goes_on = False
            fault = StoreError(f"A fault of this program: {error!r}. Nothing of these lines was stored.")
            results = [place | error_data(fault) for place, _ in found]
        return b"".join(json.dumps(result).encode("ascii") + b"\n" for result in results), goes_on
