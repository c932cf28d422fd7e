"""The local socket: starlette on uvicorn, in a thread of its own, on a Unix socket of mode 0600."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outbox.api.report import status_report
from outbox.errors import ConfigError, OutboxError, StoreBusy, StoreClosed, StoreFull, UsageError
from outbox.event import Draft, Limits, check_agent, parse_event
from outbox.json_text import elements, split_lines
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt

_MOST_BODY_BYTES = 64 * 1024 * 1024
_MOST_FLUSH_S = 3_600.0
_MOST_FLUSHES = 64  # under way at once; they have threads of their own, so that none keeps an event waiting
_LINES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


class Served(Protocol):
    """What the socket needs of the daemon."""

    state: StateDirectory

    @property
    def limits(self) -> Limits:
        """What an event may be."""

    @property
    def kind_paths(self) -> Mapping[str, str]:
        """Where each kind of event goes."""

    def enqueue(self, agent: str, drafts: list[Draft]) -> list[Receipt | OutboxError]:
        """Take events; returns after the commit."""

    def flush(self, agent: str | None, timeout_s: float) -> dict[str, Any]:
        """Flush one agent or all; what became of it, as JSON has it."""

    def pause(self, agent: str | None) -> int:
        """Pause one agent or all."""

    def resume(self, agent: str | None) -> int:
        """Resume one agent or all."""

    def retry_tokens(self) -> None:
        """Forget why no token could be had, and try at once."""

    def stop(self) -> None:
        """Stop the daemon."""


class LocalServer:
    """Serves the daemon's local HTTP on a Unix socket that only its user may open."""

    def __init__(self, daemon: Served, path: Path, handed: Sequence[socket.socket] = ()) -> None:
        """Nothing is bound yet. Sockets `handed` to us listen already; their names are not ours to remove."""
        self._path = path
        self._handed = list(handed)
        config = uvicorn.Config(
            local_app(daemon),
            lifespan="off",
            loop="asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="local-socket", daemon=True)
        self._sockets: list[socket.socket] = []

    def start(self) -> None:
        """Bind (0600, before anybody can connect) and serve; raises ConfigError as `bind_private`."""
        self._sockets = self._handed or [bind_private(self._path)]
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            # outside the main thread uvicorn leaves the signals alone: they are the daemon's business
            asyncio.run(self._server.serve(self._sockets))

    def stop(self) -> None:
        """End, and remove the name of a socket of our own."""
        if not self._handed:
            self._path.unlink(missing_ok=True)
        self._server.should_exit = True
        self._thread.join(3)


def bind_private(path: Path) -> socket.socket:
    """A listening Unix socket of mode 0600; a dead one's leftover is replaced. Long paths work too (Linux).

    Raises ConfigError when something else lies there, or it cannot be made.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_name(path) as name:
            _remove_leftover(path, name)
            old_mask = os.umask(0o177)
            try:
                bound.bind(name)
            finally:
                os.umask(old_mask)
        bound.listen(256)
    except OSError as error:
        bound.close()
        raise _unusable(path, error.strerror or str(error)) from error
    except BaseException:
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A name that fits into sockaddr_un (108 bytes, unix(7)), however deep the path lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _remove_leftover(path: Path, name: str) -> None:
    """Remove a socket that nobody listens at; raises ConfigError for whatever else lies there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _unusable(path, "something that is no socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise _unusable(path, "another process listens there")


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"The local socket cannot be made at {str(path)!r}: {why}. Nothing was started; what waits stays on "
        "disk. Name another place with daemon.socket or --socket."
    )


def local_app(daemon: Served) -> Starlette:
    """The application: what `enqueue`, `status`, `flush`, `pause`, `resume` and `stop` need."""
    flushes = CapacityLimiter(_MOST_FLUSHES)

    async def events(request: Request) -> Response:
        agent = _agent_in(request)
        body = await _body(request)
        return await run_in_threadpool(_take, daemon, agent, body, request.headers.get("content-type", ""))

    async def status(_request: Request) -> Response:
        return _json(await run_in_threadpool(status_report, daemon.state, paths=daemon.kind_paths))

    async def flush(request: Request) -> Response:
        asked = _object(await _body(request))
        work = partial(daemon.flush, _agent(asked), _timeout_s(asked))
        return _json(await to_thread.run_sync(work, limiter=flushes))

    async def pause(request: Request) -> Response:
        asked = _object(await _body(request))
        return _json({"paused": await run_in_threadpool(daemon.pause, _agent(asked))})

    async def resume(request: Request) -> Response:
        asked = _object(await _body(request))
        return _json({"resumed": await run_in_threadpool(daemon.resume, _agent(asked))})

    async def retry_tokens(_request: Request) -> Response:
        await run_in_threadpool(daemon.retry_tokens)
        return _json({"retried": True})

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
            Route("/v1/auth/retry", retry_tokens, methods=["POST"]),
            Route("/v1/stop", stop, methods=["POST"]),
        ],
        exception_handlers={OutboxError: _refused, HTTPException: _not_served},
    )


# Requests --------------------------------------------------------------------------------------------------


def _agent_in(request: Request) -> str:
    """The agent that the path names, decoded once; raises UsageError."""
    raw = request.scope["raw_path"].partition(b"?")[0]
    try:
        name = unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError("The agent in the path is not UTF-8. Nothing was stored.") from None
    return check_agent(name.removeprefix("/v1/agents/").removesuffix("/events"))


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _MOST_BODY_BYTES:
            raise UsageError(
                f"The request is larger than {_MOST_BODY_BYTES:,} bytes. Nothing was stored; send parts.",
                code="too_large",
            )
        parts.append(chunk)
    return b"".join(parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except ValueError as error:
        raise UsageError(f"The request is not JSON: {error}. Nothing was changed.") from error
    if not isinstance(value, dict):
        raise UsageError("The request is no JSON object. Nothing was changed.")
    return value


def _agent(asked: Mapping[str, Any]) -> str | None:
    agent = asked.get("agent")
    if agent is not None and not isinstance(agent, str):
        raise UsageError("agent is a text, or null for all. Nothing was changed.")
    return agent


def _timeout_s(asked: Mapping[str, Any]) -> float:
    timeout_s = asked.get("timeoutS", 10)
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 <= timeout_s <= _MOST_FLUSH_S:
        raise UsageError(
            f"timeoutS is a number of seconds from 0 to {_MOST_FLUSH_S:.0f}. Nothing was changed."
        )
    return float(timeout_s)


# Events ----------------------------------------------------------------------------------------------------


def _take(daemon: Served, agent: str, body: bytes, content_type: str) -> Response:
    """One event, an array of them, or NDJSON: the answer comes after the commit, one result for each."""
    limits = daemon.limits
    if content_type.partition(";")[0].strip().lower() in _LINES:
        lines = split_lines([body], _MOST_BODY_BYTES)
        return _take_several(daemon, agent, [_numbered(number, line, limits) for number, line in lines])
    if body.lstrip()[:1] == b"[":
        return _take_several(daemon, agent, [({}, _parsed(text, limits)) for text in _elements(body)])
    draft = parse_event(body, limits)
    (result,) = daemon.enqueue(agent, [draft])
    if isinstance(result, OutboxError):
        raise result
    return _json(_receipt(result))


_Found = tuple[dict[str, Any], Draft | UsageError]


def _take_several(daemon: Served, agent: str, found: list[_Found]) -> Response:
    drafts = [draft for _, draft in found if isinstance(draft, Draft)]
    stored = iter(daemon.enqueue(agent, drafts) if drafts else [])
    results = [
        {**_result(draft if isinstance(draft, UsageError) else next(stored)), **place}
        for place, draft in found
    ]
    refused = sum("error" in result for result in results)
    return _json({"results": results, "accepted": len(results) - refused, "refused": refused})


def _numbered(number: int, line: bytes | UsageError, limits: Limits) -> _Found:
    return {"line": number}, line if isinstance(line, UsageError) else _parsed(line, limits)


def _elements(body: bytes) -> list[str]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"The request is not UTF-8 (byte {error.start + 1:,}). Nothing was stored."
        ) from error
    return elements(text.strip())


def _parsed(text: bytes | str, limits: Limits) -> Draft | UsageError:
    try:
        return parse_event(text, limits)
    except UsageError as error:
        return error


def _result(result: Receipt | OutboxError) -> dict[str, Any]:
    return _error(result) if isinstance(result, OutboxError) else _receipt(result)


def _receipt(receipt: Receipt) -> dict[str, Any]:
    return {
        "seq": receipt.seq,
        "idempotencyKey": receipt.idempotency_key,
        "duplicate": receipt.duplicate,
        "state": receipt.state,
    }


# Answers ---------------------------------------------------------------------------------------------------


def _error(error: OutboxError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": str(error)}}


def _status_of(error: OutboxError) -> int:
    if isinstance(error, UsageError):
        return {"unknown_agent": 404, "too_large": 413}.get(error.code, 422)
    if isinstance(error, StoreFull):
        return 507
    return 503 if isinstance(error, StoreBusy | StoreClosed) else 500


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OutboxError)  # noqa: S101 - registered for these only
    return _json(_error(error), _status_of(error))


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these only
    message = f"{request.method} {request.url.path} is not served here. Nothing was changed."
    return JSONResponse(
        {"error": {"code": "not_served", "message": message}}, error.status_code, error.headers
    )


def _json(value: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(value, status_code=status)
