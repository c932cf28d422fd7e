"""OAuth 2.0: tokens by client credentials or by a refresh token (RFC 6749 4.4 and 6), form-encoded."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote_plus, urlencode

import httpx

from relay_client.auth import TokenFile, TokenUnavailable, fingerprint
from relay_client.minting import Exchange, Grant, TokenEndpoint
from relay_client.refresh_token import RefreshTokenFile
from relay_client.token_answer import read_oauth, read_rotated


@dataclass(frozen=True, slots=True)
class OAuthClient:
    """Who we are at a token endpoint, and what we ask for. A public client has no secret.

    `resource` is RFC 8707's; `style` says where id and secret stand: "basic" in a header, "post" in the form.
    """

    client_id: str
    secret: Callable[[], str] | None = None
    scope: str | None = None
    resource: str | None = None
    style: Literal["basic", "post"] = "basic"


def secret_from(value: str | None, path: str | None) -> Callable[[], str] | None:
    """A client secret that is given, or stands in a file that is read when it changes."""
    if path is not None:
        return TokenFile(path).token
    return None if value is None else lambda: value


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class OAuthTokens:
    """Asks a token endpoint: by the refresh token where there is one, else by the client's credentials.

    `tell` is given each secret before it is used, so that it can be masked in logs.
    """

    one_per_agent = False
    is_kept = True

    def __init__(
        self,
        endpoint: TokenEndpoint,
        client: OAuthClient,
        refresh: RefreshTokenFile | None = None,
        *,
        wall_ms: Callable[[], int] = _wall_ms,
        tell: Callable[[str | None], None] = lambda _secret: None,
    ) -> None:
        """Nothing is asked yet."""
        self._endpoint = endpoint
        self._client = client
        self._refresh = refresh
        self._wall_ms = wall_ms
        self._tell = tell

    def mint(self, agent: str, *, deadline: float | None) -> Grant:  # noqa: ARG002 - one token for all agents
        """Ask for a token; raises TokenUnavailable."""
        return self._endpoint.run(self.exchange(), deadline=deadline)

    def exchange(self) -> Exchange:
        """One request, one answer. A rotated refresh token is on disk before this returns the grant."""
        secret = self._client.secret() if self._client.secret else None
        refresh_token = self._refresh.token() if self._refresh else None
        for text in filter(None, (secret, refresh_token)):
            self._tell(text)
        response = yield self._request(secret, refresh_token)
        rotated = read_rotated(response)
        if self._refresh and rotated is not None and rotated != refresh_token:
            self._tell(rotated)
            self._refresh.keep(rotated)
        secrets = self._as_sent(secret, refresh_token, rotated)
        return read_oauth(response, self._endpoint.place, secrets, now_ms=self._wall_ms())

    def describe(self) -> str:
        """Where tokens come from."""
        return f"OAuth, {self._endpoint.place}"

    def inputs(self) -> str:
        """Changes with settings, client secret and refresh token."""
        client = self._client
        words = [str(self._endpoint.url), client.client_id, client.scope, client.resource, client.style]
        for read in (client.secret, self._refresh.token if self._refresh else None):
            try:
                words.append(read() if read else "")
            except TokenUnavailable as unavailable:
                words.append(str(unavailable))
        return fingerprint("\0".join(word or "" for word in words))

    def abort(self) -> None:
        """End what is under way, for good."""
        self._endpoint.abort()

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def _as_sent(self, *secrets: str | None) -> list[str]:
        """The secrets, also encoded: what repeats a request shows them so."""
        plain = [text for text in secrets if text]
        pairs = [self._basic(text) for text in plain]
        return [*plain, *(quote_plus(text) for text in plain), *pairs]

    def _basic(self, secret: str) -> str:
        """Each half is form-encoded first (RFC 6749 2.3.1)."""
        pair = f"{quote_plus(self._client.client_id)}:{quote_plus(secret)}"
        return base64.b64encode(pair.encode()).decode()

    def _request(self, secret: str | None, refresh_token: str | None) -> httpx.Request:
        client = self._client
        form = {"grant_type": "client_credentials"}
        if refresh_token is not None:
            form = {"grant_type": "refresh_token", "refresh_token": refresh_token}
        form |= {"scope": client.scope} if client.scope else {}
        form |= {"resource": client.resource} if client.resource else {}
        headers = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
        if secret is None:
            form["client_id"] = client.client_id
        elif client.style == "post":
            form |= {"client_id": client.client_id, "client_secret": secret}
        else:
            headers["Authorization"] = f"Basic {self._basic(secret)}"
        headers["Accept-Encoding"] = "identity"
        return httpx.Request("POST", self._endpoint.url, headers=headers, content=urlencode(form).encode())
