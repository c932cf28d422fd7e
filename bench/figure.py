"""What a bench gives: figures with what was measured, round by round, and the targets they are held against.

Pure. How a value is written stands here too, so that terminal and document say the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Values = Sequence[float]

_WRITTEN = {
    "/s": "{:,.0f}/s",
    "us": "{:,.0f} us",
    "ms": "{:,.2f} ms",
    "MB": "{:,.1f} MB",
    "%": "{:.2f} %",
    "": "{:,.0f}",
    "times": "{:.2f}",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is done: all of it, or with `quick` just enough to see that it runs."""

    rounds: int
    quick: bool

    def pick(self, whole: int, quick: int) -> int:
        """A count for either way."""
        return quick if self.quick else whole


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was measured: a value a round."""

    name: str
    values: Values
    unit: str


@dataclass(frozen=True, slots=True)
class Target:
    """What the design asks for: the median has to be at least, or at most, `bound`."""

    name: str
    values: Values
    unit: str
    bound: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether the median is on the right side."""
        median = statistics.median(self.values)
        return median >= self.bound if self.at_least else median <= self.bound

    @property
    def asked(self) -> str:
        """The bound in words."""
        return f"{'at least' if self.at_least else 'at most'} {written(self.bound, self.unit)}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture: the name of its file, and its SVG text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One table. Where `base` names a row, the others of its unit are also told as ratios to it."""

    title: str
    how: str
    rows: Sequence[Row]
    targets: Sequence[Target] = ()
    base: str = ""
    notes: Sequence[str] = ()
    plot: Plot | None = None

    def ratios(self, row: Row) -> Values:
        """A row in proportion to the base, round by round; nothing when they are not of one kind."""
        base = next((other for other in self.rows if other.name == self.base), None)
        if base is None or base is row or base.unit != row.unit or len(base.values) != len(row.values):
            return ()
        return ratio(row.values, base.values)


def ratio(values: Values, base: Values) -> Values:
    """One in proportion to the other, round by round: a machine whose speed drifts slows both of a round."""
    return [value / least for value, least in zip(values, base, strict=True)]


def share(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def written(value: float, unit: str) -> str:
    """A value with its unit."""
    return _WRITTEN[unit].format(value)


def middle(values: Values, unit: str) -> str:
    """The median with its unit."""
    return written(statistics.median(values), unit)


def spread(values: Values, unit: str) -> str:
    """The smallest and the largest."""
    return f"{written(min(values), unit)} to {written(max(values), unit)}"
