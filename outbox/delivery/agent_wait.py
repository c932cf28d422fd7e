"""The wait of one agent: its backoff, and why it waits. In memory; the file holds what people are told."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.delivery.shared import Delivery
from outbox.delivery.verdict import Effect, Verdict
from outbox.outcome import Blocked
from outbox.policy import backoff_ms, schedule_of
from outbox.store.inspect import OutboxStatus
from outbox.store.row import Row
from relay_client import Reading, Sort, fingerprint

_FLUSH_INTERVAL_MS = 150
_LEAST_VERDICT_WAIT_MS = 1_000
_ASKED = "retry_after"


@dataclass(frozen=True, slots=True)
class Held:
    """Why the first event that stays does so, and the token with which it was sent.

    `verdict_wait_ms` is what the blame budget asks for before the event may become a dead letter.
    """

    row: Row
    token: str | None
    reading: Reading
    verdict: Verdict
    verdict_wait_ms: int = 0


class AgentWait:
    """`until_ms` is monotonic, 0 when nothing is waited for; `blocked` is what `why` tells."""

    def __init__(self, delivery: Delivery) -> None:
        """Nothing is in the way."""
        self._d = delivery
        self.agent = ""
        self._failures = 0
        self._recovered = False  # a recovery of the token was tried since the last success
        self.until_ms = 0
        self.blocked: Blocked | None = None

    def restore(self, status: OutboxStatus, most_ms: int) -> None:
        """After a restart a head goes at once, unless this same relay asked to wait: that is still kept to.

        A wall clock that was set back since then makes the wait no longer than it was.
        """
        blocked = status.blocked
        if blocked is None or blocked.reason != _ASKED or blocked.next_try_at_ms is None:
            return
        now_ms = max(self._d.clock.wall_ms(), _last_answer_at_ms(status) or blocked.since_ms)
        left_ms = min(most_ms, blocked.next_try_at_ms - now_ms)
        if left_ms > 0 and self._d.gate.is_known:
            self.until_ms = self._d.clock.monotonic_ms() + left_ms
            self.blocked = blocked

    @property
    def over(self) -> bool:
        """Whether the head may go now."""
        return self._d.clock.monotonic_ms() >= self.until_ms

    def end(self) -> None:
        """The head went through."""
        self._failures, self.until_ms, self.blocked, self._recovered = 0, 0, None, False

    def new_head(self) -> None:
        """Another event is the head: its predecessor's backoff is none of its business, a Retry-After is."""
        if self.blocked is None or self.blocked.reason != _ASKED:
            self._failures, self.until_ms = 0, 0

    def hurry(self) -> None:
        """A flush begins: only what the relay asked for is waited for."""
        if self.blocked is None or self.blocked.reason != _ASKED:
            self.until_ms = 0

    def forget(self) -> None:
        """A person wants it to go on."""
        self._failures, self.until_ms = 0, 0

    def after(self, held: Held) -> bool:
        """Take in why the head stays; True when that is news. Without an own wait only the gate decides."""
        reading, verdict = held.reading, held.verdict
        asked_ms = reading.retry_after_ms
        own = verdict.effect in {Effect.AGENT, Effect.WORKS} or verdict.counts
        if not (own or asked_ms is not None) or (own and self._is_mended(held)):
            self.until_ms, self.blocked = 0, None
            return False
        self._failures += 1
        schedule = schedule_of(self._d.schedule, held.row.extra.get("retry"))
        wait_ms = backoff_ms(schedule, self._failures, self._d.rng.random())
        reason = verdict.hold or str(verdict.reason or "")
        if held.verdict_wait_ms:
            wait_ms = min(held.verdict_wait_ms, max(wait_ms, _LEAST_VERDICT_WAIT_MS))
            reason = "mass_rejection"
        if self._d.flushing:
            wait_ms = min(wait_ms, _FLUSH_INTERVAL_MS)
        if asked_ms is not None and asked_ms >= wait_ms:
            wait_ms, reason = asked_ms, _ASKED
        return self.hold(reason, reading.detail, wait_ms)

    def _is_mended(self, held: Held) -> bool:
        """Whether the token was refused and there is another one by now.

        A token that is good for others is recovered once for each hold; one that is this agent's alone as
        often as it is refused.
        """
        sort, tokens = held.reading.sort, self._d.tokens
        if sort is Sort.UNAUTHORIZED and tokens.one_per_agent:
            return self._d.recover(self.agent, held.token)
        if sort not in {Sort.FORBIDDEN, Sort.UNAUTHORIZED}:
            return False
        if self._recovered:
            return tokens.has_other(self.agent, fingerprint(held.token))
        self._recovered = True
        return self._d.recover(self.agent, held.token, still_good=True)

    def hold(self, reason: str, detail: str, wait_ms: int) -> bool:
        """Wait so long for this reason; True when the reason is a new one."""
        now_ms = self._d.clock.wall_ms()
        news = self.blocked is None or self.blocked.reason != reason
        since_ms = self.blocked.since_ms if self.blocked else now_ms
        self.until_ms = self._d.clock.monotonic_ms() + wait_ms
        self.blocked = Blocked(reason, since_ms, now_ms + wait_ms, detail)
        return news


def _last_answer_at_ms(status: OutboxStatus) -> int | None:
    history = status.head.history if status.head else ()
    at_ms = history[-1].get("at_ms") if history else None
    return at_ms if isinstance(at_ms, int) else None
