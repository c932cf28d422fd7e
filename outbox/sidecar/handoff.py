"""What hooks note for the sidecar of their agent: a compaction, the session. Cheap to import and to call.

Notes are lines in the file of that sidecar, which reads them when its command ends. Nothing here raises, and
without such a sidecar nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox.store.directory import StateDirectory

VARIABLE = "OUTBOX_SIDECAR"  # the sidecar's name, in the environment of its command
COMPACTED, SESSION = "compacted", "session"
_MOST_ID_CHARS = 512


def note_compaction(state: StateDirectory, agent: str) -> bool:
    """The conversation of this agent's command was compacted; whether a sidecar will hear of it."""
    return _note(state, agent, {"note": COMPACTED})


def note_session(state: StateDirectory, agent: str, session_id: str) -> bool:
    """This agent's command is in this session; whether a sidecar will hear of it."""
    if not names_session(session_id):
        return False
    return _note(state, agent, {"note": SESSION, "sessionId": session_id})


def names_session(session_id: object) -> bool:
    """Whether this can be the word of a command line that names a session: no option, nothing unprintable."""
    if not isinstance(session_id, str) or not 0 < len(session_id) <= _MOST_ID_CHARS:
        return False
    return session_id.isprintable() and not session_id.startswith("-")


def _note(state: StateDirectory, agent: str, note: dict[str, str]) -> bool:
    noted = [note_in(path, note) for path in _notes_of(state.path / "sidecars", agent)]
    return any(noted)


def note_in(path: Path, note: dict[str, str]) -> bool:
    """Note it in the file of one sidecar; whether that could be done."""
    line = json.dumps(note).encode() + b"\n"
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)  # it is there, or nobody reads it
        try:
            return os.write(fd, line) == len(line)
        finally:
            os.close(fd)
    return False


def _notes_of(folder: Path, agent: str) -> Iterator[Path]:
    """The file of the sidecar around us, else those of all sidecars of this agent."""
    name = os.environ.get(VARIABLE, "")
    if name and "/" not in name and os.path.lexists(folder / f"{name}.notes"):
        yield folder / f"{name}.notes"
        return
    try:
        found = sorted(folder.glob("[!.]*.notes"))
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            told = json.loads(path.with_suffix(".json").read_bytes().partition(b"\n")[0])
            if isinstance(told, dict) and told.get("agent") == agent:
                yield path


class Notes:
    """A sidecar's end of it: what was noted since the last look."""

    def __init__(self, path: Path) -> None:
        """Make the file (0600): from now on hooks write there. Raises OSError."""
        self._fd = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600)
        self._rest = b""

    def read(self) -> list[dict[str, str]]:
        """The notes that came since the last call, oldest first."""
        chunks = [self._rest]
        while chunk := os.read(self._fd, 65_536):
            chunks.append(chunk)
        *lines, self._rest = b"".join(chunks).split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                note = json.loads(line)
                if isinstance(note, dict):
                    found.append(note)
        return found

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)
