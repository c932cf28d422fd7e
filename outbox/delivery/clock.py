"""The two clocks of delivery, as one value that tests replace, and how far the wall clock can be believed."""

from __future__ import annotations

import threading
import time

from outbox.policy import HOUR_MS, MINUTE_MS


class Clock:
    """`monotonic_ms` for waits, `wall_ms` (epoch) for what people and the disk are told."""

    def monotonic_ms(self) -> int:
        """Milliseconds that only go forward; not comparable between processes."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Epoch milliseconds; may jump."""
        return time.time_ns() // 1_000_000


class Steadiness:
    """Whether the wall clock may say that something has grown too old: it has gone evenly for an hour.

    Each look notices a step itself, so that nobody decides by a clock that was set a moment ago.
    """

    def __init__(self, clock: Clock) -> None:
        """The hour begins now: at a start nobody knows what the clock did before."""
        self.steps = 0  # of more than a minute, so far
        self._clock = clock
        self._mutex = threading.Lock()
        self._since_ms = clock.monotonic_ms()
        self._offset_ms = clock.wall_ms() - self._since_ms

    def lasts(self) -> bool:
        """Whether an hour has passed since the start and the last step of more than a minute."""
        with self._mutex:
            now_ms = self._clock.monotonic_ms()
            offset_ms = self._clock.wall_ms() - now_ms
            if abs(offset_ms - self._offset_ms) > MINUTE_MS:
                self.steps += 1
                self._offset_ms, self._since_ms = offset_ms, now_ms
            return now_ms - self._since_ms >= HOUR_MS
