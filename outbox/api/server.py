"""The local HTTP: starlette on uvicorn, in a thread of its own, on a Unix socket and, when asked for, TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from outbox.api.app import local_app, undecoded
from outbox.api.binding import bind_private
from outbox.api.gathering import Gathering
from outbox.api.guard import Guard
from outbox.api.served import Served
from outbox.api.short_way import ShortWay

__all__ = ["LocalServer", "Tcp"]


class Tcp:
    """A listening TCP socket, the host it was asked for by, and the token of now."""

    def __init__(self, listening: socket.socket, host: str, token: Callable[[], str]) -> None:
        """The socket is closed when the server stops."""
        self.listening = listening
        self.host = host
        self.token = token


class LocalServer:
    """Serves the daemon's local HTTP on a Unix socket of its user, or a group; and by TCP."""

    def __init__(
        self,
        daemon: Served,
        path: Path,
        handed: Sequence[socket.socket] = (),
        *,
        group: str | None = None,
        tcp: Tcp | None = None,
    ) -> None:
        """Nothing is bound yet. Sockets `handed` to us listen already; their names are not ours to remove."""
        self._path = path
        self._handed = list(handed)
        self._group = group
        app = undecoded(local_app(daemon))
        self._gathering = Gathering(daemon)
        self._sockets: list[socket.socket] = []
        self._servers = [(_server(app, partial(ShortWay, self._gathering, None)), self._sockets)]
        if tcp is not None:
            guard = Guard(app, tcp.token, tcp.host)
            self._servers.append((_server(guard, partial(ShortWay, self._gathering, guard)), [tcp.listening]))
        self._thread = threading.Thread(target=self._run, name="local-socket", daemon=True)

    def start(self) -> None:
        """Bind (before anybody can connect) and serve; raises ConfigError as `bind_private`."""
        self._sockets += self._handed or [bind_private(self._path, self._group)]
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        # outside the main thread uvicorn leaves the signals alone: they are the daemon's business
        await asyncio.gather(*(server.serve(sockets) for server, sockets in self._servers))

    def stop(self) -> None:
        """End, and remove the name of a socket of our own."""
        if not self._handed:
            self._path.unlink(missing_ok=True)
        for server, _ in self._servers:
            server.should_exit = True
        self._thread.join(3)
        self._gathering.close()


def _server(app: ASGIApp, protocol: Callable[..., asyncio.Protocol]) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        lifespan="off",
        loop="asyncio",
        http=cast("type[asyncio.Protocol]", protocol),  # it is only ever called
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)
