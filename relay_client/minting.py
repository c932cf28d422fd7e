"""What gives out tokens when asked, as one protocol, and how one that speaks HTTP is asked.

An exchange is a generator, as in httpx's auth: it yields requests, is sent the responses, and returns the
grant. It is tested without a network; `TokenEndpoint` runs it over one.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol, cast

import httpx

from relay_client.address import Address
from relay_client.auth import TokenUnavailable
from relay_client.body import DamagedBody, limit_bytes, read_capped, unpacked
from relay_client.clean import one_line
from relay_client.network import network_transport
from relay_client.transport import RelayTransport

_MOST_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Grant:
    """A token that was given out, and until when it is good (epoch milliseconds; None: nobody said)."""

    token: str = field(repr=False)
    expires_at_ms: int | None = None


Exchange = Generator[httpx.Request, httpx.Response, Grant]


class Minter(Protocol):
    """Gives out a new token each time it is asked. Thread-safe."""

    one_per_agent: bool
    is_kept: bool  # what it gave out may be kept on disk, for other processes of the same user

    def mint(self, agent: str, *, deadline: float | None) -> Grant:
        """A new token, before `deadline` (monotonic seconds); `agent` matters where there is one for each.

        Raises:
            TokenUnavailable: there is none now.
        """

    def describe(self) -> str:
        """Where tokens come from, for status and log."""

    def inputs(self) -> str:
        """A name of all that it was told (settings, files), which tells nothing of it and changes with it."""

    def abort(self) -> None:
        """End what is under way at once, from any thread and for good."""

    def close(self) -> None:
        """Close what is idle; what is under way is not concerned."""


class TokenEndpoint:
    """Where tokens are asked for. The timeout is for a whole request; redirects are not followed.

    Raises:
        ValueError: the address, a TLS file, or the environment's proxy cannot be used; one line tells why.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_ms: int = 30_000,
        connect_timeout_ms: int = 5_000,
        ca_file: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        trust_env: bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        try:
            self.url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(
                f"{url.partition('?')[0]!r} is no address of a token endpoint: {error}"
            ) from None
        self._timeout_s = timeout_ms / 1000
        port = self.url.port or {"http": 80, "https": 443}[self.url.scheme]
        self._transport = transport or network_transport(
            Address(self.url.scheme, self.url.raw_host.decode("ascii"), port),
            trust_env=trust_env,
            tls_files=(ca_file, client_cert, client_key),
            connect_timeout_s=connect_timeout_ms / 1000,
            max_connections=_MOST_CONNECTIONS,
        )

    @property
    def place(self) -> str:
        """Its address without a query, for people."""
        return str(self.url.copy_with(query=None))

    def run(self, exchange: Exchange, *, deadline: float | None = None) -> Grant:
        """Send what the exchange yields until it returns; raises TokenUnavailable."""
        try:
            request = next(exchange)
            while True:
                request = exchange.send(self._ask(request, deadline))
        except StopIteration as end:
            return cast("Grant", end.value)
        finally:
            exchange.close()

    def abort(self) -> None:
        """End all requests under way at once, from any thread and for good."""
        if isinstance(self._transport, RelayTransport):
            self._transport.abort()

    def close(self) -> None:
        """Close the idle connections."""
        self._transport.close()

    def _ask(self, request: httpx.Request, deadline: float | None) -> httpx.Response:
        until = time.monotonic() + self._timeout_s
        request.extensions["deadline"] = until if deadline is None else min(until, deadline)
        try:
            response = self._transport.handle_request(request)
            try:
                stream = cast("httpx.SyncByteStream", response.stream)
                chunks = unpacked(stream, response.headers.get("content-encoding", ""))
                body, _ = read_capped(chunks, limit_bytes(500))  # an answer with a token is small
            finally:
                response.close()
        except (httpx.TransportError, DamagedBody) as error:
            raise TokenUnavailable(f"{self.place} does not answer: {one_line(str(error))}") from error
        kept = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-encoding"]
        return httpx.Response(response.status_code, headers=kept, content=body)
