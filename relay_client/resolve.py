"""Name lookups that a deadline bounds.

`getaddrinfo` can neither be given a time nor be interrupted, so it runs in a thread of its own: one at a time
for a name, however many requests wait for it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

Lookup = Callable[[str, int], list[Any]]


def system_lookup(host: str, port: int) -> list[Any]:
    """The addresses of a host as `socket.getaddrinfo` tells them, for TCP."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class Resolver:
    """Looks names up; thread-safe."""

    def __init__(self, lookup: Lookup = system_lookup) -> None:
        self._lookup = lookup
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], Future[list[Any]]] = {}

    def addresses(self, host: str, port: int, timeout_s: float) -> list[Any]:
        """The addresses to try, in order.

        Raises:
            TimeoutError: there was no answer within `timeout_s`.
            OSError: the name cannot be looked up, or `abort` was called.
        """
        with self._lock:
            future = self._pending.get((host, port))
            if future is None:
                future = self._pending[host, port] = Future()
                self._start(host, port, future)
        return future.result(timeout_s)

    def abort(self) -> None:
        """End all waits at once; the threads end when the system answers them."""
        with self._lock:
            pending = list(self._pending.values())
        for future in pending:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(OSError("stopped"))

    def _start(self, host: str, port: int, future: Future[list[Any]]) -> None:
        thread = threading.Thread(
            target=self._answer, args=(host, port, future), name=f"lookup {host}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down, and starts no thread any more
            self._fill(host, port, future)
            del self._pending[host, port]

    def _answer(self, host: str, port: int, future: Future[list[Any]]) -> None:
        self._fill(host, port, future)
        with self._lock:
            self._pending.pop((host, port), None)

    def _fill(self, host: str, port: int, future: Future[list[Any]]) -> None:
        with contextlib.suppress(InvalidStateError):
            try:
                future.set_result(self._lookup(host, port))
            except (OSError, UnicodeError) as error:
                future.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
