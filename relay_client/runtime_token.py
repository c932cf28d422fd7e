"""The relay's own re-mint: a token for each agent, asked for with the bootstrap token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import httpx

from relay_client.auth import TokenSource, TokenUnavailable, fingerprint
from relay_client.minting import Exchange, Grant, TokenEndpoint
from relay_client.token_answer import read_runtime


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class RuntimeTokens:
    """`POST` with the bootstrap token and `{"agentId", "instanceId"}`, answered 201 `{"token", "expiresAt"}`.

    `instance_id` stands for this outbox, whichever process sends. `tell` is given each secret before it is
    used, so that it can be masked in logs.
    """

    one_per_agent = True
    is_kept = True

    def __init__(
        self,
        endpoint: TokenEndpoint,
        bootstrap: TokenSource,
        instance_id: str,
        *,
        wall_ms: Callable[[], int] = _wall_ms,
        tell: Callable[[str | None], None] = lambda _secret: None,
    ) -> None:
        """Nothing is asked yet."""
        self._endpoint = endpoint
        self._bootstrap = bootstrap
        self._instance_id = instance_id
        self._wall_ms = wall_ms
        self._tell = tell

    def mint(self, agent: str, *, deadline: float | None) -> Grant:
        """Ask for a token of this agent; raises TokenUnavailable."""
        return self._endpoint.run(self.exchange(agent), deadline=deadline)

    def exchange(self, agent: str) -> Exchange:
        """One request, and a second one where a 401 makes us find another bootstrap token in its file."""
        bootstrap = self._bootstrap.token()
        response = yield self._request(agent, bootstrap)
        if response.status_code == 401 and self._bootstrap.refresh():
            bootstrap = self._bootstrap.token()
            response = yield self._request(agent, bootstrap)
        secrets = [bootstrap] if bootstrap else []
        return read_runtime(response, self._endpoint.place, secrets, now_ms=self._wall_ms())

    def describe(self) -> str:
        """Where tokens come from."""
        return f"runtime tokens of the relay ({self._bootstrap.describe()})"

    def inputs(self) -> str:
        """Changes with the address and the bootstrap token."""
        try:
            bootstrap = self._bootstrap.token() or ""
        except TokenUnavailable as unavailable:
            bootstrap = str(unavailable)
        return fingerprint(f"{self._endpoint.url}\0{bootstrap}")

    def abort(self) -> None:
        """End what is under way, for good."""
        self._endpoint.abort()

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def _request(self, agent: str, bootstrap: str | None) -> httpx.Request:
        self._tell(bootstrap)
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if bootstrap is not None:
            headers["Authorization"] = f"Bearer {bootstrap}"
        body = json.dumps({"agentId": agent, "instanceId": self._instance_id}).encode()
        return httpx.Request("POST", self._endpoint.url, headers=headers, content=body)
