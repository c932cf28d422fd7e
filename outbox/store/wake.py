"""The hint from producers to the daemon: a datagram that names the outbox file with something new in it.

Only a hint: it is never waited for, may be lost, and a poll by stat is the backstop.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def wake_daemon(socket_path: Path, file_name: str) -> bool:
    """Tell a daemon, if one listens; True when the datagram was handed over."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            with _short_name(socket_path) as address:
                sender.sendto(file_name.encode(), address)
            return True
    except OSError:
        return False


def bind_wake_socket(socket_path: Path) -> socket.socket:
    """The daemon's end, mode 0600; a leftover of a dead daemon is replaced."""
    socket_path.unlink(missing_ok=True)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        with _short_name(socket_path) as address:
            receiver.bind(address)
        socket_path.chmod(0o600)
    except BaseException:
        receiver.close()
        raise
    return receiver


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A name of the socket that fits into the 108 bytes of sockaddr_un, however deep STATE lies (Linux)."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
