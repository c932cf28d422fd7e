"""Which proxy stands between us and the one relay, read from the environment's variables.

`urllib.request` knows the variables (and the settings of macOS); what it makes of IPv6 addresses and networks
in NO_PROXY is put right here.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from relay_client.address import Address

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy, spoken to over TLS when its scheme is https."""

    scheme: str
    host: str
    port: int
    credentials: tuple[str, str] | None = None

    @property
    def url(self) -> str:
        """Its address, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def proxy_from_environment(relay: Address) -> Proxy | None:
    """The proxy that the process's environment names for `relay`.

    Raises:
        ValueError: it names one that cannot be used; one line, credentials masked.
    """
    return choose_proxy(relay, urllib.request.getproxies())


def choose_proxy(relay: Address, proxies: Mapping[str, str]) -> Proxy | None:
    """The proxy for `relay` out of the form of `urllib.request.getproxies`; None to go there directly.

    Raises:
        ValueError: the one for it cannot be used; one line, credentials masked.
    """
    named = proxies.get(relay.scheme) or proxies.get("all")
    if not named or _is_excepted(relay, proxies.get("no", "")):
        return None
    return _parse(named, relay)


def _parse(named: str, relay: Address) -> Proxy:
    try:
        parts = urlsplit(named if "://" in named else f"http://{named}")
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit("none://"), None, None
    way_out = f"Except {relay.host} from it in NO_PROXY, or set relay.trust_env = false"
    if host is None:
        raise ValueError(f"the proxy that the environment names for {relay.origin} is no address. {way_out}")
    if parts.scheme not in _DEFAULT_PORTS:
        shown = f"{parts.scheme}://{host}" + (f":{port}" if port else "")
        raise ValueError(
            f"the proxy {shown} for {relay.origin} cannot be used, it has to be http or https. {way_out}"
        )
    credentials = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return Proxy(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], credentials)


def _is_excepted(relay: Address, no_proxy: str) -> bool:
    entries = [entry.strip() for entry in no_proxy.split(",")]
    literal = f"[{relay.host}]" if ":" in relay.host else relay.host
    forms = {relay.host, literal, f"{literal}:{relay.port}"}
    proxies = {"no": no_proxy}
    if any(urllib.request.proxy_bypass(form, proxies) for form in forms):
        return True
    return any(_covers(entry, relay.host) for entry in entries)


def _covers(network: str, host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network.strip("[]"), strict=False)
    except ValueError:
        return False
