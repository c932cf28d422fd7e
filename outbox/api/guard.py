"""Who may speak over TCP: whoever has the token, and no web page. Not for the Unix socket, which has a mode.

Host is checked against DNS rebinding (a name that a page's owner points to this host), Origin and
Sec-Fetch-Site against requests that a page of somebody else sends. No answer carries a CORS header.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outbox.api.problems import problem

_OPEN = frozenset(("/livez",))  # says nothing but that the process lives


class Guard:
    """Lets requests with the token through to the application."""

    def __init__(self, app: ASGIApp, token: Callable[[], str], host: str) -> None:
        """`token` gives the one of now; `host` is the name that was configured, beside loopback's own."""
        self._app = app
        self._token = token
        self._host = host.lower().strip("[]")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        refusal = None
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope), is_open=scope["path"] in _OPEN)
        await (refusal or self._app)(scope, receive, send)

    def admits(self, fields: list[tuple[bytes, bytes]]) -> bool:
        """Whether a request with these fields, names in lower case, may do what needs the token."""
        return self._refusal(Headers(raw=fields), is_open=False) is None

    def _refusal(self, headers: Headers, *, is_open: bool) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return problem(
                403,
                "foreign_host",
                "The header Host names no address of this daemon. Nothing was changed. Use 127.0.0.1 or "
                "localhost.",
            )
        if not _is_own(headers, hosts[0]):
            return problem(
                403,
                "foreign_origin",
                "The request comes from a web page of somebody else. Nothing was changed. Send it from a "
                "program, without Origin.",
            )
        if not is_open and not self._has_token(headers):
            return problem(
                401,
                "no_token",
                "The token is missing or another one. Nothing was changed. Send the header Authorization: "
                "Bearer TOKEN; it is daemon.http_token, or stands in http-token in the state directory.",
                {"WWW-Authenticate": "Bearer"},
            )
        return None

    def _is_ours(self, given: str) -> bool:
        name = _name_of(given)
        if name in {"localhost", self._host}:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True  # an address is no name that could be pointed elsewhere

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(token, self._token().encode())


def _name_of(host: str) -> str:
    """The name or address in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_own(headers: Headers, host: str) -> bool:
    origins = headers.getlist("origin")
    if any(origin.lower() != f"http://{host.lower()}" for origin in origins):
        return False
    return headers.get("sec-fetch-site", "none") in {"none", "same-origin"}
