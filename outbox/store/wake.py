"""The hint from producers to the daemon: a datagram that names the outbox file with something new in it.

Only a hint: it is never waited for, may be lost, and a poll by stat is the backstop.
"""

from __future__ import annotations

import errno
import os
from _thread import allocate_lock  # see connection.py

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

_LONGEST_NAME_BYTES = 100  # sockaddr_un has room for 108


class Waker:
    """Tells the daemon of a state directory; keeps one socket for it, which `close` gives back."""

    def __init__(self, socket_path: str | os.PathLike[str]) -> None:
        """Nothing is opened before the first hint."""
        self._path = os.fspath(socket_path)
        self._address = os.fsencode(socket_path)
        self._mutex = allocate_lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def wake(self, file_name: str) -> bool:
        """Tell a daemon, if one listens; True when the datagram was handed over."""
        if self._socket is None and not os.path.lexists(self._address):
            return False  # nobody listens, and a hook is spared the import
        try:
            sender = self._socket or self._opened()
            _by_short_name(self._path, lambda address: sender.sendto(file_name.encode(), address))
        except OSError:
            return False
        return True

    def _opened(self) -> socket.socket:
        """The one socket, whichever thread needs it first; raises OSError after `close`."""
        with self._mutex:
            if self._closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            if self._socket is None:
                import socket  # noqa: PLC0415 - a producer without a daemon does not need it

                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            return self._socket

    def free_mutex(self) -> None:
        """For a forked child: a thread of the parent may have held it, and nobody would ever let it go."""
        self._mutex = allocate_lock()

    def close(self) -> None:
        """Give the socket back; nobody is told any more."""
        with self._mutex:
            self._closed = True
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def wake_daemon(socket_path: str | os.PathLike[str], file_name: str) -> bool:
    """One hint, from somebody who gives no second one; True when the datagram was handed over."""
    waker = Waker(socket_path)
    try:
        return waker.wake(file_name)
    finally:
        waker.close()


def bind_wake_socket(socket_path: Path) -> socket.socket:
    """The daemon's end, mode 0600; a leftover of a dead daemon is replaced."""
    import socket  # noqa: PLC0415 - as above

    socket_path.unlink(missing_ok=True)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        _by_short_name(os.fspath(socket_path), receiver.bind)
        socket_path.chmod(0o600)
    except BaseException:
        receiver.close()
        raise
    return receiver


def _by_short_name(path: str, use: Callable[[str], object]) -> None:
    """Use the socket by a name that fits into sockaddr_un, however deep STATE lies (Linux)."""
    if len(os.fsencode(path)) <= _LONGEST_NAME_BYTES:
        use(path)
        return
    parent, _, name = path.rpartition("/")
    folder = os.open(parent or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        use(f"/proc/self/fd/{folder}/{name}")
    finally:
        os.close(folder)
