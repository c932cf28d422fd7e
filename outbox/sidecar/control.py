"""The control socket of a sidecar: a hand-off is announced by a line of JSON, and answered by one."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.errors import Unavailable
from outbox.sidecar.listening import connect, listen

_MOST_BYTES = 65_536
_REQUEST_WITHIN_S = 5.0
_ANSWER_WITHIN_S = 5.0
_ACCEPT_AGAIN_S = 0.1
_MOST_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Announcement:
    """A hand-off as its issuer announced it; `answer` is called once: at its end when the issuer `waits`."""

    command_id: str
    generation: int | None
    waits: bool
    connection: socket.socket

    def answer(self, value: Mapping[str, Any]) -> None:
        """Tell the issuer; one that is gone needs no answer."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(value).encode() + b"\n")
        self.connection.close()


class ControlSocket:
    """Hears announcements in a thread of its own, and keeps them for `take`."""

    def __init__(self, path: Path, nudge: Callable[[], None]) -> None:
        """Listen from now on; `nudge` is called for each announcement. Raises StoreError."""
        self._path = path
        self._nudge = nudge
        self._heard: queue.SimpleQueue[Announcement] = queue.SimpleQueue()
        self._over = threading.Event()
        self._listener = listen(path)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)
        self._thread.start()

    def take(self) -> list[Announcement]:
        """What was announced since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._heard.get_nowait())
        return found

    def close(self) -> None:
        """Hear nothing any more."""
        self._path.unlink(missing_ok=True)
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_REQUEST_WITHIN_S + 1)
        self._listener.close()
        for announcement in self.take():
            announcement.answer(refused("stopping", "The sidecar is about to end. Nothing was announced."))

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is free just now (accept(2): EMFILE, ENFILE)
                self._over.wait(_ACCEPT_AGAIN_S)
                continue
            try:
                self._heard.put(_read(connection))
            except (OSError, ValueError, RecursionError) as error:
                with contextlib.suppress(OSError):
                    answer = refused("usage", f"This is no announcement: {error}. Nothing was announced.")
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                connection.close()
            else:
                self._nudge()


def refused(code: str, message: str) -> dict[str, Any]:
    """An answer that says no, in the form of the local socket."""
    return {"error": {"code": code, "message": message}}


def _read(connection: socket.socket) -> Announcement:
    """One announcement; raises ValueError, or OSError when it does not come."""
    end = time.monotonic() + _REQUEST_WITHIN_S
    text = b""
    while not text.endswith(b"\n"):
        if (left_s := end - time.monotonic()) <= 0:
            raise TimeoutError("it did not come in time")
        connection.settimeout(left_s)
        if not (chunk := connection.recv(_MOST_BYTES)):
            break
        text += chunk
        if len(text) > _MOST_BYTES:
            raise ValueError("it is too long")
    asked = json.loads(text)
    if not isinstance(asked, dict) or asked.get("act") != "begin":
        raise ValueError('its act is not "begin"')
    command_id, generation = asked.get("commandId"), asked.get("generation")
    if not isinstance(command_id, str) or not 0 < len(command_id) <= _MOST_ID_CHARS:
        raise ValueError(f"commandId is a text of 1 to {_MOST_ID_CHARS} characters")
    if generation is not None and (not isinstance(generation, int) or isinstance(generation, bool)):
        raise ValueError("generation is a whole number")
    connection.settimeout(_ANSWER_WITHIN_S)
    return Announcement(command_id, generation, asked.get("wait") is True, connection)


def announce(path: Path, command_id: str, generation: int | None, *, wait: bool) -> dict[str, Any]:
    """Announce a hand-off to the sidecar at `path`: its answer, with `wait` that of the end.

    Raises Unavailable when it is not there, or ends without an answer.
    """
    asked = {"act": "begin", "commandId": command_id, "generation": generation, "wait": wait}
    try:
        with connect(path, _ANSWER_WITHIN_S) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            connection.settimeout(None if wait else _ANSWER_WITHIN_S)
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline())
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"The sidecar does not answer at {str(path)!r}: {error}. Whether the hand-off was announced "
            "is not known; events are not affected. See: outbox status"
        ) from error
    if not isinstance(answer, dict):
        raise Unavailable("The sidecar's answer cannot be read. Events are not affected. See: outbox status")
    return answer
