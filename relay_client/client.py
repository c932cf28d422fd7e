"""One relay, spoken to over HTTP: a request in, an `Answer` out. Knows no queue and judges nothing.

Synchronous and thread-safe; each thread has one request under way at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, cast

import httpx

from relay_client import mcp
from relay_client.address import parse_base_url
from relay_client.body import DamagedBody, limit_bytes, read_capped, read_message, unpacked
from relay_client.clean import one_line
from relay_client.headers import encode_key, origin_fields
from relay_client.masking import without_token, without_token_text
from relay_client.network import network_transport
from relay_client.reading import Answer, Failure, Origin
from relay_client.transport import NOTHING_SENT, RelayTransport

PATHS: Mapping[str, str] = {"mcp": "/api/mcp", "health": "/api/health", "spec": "/api/spec"}

Fields = list[tuple[str, str]]
Read = Callable[[int, Mapping[str, str], Iterable[bytes]], tuple[bytes, bool]]

_SPAN_ID_BYTES = 8
_REQUEST_ID_BYTES = 16


def _own_version() -> str:
    try:
        return version("relay-outbox")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"


VERSION = _own_version()


class RelayClient:
    """A relay and how to speak to it.

    `paths` overrides those of PATHS; other names in it are the caller's own business. `client_cert` is a PEM
    file with the key in it, or beside `client_key`. `transport` takes the place of the network, in tests.
    `random_bytes` makes span ids and the ids of our own requests.

    Timeouts are for a whole request, connecting included; `deadline` (monotonic seconds) is the caller's own
    end: cut off by it, an answer says STOPPED and speaks about us, not about the relay. Nothing that a
    network does raises.

    Raises:
        ValueError: an argument, or the environment's proxy, cannot be used; one line that shows the value.
    """

    def __init__(
        self,
        base_url: str,
        *,
        paths: Mapping[str, str] | None = None,
        idempotency_header: Literal["quoted", "bare", "off"] = "quoted",
        connect_timeout_ms: int = 5_000,
        request_timeout_ms: int = 30_000,
        mcp_timeout_ms: int = 120_000,
        max_connections: int = 32,
        ca_file: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        trust_env: bool = True,
        user_agent: str = f"relay-outbox/{VERSION}",
        transport: httpx.BaseTransport | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if idempotency_header not in {"quoted", "bare", "off"}:
            raise ValueError(f'idempotency_header is "quoted", "bare" or "off", not {idempotency_header!r}')
        self.address = parse_base_url(base_url)
        self._paths = {**PATHS, **(paths or {})}
        self._idempotency_header = idempotency_header
        self._request_timeout_ms = request_timeout_ms
        self._mcp_timeout_ms = mcp_timeout_ms
        self._random_bytes = random_bytes
        self._usual: Fields = [("User-Agent", user_agent), ("Accept-Encoding", "identity")]
        self._host = self.address.origin.partition("//")[2]
        self._urls: dict[str, httpx.URL] = {}
        self._aborted = False
        self._transport = transport or network_transport(
            self.address,
            trust_env=trust_env,
            tls_files=(ca_file, client_cert, client_key),
            connect_timeout_s=connect_timeout_ms / 1000,
            max_connections=max_connections,
        )

    def post_event(
        self,
        path: str,
        body: bytes,
        *,
        token: str | None,
        key: str | None,
        origin: Origin,
        timeout_ms: int | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Deliver the JSON text `body`; `key` is None for a request of several events."""
        fields = [("Content-Type", "application/json"), ("Accept", "application/json")]
        fields += self._credentials(token) + self._delivery(key, origin)
        request = self._request("POST", path, fields, body)
        return self._ask(request, timeout_ms, deadline, token=token)

    def call_tool(
        self,
        params: bytes,
        *,
        tool: str,
        token: str | None,
        key: str | None,
        origin: Origin,
        request_id: str | None = None,
        session: mcp.Session | None = None,
        mirrored: Iterable[tuple[str, str]] = (),
        timeout_ms: int | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Call an MCP tool, in this session or else stateless; `params` is `{"name": …, "arguments": …}`.

        `mirrored` are the header fields that a stateless tool asks for (`mcp_params`). The body of the answer
        is the text of the JSON-RPC message with our id, out of an event stream too; the stream is read no
        further. The call has a connection of its own: no idle one that ends on the way makes the outcome of
        an unsafe call unknown.
        """
        request_id = request_id or self._new_id()
        if session is None:
            body = mcp.tool_call_body(params, request_id=request_id, key=key, version=VERSION)
            fields = [*mcp.request_fields("tools/call", tool), *mirrored]
        else:
            body = mcp.session_call_body(params, request_id=request_id, key=key)
            fields = mcp.session_fields(session)
        timeout_ms = self._mcp_timeout_ms if timeout_ms is None else timeout_ms
        fields += self._delivery(key, origin)
        return self._ask_mcp(body, fields, request_id, token=token, timeout_ms=timeout_ms, deadline=deadline)

    def discover_tools(
        self,
        *,
        token: str | None,
        request_id: str | None = None,
        cursor: str | None = None,
        timeout_ms: int | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Ask for `tools/list`, stateless: finds out which era the endpoint speaks, and repeats nothing."""
        request_id = request_id or self._new_id()
        body = mcp.tools_list_body(request_id=request_id, version=VERSION, cursor=cursor)
        fields = mcp.request_fields("tools/list")
        return self._ask_mcp(body, fields, request_id, token=token, timeout_ms=timeout_ms, deadline=deadline)

    def initialize(
        self, *, token: str | None, timeout_ms: int | None = None, deadline: float | None = None
    ) -> Answer:
        """Ask for a session; `confirm_session` ends its opening."""
        request_id = self._new_id()
        body = mcp.initialize_body(request_id=request_id, version=VERSION)
        fields = mcp.session_fields(None)
        return self._ask_mcp(body, fields, request_id, token=token, timeout_ms=timeout_ms, deadline=deadline)

    def confirm_session(
        self,
        session: mcp.Session,
        *,
        token: str | None,
        timeout_ms: int | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Say `notifications/initialized`: the session may be used once this is answered with a 2xx."""
        fields = mcp.session_fields(session)
        body = mcp.initialized_body()
        return self._ask_mcp(body, fields, None, token=token, timeout_ms=timeout_ms, deadline=deadline)

    def end_session(
        self,
        session: mcp.Session,
        *,
        token: str | None,
        timeout_ms: int | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Say `DELETE`: nobody calls in this session any more. A server may refuse it with 405."""
        fields = [*mcp.session_fields(session), *self._credentials(token)]
        request = self._request("DELETE", self._paths["mcp"], fields)
        request.extensions["fresh"] = True
        return self._ask(request, timeout_ms, deadline, token=token)

    def health(self, *, timeout_ms: int | None = None, deadline: float | None = None) -> Answer:
        """Ask whether the relay works; without a token."""
        request = self._request("GET", self._paths["health"], [("Accept", "application/json")])
        return self._ask(request, timeout_ms, deadline)

    def spec(
        self, *, token: str | None = None, timeout_ms: int | None = None, deadline: float | None = None
    ) -> Answer:
        """Ask for the relay's OpenAPI document."""
        fields = [("Accept", "application/json"), *self._credentials(token)]
        request = self._request("GET", self._paths["spec"], fields)
        return self._ask(request, timeout_ms, deadline, token=token)

    def abort(self) -> None:
        """End all requests under way at once, from any thread and for good: later ones are STOPPED too."""
        self._aborted = True
        if isinstance(self._transport, RelayTransport):
            self._transport.abort()

    def close_idle(self) -> None:
        """Close the connections that nobody uses just now; the next request opens its own."""
        if isinstance(self._transport, RelayTransport):
            self._transport.close()

    def close(self) -> None:
        """Close the connections. No request may be under way; `abort` ends those that are."""
        self._transport.close()

    def _ask_mcp(
        self,
        body: bytes,
        fields: Fields,
        request_id: str | None,
        *,
        token: str | None,
        timeout_ms: int | None,
        deadline: float | None,
    ) -> Answer:
        fields = [("Content-Type", "application/json"), *fields, *self._credentials(token)]
        request = self._request("POST", self._paths["mcp"], fields, body)
        request.extensions["fresh"] = True

        def read(status: int, headers: Mapping[str, str], chunks: Iterable[bytes]) -> tuple[bytes, bool]:
            if 200 <= status < 300 and _is_event_stream(headers):
                # To a notification there is no answer that could be waited for.
                return read_message(chunks, request_id, limit_bytes(status)) if request_id else (b"", False)
            return _read_whole(status, headers, chunks)

        answer = self._ask(request, timeout_ms, deadline, token=token, read=read)
        return answer._replace(request_id=request_id or "")

    def _new_id(self) -> str:
        return self._random_bytes(_REQUEST_ID_BYTES).hex()

    def _delivery(self, key: str | None, origin: Origin) -> Fields:
        fields = origin_fields(origin, self._random_bytes(_SPAN_ID_BYTES) if origin.traceparent else b"")
        encoded = encode_key(key, self._idempotency_header) if key else None
        return fields if encoded is None else [("Idempotency-Key", encoded), *fields]

    def _credentials(self, token: str | None) -> Fields:
        return [] if token is None else [("Authorization", f"Bearer {token}")]

    def _request(self, method: str, path: str, fields: Fields, body: bytes | None = None) -> httpx.Request:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self.address.url(path))
        # Everything is given, so that httpx, which would take longer for it than the network, adds nothing.
        fields = [("Host", self._host), *self._usual, *fields]
        if body is not None:
            fields.append(("Content-Length", str(len(body))))
        return httpx.Request(method, url, headers=fields, stream=httpx.ByteStream(body or b""))

    def _ask(
        self,
        request: httpx.Request,
        timeout_ms: int | None,
        deadline: float | None,
        *,
        token: str | None = None,
        read: Read | None = None,
    ) -> Answer:
        began = time.monotonic()
        until = began + (self._request_timeout_ms if timeout_ms is None else timeout_ms) / 1000
        ours = deadline is not None and deadline < until
        request.extensions["deadline"] = deadline if ours else until
        if self._aborted or (deadline is not None and deadline <= began):
            return Answer(None, failure=Failure.STOPPED, detail="stopped before it was sent", sent=False)
        try:
            response = self._transport.handle_request(request)
            # Not `iter_raw`: an answer that a test made counts as read, its stream can be read again.
            stream = cast("httpx.SyncByteStream", response.stream)
            try:
                headers = _joined(response)
                chunks = unpacked(stream, headers.get("content-encoding", ""))
                body, cut = (read or _read_whole)(response.status_code, headers, chunks)
            finally:
                stream.close()
        except (httpx.TransportError, DamagedBody) as error:
            stopped = self._aborted or (ours and time.monotonic() >= request.extensions["deadline"])
            return _no_answer(error, stopped=stopped, elapsed_ms=_ms_since(began))
        return Answer(
            response.status_code,
            # A relay that echoes what it was sent must not bring the token into a dead letter or a receipt.
            headers={name: without_token_text(value, token) for name, value in headers.items()},
            body=without_token(body, token),
            cut=cut,
            elapsed_ms=_ms_since(began),
        )


def _read_whole(status: int, _headers: Mapping[str, str], chunks: Iterable[bytes]) -> tuple[bytes, bool]:
    return read_capped(chunks, limit_bytes(status))


def _is_event_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"


def _no_answer(error: Exception, *, stopped: bool, elapsed_ms: int) -> Answer:
    sent = not isinstance(error, NOTHING_SENT)
    failure = Failure.LOST if sent else Failure.UNREACHABLE
    # No free connection is our own shortage: it says nothing about the relay.
    if stopped or isinstance(error, httpx.PoolTimeout):
        failure = Failure.STOPPED
    words = f"the answer cannot be unpacked: {error}" if isinstance(error, DamagedBody) else str(error)
    return Answer(None, failure=failure, detail=one_line(words), elapsed_ms=elapsed_ms, sent=sent)


def _joined(response: httpx.Response) -> dict[str, str]:
    """The header fields with lower-case names, a repeated one joined (RFC 9110, section 5.3)."""
    joined: dict[str, str] = {}
    for raw_name, raw_value in response.headers.raw:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def _ms_since(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
