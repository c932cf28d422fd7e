"""What hooks could not store: a line each in STATE/hooks/faults, which `outbox status` counts.

A hook has nobody to tell: its exit status is 0 and its stdout empty, whatever happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from outbox.printable import printable
from outbox.store.reserve import give_up_reserve
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outbox.store.directory import StateDirectory

_MOST_BYTES = 64 * 1024
_KEPT_LINES = 50
_LINE_CHARS = 500
_MOST_DIGITS = 18
_LOCK_TRIES = 20
_LOCK_STEP_S = 0.005


class HookFaults(NamedTuple):
    """How many calls of hooks were lost in all, and what was said of the last one."""

    lost: int
    last_at_ms: int
    last: str


def note_fault(state: StateDirectory, sentence: str, now_ms: int) -> bool:
    """Append one line, making the folder where it is missing; False when not even that was possible.

    On a full disk the reserve is given up for it.
    """
    line = f"{now_ms} 1 {printable(sentence)[:_LINE_CHARS]}\n".encode("utf-8", "replace")
    for _ in range(2):
        try:
            _append(state, line)
        except OSError:
            if not give_up_reserve(state):
                return False
        else:
            return True
    return False


def read_faults(state: StateDirectory) -> HookFaults | None:
    """The faults so far; None when there is none, or they cannot be read."""
    try:
        lines = _lines(state.path.joinpath("hooks", "faults").read_bytes())
    except OSError:
        return None
    if not lines:
        return None
    return HookFaults(sum(count for _, count, _ in lines), lines[-1][0], lines[-1][2])


def _append(state: StateDirectory, line: bytes) -> None:
    folder = state.path / "hooks"
    for missing in (state.path, folder):
        missing.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "faults", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _locked(fd) and os.fstat(fd).st_size > _MOST_BYTES:
            _shorten(fd)
        os.write(fd, line)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Whether others are kept from shortening the file; a line is appended in any case."""
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_STEP_S)
    return False


def _shorten(fd: int) -> None:
    """Keep the last lines, and of those before them the number."""
    lines = _lines(os.pread(fd, 2 * _MOST_BYTES, 0))
    gone, kept = lines[:-_KEPT_LINES], lines[-_KEPT_LINES:]
    os.ftruncate(fd, 0)
    before = (gone[-1][0], sum(count for _, count, _ in gone), "earlier ones") if gone else None
    for at_ms, count, sentence in [before, *kept] if before else kept:
        os.write(fd, f"{at_ms} {count} {sentence}\n".encode())


def _is_number(text: str) -> bool:
    """Whether it is a number that a hook wrote: `int` takes more than these, and other digits less."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _lines(data: bytes) -> list[tuple[int, int, str]]:
    parts = (line.split(" ", 2) for line in data.decode("utf-8", "replace").split("\n"))
    return [
        (int(at_ms), int(count), sentence)
        for at_ms, count, sentence in (part for part in parts if len(part) == 3)
        if _is_number(at_ms) and _is_number(count)
    ]
