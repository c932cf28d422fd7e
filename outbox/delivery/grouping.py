"""Which events travel together, and how the guilty one of a refused group is found. Pure.

Neighbouring session messages form a group. A group that was refused as a whole is split by fences: no later
group reaches over one, so that each guilty event is alone in the end. Events that travel alone are claimed
and settled as a series, since two commits for each would cost more than the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outbox.store.row import Row

GROUPED_KIND = "session-message"
_PLAIN = frozenset(("object", "value"))  # shapes whose wire text is the request's body as it stands
_ALONE_FROM_CRASH = 2
_FRAME_BYTES = len(b'{"messages":[]}')
_MOST_IN_SERIES = 64
_SERIES_MS = 25  # so long a pause, or a settlement that others see, may have to wait for the rest of it


@dataclass(frozen=True, slots=True)
class Size:
    """How large a group may be."""

    items: int
    bytes: int


def take_run(rows: Iterator[Row], size: Size, fence: int | None) -> list[Row]:
    """The head run: the head, and as many neighbouring session messages as may go with it."""
    run: list[Row] = []
    total = _FRAME_BYTES
    for row in rows:
        total += row.size_bytes + 1
        if run and (
            len(run) >= size.items
            or total > size.bytes
            or not groupable(row)
            or (fence is not None and row.seq > fence)
        ):
            break
        run.append(row)
        if not groupable(row):
            break
    return run


def take_series(rows: Iterator[Row], size: Size, path_of: Callable[[Row], str | None]) -> list[Row]:
    """The head, and as many neighbours that were never sent as may follow it to the same path, one by one."""
    series: list[Row] = []
    total, path = 0, None
    for row in rows:
        total += row.size_bytes
        if not series:
            path = path_of(row)
        elif total > size.bytes or path_of(row) != path or not _may_follow(row):
            break
        series.append(row)
        if len(series) >= size.items or row.shape not in _PLAIN:
            break
    return series


def _may_follow(row: Row) -> bool:
    is_new = row.first_try_at_ms is None and row.crashes < _ALONE_FROM_CRASH
    return is_new and row.sound and row.shape in _PLAIN


def next_length(sent: int, took_ms: int) -> int:
    """How long the next series may be, after one of `sent` accepted events: twice as long, but of 25 ms."""
    return max(1, min(_MOST_IN_SERIES, 2 * sent, sent * _SERIES_MS // max(1, took_ms)))


def is_over(took_ms: int) -> bool:
    """Whether a series has gone on for long enough."""
    return took_ms >= _SERIES_MS


def groupable(row: Row) -> bool:
    """Whether an event may travel in a group; one whose sender died twice while sending it goes alone."""
    return row.kind == GROUPED_KIND and row.sound and row.crashes < _ALONE_FROM_CRASH


@dataclass(slots=True)
class Grouping:
    """What one agent's sender has learned of its head; forgotten with the process."""

    most_items: int
    items: int = field(init=False)
    fences: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Groups start at full size."""
        self.items = self.most_items

    def fence(self, head_seq: int) -> int | None:
        """The seq that a group beginning at the head must not reach over."""
        self.fences = [fence for fence in self.fences if fence >= head_seq]
        return self.fences[0] if self.fences else None

    def split(self, seqs: Sequence[int]) -> None:
        """A group of these events was refused as a whole: each half goes on its own."""
        self._add(seqs[len(seqs) // 2 - 1], seqs[-1])

    def singly(self, seqs: Sequence[int]) -> None:
        """The answer said nothing of the single ones: each of these goes alone."""
        self._add(*seqs)

    def halve(self, size: int) -> None:
        """A group of this size failed: the next is half as large."""
        self.items = max(1, size // 2)

    def grow(self) -> None:
        """A group went through: the next may be twice as large."""
        self.items = min(self.most_items, self.items * 2)

    def _add(self, *seqs: int) -> None:
        self.fences = sorted({*self.fences, *seqs})
