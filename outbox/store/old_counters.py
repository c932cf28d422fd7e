"""The counters of a damaged file, believed only where they agree with each other and with its rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outbox.store.own_row import NO_MOMENT

READ = """
SELECT last_seq, waiting, waiting_bytes, dead, delivered, generation, claimed_through, claim_unsafe,
       created_at_ms, accepted, dropped, paused_at_ms, rules
FROM outbox"""
_MOST = 2**62


@dataclass(frozen=True, slots=True)
class OldCounters:
    """What stood in the outbox's own row."""

    last_seq: int
    waiting: int
    waiting_bytes: int
    dead: int
    delivered: int
    generation: int
    claimed_through: int
    claim_unsafe: int
    created_at_ms: int
    accepted: int
    dropped: int
    paused_at_ms: int | None
    rules: str


def believed(raw: tuple[Any, ...] | None, last_seen: int) -> OldCounters | None:
    """The counters of a row of READ; None when they cannot be. `last_seen` is the highest seq of a row."""
    if raw is None or len(raw) != 13:
        return None
    old = OldCounters(*raw)
    numbers = (*raw[:11], old.paused_at_ms or 0)
    if type(old.rules) is not str or any(type(n) is not int or not 0 <= n < _MOST for n in numbers):
        return None
    ended = old.dead + old.delivered + old.dropped
    if old.last_seq < last_seen or old.waiting > old.last_seq or old.waiting + ended > old.accepted:
        return None
    return replace(old, paused_at_ms=None) if (old.paused_at_ms or 0) <= NO_MOMENT else old
