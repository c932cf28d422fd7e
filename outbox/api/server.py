"""The local socket: starlette on uvicorn, in a thread of its own, on a Unix socket of mode 0600."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outbox.api.report import status_report
from outbox.errors import OutboxError, StoreBusy, StoreFull, UsageError
from outbox.event import Draft, Limits, parse_event
from outbox.json_text import elements, split_lines
from outbox.library import read_rules
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt

_MOST_BODY_BYTES = 64 * 1024 * 1024
_MOST_FLUSH_S = 3_600.0


class Served(Protocol):
    """What the socket needs of the daemon."""

    state: StateDirectory

    def enqueue(self, agent: str, drafts: list[Draft]) -> list[Receipt | OutboxError]:
        """Take events; returns after the commit."""

    def flush(self, agent: str | None, timeout_s: float) -> Any:
        """Flush one agent or all."""

    def pause(self, agent: str | None) -> int:
        """Pause one agent or all."""

    def resume(self, agent: str | None) -> int:
        """Resume one agent or all."""

    def stop(self) -> None:
        """Stop the daemon."""


class LocalServer:
    """Serves the daemon's local HTTP on a Unix socket that only its user may open."""

    def __init__(self, daemon: Served, path: Path) -> None:
        """Nothing is bound yet."""
        self._path = path
        config = uvicorn.Config(
            local_app(daemon), lifespan="off", log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="local-socket", daemon=True)
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Bind (0600, before anybody can connect) and serve."""
        self._socket = bind_private(self._path)
        self._thread.start()

    def _run(self) -> None:
        assert self._socket is not None  # noqa: S101 - start bound it
        with contextlib.suppress(SystemExit):
            # outside the main thread uvicorn leaves the signals alone: they are the daemon's business
            asyncio.run(self._server.serve([self._socket]))

    def stop(self) -> None:
        """End, and remove the socket's name."""
        self._server.should_exit = True
        self._thread.join(3)
        self._path.unlink(missing_ok=True)


def bind_private(path: Path) -> socket.socket:
    """A listening Unix socket of mode 0600; a dead one's leftover is replaced. Long paths work too (Linux)."""
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    old_mask = os.umask(0o177)
    try:
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.umask(old_mask)
        os.close(folder)
    bound.listen(256)
    return bound


def local_app(daemon: Served) -> Starlette:
    """The application: what `enqueue`, `status`, `flush`, `pause`, `resume` and `stop` need."""
    limits, _ = read_rules(daemon.state)

    async def events(request: Request) -> Response:
        agent = unquote(request.path_params["agent"])
        body = await _body(request)
        return await run_in_threadpool(_take, daemon, agent, body, request.headers.get("content-type", ""), limits)

    async def status(_request: Request) -> Response:
        return _json(await run_in_threadpool(status_report, daemon.state))

    async def flush(request: Request) -> Response:
        asked = _object(await _body(request))
        timeout_s = asked.get("timeoutS", 10)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= _MOST_FLUSH_S:
            raise UsageError("timeoutS is a number of seconds from 0 to 3600")
        return _json(await run_in_threadpool(daemon.flush, _agent(asked), float(timeout_s)))

    async def pause(request: Request) -> Response:
        asked = _object(await _body(request))
        return _json({"paused": await run_in_threadpool(daemon.pause, _agent(asked))})

    async def resume(request: Request) -> Response:
        asked = _object(await _body(request))
        return _json({"resumed": await run_in_threadpool(daemon.resume, _agent(asked))})

    async def stop(_request: Request) -> Response:
        daemon.stop()
        return _json({"stopping": True, "pid": os.getpid()}, 202)

    return Starlette(
        routes=[
            Route("/v1/agents/{agent:path}/events", events, methods=["POST"]),
            Route("/v1/status", status, methods=["GET"]),
            Route("/v1/flush", flush, methods=["POST"]),
            Route("/v1/pause", pause, methods=["POST"]),
            Route("/v1/resume", resume, methods=["POST"]),
            Route("/v1/stop", stop, methods=["POST"]),
        ],
        exception_handlers={OutboxError: _refused},
    )


def _take(daemon: Served, agent: str, body: bytes, content_type: str, limits: Limits) -> Response:
    """One event, an array of them, or NDJSON: the answer comes after the commit, one result for each."""
    single = False
    found: list[Draft | UsageError] = []
    if content_type.startswith(("application/x-ndjson", "application/jsonl", "application/x-jsonlines")):
        found = [_parsed(line, limits) for _, line in split_lines([body], _MOST_BODY_BYTES)]
    elif body.lstrip()[:1] == b"[":
        found = [_parsed(text, limits) for text in elements(body.decode("utf-8").strip())]
    else:
        single = True
        found = [_parsed(body, limits)]
    stored = iter(daemon.enqueue(agent, [draft for draft in found if isinstance(draft, Draft)]))
    results = [_result(draft if isinstance(draft, UsageError) else next(stored)) for draft in found]
    if single:
        return _json(results[0], int(results[0].pop("httpStatus", 200)))
    refused = sum("error" in result for result in results)
    for result in results:
        result.pop("httpStatus", None)
    return _json({"results": results, "accepted": len(results) - refused, "refused": refused})


def _parsed(text: bytes | str | UsageError, limits: Limits) -> Draft | UsageError:
    if isinstance(text, UsageError):
        return text
    try:
        return parse_event(text, limits)
    except UsageError as error:
        return error


def _result(receipt: Receipt | OutboxError) -> dict[str, Any]:
    if isinstance(receipt, OutboxError):
        return {"error": {"code": receipt.code, "message": str(receipt)}, "httpStatus": _status_of(receipt)}
    return {
        "seq": receipt.seq,
        "idempotencyKey": receipt.idempotency_key,
        "duplicate": receipt.duplicate,
        "state": receipt.state,
    }


def _status_of(error: OutboxError) -> int:
    if isinstance(error, UsageError):
        return 404 if error.code == "unknown_agent" else 422
    if isinstance(error, StoreFull):
        return 507
    return 503 if isinstance(error, StoreBusy) else 500


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OutboxError)  # noqa: S101 - registered for these only
    return _json({"error": {"code": error.code, "message": str(error)}}, _status_of(error))


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MOST_BODY_BYTES:
            raise UsageError(f"the request is larger than {_MOST_BODY_BYTES:,} bytes; nothing was stored")
        parts.append(chunk)
    return b"".join(parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except ValueError as error:
        raise UsageError(f"the request is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError("the request is no JSON object")
    return value


def _agent(asked: dict[str, Any]) -> str | None:
    agent = asked.get("agent")
    if agent is not None and not isinstance(agent, str):
        raise UsageError("agent is a text, or null for all")
    return agent


def _json(value: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(value, status_code=status)

