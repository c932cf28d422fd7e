"""Which outbox files have something new in them, told by their looks: a lost wake-up costs one look only."""

from __future__ import annotations

import os
from pathlib import Path

from outbox.store.directory import StateDirectory

_QUIET_LOOKS = 3


class FileWatch:
    """The outbox files of a state directory, and how each looked the last time."""

    def __init__(self, state: StateDirectory) -> None:
        """Nothing was looked at yet: every file is new."""
        self._state = state
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._quiet_looks = 0

    def changed(self) -> list[Path]:
        """Look at all files; those that look otherwise than the last time. Raises StoreError."""
        self._quiet_looks, quiet_looks = 0, self._quiet_looks
        looks = {path: _look_of(path) for path in self._state.outbox_files()}
        found = [path for path, look in looks.items() if self._seen.get(path) != look]
        self._seen = looks
        if not found:
            self._quiet_looks = quiet_looks + 1
        return found

    @property
    def paths(self) -> list[Path]:
        """The files that were there the last time."""
        return list(self._seen)

    @property
    def all_is_quiet(self) -> bool:
        """Whether nothing changed for the last few looks: what is open can be closed until it is needed."""
        return self._quiet_looks >= _QUIET_LOOKS


def _look_of(path: Path) -> tuple[int, ...]:
    """Whoever opens a file makes an empty log beside it, and whoever closes it last removes it: not news."""
    look: list[int] = []
    file = os.fspath(path)
    for name in (file, f"{file}-wal"):
        try:
            status = os.stat(name)  # noqa: PTH116 - a Path for each would cost more than the call itself
        except FileNotFoundError:
            continue
        if status.st_size:
            look += (status.st_ino, status.st_size, status.st_mtime_ns)
    return tuple(look)
