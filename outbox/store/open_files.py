"""The open outbox files of this process: a bounded number, the least recently used one closed first.

Whoever works with a file borrows it; a borrowed file is never closed under its borrower.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox.errors import StoreFull
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.reserve import give_up_reserve
from outbox.store.salvage import set_aside


class OpenFiles:
    """Outbox files by path, at most `most` of them open while not borrowed.

    Opening and closing can take long (a lock, a checkpoint), so both are done outside the mutex.
    """

    def __init__(self, state: StateDirectory, most: int = 64) -> None:
        """Nothing is opened yet."""
        self._state = state
        self._most = most
        self._mutex = threading.Lock()
        self._current: OrderedDict[Path, OutboxFile] = OrderedDict()
        self._borrowers: Counter[OutboxFile] = Counter()

    @contextmanager
    def borrow(self, path: Path) -> Iterator[OutboxFile]:
        """The open file; raises what `open_outbox` raises. One that was replaced or closed is opened anew."""
        box = self._known(path) or self._opened(path)
        try:
            yield box
        finally:
            self._give_back(path, box)

    def _known(self, path: Path) -> OutboxFile | None:
        """Borrow what is open already, as long as the path still names it."""
        with self._mutex:
            box = self._current.get(path)
            if box is None:
                return None
            if not (box.closed or box.was_replaced):
                self._current.move_to_end(path)
                self._borrowers[box] += 1
                return box
            del self._current[path]
            idle = not self._borrowers[box]
        if idle:
            box.close()
        return None

    def _opened(self, path: Path) -> OutboxFile:
        """Open the file and borrow it; if another thread was faster, its one is taken."""
        self._close_idle(self._most - 1)
        opened = self._open(path)
        with self._mutex:
            box = self._current.setdefault(path, opened)
            self._current.move_to_end(path)
            self._borrowers[box] += 1
        if box is not opened:
            opened.close()
        return box

    def _open(self, path: Path) -> OutboxFile:
        try:
            return open_outbox(self._state, path)
        except StoreFull:
            if not give_up_reserve(self._state):
                raise
            return open_outbox(self._state, path)

    def mend(self, path: Path, agent: str | None) -> None:
        """Have a file that seems damaged set aside, and a new one put in its place; raises StoreError."""
        set_aside(self._state, path, agent, time.time_ns() // 1_000_000)

    def _give_back(self, path: Path, box: OutboxFile) -> None:
        with self._mutex:
            self._borrowers[box] -= 1
            idle = not self._borrowers[box]
            if idle:
                del self._borrowers[box]
            orphan = idle and self._current.get(path) is not box
        if orphan:
            box.close()
        self._close_idle(self._most)

    def _close_idle(self, most: int) -> None:
        """One by one: a thread has one file in use or one that closes, which bounds the descriptors."""
        while (box := self._least_used(most)) is not None:
            box.close(checkpoint=True)

    def _least_used(self, most: int) -> OutboxFile | None:
        """Take out the idle file that was used least recently, when there are more than `most`."""
        with self._mutex:
            if len(self._current) <= most:
                return None
            found = next((path for path, box in self._current.items() if not self._borrowers[box]), None)
            return None if found is None else self._current.pop(found)

    def close(self) -> None:
        """Close what is not borrowed; what is, closes when it is given back."""
        self._close_idle(0)
        with self._mutex:
            self._current.clear()
