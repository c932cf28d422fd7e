"""The open outbox files of this process: a bounded number, the least recently used one closed first.

Whoever works with a file borrows it; a borrowed file is never closed under its borrower.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox.errors import StoreClosed
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile, open_outbox


class OpenFiles:
    """Outbox files by path, at most `most` of them open while not borrowed."""

    def __init__(self, state: StateDirectory, most: int = 64) -> None:
        """Nothing is opened yet."""
        self._state = state
        self._most = most
        self._mutex = threading.Lock()
        self._current: OrderedDict[Path, OutboxFile] = OrderedDict()
        self._borrowers: Counter[OutboxFile] = Counter()

    @contextmanager
    def borrow(self, path: Path) -> Iterator[OutboxFile]:
        """The open file; raises what `open_outbox` raises. A file that was replaced is opened anew next time."""
        box = self._take(path)
        try:
            yield box
        except StoreClosed:
            box.close()
            raise
        finally:
            self._give_back(box)

    def _take(self, path: Path) -> OutboxFile:
        with self._mutex:
            box = self._current.pop(path, None)
            if box is None or box.closed:
                self._shrink(self._most - 1)
                box = open_outbox(self._state, path)
            self._current[path] = box
            self._borrowers[box] += 1
            return box

    def _give_back(self, box: OutboxFile) -> None:
        with self._mutex:
            self._borrowers[box] -= 1
            if not self._borrowers[box]:
                del self._borrowers[box]
            self._shrink(self._most)

    def _shrink(self, most: int) -> None:
        for path, box in list(self._current.items()):
            if len(self._current) <= most:
                return
            if not self._borrowers[box]:
                del self._current[path]
                box.close(checkpoint=True)

    def close(self) -> None:
        """Close what is not borrowed."""
        with self._mutex:
            self._shrink(0)
