"""The relay's base address, checked once. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

_DEFAULT_PORTS = {"http": 80, "https": 443}
_AFTER_USER = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, slots=True)
class Address:
    """Scheme, host and port of a relay, and the path that comes before every path of the contract."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def origin(self) -> str:
        """`http://host:port`, the port only where it is not the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + (
            "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        )

    def url(self, path: str) -> str:
        """The whole address of `path`, with one slash between."""
        return f"{self.origin}{self.prefix}/{path.lstrip('/')}"


def parse_base_url(text: str) -> Address:
    """Read `http://HOST[:PORT][/PREFIX]`; the scheme in any case, a slash at the end or not.

    Raises:
        ValueError: it is no such address; the message is one line and shows the value, a password masked.
    """
    value = text.strip()
    shown = repr(_AFTER_USER.sub("//***@", value))
    if not value:
        raise ValueError("the relay's address is empty; it looks like http://127.0.0.1:4850")
    if any(character.isspace() or not character.isprintable() for character in value):
        raise ValueError(f"{shown} is no address of a relay: there is white space in it")
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{shown} is no address of a relay: {_lower(str(error))}") from None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS or not value[len(scheme) :].startswith("://"):
        raise ValueError(f"{shown} is no address of a relay: it has to start with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError(f"{shown} is no address of a relay: the token belongs into its own setting")
    if parts.query or parts.fragment or "?" in value or "#" in value:
        raise ValueError(f"{shown} is no address of a relay: it has a query or a fragment")
    if not parts.hostname or port == 0:
        raise ValueError(
            f"{shown} is no address of a relay: the {'port is 0' if port == 0 else 'host is missing'}"
        )
    return _address(scheme, parts.hostname, port or _DEFAULT_PORTS[scheme], parts.path, shown)


def _address(scheme: str, host: str, port: int, path: str, shown: str) -> Address:
    prefix = re.sub(r"/+", "/", path).rstrip("/")
    try:
        url = httpx.URL(Address(scheme, host, port, prefix).url("/"))
    except httpx.InvalidURL as error:
        raise ValueError(f"{shown} is no address of a relay: {_lower(str(error))}") from None
    return Address(scheme, url.raw_host.decode("ascii"), port, prefix)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
