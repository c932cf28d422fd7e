"""STATE/tokens: tokens that were given out, for all processes of this user; a file of mode 0600 for each.

Losing one costs a request. Whether it is still good is the reader's to say.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from outbox.errors import StoreError
from outbox.store.directory import StateDirectory, file_name
from outbox.store.locks import owners_lock, token_byte
from outbox.store.place import write_private


class TokenCache:
    """The tokens of a state directory, by the agent they are for; "" stands for the host."""

    def __init__(self, state: StateDirectory) -> None:
        """Nothing is read or made yet."""
        self._state = state

    def read(self, agent: str, inputs: str) -> tuple[str, int | None] | None:
        """The token and its end (epoch ms) that was given out for the same `inputs`; None without one."""
        try:
            kept = json.loads(self._path(agent).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(kept, dict) or kept.get("inputs") != inputs:
            return None
        token, until = kept.get("token"), kept.get("expiresAt")
        return (token, until if isinstance(until, int) else None) if isinstance(token, str) else None

    def write(self, agent: str, inputs: str, token: str, expires_at_ms: int | None) -> None:
        """Keep it in place of the one before; trouble with the disk is no reason not to use it."""
        kept = {"inputs": inputs, "token": token, "expiresAt": expires_at_ms}
        with contextlib.suppress(StoreError, OSError):
            self._state.tokens.mkdir(mode=0o700, exist_ok=True)
            write_private(self._path(agent), json.dumps(kept))

    def forget(self, agent: str) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            self._path(agent).unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, agent: str, timeout_s: float) -> Iterator[bool]:
        """No other process gets a token of this name meanwhile; False where one did for all of `timeout_s`.

        Raises:
            StoreError: the lock file cannot be opened.
        """
        lock, byte = owners_lock(self._state.path), token_byte(agent)
        is_ours = lock.wait_exclusive(byte, timeout_s)
        try:
            yield is_ours
        finally:
            if is_ours:
                lock.release(byte)

    def _path(self, agent: str) -> Path:
        name = file_name(agent).removesuffix(".sqlite") if agent else "host"
        return self._state.tokens / f"{name}.json"
