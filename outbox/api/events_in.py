"""Events come in: one, an array, or a stream of lines, each line answered once it is on disk.

A stream is read as it comes: while one commit runs the next lines gather, and share the next one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outbox.api.problems import JSON, error_data
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


class Taken(NamedTuple):
    """What became of each event, in order; `refusal` is why the store took nothing at all, if it did not."""

    results: Sequence[Receipt | OutboxError]
    refusal: OutboxError | None


def take(daemon: Served, agent: str, texts: Iterable[bytes | str | UsageError]) -> Taken:
    """Put events on disk with one commit; what is none already keeps its error. Counts what is not taken."""
    limits, meter = daemon.limits, daemon.meter
    found = [text if isinstance(text, UsageError) else _parsed(text, limits) for text in texts]
    drafts = [draft for draft in found if isinstance(draft, Draft)]
    refusal = None
    try:
        results = daemon.enqueue(agent, drafts) if drafts else []
    except OutboxError as error:
        refusal = error
        meter.refuse(error.code, len(drafts))
        results = [error] * len(drafts)
    else:
        for result in results:
            # a full outbox counts in its own file what it refuses
            if isinstance(result, OutboxError) and not isinstance(result, StoreFull):
                meter.refuse(result.code)
    if len(drafts) < len(found):
        rest = iter(results)
        results = [next(rest) if isinstance(draft, Draft) else draft for draft in found]
        for draft in found:
            if isinstance(draft, UsageError):
                meter.refuse(draft.code)
    return Taken(results, refusal)


def _parsed(text: bytes | str, limits: Limits) -> Draft | UsageError:
    try:
        return parse_event(text, limits)
    except UsageError as error:
        return error


def members(result: Receipt | OutboxError) -> str:
    """The members of the JSON object, in ASCII, that tells what became of one event."""
    if isinstance(result, OutboxError):
        return json.dumps(error_data(result))[1:-1]
    seq, key, duplicate, state = result
    return (
        f'"seq": {seq}, "idempotencyKey": {encode_basestring_ascii(key)}, '
        f'"duplicate": {"true" if duplicate else "false"}, "state": "{state}"'
    )


# Requests with an end ---------------------------------------------------------------------------------------


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
    return await run_in_threadpool(_take_body, daemon, agent, body)


def _take_body(daemon: Served, agent: str, body: bytes) -> Response:
    """The receipt of one event, or the results of an array, after the commit."""
    if body.lstrip()[:1] != b"[":
        result = take(daemon, agent, [body]).results[0]
        if isinstance(result, OutboxError):
            raise result
        return _answer(f"{{{members(result)}}}")
    results, refusal = take(daemon, agent, _elements(body))
    if refusal is not None:
        raise refusal
    refused = sum(isinstance(result, OutboxError) for result in results)
    listed = ", ".join(f"{{{members(result)}}}" for result in results)
    return _answer(f'{{"results": [{listed}], "accepted": {len(results) - refused}, "refused": {refused}}}')


def _answer(text: str) -> Response:
    return Response(text.encode("ascii"), media_type=JSON)


def _elements(body: bytes) -> list[str]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The request is not UTF-8 (byte {error.start + 1:,}). Nothing was stored.", code="not_json"
        ) from error
    return elements(text.strip())


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
        try:
            results, refusal = take(self._daemon, self._agent, [line for _, line in lines])
        except Exception as error:  # noqa: BLE001 - the answer has begun: it must end with what is known
            refusal = StoreError(f"A fault of this program: {error!r}. Nothing of these lines was stored.")
            results = [refusal] * len(lines)
        text = "".join(
            f'{{"line": {number}, {members(result)}}}\n'
            for (number, _), result in zip(lines, results, strict=True)
        )
        return text.encode("ascii"), refusal is None
