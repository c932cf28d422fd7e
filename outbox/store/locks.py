"""Locks between processes: open-file-description byte-range locks in STATE/owners.lock.

One descriptor serves every lock of a state directory, however many agents there are. A lock ends with the
process that holds it, whatever ended the process. Which byte means what is decided here.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

DAEMON_BYTE = 0
_FIRST_AGENT_BYTE = 1024
_FLOCK = "hhqqi"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def sender_byte(agent: str) -> int:
    """The byte that the one sender of this agent's outbox holds exclusively."""
    digest = int.from_bytes(blake2b(agent.encode(), digest_size=7).digest())
    return _FIRST_AGENT_BYTE + 2 * digest


def lifecycle_byte(agent: str) -> int:
    """The byte held shared during each commit of a producer, exclusively by whoever replaces the file."""
    return sender_byte(agent) + 1


class OwnersLock:
    """All locks that this process holds in one state directory.

    Threads of a process share its open file description, so the kernel does not keep them apart: exclusive
    locks are refused to a second taker in here, and shared ones are counted.
    """

    def __init__(self, path: Path) -> None:
        """Open (or make, mode 0600) the lock file."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mutex = threading.Lock()
        self._exclusive: set[int] = set()
        self._shared: Counter[int] = Counter()

    def try_exclusive(self, byte: int) -> bool:
        """Take the byte; False when another process or another holder in this one has it."""
        with self._mutex:
            if byte in self._exclusive or self._shared[byte] or not self._set(byte, fcntl.F_WRLCK):
                return False
            self._exclusive.add(byte)
            return True

    def release(self, byte: int) -> None:
        """Give an exclusive byte back."""
        with self._mutex:
            self._exclusive.discard(byte)
            self._set(byte, fcntl.F_UNLCK)

    @contextmanager
    def shared(self, byte: int) -> Iterator[bool]:
        """Hold the byte shared; yields False (holding nothing) while someone has it exclusively."""
        with self._mutex:
            held = byte not in self._exclusive and (
                self._shared[byte] > 0 or self._set(byte, fcntl.F_RDLCK)
            )
            if held:
                self._shared[byte] += 1
        try:
            yield held
        finally:
            if held:
                self._end_shared(byte)

    def _end_shared(self, byte: int) -> None:
        with self._mutex:
            self._shared[byte] -= 1
            if not self._shared[byte]:
                del self._shared[byte]
                self._set(byte, fcntl.F_UNLCK)

    def held_elsewhere(self, byte: int) -> bool:
        """Whether another process holds the byte exclusively right now."""
        probe = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, probe)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def holds(self, byte: int) -> bool:
        """Whether this process holds the byte exclusively."""
        return byte in self._exclusive

    def close(self) -> None:
        """Give every lock back."""
        os.close(self._fd)

    def _set(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True


_open: dict[str, OwnersLock] = {}
_open_mutex = threading.Lock()


def owners_lock(state: Path) -> OwnersLock:
    """This process's locks of a state directory: one object, whoever asks."""
    key = os.path.realpath(state)
    with _open_mutex:
        if key not in _open:
            _open[key] = OwnersLock(state / "owners.lock")
        return _open[key]


def _forget_after_fork() -> None:
    """A child must neither keep its parent's locks alive nor release them: it drops the descriptor only."""
    global _open_mutex  # noqa: PLW0603 - a mutex copied while held would never be free again
    _open_mutex = threading.Lock()
    for lock in _open.values():
        lock.close()
    _open.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
