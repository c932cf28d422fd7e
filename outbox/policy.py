"""Decisions about retry, blame and bounds: functions from values to values.

Clock and randomness are arguments; all times are milliseconds of whatever clock the caller keeps.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from outbox.bounds import REFUSE, Bounds, fits
from outbox.outcome import Reason

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

# Bounds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fill:
    """How full an outbox is: rows and bytes that wait, and those of dead letters."""

    waiting: int
    waiting_bytes: int
    dead: int
    dead_bytes: int

    @property
    def events(self) -> int:
        """Rows that count against `max_events`."""
        return self.waiting + self.dead

    @property
    def size_bytes(self) -> int:
        """Bytes that count against `max_bytes`."""
        return self.waiting_bytes + self.dead_bytes


class Room(enum.Enum):
    """Whether one more event fits."""

    THERE = enum.auto()
    BY_DROPPING = enum.auto()  # dead letters first, then the oldest waiting
    REFUSED = enum.auto()


_NOTHING = Fill(0, 0, 0, 0)


def room_for(fill: Fill, size_bytes: int, bounds: Bounds, *, in_flight: Fill = _NOTHING) -> Room:
    """Whether one more event of `size_bytes` fits, and what may be done about it.

    What is in flight is never dropped: an event that would not fit beside it is refused before anything goes.
    """
    if fits(fill.events, fill.size_bytes, size_bytes, bounds):
        return Room.THERE
    if bounds.overflow == REFUSE or not fits(in_flight.events, in_flight.size_bytes, size_bytes, bounds):
        return Room.REFUSED
    return Room.BY_DROPPING


def expiry_horizon_ms(bounds: Bounds, now_ms: int, *, steady: bool) -> int | None:
    """The moment of acceptance before which waiting events have grown too old; None when nothing may expire.

    Nothing expires unless the wall clock is `steady`: an hour after a start and after each of its steps.
    """
    if not bounds.max_age_ms or not steady:
        return None
    return now_ms - bounds.max_age_ms


# Retry ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Schedule:
    """When to try again, and how often before an event is given up."""

    initial_ms: int = 1_000
    max_ms: int = 60_000
    max_attempts: int = 12
    exponential: bool = True
    jitter: float = 0.5  # the share of the wait that is left to chance


def backoff_ms(schedule: Schedule, failures: int, chance: float) -> int:
    """The wait after the `failures`-th failure in a row; `chance` is uniform in [0, 1).

    Exponential from `initial_ms` to `max_ms`, with a jitter between half and all of it.
    """
    doublings = min(max(failures, 1) - 1, 40) if schedule.exponential else 0
    full = min(schedule.max_ms, schedule.initial_ms << doublings)
    return round(full * (1 - schedule.jitter * chance))


def schedule_of(default: Schedule, retry: object) -> Schedule:
    """The schedule of an event with its own `retry`, as it was checked at acceptance; else the default.

    A first wait of its own that is longer than the default's longest one is the longest, too.
    """
    if not isinstance(retry, Mapping):
        return default
    backoff, initial_ms = retry.get("backoff"), retry.get("initialDelayMs", default.initial_ms)
    return Schedule(
        initial_ms=initial_ms,
        max_ms=retry.get("maxDelayMs", max(default.max_ms, retry.get("initialDelayMs", 0))),
        max_attempts=retry.get("maxAttempts", default.max_attempts),
        exponential=default.exponential if backoff is None else backoff == "exponential",
        jitter=retry.get("jitter", default.jitter),
    )


# Blame ------------------------------------------------------------------------------------------------------

_FREE_VERDICTS = 3
_REFUSAL_INTERVAL_MS = (1_000, 10 * MINUTE_MS)
_OTHER_INTERVAL_MS = (10 * MINUTE_MS, DAY_MS)


@dataclass(frozen=True, slots=True)
class Budget:
    """The blame budget of one path: dead letters with nothing accepted between, and the last one's time.

    Three in a row are free; after that each further verdict waits for its interval: 1 s doubling to 10 min
    for refusals, 10 min doubling to 24 h for the others.
    """

    in_a_row: int = 0
    last_ms: int = 0


def verdict_wait_ms(budget: Budget, reason: Reason, now_ms: int) -> int:
    """How long a dead letter for this reason has to wait yet; 0 when it is allowed now."""
    over = budget.in_a_row - _FREE_VERDICTS
    if over < 0:
        return 0
    first, most = _REFUSAL_INTERVAL_MS if reason is Reason.REJECTED else _OTHER_INTERVAL_MS
    interval = min(most, first << min(over, 40))
    return min(interval, max(0, budget.last_ms + interval - now_ms))


def is_spent(budget: Budget) -> bool:
    """Whether the free dead letters are used up: the heads of the path then go alone."""
    return budget.in_a_row >= _FREE_VERDICTS


def spend(budget: Budget, now_ms: int) -> Budget:
    """The budget after one more dead letter."""
    return replace(budget, in_a_row=budget.in_a_row + 1, last_ms=now_ms)


def is_stuck(
    first_try_at_ms: int | None, now_ms: int, max_stuck_ms: int, accepted_at_ms: Collection[int]
) -> bool:
    """Whether a head has waited for `max_stuck_ms` while others were accepted all along.

    All along means: in each quarter of the time since the window began (`accepted_at_ms` may be coarse).
    """
    if first_try_at_ms is None or now_ms - first_try_at_ms < max_stuck_ms:
        return False
    start = now_ms - max_stuck_ms
    quarter = max_stuck_ms / 4
    hit = {int((at - start) // quarter) for at in accepted_at_ms if start <= at < now_ms}
    return {0, 1, 2, 3} <= hit
