"""When the files of agents that are done for good go: looked at seldom, and only those long untouched."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from outbox.delivery.engine import Engine
from outbox.delivery.shared import Log
from outbox.errors import StoreError
from outbox.store.directory import StateDirectory
from outbox.store.retiring import is_finished, retire

_LOOK_EVERY_MS = 3_600_000


class Retirement:
    """Removes the outbox files of a state directory that nobody has touched for `after_ms` (0: none)."""

    def __init__(self, state: StateDirectory, log: Log) -> None:
        """The first look is due at once."""
        self._state = state
        self._log = log
        self._due_ms = 0

    def turn(self, engine: Engine, paths: Iterable[Path], after_ms: int) -> None:
        """Look through the files if it is time to; trouble with one of them is the sender's to tell."""
        clock = engine.delivery.clock
        if not after_ms or clock.monotonic_ms() < self._due_ms:
            return
        self._due_ms = clock.monotonic_ms() + min(_LOOK_EVERY_MS, after_ms)
        now_ms = clock.wall_ms()
        for path in paths:
            if _touched_ms(path) > now_ms - after_ms:
                continue
            try:
                self._retire(engine, path, now_ms)
            except StoreError:
                continue

    def _retire(self, engine: Engine, path: Path, now_ms: int) -> None:
        with engine.delivery.files.borrow(path) as box:
            agent, finished = box.agent, is_finished(box, now_ms)
        if not finished or not engine.dismiss(path):
            return
        if retire(self._state, path, now_ms):
            engine.delivery.tokens.forget(agent)
            self._log("retired", {"agent": agent, "file": path.name})
        else:
            engine.wake(path)


def _touched_ms(path: Path) -> int:
    """When the file or its log was written to last; epoch milliseconds."""
    touched_ns = 0
    for name in (str(path), f"{path}-wal"):
        try:
            status = os.stat(name)  # noqa: PTH116 - for each of a thousand files
        except OSError:
            continue
        if status.st_size:
            touched_ns = max(touched_ns, status.st_mtime_ns)
    return touched_ns // 1_000_000
