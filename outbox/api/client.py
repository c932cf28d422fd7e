"""A client of the daemon's local socket, for commands: one request, one answer. Standard library only."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from outbox.errors import OutboxError, StoreDamaged, StoreError, StoreFull, Unavailable, UsageError

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
        return self._ask("POST", path, (json.dumps(value).encode("ascii"), "application/json"), timeout_s)

    def post_lines(self, path: str, lines: Sequence[bytes], timeout_s: float = 60.0) -> list[Any]:
        """Post a line each; what was answered to each of them, in order: fewer when the daemon ended it.

        Raises Unavailable as `post`, and the error that the daemon answers when it took none of them.
        """
        body = b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines)
        status, answer = self._ask("POST", path, (body, "application/x-ndjson"), timeout_s, read=_lines)
        if status != 200:
            raise error_in(status, answer[0] if answer else None)
        return list(answer)

    def value(self, method: str, path: str, asked: Any = None, timeout_s: float = 10.0) -> Any:
        """The JSON value of a good answer; raises Unavailable, and the error that the daemon answers."""
        get = method == "GET"
        status, answer = self.get(path, timeout_s) if get else self.post(path, asked, timeout_s)
        if status >= 300:
            raise error_in(status, answer)
        return answer

    def _ask(
        self,
        method: str,
        path: str,
        body: tuple[bytes, str] | None,
        timeout_s: float,
        read: Callable[[bytes], Any] | None = None,
    ) -> tuple[int, Any]:
        connection = _UnixConnection(self._socket_path, timeout_s)
        content, headers = (body[0], {"Content-Type": body[1]}) if body is not None else (None, {})
        kept = "Nothing was changed"
        try:
            connection.connect()
            kept = kept if method == "GET" else "Whether it was done is not known"
            connection.request(method, path, content, headers)
            answer = connection.getresponse()
            return answer.status, (read or _value)(answer.read(_MOST_BYTES))
        except (OSError, HTTPException) as error:
            raise Unavailable(
                f"The daemon does not answer at {str(self._socket_path)!r}: {_reason(error)}. "
                f"{kept}; what waits stays on disk. See: outbox status"
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


def error_in(status: int, problem: Any) -> OutboxError:
    """The error that an answer tells of, as the command line knows it."""
    told = problem if isinstance(problem, dict) else {}
    code, detail = str(told.get("code", "error")), str(told.get("detail") or f"The daemon answered {status}.")
    if status == 507:
        return StoreFull(detail)
    if status == 503:
        return Unavailable(detail)
    if status >= 500:
        return StoreDamaged(detail) if code == "damaged" else StoreError(detail)
    return UsageError(detail, code=code)


def _lines(body: bytes) -> list[Any]:
    return [value for line in body.splitlines() if (value := _value(line)) is not None]


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
