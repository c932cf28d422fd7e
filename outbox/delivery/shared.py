"""What the pumps of a state directory share, and what a pump may want after a turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outbox.bounds import Bounds
from outbox.delivery.clock import Clock, Steadiness
from outbox.delivery.gate import Gate
from outbox.delivery.grouping import Size
from outbox.delivery.parcel import Routes
from outbox.delivery.rate import RATE, Rate
from outbox.delivery.tokens import NoTokenNow, Tokens
from outbox.event import Limits
from outbox.policy import Schedule
from outbox.store.open_files import OpenFiles
from outbox.store.row import Row
from relay_client import McpEndpoint, RelayClient, fingerprint, read_health, read_spec

_SPEC_TIMEOUT_MS = 5_000

Log = Callable[[str, dict[str, Any]], None]


def silent(event: str, fields: dict[str, Any]) -> None:
    """A log that nobody reads."""


def uncounted(outcome: str, seconds: float) -> None:
    """A meter that nobody reads."""


@dataclass(slots=True)
class Delivery:
    """The relay, what is known of it, and the files; `flushing` and `deadline` change while a flush is on."""

    client: RelayClient
    tokens: Tokens
    gate: Gate
    files: OpenFiles
    routes: Routes
    schedule: Schedule
    size: Size
    clock: Clock
    rng: random.Random
    max_retry_after_ms: int = 3_600_000
    log: Log = silent
    count: Callable[[str, float], None] = uncounted  # each request to the relay: what came of it, how long
    rules: tuple[Limits, Bounds] | None = None  # written into each outbox file for its producers
    rate: Rate | None = None  # how fast events may leave; None: as fast as the relay takes them
    flushing: bool = False
    longest_call_ms: int = 1_000  # of the tool calls so far; at first a guess
    deadline: float | None = None  # monotonic seconds: no request goes on beyond it
    mcp: McpEndpoint = field(init=False)
    steady: Steadiness = field(init=False)

    def __post_init__(self) -> None:
        """The endpoint is the client's, and the hour of the wall clock begins."""
        self.mcp = McpEndpoint(self.client)
        self.steady = Steadiness(self.clock)

    def token(self, agent: str) -> str | None:
        """The agent's token, got anew where that is due; raises NoTokenNow."""
        return self.tokens.token(agent, self.deadline)

    def recover(self, agent: str, refused: str | None, *, still_good: bool = False) -> bool:
        """Get another token than the refused one; whether there is one now."""
        return self.tokens.recover(agent, fingerprint(refused), still_good=still_good, deadline=self.deadline)

    def let_in(self, tag: str, waiting: int, ready: int) -> int:
        """How many of those who wait for `tag` are let in now, with so many others ready to take a turn.

        At the gate at least one is, however many are ready: a busy agent must not keep the others there.
        """
        if tag == RATE:
            return self.rate.take(waiting) if self.rate else waiting
        slots = self.gate.slots(tag)
        return min(waiting, max(1, slots - ready)) if slots > 0 else 0

    def next_due_ms(self, tag: str) -> int | None:
        """The monotonic moment from which somebody who waits for `tag` may be let in, where it is known."""
        if tag == RATE:
            return self.rate.next_due_ms() if self.rate else self.clock.monotonic_ms()
        return self.gate.next_due_ms(tag)

    def is_unsafe(self, row: Row) -> bool:
        """Whether the event must not be repeated when its outcome is unknown."""
        return self.routes.is_unsafe(row) and not self.gate.capabilities.mcp_idempotency

    def most(self, own_items: int) -> Size:
        """How large a group may be: what was asked for, what the relay takes, what was learned."""
        known, path = self.gate.capabilities, self.routes.batch
        items = 1 if self.gate.batches_off(path) else min(own_items, known.batch_max_items)
        return Size(items, self.gate.most_bytes(path, min(self.size.bytes, known.batch_max_bytes)))

    def time_covers_a_call(self) -> bool:
        """Whether an unsafe call begun now would end in time, taking twice as long as the longest so far."""
        if self.deadline is None:
            return True
        return self.deadline * 1_000 - self.clock.monotonic_ms() >= 2 * self.longest_call_ms

    def learn_spec(self, agent: str) -> None:
        """Ask once an hour what the relay says of itself; without an answer the contract's defaults stand."""
        if not self.gate.spec_is_due():
            return
        try:
            token = self.token(agent)
        except NoTokenNow:
            token = None
        answer = self.client.spec(token=token, timeout_ms=_SPEC_TIMEOUT_MS, deadline=self.deadline)
        self.gate.learn_capabilities(read_spec(answer), reached=answer.status is not None)

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
    """Waits for the gate ("" the relay, else a path), or in the line for the send rate."""

    tag: str


Turn = Again | Sleep | AtGate
