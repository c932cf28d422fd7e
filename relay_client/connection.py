"""One connection to the relay, directly or through a proxy, and the one request on it at a time."""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from relay_client.http1 import BodyReader, Head, HeadReader, body_reader, request_head
from relay_client.proxy import Proxy
from relay_client.sockets import Exchange, Sockets, Stream

_ONE_WRITE_BYTES = 64 * 1024


class ProxyRefused(Exception):
    """The proxy opened no tunnel."""


@dataclass(frozen=True, slots=True)
class Route:
    """How to get to the relay. `tls` is None for a relay that is spoken to in the clear."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    proxy: Proxy | None = None
    proxy_tls: ssl.SSLContext | None = None

    @property
    def first_stop(self) -> str:
        """The host and port that a connection is opened to."""
        host, port = (self.proxy.host, self.proxy.port) if self.proxy else (self.host, self.port)
        return _host_port(host, port)

    @property
    def is_forwarded(self) -> bool:
        """Whether a proxy reads the requests: the target is then a whole URL (RFC 9112, section 3.2.2)."""
        return self.proxy is not None and self.tls is None

    @property
    def proxy_fields(self) -> list[tuple[bytes, bytes]]:
        """What the proxy wants to know of us."""
        if self.proxy is None or self.proxy.credentials is None:
            return []
        credentials = base64.b64encode(":".join(self.proxy.credentials).encode())
        return [(b"Proxy-Authorization", b"Basic " + credentials)]


def open_connection(
    route: Route, sockets: Sockets, exchange: Exchange, connect_timeout_s: float
) -> Connection:
    """Connect along the route, tunnel and handshakes included, all within `connect_timeout_s`.

    Raises:
        OSError, NotHttp, ProxyRefused: nothing is left open.
    """
    first = route.proxy or route
    opening = Exchange(time.monotonic() + min(connect_timeout_s, exchange.left_s()))
    stream = sockets.connect(first.host, first.port, opening, connect_timeout_s)
    try:
        if route.proxy_tls is not None and route.proxy is not None:
            stream = stream.start_tls(route.proxy_tls, route.proxy.host, opening)
        if route.tls is not None:
            if route.proxy is not None:
                _tunnel(route, stream, opening)
            stream = stream.start_tls(route.tls, route.host, opening)
    except BaseException:
        stream.close()
        raise
    return Connection(stream)


class Connection:
    """Serves one request after another."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._reader: BodyReader | None = None
        self._rest = b""
        self._may_be_kept = True
        self.idle_since = 0.0

    def ask(self, head: bytes, body: bytes, exchange: Exchange) -> Head:
        """Send a request; give the head of the final response. Raises OSError or NotHttp."""
        self._may_be_kept = False
        all_written = self._send(head, body, exchange)
        reader = HeadReader()
        answer = None
        while answer is None:
            answer = reader.feed(self._stream.read(exchange))
        self._reader, self._rest = body_reader(answer), reader.rest
        self._may_be_kept = all_written and answer.keeps
        return answer

    def body(self, exchange: Exchange) -> Iterator[bytes]:
        """The body of the response, piece by piece. Raises OSError or NotHttp."""
        reader = self._reader
        if reader is None:
            return
        if self._rest and (part := reader.feed(self._rest)):
            yield part
        while not reader.done:
            if part := reader.feed(self._stream.read(exchange)):
                yield part

    @property
    def can_be_kept(self) -> bool:
        """Whether the response was read to its end and the connection may serve another request."""
        reader = self._reader
        return self._may_be_kept and reader is not None and reader.done and not reader.surplus

    def is_ended(self) -> bool:
        """Whether the other end has closed this idle connection."""
        return self._stream.is_ended()

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def _send(self, head: bytes, body: bytes, exchange: Exchange) -> bool:
        """Whether all could be written. A server may refuse a large body early, answer and close."""
        try:
            if len(body) <= _ONE_WRITE_BYTES:
                self._stream.write(head + body, exchange, of_request=True)
            else:
                self._stream.write(head, exchange, of_request=True)
                self._stream.write(body, exchange, of_request=True)
        except TimeoutError:
            raise
        except OSError:
            if not exchange.sent:
                raise
            return False
        return True


def _tunnel(route: Route, stream: Stream, exchange: Exchange) -> None:
    """CONNECT (RFC 9110, section 9.3.6)."""
    target = _host_port(route.host, route.port).encode("ascii")
    head = request_head(b"CONNECT", target, [(b"Host", target), *route.proxy_fields])
    stream.write(head, exchange, of_request=False)
    reader = HeadReader()
    answer = None
    while answer is None:
        answer = reader.feed(stream.read(exchange))
    if not 200 <= answer.status < 300:
        raise ProxyRefused(f"the proxy {route.first_stop} answered {answer.status}")


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
