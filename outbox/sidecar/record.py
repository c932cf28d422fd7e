"""What a sidecar tells of itself: STATE/sidecars/NAME.json, locked while it lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.errors import StoreError

_MOST_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Place:
    """Where one sidecar's files lie: NAME.json, NAME.sock, NAME.control, NAME.notes in STATE/sidecars."""

    folder: Path
    name: str

    @property
    def record(self) -> Path:
        """What it tells of itself."""
        return self.folder / f"{self.name}.json"

    @property
    def socket(self) -> Path:
        """The local HTTP of its own engine."""
        return self.folder / f"{self.name}.sock"

    @property
    def control(self) -> Path:
        """Where hand-offs are announced."""
        return self.folder / f"{self.name}.control"

    @property
    def notes(self) -> Path:
        """What hooks note for it."""
        return self.folder / f"{self.name}.notes"

    def remove(self) -> None:
        """All of it."""
        for path in (self.socket, self.control, self.notes, self.record):
            path.unlink(missing_ok=True)


def folder_of(state: Path) -> Path:
    """The folder of all sidecars of a state directory."""
    return state / "sidecars"


class Record:
    """The record of this process; it holds the lock until `close`, or until it dies."""

    def __init__(self, state: Path) -> None:
        """Take a name that no other has, also not one in another container on the same folder.

        What dead sidecars left behind is removed. Raises StoreError.
        """
        folder = folder_of(state)
        self.place = Place(folder, f"{os.getpid()}-{os.urandom(4).hex()}")
        self._fd = -1
        draft = folder / f".{self.place.name}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for dead in _dead(folder):
                dead.remove()
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            self._fd = os.open(draft, flags, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            draft.rename(self.place.record)  # nobody sees it unlocked
        except OSError as error:
            self.close()
            raise StoreError(
                f"The folder {str(folder)!r} cannot be used: {error.strerror}. Nothing was started. "
                "Give this user leave to write there."
            ) from error

    def write(self, fields: Mapping[str, Any]) -> None:
        """Tell this from now on; a full disk keeps what stood there."""
        line = json.dumps(fields).encode() + b"\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, line, 0)
            os.ftruncate(self._fd, len(line))

    def close(self) -> None:
        """Remove all files of this sidecar, and let go."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.place.remove()
            os.close(self._fd)
            self._fd = -1


def living(state: Path) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Each sidecar of a state directory that lives, with what it tells, in the order of their names."""
    for place in _places(folder_of(state)):
        if (told := _told(place)) is not None:
            yield place, told


def _places(folder: Path) -> list[Place]:
    try:
        return [Place(folder, path.stem) for path in sorted(folder.glob("[!.]*.json"))]
    except OSError:
        return []


def _told(place: Place) -> Mapping[str, Any] | None:
    """What a living one tells; None for a dead one, or one that has told nothing yet."""
    try:
        fd = os.open(place.record, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not _is_held(fd):
            return None
        fields = json.loads(os.read(fd, _MOST_BYTES).partition(b"\n")[0])
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(fd)
    return fields if isinstance(fields, dict) else None


def _dead(folder: Path) -> Iterator[Place]:
    for place in _places(folder):
        with contextlib.suppress(OSError):
            fd = os.open(place.record, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not _is_held(fd):
                    yield place
            finally:
                os.close(fd)


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def tmux_of(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The tmux session around us, from $TMUX (SOCKET,PID,SESSION) and $TMUX_PANE; None outside of one."""
    socket, pid, session = [*environ.get("TMUX", "").rsplit(",", 2), "", ""][:3]
    if not (socket and pid and session):
        return None
    return {"socket": socket, "session": f"${session}", "pane": environ.get("TMUX_PANE", "")}
