"""Who serves a state directory: the daemon's lock, and what it tells of itself in STATE/daemon.json."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.errors import StoreError, StoreFull, StoreHeld
from outbox.store.directory import StateDirectory
from outbox.store.fact_fields import LAST_MOMENT_MS
from outbox.store.locks import DAEMON_BYTE, owners_lock
from outbox.store.reserve import keep_reserve


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """The daemon of a state directory. `pid` is 0 while it has not written its file yet."""

    pid: int
    version: str
    started_at_ms: int
    socket: Path


def default_socket(state: StateDirectory) -> Path:
    """Where the local socket lies unless a setting says otherwise."""
    return state.path / "outbox.sock"


def running_daemon(state: StateDirectory) -> RunningDaemon | None:
    """The daemon that holds this state directory's lock; the file alone proves nothing."""
    if not (state.path / "owners.lock").exists():
        return None
    lock = owners_lock(state.path)
    if not lock.holds(DAEMON_BYTE) and not lock.held_elsewhere(DAEMON_BYTE):
        return None
    try:
        return _told(json.loads(state.daemon_file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return RunningDaemon(0, "", 0, default_socket(state))


def _told(raw: Any) -> RunningDaemon:
    pid, version, started_at_ms = raw["pid"], raw["version"], raw["startedAtMs"]
    if not (type(pid) is type(started_at_ms) is int and pid > 0 and 0 <= started_at_ms <= LAST_MOMENT_MS):
        raise ValueError("no process and no moment")
    return RunningDaemon(pid, str(version), started_at_ms, Path(raw["socket"]))


def take_place(state: StateDirectory, version: str, socket: Path, now_ms: int) -> None:
    """Become the one daemon; raises StoreHeld, naming the other one, when there is one.

    On a full disk the daemon's file may be missing: it is known to run then, and asked at its usual socket.
    """
    if not owners_lock(state.path).try_exclusive(DAEMON_BYTE):
        other = running_daemon(state)
        who = f"pid {other.pid}" if other and other.pid else "another process"
        raise StoreHeld(
            f"Another daemon serves this state directory: {who} ({state.path}). Nothing was changed. "
            "To replace it: outbox stop, or systemctl restart outbox."
        )
    raw = {"pid": os.getpid(), "version": version, "startedAtMs": now_ms, "socket": str(socket)}
    with contextlib.suppress(StoreError):
        write_private(state.daemon_file, json.dumps(raw))
    keep_reserve(state)


def leave_place(state: StateDirectory) -> None:
    """Another daemon may come."""
    state.daemon_file.unlink(missing_ok=True)
    owners_lock(state.path).release(DAEMON_BYTE)


def write_private(path: Path, text: str) -> None:
    """Replace a small file as a whole, mode 0600; raises StoreFull or StoreError, and the old one stays."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        kind = StoreFull if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreError
        raise kind(
            f"The file {path.name} cannot be written: {error.strerror}. The old one stays; events are not "
            f"affected. Make space below {str(path.parent)!r}, or give its owner leave to write there."
        ) from error
