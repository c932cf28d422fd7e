"""What the hooks of one session have recorded: a line each in STATE/hooks/sessions, added up at its end.

It feeds the insight of a session's end and nothing else: losing a line costs a count, never an event.
"""

from __future__ import annotations

import os

from outbox.blake2 import blake2b
from outbox.json_text import dump
from outbox.value import NamedTuple

# ruff: noqa: PTH102, PTH123 - a hook does without pathlib

_KEPT_MS = 30 * 24 * 60 * 60 * 1000
_MOST_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 18
_ROLES = frozenset(("user", "assistant", "tool", "error", "system", "status"))


class Tally(NamedTuple):
    """A session as its hooks saw it; times in epoch milliseconds."""

    started_at_ms: int
    ended_at_ms: int
    messages: dict[str, int]
    redacted: int


class SessionNotes:
    """The notes of one session of one runner."""

    def __init__(self, folder: str | os.PathLike[str], runner: str, session: str) -> None:
        """`folder` is STATE/hooks/sessions; nothing is made yet."""
        name = blake2b(f"{runner}\0{session}".encode("utf-8", "replace"), digest_size=16).hexdigest()
        self._folder = os.fspath(folder)
        self._path = f"{self._folder}/{name}"

    def add(self, role: str, occurred_at_ms: int, redacted: int) -> None:
        """Note one message that was recorded; what cannot be noted is not."""
        line = f"{occurred_at_ms} {role} {redacted}\n".encode()
        try:
            if not os.path.lexists(self._folder):
                _make_folder(self._folder.rpartition("/")[0])
                _make_folder(self._folder)
            self._append(line)
        except OSError:
            return

    def tally(self, role: str, now_ms: int, redacted: int) -> Tally:
        """The notes added up, with one more message at `now_ms` that is not noted yet."""
        times, messages = [now_ms], {role: 1}
        for at_ms, noted_role, noted_redacted in self._notes():
            times.append(at_ms)
            messages[noted_role] = messages.get(noted_role, 0) + 1
            redacted += noted_redacted
        return Tally(min(times), max(times), messages, redacted)

    def forget_old(self, now_ms: int) -> None:
        """Remove the notes of sessions in which nothing was recorded for 30 days."""
        try:
            for entry in os.scandir(self._folder):
                if entry.stat().st_mtime * 1000 < now_ms - _KEPT_MS:
                    os.unlink(entry.path)  # noqa: PTH108 - the entry has the path as a text
        except OSError:
            return

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def _notes(self) -> list[tuple[int, str, int]]:
        try:
            with open(self._path, "rb") as file:
                lines = file.read(_MOST_BYTES).decode("ascii", "replace").splitlines()
        except OSError:
            return []
        parts = (line.split(" ") for line in lines)
        return [
            (int(at_ms), role, int(redacted))
            for at_ms, role, redacted in (part for part in parts if len(part) == 3)
            if role in _ROLES
            and all(part.isdigit() and len(part) <= _MOST_DIGITS for part in (at_ms, redacted))
        ]


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        return


def insight_payload(agent: str, runner: str, session: str | None, reason: str | None, tally: Tally) -> str:
    """The insight of a session's end, as JSON text: how long it took, and how many messages of whom."""
    whole = sum(tally.messages.values())
    duration_ms = tally.ended_at_ms - tally.started_at_ms
    minutes, seconds = divmod(duration_ms // 1000, 60)
    counts = {"messages": whole, **dict(sorted(tally.messages.items())), "redacted": tally.redacted}
    facts = {
        "from": agent,
        "kind": "session-end",
        "text": f"A session of {runner} ended after {minutes} min {seconds} s: {whole} messages recorded, "
        f"{tally.messages.get('user', 0)} of the person's, {tally.messages.get('tool', 0)} of tools.",
        "runner": runner,
        "sessionId": session,
        "startedAt": tally.started_at_ms,
        "endedAt": tally.ended_at_ms,
        "durationMs": duration_ms,
        "counts": counts,
        "reason": reason,
    }
    return dump(facts)
