"""Which events travel together, and how the guilty one of a refused group is found. Pure.

Neighbouring session messages form a group. A group that was refused as a whole is split by fences: no later
group reaches over one, so that each guilty event is alone in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outbox.store.row import Row

GROUPED_KIND = "session-message"
_ALONE_FROM_CRASH = 2
_FRAME_BYTES = len(b'{"messages":[]}')


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
