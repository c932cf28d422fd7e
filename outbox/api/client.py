"""A client of the daemon's local socket, for commands: one request, one answer. Standard library only."""

from __future__ import annotations

import json
import os
import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from outbox.errors import Unavailable

_MOST_BYTES = 64 * 1024 * 1024
_LONGEST_NAME_BYTES = 100  # sockaddr_un holds 108 (unix(7))


class LocalClient:
    """Speaks to the daemon that serves at `socket_path`; a connection of its own for each request."""

    def __init__(self, socket_path: Path) -> None:
        """Nothing is connected yet."""
        self._socket_path = socket_path

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, Any]:
        """The status and the JSON value of the answer (None when there is none); raises as `post`."""
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, value: Any, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Post a JSON value; the status and the JSON value of the answer (None when there is none).

        `timeout_s` bounds each wait for the daemon. Raises Unavailable when it is not there, does not answer
        in time, or does not speak HTTP.
        """
        return self._ask("POST", path, json.dumps(value), timeout_s)

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, Any]:
        connection = _UnixConnection(self._socket_path, timeout_s)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, _value(answer.read(_MOST_BYTES))
        except (OSError, HTTPException) as error:
            raise Unavailable(
                f"The daemon does not answer at {str(self._socket_path)!r}: {_reason(error)}. "
                "Nothing was changed; what waits stays on disk. See: outbox status"
            ) from error
        finally:
            connection.close()


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, socket_path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._socket_path = socket_path

    def connect(self) -> None:
        """Connect to the path, however deep it lies (Linux)."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        if len(os.fsencode(self._socket_path)) < _LONGEST_NAME_BYTES:
            self.sock.connect(str(self._socket_path))
            return
        folder = os.open(self._socket_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._socket_path.name}")
        finally:
            os.close(folder)


def _value(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text[:1].lower() + text[1:]
