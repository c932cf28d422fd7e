"""The way to the one relay: an httpx transport with a small pool of connections.

What it adds to httpx's own: one deadline for a whole request (`extensions["deadline"]`, monotonic seconds),
certainty whether a byte of it left, and `abort()`. The certainty is in the type of the error: NOTHING_SENT,
or any other httpx.TransportError. A connection in use belongs to the thread that uses it and nobody else
looks at it; httpcore's pool looks, and under threads closes connections that are being read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import httpx

from relay_client.connection import Connection, ProxyRefused, Route, open_connection
from relay_client.http1 import NotHttp, request_head
from relay_client.resolve import Resolver
from relay_client.sockets import Exchange, Sockets, words_for

NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)

# Shorter than the five seconds after which common servers close an idle connection: a request that meets such
# a close on its way is lost, and nobody can tell whether it was read.
KEEP_IDLE_S = 4.0

# ValueError: a TLS socket that was closed under its reader says so in this way.
_ERRORS = (OSError, NotHttp, ProxyRefused, ValueError)
_IN_THIS_PROCESS: weakref.WeakSet[RelayTransport] = weakref.WeakSet()


class RelayTransport(httpx.BaseTransport):
    """Thread-safe; at most `max_connections` requests are under way, the others wait for their turn."""

    def __init__(
        self,
        route: Route,
        *,
        connect_timeout_s: float = 5.0,
        max_connections: int = 32,
        resolver: Resolver | None = None,
    ) -> None:
        self._route = route
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._resolver = resolver
        self._begin()
        _IN_THIS_PROCESS.add(self)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; its response's body is read later, under the same deadline.

        `extensions["fresh"]` asks for a connection of its own, so that no idle one can end on the way.

        Raises:
            httpx.TransportError: one of NOTHING_SENT exactly when no byte of the request left.
        """
        exchange = Exchange(request.extensions["deadline"])
        if not self._turns.acquire(timeout=max(0.0, exchange.deadline - time.monotonic())):
            raise httpx.PoolTimeout("no connection was free in time")
        try:
            return self._ask(request, exchange)
        except _ERRORS as error:
            self._turns.release()
            raise self.told(error, exchange) from error
        except BaseException:
            self._turns.release()
            raise

    def abort(self) -> None:
        """End all requests under way, from any thread; those that come later fail at once."""
        self._sockets.abort()

    def close(self) -> None:
        """Close the idle connections; those in use are closed by their users, `abort` hurries them."""
        with contextlib.suppress(IndexError):  # there is none any more, whoever took the last one
            while True:
                self._idle.pop().close()

    def _begin(self) -> None:
        self._sockets = Sockets(self._resolver or Resolver())
        self._turns = threading.Semaphore(self._max_connections)
        self._idle: deque[Connection] = deque()  # its ends are safe to use from several threads

    def _ask(self, request: httpx.Request, exchange: Exchange) -> httpx.Response:
        head, body = self._head(request), request.read()
        is_fresh = bool(request.extensions.get("fresh"))
        while True:
            kept = None if is_fresh else self._take_idle()
            connection = kept or self._open(exchange)
            try:
                answer = connection.ask(head, body, exchange)
            except _ERRORS as error:
                connection.close()
                if kept and not exchange.sent and not isinstance(error, TimeoutError):
                    continue  # it had ended before anything was written: no attempt was made yet
                raise
            except BaseException:
                connection.close()
                raise
            stream = _Body(self, connection, exchange, keep=not is_fresh)
            return httpx.Response(answer.status, headers=answer.fields, stream=stream)

    def _head(self, request: httpx.Request) -> bytes:
        fields = request.headers.raw
        if not self._route.is_forwarded:
            return request_head(request.method.encode("ascii"), request.url.raw_path, fields)
        target = str(request.url).encode("ascii")
        return request_head(request.method.encode("ascii"), target, [*fields, *self._route.proxy_fields])

    def _open(self, exchange: Exchange) -> Connection:
        return open_connection(self._route, self._sockets, exchange, self._connect_timeout_s)

    def _take_idle(self) -> Connection | None:
        """The connection used last that still lives; the others are closed on the way."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - connection.idle_since < KEEP_IDLE_S and not connection.is_ended():
                return connection
            connection.close()

    def give_back(self, connection: Connection, *, keep: bool) -> None:
        """End the use of a connection; what cannot serve again is closed."""
        if keep and connection.can_be_kept:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
            self._close_stale()
        else:
            connection.close()
        self._turns.release()

    def _close_stale(self) -> None:
        with contextlib.suppress(IndexError):  # another thread was faster
            while time.monotonic() - self._idle[0].idle_since >= KEEP_IDLE_S:
                self._idle.popleft().close()

    def told(self, error: Exception, exchange: Exchange) -> httpx.TransportError:
        """The error as httpx's, in words for a person."""
        if isinstance(error, ProxyRefused):
            return httpx.ProxyError(str(error))
        where = self._route.first_stop
        if not exchange.sent:
            if isinstance(error, TimeoutError):
                return httpx.ConnectTimeout(f"no connection to {where} in time")
            return httpx.ConnectError(f"{words_for(error)} at {where}")
        if isinstance(error, TimeoutError):
            return httpx.ReadTimeout("no answer in time")
        if isinstance(error, NotHttp):
            return httpx.RemoteProtocolError(str(error))
        return httpx.ReadError(f"the connection broke: {words_for(error)}")

    def _begin_anew(self) -> None:
        """In a forked child: connections of its own; locks and sockets of the parent are left as they are."""
        self._sockets.drop_after_fork()
        self._begin()


class _Body(httpx.SyncByteStream):
    """The body of a response, read in the thread that asked."""

    def __init__(
        self, transport: RelayTransport, connection: Connection, exchange: Exchange, *, keep: bool
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._exchange = exchange
        self._keep = keep
        self._is_open = True

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._connection.body(self._exchange)
        except _ERRORS as error:
            raise self._transport.told(error, self._exchange) from error

    def close(self) -> None:
        """Give the connection back; one with an unread rest is closed."""
        if self._is_open:
            self._is_open = False
            self._transport.give_back(self._connection, keep=self._keep)


def _forked() -> None:
    for transport in list(_IN_THIS_PROCESS):
        transport._begin_anew()  # noqa: SLF001 - the module's own class


os.register_at_fork(after_in_child=_forked)
