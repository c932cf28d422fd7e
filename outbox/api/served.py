"""What the local HTTP needs of the daemon, or of a sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from outbox.api.meter import Meter
from outbox.errors import OutboxError
from outbox.event import Draft, Limits
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt


class Served(Protocol):
    """The daemon, as far as the local HTTP speaks to it; from any thread."""

    state: StateDirectory
    meter: Meter

    @property
    def limits(self) -> Limits:
        """What an event may be."""

    @property
    def kind_paths(self) -> Mapping[str, str]:
        """Where each kind of event goes."""

    @property
    def least_free_bytes(self) -> int:
        """How much disk is to stay free: with less nothing is accepted."""

    def hangs(self) -> str:
        """Why delivery does not go on by itself any more; "" while it does."""

    def enqueue(self, agent: str, drafts: list[Draft]) -> list[Receipt | OutboxError]:
        """Take events; returns after the commit."""

    def flush(self, agent: str | None, timeout_s: float) -> dict[str, Any]:
        """Flush one agent or all; what became of it, as JSON has it."""

    def pause(self, agent: str | None) -> int:
        """Pause one agent or all."""

    def resume(self, agent: str | None) -> int:
        """Resume one agent or all."""

    def retry_tokens(self) -> None:
        """Forget why no token could be had, and try at once."""

    def stop(self) -> None:
        """Stop the daemon."""
