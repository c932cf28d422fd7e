"""What the pumps of a state directory share, and what a pump may want after a turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outbox.bounds import Bounds
from outbox.delivery.clock import Clock
from outbox.delivery.gate import Gate
from outbox.delivery.grouping import Size
from outbox.delivery.parcel import Routes
from outbox.event import Limits
from outbox.policy import Schedule
from outbox.store.open_files import OpenFiles
from relay_client import RelayClient, TokenSource, TokenUnavailable, read_health

Log = Callable[[str, dict[str, Any]], None]


def silent(event: str, fields: dict[str, Any]) -> None:
    """A log that nobody reads."""


@dataclass(slots=True)
class Delivery:
    """The relay, what is known of it, and the files; `flushing` and `deadline` change while a flush is on."""

    client: RelayClient
    tokens: TokenSource
    gate: Gate
    files: OpenFiles
    routes: Routes
    schedule: Schedule
    size: Size
    clock: Clock
    rng: random.Random
    max_retry_after_ms: int = 3_600_000
    log: Log = silent
    rules: tuple[Limits, Bounds] | None = None  # written into each outbox file for its producers
    flushing: bool = False
    deadline: float | None = None  # monotonic seconds: no request goes on beyond it

    def token_name(self) -> str:
        """A name of the token that tells nothing of it; "" while there is none to be had."""
        try:
            return self.tokens.fingerprint()
        except TokenUnavailable:
            return ""

    def healthy(self) -> bool:
        """Whether the relay answers health (asked at most once a second)."""
        return self.gate.ask_health(lambda: read_health(self.client.health(deadline=self.deadline)))


@dataclass(frozen=True, slots=True)
class Again:
    """There is more to do at once."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing before this monotonic moment; None: nothing until something new is enqueued."""

    until_ms: int | None


@dataclass(frozen=True, slots=True)
class AtGate:
    """Waits for the gate ("" the relay, else a path)."""

    tag: str


Turn = Again | Sleep | AtGate
