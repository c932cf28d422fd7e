"""How a credential stands, and how long a recovery that failed waits: values and their one schedule. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outbox.policy import MINUTE_MS, Schedule, backoff_ms

FOR_ALL = "auth"
"""The fact about the host's token, or about whoever gives out each agent's own; those are "token:AGENT"."""

_LEAST_LIFETIME_MS = 1_000


@dataclass(frozen=True, slots=True)
class Held:
    """A token in use. Times are monotonic, None: nobody said until when it is good."""

    token: str = field(repr=False)
    name: str
    expires_ms: int | None = None
    renew_ms: int | None = None
    refused: bool = False
    proven: bool = False  # the relay took something with it, or it was in use before this process began
    got_ms: int = 0

    def is_good(self, now_ms: int) -> bool:
        """Whether it may be sent."""
        return not self.refused and (self.expires_ms is None or now_ms < self.expires_ms)

    def is_new(self, now_ms: int) -> bool:
        """Whether a refusal says that new tokens are of no use, and not that this one has had its time."""
        return not self.proven and now_ms - self.got_ms < MINUTE_MS

    def is_due(self, now_ms: int) -> bool:
        """Whether a new one is to be got before this one ends."""
        return self.renew_ms is not None and now_ms >= self.renew_ms


def held(
    token: str, name: str, expires_at_ms: int | None, *, wall_ms: int, now_ms: int, proven: bool
) -> Held:
    """A token that was just given out, or found.

    It is renewed when a fifth of its life is left, or a minute. One that seems over at once comes from a
    clock that goes otherwise than ours: then only the relay can say when it ends.
    """
    lifetime_ms = None if expires_at_ms is None else expires_at_ms - wall_ms
    if lifetime_ms is None or lifetime_ms < _LEAST_LIFETIME_MS:
        return Held(token, name, proven=proven, got_ms=now_ms)
    margin_ms = min(MINUTE_MS, lifetime_ms // 5)
    ends_ms = now_ms + lifetime_ms
    return Held(token, name, ends_ms, ends_ms - margin_ms, proven=proven, got_ms=now_ms)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why no new token can be had. `next_ms` is monotonic, `since_ms` epoch; `inputs` names what was used."""

    detail: str
    since_ms: int
    failures: int
    next_ms: int
    asked: bool = False  # the wait was asked for
    stopped: bool = False
    inputs: str = ""

    @property
    def state(self) -> str:
        """In one word, for status."""
        return "stopped" if self.stopped else "failing"

    @property
    def reason(self) -> str:
        """What `why` shows."""
        return "token_stopped" if self.stopped else "token_recovery"


def after_failure(
    before: Trouble | None,
    detail: str,
    *,
    schedule: Schedule,
    chance: float,
    now_ms: int,
    wall_ms: int,
    retry_after_ms: int | None = None,
    stopped: bool = False,
    inputs: str = "",
) -> Trouble:
    """One failure more; `chance` is uniform in [0, 1)."""
    failures = before.failures + 1 if before else 1
    wait_ms = backoff_ms(schedule, failures, chance)
    asked = retry_after_ms is not None and retry_after_ms > wait_ms
    return Trouble(
        detail,
        before.since_ms if before else wall_ms,
        failures,
        now_ms + (retry_after_ms if asked and retry_after_ms is not None else wait_ms),
        asked,
        stopped,
        inputs,
    )


def at_once(trouble: Trouble, now_ms: int) -> Trouble:
    """The next try may be made now, unless a wait was asked for or nothing but a change helps."""
    return trouble if trouble.asked or trouble.stopped else replace(trouble, next_ms=now_ms)


def stopped_before(fact: Mapping[str, Any], source: str, inputs: str, now_ms: int) -> Trouble | None:
    """The trouble of an earlier process that still holds: it stopped, and nothing has changed since."""
    if fact.get("source") != source or fact.get("state") != "stopped" or fact.get("inputs") != inputs:
        return None
    since, failures = fact.get("since"), fact.get("failures")
    return Trouble(
        str(fact.get("detail") or ""),
        since if isinstance(since, int) else 0,
        failures if isinstance(failures, int) else 1,
        now_ms,
        stopped=True,
        inputs=inputs,
    )
