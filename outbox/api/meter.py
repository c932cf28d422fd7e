"""What only this process knows for the metrics: its requests to the relay, and what it did not accept."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


@dataclass(frozen=True, slots=True)
class Metered:
    """The counts of one moment. `buckets` are cumulative, the last one holds all."""

    attempts: dict[str, int]
    refused: dict[str, int]
    buckets: tuple[int, ...]
    sum_s: float


class Meter:
    """Counts, from any thread."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._mutex = threading.Lock()
        self._attempts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._buckets = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def attempt(self, outcome: str, seconds: float) -> None:
        """One request to the relay came to its end."""
        index = next((at for at, most in enumerate(BUCKETS_S) if seconds <= most), len(BUCKETS_S))
        with self._mutex:
            self._attempts[outcome] += 1
            self._buckets[index] += 1
            self._sum_s += seconds

    def refuse(self, code: str, events: int = 1) -> None:
        """Events that were offered to this process were not accepted."""
        with self._mutex:
            self._refused[code] += events

    def read(self) -> Metered:
        """All counts."""
        with self._mutex:
            total, cumulative = 0, []
            for many in self._buckets:
                total += many
                cumulative.append(total)
            return Metered(dict(self._attempts), dict(self._refused), tuple(cumulative), self._sum_s)
