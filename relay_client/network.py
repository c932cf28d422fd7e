"""From settings to the way to one server: its transport, whom to trust, which proxy stands between."""

from __future__ import annotations

from relay_client.address import Address
from relay_client.connection import Route
from relay_client.proxy import proxy_from_environment
from relay_client.tls import tls_context
from relay_client.transport import RelayTransport


def network_transport(
    address: Address,
    *,
    trust_env: bool,
    tls_files: tuple[str | None, str | None, str | None],
    connect_timeout_s: float,
    max_connections: int,
) -> RelayTransport:
    """A transport to `address`; `tls_files` are CA file, client certificate and its key.

    Raises:
        ValueError: a file, or the environment's proxy, cannot be used; one line that shows the value.
    """
    proxy = proxy_from_environment(address) if trust_env else None
    route = Route(
        address.host,
        address.port,
        tls=tls_context(*tls_files) if address.scheme == "https" else None,
        proxy=proxy,
        proxy_tls=tls_context(tls_files[0]) if proxy and proxy.scheme == "https" else None,
    )
    return RelayTransport(route, connect_timeout_s=connect_timeout_s, max_connections=max_connections)
