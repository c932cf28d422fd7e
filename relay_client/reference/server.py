"""The reference relay as a process: a socket, uvicorn above it, signals, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from relay_client.reference.app import Relay
from relay_client.reference.store import Store, StoreUnusable

EXIT_UNAVAILABLE = 69
EXIT_FILE = 5
_BACKLOG = 512
_KEEP_ALIVE_S = 75
_STOP_WITHIN_S = 5


class _Connection(H11Protocol):
    """uvicorn's connection, which also lets the application reach it: to drop it without an answer."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)


class _Server(uvicorn.Server):
    """uvicorn's server, its signals left to us: it would end by raising them again, we end with exit 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    host: str,
    port: int,
    db: str,
    tokens: Sequence[str],
    *,
    ready: Callable[[str], None] | None = None,
    paths: Sequence[str] = (),
    runtime_token_ttl_s: int = 3600,
    faults: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status.

    Args:
        host: the address to bind; nothing but loopback is bound unless it is named here.
        port: the port; 0 takes a free one.
        db: the SQLite file, made when it is not there.
        tokens: the tokens that are good for everything; without any, no token is asked for.
        ready: called with the base URL once connections are taken.
        paths: further paths that take events of custom kinds.
        runtime_token_ttl_s: how long a minted token lives.
        faults: rules of misbehaviour that hold from the start (as `POST /api/reference/faults` takes them).

    Returns:
        0 after a clean stop, 69 when the address cannot be bound, 5 when the file cannot be used; the reason
        stands on stderr.
    """
    try:
        listener = _listen(host, port)
    except OSError as error:
        sys.stderr.write(
            f"{host}:{port} cannot be bound: {error.strerror or error}. Nothing was started. "
            "Name another address with --host or --port (0 takes a free port).\n"
        )
        return EXIT_UNAVAILABLE
    with listener:
        try:
            store = Store(db)
        except StoreUnusable as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_FILE
        try:
            relay = Relay(store, tokens, paths=paths, runtime_token_ttl_s=runtime_token_ttl_s, faults=faults)
            asyncio.run(_run(relay, listener, ready))
        finally:
            store.close()
    return 0


async def _run(relay: Relay, listener: socket.socket, ready: Callable[[str], None] | None) -> None:
    config = uvicorn.Config(
        relay,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOP_WITHIN_S,
    )
    server = _Server(config)

    def stop() -> None:
        server.should_exit = True
        relay.stopping.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
    if ready is not None:
        ready(_url(listener))
    await server.serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named, and socket.create_server() does not name
    # it; without it each answer, written as head and body, waits 40 ms for the peer to acknowledge.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
