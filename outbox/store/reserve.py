"""The reserve: a few MiB of disk that are given up when it is full, so that deliveries can still be written.

Without it a disk that others filled would keep the outbox from making room for itself.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outbox.store.directory import StateDirectory

RESERVE_BYTES = 4 * 1024 * 1024
_PLENTY = 8  # times the reserve that must be free before it is made


def keep_reserve(state: StateDirectory) -> None:
    """Make the reserve where there is plenty of room; nothing happens when it is there, or cannot be made."""
    path = state.reserve_file
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() or _free_bytes(state) < _PLENTY * RESERVE_BYTES:
            return
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        finally:
            os.close(fd)
        draft.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def give_up_reserve(state: StateDirectory) -> bool:
    """Free it; False when there is none."""
    try:
        state.reserve_file.unlink()
    except OSError:
        return False
    return True


def _free_bytes(state: StateDirectory) -> int:
    disk = os.statvfs(state.path)
    return disk.f_bavail * disk.f_frsize
