"""The reference relay as an ASGI application: a request, perhaps a fault, an answer, a line in the log.

The table of routes is its own and not starlette's: every request, also one to a path nobody serves, passes
the fault rules and the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import apsw
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relay_client.reference import document, json_text
from relay_client.reference.calls import BATCH_PATH, MCP_PATH, MESSAGES_PATH, Calls, Rules, token_digest
from relay_client.reference.faults import Fault, Faults
from relay_client.reference.incoming import Incoming, Invalid
from relay_client.reference.mcp import IDEMPOTENCY_KEY
from relay_client.reference.readback import Readback
from relay_client.reference.replies import JSON, Reply, insufficient_scope, json_reply, problem, unauthorized
from relay_client.reference.store import Store

MAX_BODY_BYTES = 16 * 1024 * 1024
LOGGED_REQUESTS = 100_000
REFERENCE_PREFIX = "/api/reference/"
HEALTH_PATH, SPEC_PATH, MINT_PATH = "/api/health", "/api/spec", "/api/runtime-tokens"
OPEN_PATHS = frozenset({HEALTH_PATH, SPEC_PATH})

_LOGGED_HEADERS = (
    "idempotency-key",
    "user-agent",
    "traceparent",
    "tracestate",
    "mcp-protocol-version",
    "mcp-method",
    "mcp-name",
)

_Endpoint = Callable[[Incoming, Fault], Awaitable[Reply]]
_Read = Callable[[Incoming], Awaitable[Reply]]
_Routes = dict[str, dict[str, _Endpoint]]


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Relay:
    """The ASGI application.

    Args:
        store: the open file; whoever opened it closes it.
        tokens: the tokens that are good for everything; without any, no token is asked for.
        paths: further paths that take events of custom kinds.
        runtime_token_ttl_s: how long a minted token lives.
        faults: rules of misbehaviour that hold from the start.
        clock_ms: the wall clock, epoch milliseconds.
    """

    def __init__(
        self,
        store: Store,
        tokens: Sequence[str] = (),
        *,
        paths: Sequence[str] = (),
        runtime_token_ttl_s: int = 3600,
        faults: Sequence[Mapping[str, Any]] = (),
        clock_ms: Callable[[], int] = _wall_clock_ms,
    ) -> None:
        self.stopping = asyncio.Event()
        self._store = store
        self._clock_ms = clock_ms
        self._tokens = frozenset(token_digest(token) for token in tokens)
        self._faults = Faults()
        self._faults.add(list(faults))
        self._document = document.load(paths)
        self._reference = _reference_routes(Readback(store, self._faults))
        limits = (self._document.batch_max_items, self._document.batch_max_bytes)
        self._routes = self._product_routes(
            Calls(store, Rules(*limits, runtime_token_ttl_s), clock_ms), paths
        )

    def _product_routes(self, calls: Calls, paths: Sequence[str]) -> _Routes:
        routes: _Routes = {path: {"POST": calls.event} for path in paths}
        return routes | {
            MESSAGES_PATH: {"POST": calls.event},
            BATCH_PATH: {"POST": calls.batch},
            "/api/insights/observations": {"POST": calls.event},
            "/api/continuation-archives": {"POST": calls.archive},
            MCP_PATH: {"POST": calls.mcp},
            MINT_PATH: {"POST": calls.runtime_token},
            HEALTH_PATH: {"GET": self._health},
            SPEC_PATH: {"GET": self._spec},
        }

    async def _health(self, _incoming: Incoming, _fault: Fault) -> Reply:
        return json_reply(200, {"status": "ok"})

    async def _spec(self, _incoming: Incoming, _fault: Fault) -> Reply:
        return Reply(200, self._document.text, JSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        began_ns = time.monotonic_ns()
        try:
            body = await _read_body(receive)
        except ClientDisconnect:
            return
        incoming = _incoming(scope, body or b"")
        if incoming.path.startswith(REFERENCE_PREFIX):
            reply: Reply | None = await self._guarded(self._answer_reference(incoming))
        else:
            fault = self._faults.take(incoming)
            reply = await self._guarded(self._act(incoming, fault, receive, too_large=body is None))
            self._log(incoming, fault, reply, (time.monotonic_ns() - began_ns) // 1_000_000)
        if reply is None:
            await _drop(scope, receive)
        else:
            response = Response(reply.body, reply.status, media_type=reply.media_type)
            for name, header in reply.headers:
                response.headers.append(name, header)
            await response(scope, receive, send)

    async def _guarded(self, answering: Awaitable[Reply | None]) -> Reply | None:
        try:
            return await answering
        except apsw.Error as error:
            return problem(503, "storage", f"The relay cannot write: {error}. Nothing of this was stored.")
        except Exception:  # noqa: BLE001 - a fault of ours is a 500 and a trace, not a connection cut off
            traceback.print_exc(file=sys.stderr)
            return problem(500, "internal", "The relay failed on this request; it may or may not be stored.")

    async def _act(
        self, incoming: Incoming, fault: Fault, receive: Receive, *, too_large: bool
    ) -> Reply | None:
        """Return the answer, None for a connection to drop without one."""
        if fault.revoke is not None:
            digest = token_digest(fault.revoke)
            await self._store.submit(lambda ledger: ledger.set_revoked(digest, revoked=True))
        if fault.close or fault.hang_s:
            await self._linger(fault.hang_s or fault.delay_s, receive)
            return None
        if too_large:
            reply = problem(413, "too_large", f"A body holds at most {MAX_BODY_BYTES} bytes.")
        else:
            reply = fault.reply or await self._answer(incoming, fault)
        await self._linger(fault.delay_s, receive)
        return None if fault.store_then_close else reply

    async def _answer(self, incoming: Incoming, fault: Fault) -> Reply:
        if _foreign_origin(incoming):
            return problem(403, "foreign_origin", "Pages of other origins have no business here.")
        endpoint = _find(self._routes, incoming)
        if isinstance(endpoint, Reply):
            return endpoint
        refusal = None if incoming.path in OPEN_PATHS else self._refusal(incoming)
        if refusal is None and incoming.method == "POST" and not _says_json(incoming):
            refusal = problem(
                415, "unsupported_media_type", "Send the body as Content-Type: application/json."
            )
        return refusal or await endpoint(incoming, fault)

    async def _answer_reference(self, incoming: Incoming) -> Reply:
        """Read back. The given tokens are good here even when revoked, so that a test can still look."""
        endpoint = _find(self._reference, incoming)
        if isinstance(endpoint, Reply):
            return endpoint
        if self._tokens and (incoming.token is None or token_digest(incoming.token) not in self._tokens):
            return unauthorized(
                "One of the relay's own tokens is needed.", presented=incoming.token is not None
            )
        try:
            return await endpoint(incoming, Fault())
        except (Invalid, json_text.Malformed) as error:
            return problem(422, "validation_failed", str(error))

    def _refusal(self, incoming: Incoming) -> Reply | None:
        """Return why this request may not pass, None when it may."""
        if incoming.token is None:
            return unauthorized("A bearer token is needed.", presented=False) if self._tokens else None
        digest = token_digest(incoming.token)
        expires_at_ms, revoked = self._store.ledger.token(digest) or (None, False)
        if revoked:
            return unauthorized("This token was revoked.", presented=True)
        if expires_at_ms is None:
            known = not self._tokens or digest in self._tokens
            return None if known else unauthorized("This token is not known.", presented=True)
        if expires_at_ms <= self._clock_ms():
            return unauthorized("This token has expired.", presented=True)
        if incoming.path == MINT_PATH:
            return insufficient_scope("A minted token mints no others; use the bootstrap token.")
        return None

    async def _linger(self, seconds: float, receive: Receive) -> None:
        """Wait; less when the client goes away or the relay stops."""
        if not seconds:
            return
        waits = {asyncio.ensure_future(self.stopping.wait()), asyncio.ensure_future(_disconnected(receive))}
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    def _log(self, incoming: Incoming, fault: Fault, reply: Reply | None, took_ms: int) -> None:
        headers = {name: incoming.headers[name] for name in _LOGGED_HEADERS if name in incoming.headers}
        record = json.dumps(
            {
                "at": self._clock_ms(),
                "method": incoming.method,
                "path": incoming.path,
                "status": None if reply is None else reply.status,
                "ms": took_ms,
                "fault": fault.name,
                "agent": incoming.agent,
                "stream": incoming.stream,
                "seq": incoming.headers.get("outbox-seq"),
                "attempt": incoming.headers.get("outbox-attempt"),
                "keys": _keys(incoming.value),
                "token": token_digest(incoming.token).hex()[:12] if incoming.token else None,
                "headers": headers,
                "bodyBytes": len(incoming.body),
                "bodySha256": hashlib.sha256(incoming.body).hexdigest(),
            }
        )
        self._store.note(lambda ledger: ledger.log(record, keep_last=LOGGED_REQUESTS))


def _reference_routes(readback: Readback) -> _Routes:
    routes: dict[str, dict[str, _Read]] = {
        "events": {"GET": readback.events},
        "requests": {"GET": readback.requests},
        "summary": {"GET": readback.summary},
        "archives": {"GET": readback.archives},
        "faults": {
            "GET": readback.list_faults,
            "POST": readback.add_faults,
            "DELETE": readback.clear_faults,
        },
        "revocations": {"POST": readback.revoke},
    }
    return {
        REFERENCE_PREFIX + name: {method: _unspoiled(read) for method, read in methods.items()}
        for name, methods in routes.items()
    }


def _unspoiled(read: _Read) -> _Endpoint:
    async def endpoint(incoming: Incoming, _fault: Fault) -> Reply:
        return await read(incoming)

    return endpoint


def _find(routes: _Routes, incoming: Incoming) -> _Endpoint | Reply:
    methods = routes.get(incoming.path)
    if methods is None:
        return problem(404, "not_found", f"Nothing is served at {incoming.path}.")
    endpoint = methods.get(incoming.method)
    if endpoint is None:
        allow = (("Allow", ", ".join(methods)),)
        return problem(
            405, "method_not_allowed", f"{incoming.path} does not know this method.", headers=allow
        )
    return endpoint


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, None for one above the limit; what is beyond is never held in memory.

    Raises:
        ClientDisconnect: the client went away in the middle of it.
    """
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MAX_BODY_BYTES:
            return None
        more = message.get("more_body", False)
    return b"".join(pieces)


def _incoming(scope: Scope, body: bytes) -> Incoming:
    try:
        content: json_text.Parsed | json_text.Malformed = json_text.parse(body)
    except json_text.Malformed as error:
        content = error
    query = dict(QueryParams(scope["query_string"])) if scope["query_string"] else {}
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return Incoming(scope["method"], scope["path"], query, headers, body, content)


def _foreign_origin(incoming: Incoming) -> bool:
    """Tell whether a browser sent this for another site's page (MCP transports, "Security & Endpoint")."""
    origin = incoming.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != incoming.headers.get("host")


def _says_json(incoming: Incoming) -> bool:
    media_type = incoming.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    return media_type == JSON or media_type.endswith("+json")


def _keys(value: Any) -> list[Any]:
    """Return the idempotency keys a body carries, for the log."""
    if not isinstance(value, dict):
        return []
    messages, params = value.get("messages"), value.get("params")
    several = messages if isinstance(messages, list) else [value]
    keys = [message.get("idempotencyKey") for message in several if isinstance(message, dict)]
    meta = params.get("_meta") if isinstance(params, dict) else None
    keys += [meta.get(IDEMPOTENCY_KEY)] if isinstance(meta, dict) else []
    return [key for key in keys if key is not None]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(scope: Scope, receive: Receive) -> None:
    """Cut the TCP connection; the server put it into the scope."""
    connection = scope["state"]["connection"]
    connection.transport.abort()
    await _disconnected(receive)
