"""The reference relay as a child process, for tests and the demo: started, killed, started again, read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import httpx

_STOP_WITHIN_S = 20
_ANSWER_WITHIN_S = 30


class RelayProcess:
    """`with RelayProcess(db, ["token"]) as relay:` serves at `relay.url` until the block ends.

    The first start takes a free port, and each later one the same port again, so that `url` stays good.
    """

    def __init__(
        self, db: str | os.PathLike[str], tokens: Sequence[str] = (), *, options: Sequence[str] = ()
    ) -> None:
        """Remember how to start; `options` are further arguments of `python -m relay_client.reference`."""
        self.url = ""
        self.tokens = tuple(tokens)
        self._db = os.fspath(db)
        self._options = tuple(options)
        self._port = 0
        self._child: subprocess.Popen[str] | None = None
        self._http: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The child's process id, None while none runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> Self:
        """Start the relay and wait until it takes connections.

        Raises:
            RuntimeError: it ended instead; why stands on stderr.
        """
        place = ("--db", self._db, "--port", str(self._port), "--token-file", "-")
        self._child = subprocess.Popen(  # noqa: S603 - our own module, no shell
            [sys.executable, "-m", "relay_client.reference", *place, *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdin is not None and self._child.stdout is not None  # noqa: S101, PT018 - asked for above
        self._child.stdin.write("\n".join(self.tokens))
        self._child.stdin.close()
        line = self._child.stdout.readline()
        if not line.startswith("listening "):
            raise RuntimeError(f"the reference relay did not start: exit status {self.stop()}")
        self.url = line.removeprefix("listening ").strip()
        self._port = int(self.url.rpartition(":")[2])
        headers = {"Authorization": f"Bearer {self.tokens[0]}"} if self.tokens else {}
        self._http = httpx.Client(headers=headers, trust_env=False, timeout=_ANSWER_WITHIN_S)
        return self

    def kill(self) -> None:
        """End it with SIGKILL, in the middle of whatever it does."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it with SIGTERM and return its exit status (0 when it does not run)."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self._http is not None:
            self._http.close()
        child, self._child, self._http = self._child, None, None
        if child is None:
            return 0
        with child:
            child.send_signal(number)
            try:
                return child.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise

    def events(self, agent: str | None = None) -> list[dict[str, Any]]:
        """Return all events kept, in the order of their arrival; `body` is their text."""
        query = {} if agent is None else {"agent": agent}
        return list(self._pages("events", query))

    def requests(self) -> list[dict[str, Any]]:
        """Return the log of requests, oldest first."""
        return list(self._pages("requests", {}))

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return what is kept of each agent, by its name."""
        agents = self._ask("GET", "summary").json()["agents"]
        return {agent["agent"]: agent for agent in agents}

    def archives(self, agent_id: str) -> list[dict[str, Any]]:
        """Return the continuation archives of an agent (the `agentId` in their bodies)."""
        answer = self._ask("GET", "archives", params={"agentId": agent_id})
        archives: list[dict[str, Any]] = answer.json()["archives"]
        return archives

    def add_faults(self, *rules: Mapping[str, Any]) -> None:
        """Add rules that make it misbehave (see the package's docstring)."""
        self._ask("POST", "faults", json=list(rules))

    def clear_faults(self) -> None:
        """Forget all such rules."""
        self._ask("DELETE", "faults")

    def revoke(self, token: str, *, revoked: bool = True) -> None:
        """Revoke a token, or take that back."""
        self._ask("POST", "revocations", json={"token": token, "revoked": revoked})

    def _pages(self, name: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        after = 0
        while True:
            page = self._ask("GET", name, params={**query, "after": str(after)}).json()
            if not page[name]:
                return
            yield from page[name]
            after = page["next"]

    def _ask(self, method: str, name: str, **options: Any) -> httpx.Response:
        if self._http is None:
            raise RuntimeError("the reference relay does not run")
        return self._http.request(method, f"{self.url}/api/reference/{name}", **options).raise_for_status()
