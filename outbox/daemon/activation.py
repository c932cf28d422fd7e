"""Sockets that systemd opened for us (sd_listen_fds(3)): they go on listening while the daemon restarts."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from outbox.errors import ConfigError

_FIRST_FD = 3  # SD_LISTEN_FDS_START


def take_sockets(environ: MutableMapping[str, str], pid: int) -> list[socket.socket]:
    """The listening Unix sockets that were handed to the process `pid`, none when there are none.

    The variables are removed and the descriptors closed on exec, so that no child takes them for its own.

    Raises:
        ConfigError: what was handed over is no listening Unix stream socket.
    """
    whose, many = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if whose != str(pid) or not (many.isascii() and many.isdigit()):
        return []
    taken: list[socket.socket] = []
    try:
        for number in range(int(many)):
            name = names[number] if number < len(names) else ""
            taken.append(_listening(_FIRST_FD + number, name))
    except ConfigError:
        for one in taken:
            one.close()
        raise
    return taken


def path_of(listening: socket.socket) -> Path:
    """Where it lies; an abstract one as systemd writes it, with a leading "@"."""
    name = os.fsdecode(listening.getsockname())
    return Path(f"@{name[1:]}" if name.startswith("\0") else name)


def _listening(fd: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(fd, False)  # noqa: FBT003 - the function's own signature
        found = socket.socket(fileno=fd)
    except OSError as error:
        raise _unusable(fd, name, error.strerror or str(error)) from error
    is_stream = found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM
    if not is_stream or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.detach()
        raise _unusable(fd, name, "it is no listening Unix stream socket")
    found.setblocking(False)  # noqa: FBT003 - the socket's own signature
    return found


def _unusable(fd: int, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"systemd handed over descriptor {fd} ({name or 'without a name'}), which cannot be used: {why}. "
        "Nothing was started; what waits stays on disk. The socket unit needs ListenStream= with a path, and "
        "no Accept=."
    )
