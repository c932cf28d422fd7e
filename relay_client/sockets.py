"""The sockets: each operation bounded by its request's deadline, each live one known, so as to be cut off.

No HTTP in here. Everything raises OSError (TimeoutError among them); a connection belongs to one thread.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from relay_client.resolve import Resolver

_READ_BYTES = 64 * 1024

T = TypeVar("T")


class Exchange:
    """One request on its way: until when (monotonic seconds), and whether a byte of it may have left."""

    __slots__ = ("deadline", "sent")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.sent = False

    def left_s(self) -> float:
        """The time that is left; raises TimeoutError when there is none."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class Stream(Protocol):
    """Bytes to and from a peer."""

    def read(self, exchange: Exchange) -> bytes:
        """What has come, b"" at the end; waits for something."""

    def write(self, data: bytes, exchange: Exchange, *, of_request: bool) -> None:
        """Write all of it; `of_request` says that it is the request itself, no handshake or tunnel."""

    def start_tls(self, context: ssl.SSLContext, hostname: str, exchange: Exchange) -> Stream:
        """Speak TLS from here on; the stream that comes back takes the place of this one."""

    def is_ended(self) -> bool:
        """Whether an idle connection is of no use: it has something to read, which can only be its end."""

    def close(self) -> None:
        """Close the connection."""


class Sockets:
    """Opens connections and remembers them. Thread-safe."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._lock = threading.Lock()
        self._live: set[socket.socket] = set()
        self._aborted = False
        self.tls_sessions: dict[tuple[ssl.SSLContext, str], ssl.SSLSession] = {}  # of connections that ended

    def connect(self, host: str, port: int, exchange: Exchange, limit_s: float) -> Stream:
        """Connect to the first address of `host` that answers, within `limit_s` for all of them together."""
        until = time.monotonic() + min(limit_s, exchange.left_s())
        addresses = self._resolver.addresses(host, port, until - time.monotonic())
        for left, (family, _, _, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
            try:
                # Each address gets its share, so that one that swallows everything leaves time for the next.
                return SocketStream(self, self._open(family, address, (until - time.monotonic()) / left))
            except OSError:
                if left == 1:
                    raise
        raise OSError("no address")

    def watch(self, opened: socket.socket, instead_of: socket.socket | None = None) -> None:
        """Remember a live socket; raises OSError after `abort`."""
        with self._lock:
            if instead_of is not None:
                self._live.discard(instead_of)
            self._live.add(opened)
            if self._aborted:
                raise OSError("stopped")

    def close(self, opened: socket.socket) -> None:
        """Close a socket; under the lock, so that `abort` never meets a descriptor given away anew."""
        with self._lock:
            self._live.discard(opened)
            opened.close()

    def abort(self) -> None:
        """End everything under way in all threads, at once and for good."""
        with self._lock:
            self._aborted = True
            for live in self._live:
                with contextlib.suppress(OSError):
                    # Not `live.shutdown`: an SSLSocket would forget its TLS under the feet of its reader.
                    socket.socket.shutdown(live, socket.SHUT_RDWR)
        self._resolver.abort()

    def drop_after_fork(self) -> None:
        """Close the descriptors a child inherited; the connections stay the parent's. Takes no lock."""
        for inherited in list(self._live):
            inherited.close()

    def _open(self, family: int, address: Any, timeout_s: float) -> socket.socket:
        if timeout_s <= 0:
            raise TimeoutError
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.watch(opened)
            opened.settimeout(timeout_s)
            opened.connect(address)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            self.close(opened)
            raise
        return opened


class SocketStream:
    """A TCP connection, in the clear or under TLS."""

    def __init__(self, sockets: Sockets, connected: socket.socket) -> None:
        self._sockets = sockets
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._speaks_tls: tuple[ssl.SSLContext, str] | None = None

    def read(self, exchange: Exchange) -> bytes:
        """What has come, b"" at the end."""
        self._socket.settimeout(exchange.left_s())
        return self._socket.recv(_READ_BYTES)

    def write(self, data: bytes, exchange: Exchange, *, of_request: bool) -> None:
        """Write all of it."""
        rest = memoryview(data)
        # Under TLS a record may be on its way although an error is reported.
        exchange.sent |= of_request and isinstance(self._socket, ssl.SSLSocket)
        while rest:
            self._socket.settimeout(exchange.left_s())
            rest = rest[self._socket.send(rest) :]
            exchange.sent |= of_request

    def start_tls(self, context: ssl.SSLContext, hostname: str, exchange: Exchange) -> Stream:
        """Speak TLS from here on; over a TLS connection, TLS within it.

        The session of the last connection is offered, which saves both ends the certificates (RFC 8446, 2.2).
        """
        if isinstance(self._socket, ssl.SSLSocket):
            return NestedTls(self, context, hostname, exchange)
        plain, left_s = self._socket, exchange.left_s()
        known = self._sockets.tls_sessions.get((context, hostname))
        self._socket = context.wrap_socket(
            plain, server_hostname=hostname, do_handshake_on_connect=False, session=known
        )
        self._sockets.watch(self._socket, instead_of=plain)
        self._socket.settimeout(left_s)
        self._socket.do_handshake()
        self._speaks_tls = (context, hostname)
        return self

    def is_ended(self) -> bool:
        """Whether an idle connection is of no use any more."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close the connection; its tickets have come by now, if the relay gives any."""
        if self._speaks_tls and isinstance(self._socket, ssl.SSLSocket) and self._socket.session:
            self._sockets.tls_sessions[self._speaks_tls] = self._socket.session
        self._sockets.close(self._socket)


class NestedTls:
    """TLS inside a connection that is TLS itself: a relay behind a proxy that is spoken to over TLS.

    The outer stream bounds every step, so nothing here knows of time.
    """

    def __init__(self, outer: Stream, context: ssl.SSLContext, hostname: str, exchange: Exchange) -> None:
        self._outer = outer
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=hostname)
        self._drive(self._tls.do_handshake, exchange)

    def read(self, exchange: Exchange) -> bytes:
        """What has come, b"" at the end."""
        try:
            return self._drive(lambda: self._tls.read(_READ_BYTES), exchange)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    def write(self, data: bytes, exchange: Exchange, *, of_request: bool) -> None:
        """Write all of it."""
        exchange.sent |= of_request
        self._drive(lambda: self._tls.write(data), exchange)  # into memory, so always all of it

    def start_tls(self, context: ssl.SSLContext, hostname: str, exchange: Exchange) -> Stream:
        """One more layer."""
        return NestedTls(self, context, hostname, exchange)

    def is_ended(self) -> bool:
        """As the stream beneath."""
        return self._outer.is_ended()

    def close(self) -> None:
        """Close the connection."""
        self._outer.close()

    def _drive(self, step: Callable[[], T], exchange: Exchange) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._flush(exchange)
                if data := self._outer.read(exchange):
                    self._received.write(data)
                else:
                    self._received.write_eof()
            else:
                self._flush(exchange)
                return result

    def _flush(self, exchange: Exchange) -> None:
        if data := self._to_send.read():
            self._outer.write(data, exchange, of_request=False)


def words_for(error: Exception) -> str:
    """What the system said, in words for a person."""
    if isinstance(error, socket.gaierror):
        return f"the name cannot be looked up ({error.strerror})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
