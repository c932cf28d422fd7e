"""Unix sockets that only their user may open, made before anybody is told of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from outbox.errors import StoreError


def listen(path: Path) -> socket.socket:
    """A listening socket of mode 0600 at a path that is free; long paths work too (Linux).

    Raises StoreError when it cannot be made.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mask = os.umask(0o177)
            try:
                bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # sockaddr_un has room for 108 bytes
            finally:
                os.umask(mask)
        finally:
            os.close(folder)
        bound.listen(64)
    except OSError as error:
        bound.close()
        raise StoreError(
            f"The socket {str(path)!r} cannot be made: {error.strerror}. Nothing was started. "
            "Give this user leave to write there."
        ) from error
    return bound


def connect(path: Path, timeout_s: float | None) -> socket.socket:
    """A connection to such a socket; raises OSError."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    asking.settimeout(timeout_s)
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            asking.connect(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)
    except OSError:
        asking.close()
        raise
    return asking
