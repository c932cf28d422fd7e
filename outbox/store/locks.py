"""Locks between processes: open-file-description locks on bytes of STATE/owners.lock (fcntl(2), F_OFD_SETLK).

One descriptor serves every lock of a state directory, however many agents there are. A lock ends with the
process that holds it, whatever ended the process. Which byte means what is decided here.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from _thread import RLock  # see connection.py
from collections.abc import Callable
from functools import lru_cache
from weakref import WeakValueDictionary

from outbox.blake2 import blake2b
from outbox.errors import StoreError

DAEMON_BYTE = 0
_FIRST_AGENT_BYTE = 1024
_FLOCK = struct.Struct("hhqqi")  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_POLL_S = 0.01


def sender_byte(file_name: str) -> int:
    """The byte that the one sender of this outbox file holds exclusively."""
    digest = int.from_bytes(blake2b(file_name.encode("utf-8", "surrogateescape"), digest_size=7).digest())
    return _FIRST_AGENT_BYTE + 2 * digest


def token_byte(name: str) -> int:
    """The byte held exclusively by whoever gets a new token of this name."""
    return sender_byte(f"token:{name}")


def lifecycle_byte(file_name: str) -> int:
    """The byte held shared during each commit, exclusively by whoever moves, replaces or removes the file."""
    return sender_byte(file_name) + 1


@lru_cache(maxsize=4_096)
def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


class OwnersLock:
    """All locks that this process holds in one state directory.

    Threads of a process share its open file description, so the kernel does not keep them apart: exclusive
    locks are refused to a second taker in here, and shared ones are counted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open (or make, mode 0600) the lock file; raises StoreError."""
        self._fd = -1
        self._mutex = RLock()
        self._exclusive: set[int] = set()
        self._shared: dict[int, int] = {}
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"The lock file {os.fspath(path)!r} cannot be opened: {error.strerror}. Nothing was stored. "
                "Give the state directory's owner leave to write there."
            ) from error

    def try_exclusive(self, byte: int) -> bool:
        """Take the byte; False when another process or another holder in this one has it."""
        with self._mutex:
            if byte in self._exclusive or byte in self._shared or not self._set(byte, fcntl.F_WRLCK):
                return False
            self._exclusive.add(byte)
            _holders.add(self)
            return True

    def release(self, byte: int) -> None:
        """Give an exclusive byte back; nothing happens when it is not held."""
        with self._mutex:
            if byte in self._exclusive:
                self._exclusive.remove(byte)
                self._set(byte, fcntl.F_UNLCK)
            if not self._exclusive:
                _holders.discard(self)

    def wait_exclusive(self, byte: int, timeout_s: float) -> bool:
        """`try_exclusive`, tried again for `timeout_s` seconds."""
        return _in_time(lambda: self.try_exclusive(byte), timeout_s)

    def take_shared(self, byte: int, timeout_s: float) -> bool:
        """Hold the byte together with others; False when one had it exclusively for all of `timeout_s`."""
        return self._try_shared(byte) or _in_time(lambda: self._try_shared(byte), timeout_s)

    def _try_shared(self, byte: int) -> bool:
        with self._mutex:
            holders = self._shared.get(byte, 0)
            if byte in self._exclusive or not (holders or self._set(byte, fcntl.F_RDLCK)):
                return False
            self._shared[byte] = holders + 1
            return True

    def give_shared(self, byte: int) -> None:
        """The opposite of `take_shared`."""
        with self._mutex:
            holders = self._shared.pop(byte) - 1
            if holders:
                self._shared[byte] = holders
            else:
                self._set(byte, fcntl.F_UNLCK)

    def held_elsewhere(self, byte: int) -> bool:
        """Whether another process holds the byte exclusively right now."""
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_RDLCK, byte))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def holds(self, byte: int) -> bool:
        """Whether this process holds the byte exclusively."""
        return byte in self._exclusive

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` still names the lock file that is open."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))  # noqa: PTH116 - see `owners_lock`
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor; in the process that took them, this gives every lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._exclusive.clear()
            self._shared.clear()

    def __del__(self) -> None:
        self.close()

    def _set(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(kind, byte))
        except (BlockingIOError, PermissionError):
            return False
        return True


def _in_time(take: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not (taken := take()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return taken


# A lock file is open as long as somebody uses it, or holds a byte of it exclusively.
_open: WeakValueDictionary[str, OwnersLock] = WeakValueDictionary()
_holders: set[OwnersLock] = set()
_open_mutex = RLock()


def owners_lock(state: str | os.PathLike[str]) -> OwnersLock:
    """This process's locks of a state directory: one object, whoever asks. Raises StoreError."""
    path = f"{os.fspath(state)}/owners.lock"  # a text: a producer does without pathlib
    key = os.path.realpath(path)
    with _open_mutex:
        lock = _open.get(key)
        if lock is None or not lock.is_at(path):
            lock = _open[key] = OwnersLock(path)
        return lock


def _forget_after_fork() -> None:
    """A child must neither keep its parent's locks alive nor release them: it drops the descriptors only."""
    global _open_mutex  # noqa: PLW0603 - a mutex copied while held would never be free again
    _open_mutex = RLock()
    for lock in {*_open.values(), *_holders}:
        lock.close()
    _open.clear()
    _holders.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
