"""A flush that nobody waits for, at a session's end: asked of the daemon, or left to a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys

from outbox.store.place import running_daemon

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from outbox.store.directory import StateDirectory

FLUSH_S = 30
_UNTIL_HEARD_S = 0.1  # a server whose caller is gone before it has read the request drops it


def leave_flush_behind(state: StateDirectory, agent: str) -> None:
    """Have this agent's events sent within `FLUSH_S` seconds. Nothing is raised: they are on disk already."""
    with contextlib.suppress(OSError):
        daemon = running_daemon(state)
        if daemon is None:
            _detach(state, agent)
        else:
            _ask(daemon.socket, agent)


def _ask(socket_path: Path, agent: str) -> None:
    body = json.dumps({"agent": agent, "timeoutS": FLUSH_S})
    request = (
        "POST /v1/flush HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    )
    folder = os.open(socket_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_UNTIL_HEARD_S)
            connection.connect(f"/proc/self/fd/{folder}/{socket_path.name}")  # however long its path is
            connection.sendall(request.encode())
            select.select([connection], [], [], _UNTIL_HEARD_S)
    finally:
        os.close(folder)


def _detach(state: StateDirectory, agent: str) -> None:
    """`outbox flush` in a session of its own; where one runs already, the sender's lock ends this one."""
    words = ["flush", f"--agent={agent}", f"--timeout={FLUSH_S}", f"--state-dir={state.folder}"]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-m", "outbox", *words],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
        setsid=True,
    )
