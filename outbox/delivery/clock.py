"""The two clocks of delivery, as one value that tests replace."""

from __future__ import annotations

import time


class Clock:
    """`monotonic_ms` for waits, `wall_ms` (epoch) for what people and the disk are told."""

    def monotonic_ms(self) -> int:
        """Milliseconds that only go forward; not comparable between processes."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Epoch milliseconds; may jump."""
        return time.time_ns() // 1_000_000
