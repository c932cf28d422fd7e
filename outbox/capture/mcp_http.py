"""One HTTP request of the proxy to the relay's MCP endpoint, on a connection of its own that can be cut off.

A stream of events is read as it comes. What the answers mean is decided elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from outbox.errors import ConfigError
from outbox.setting_keys import Settings
from relay_client.address import parse_base_url
from relay_client.body import DamagedBody, limit_bytes, read_capped, unpacked
from relay_client.clean import one_line
from relay_client.client import VERSION
from relay_client.connection import Connection, ProxyRefused, Route, open_connection
from relay_client.http1 import NotHttp, request_head
from relay_client.proxy import proxy_from_environment
from relay_client.reading import Answer, Failure
from relay_client.resolve import Resolver
from relay_client.sockets import Exchange, Sockets, words_for
from relay_client.sse import EventStream, EventTooLarge
from relay_client.tls import tls_context

MOST_BYTES = 64 * 1024 * 1024

# ValueError: a TLS socket that was closed under its reader says so in this way.
_ERRORS = (OSError, NotHttp, ProxyRefused, DamagedBody, EventTooLarge, ValueError)

Fields = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the relay's MCP is, and how to get there."""

    url: str
    target: bytes
    host: str
    route: Route
    connect_timeout_s: float


def endpoint_of(settings: Settings) -> Endpoint:
    """The configured relay's MCP endpoint; raises ConfigError when a setting cannot be used."""
    relay = settings.relay
    try:
        address = parse_base_url(settings.require_relay_url())
        proxy = proxy_from_environment(address) if relay.trust_env else None
        trusted = tls_context(relay.ca_file, relay.client_cert, relay.client_key)
        proxy_tls = tls_context(relay.ca_file) if proxy and proxy.scheme == "https" else None
    except ValueError as error:
        raise ConfigError(f"{error}. Nothing was started; what waits stays on disk.") from error
    url = address.url(settings.relay_paths.mcp)
    tls = trusted if address.scheme == "https" else None
    route = Route(address.host, address.port, tls=tls, proxy=proxy, proxy_tls=proxy_tls)
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    target = url if route.is_forwarded else path
    host = address.origin.partition("//")[2]
    return Endpoint(url, target.encode("ascii"), host, route, relay.connect_timeout_s)


class NoAnswer(Exception):
    """No whole answer came; `sent` says whether a byte of the request may have left."""

    def __init__(self, words: str, *, sent: bool) -> None:
        super().__init__(one_line(words))
        self.sent = sent

    def as_answer(self) -> Answer:
        """The same as relay_client tells it."""
        failure = Failure.LOST if self.sent else Failure.UNREACHABLE
        return Answer(None, failure=failure, detail=str(self), sent=self.sent)


class Call:
    """One request under way: opened and read by one thread, `cancel`led by any.

    `silence_s` bounds each wait for a byte, so that a stream which lives is never cut off.
    """

    def __init__(self, endpoint: Endpoint, silence_s: float) -> None:
        self._endpoint = endpoint
        self._silence_s = silence_s
        self._sockets = Sockets(Resolver())
        self._exchange = Exchange(time.monotonic() + silence_s)
        self._connection: Connection | None = None
        self.status = 0
        self.headers: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def cancel(self) -> None:
        """End it at once; its thread meets NoAnswer."""
        self._sockets.abort()

    def send(self, method: str, fields: Fields, body: bytes | None = None) -> None:
        """Send the request and read the head of the answer into `status` and `headers`; raises NoAnswer."""
        try:
            self._connection = open_connection(
                self._endpoint.route, self._sockets, self._exchange, self._endpoint.connect_timeout_s
            )
            head = self._connection.ask(self._head(method, fields, body), body or b"", self._exchange)
        except _ERRORS as error:
            raise self._no_answer(error) from error
        self.status = head.status
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head.fields
        }

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        return 200 <= self.status < 300 and kind == "text/event-stream"

    def messages(self) -> Iterator[str]:
        """The texts in a stream of events, as they come; raises NoAnswer when it breaks."""
        stream = EventStream(MOST_BYTES)
        try:
            for chunk in self._chunks():
                yield from (event.data for event in stream.feed(chunk) if event.data)
        except _ERRORS as error:
            raise self._no_answer(error) from error

    def answer(self) -> Answer:
        """The whole answer; of an error no more than 64 KiB are read. Raises NoAnswer."""
        most = MOST_BYTES if 200 <= self.status < 300 else limit_bytes(self.status)
        try:
            body, cut = read_capped(self._chunks(), most)
        except _ERRORS as error:
            raise self._no_answer(error) from error
        return Answer(self.status, headers=self.headers, body=body, cut=cut)

    def _chunks(self) -> Iterable[bytes]:
        assert self._connection is not None  # noqa: S101 - `send` comes first
        coding = self.headers.get("content-encoding", "")
        for chunk in unpacked(self._connection.body(self._exchange), coding):
            self._exchange.deadline = time.monotonic() + self._silence_s
            yield chunk

    def _head(self, method: str, fields: Fields, body: bytes | None) -> bytes:
        usual = [("Host", self._endpoint.host), ("User-Agent", f"relay-outbox/{VERSION}")]
        usual += [("Accept-Encoding", "identity"), ("Connection", "close")]
        if body is not None:
            usual += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        named = [(name.encode("ascii"), value.encode("latin-1")) for name, value in [*usual, *fields]]
        if self._endpoint.route.is_forwarded:
            named += self._endpoint.route.proxy_fields
        return request_head(method.encode("ascii"), self._endpoint.target, named)

    def _no_answer(self, error: Exception) -> NoAnswer:
        sent = self._exchange.sent
        if isinstance(error, TimeoutError):
            words = "no answer in time" if sent else f"no connection to {self._where} in time"
        elif isinstance(error, EventTooLarge):
            words = "a message of the answer is too large"
        elif isinstance(error, NotHttp | ProxyRefused | DamagedBody):
            words = str(error)
        else:
            words = f"{words_for(error)} at {self._where}"
        return NoAnswer(words, sent=sent)

    @property
    def _where(self) -> str:
        return self._endpoint.route.first_stop


class Ticket:
    """One request of the client under way: what has to be cut off when it is cancelled. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Call | None = None
        self._is_cut = False
        self.cancelled = False

    @property
    def is_cut(self) -> bool:
        """Whether its calls are cut off."""
        return self._is_cut

    def use(self, call: Call) -> Call:
        """From now on this call is cut off by `cancel`; at once when that came before."""
        with self._lock:
            self._call = call
            if self._is_cut:
                call.cancel()
        return call

    def cut(self) -> None:
        """End the call under way, and each later one; the request itself is not cancelled."""
        with self._lock:
            self._is_cut = True
            if self._call is not None:
                self._call.cancel()

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self.cancelled = True
        self.cut()
