"""How everything stands: all outboxes, the relay, the daemon. Read from the files, by whoever asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outbox.api.explain import Explanation, explain
from outbox.api.obstacle import KIND_PATHS, Obstacle, Scope, closed_gate
from outbox.capture.hook_faults import HookFaults, read_faults
from outbox.errors import StoreError
from outbox.sidecar.record import living
from outbox.store.directory import StateDirectory
from outbox.store.file import BUSY_TIMEOUT_MS, OutboxFile, open_outbox
from outbox.store.inspect import OutboxStatus, read_status
from outbox.store.place import RunningDaemon, running_daemon
from outbox.store.relay_state import read_facts

FOR_ALL = "auth"
"""The fact about the tokens as a whole; those of agents with a token of their own are "token:AGENT"."""

_BUSY_TIMEOUT_MS = 1_000
_SIDECAR_FIELDS = ("pid", "engine", "socket", "command", "tmux", "selfResume", "restarts", "handoff")


@dataclass(frozen=True, slots=True)
class OutboxLine:
    """One agent's outbox and why its head waits; or a file that cannot be opened, and the error that says so.

    Such a file's name stands for the agent, since the exact one is known to the file alone.
    """

    agent: str
    status: OutboxStatus | None
    why: Explanation | None
    trouble: StoreError | None = None
    sidecars: tuple[Mapping[str, Any], ...] = ()  # what each `outbox run` for this agent tells


@dataclass(frozen=True, slots=True)
class Overview:
    """All that `status` tells."""

    outboxes: list[OutboxLine]
    relay_url: str | None
    gate: Obstacle | None
    tried: bool  # whether anything was sent to this relay
    accepted: bool  # whether it ever accepted anything
    auth: Mapping[str, Any]
    daemon: RunningDaemon | None
    now_ms: int
    hooks: HookFaults | None = None  # what hooks of agent runners could not record


def overview(
    state: StateDirectory,
    now_ms: int,
    *,
    relay_url: str | None = None,
    paths: Mapping[str, str] = KIND_PATHS,
) -> Overview:
    """Look at every file once; nothing is made or changed.

    `relay_url` is the configured relay: without a daemon, what the files know of another one does not count.
    `paths` says where each kind goes. Raises StoreError when the state directory cannot be read.
    """
    files = outbox_files(state)
    daemon = running_daemon(state)
    facts = read_facts(state.relay_state)
    known_url = (facts.get("gate") or {}).get("url")
    if relay_url is not None and daemon is None and known_url != relay_url:
        facts, known_url = {}, relay_url
    told = partial(explain, facts=facts, daemon_running=daemon is not None, now_ms=now_ms, paths=paths)
    sidecars = [fields for _, fields in living(state.path)]
    lines = [_line(state, path, told, sidecars) for path in files]
    return Overview(
        outboxes=lines,
        relay_url=known_url,
        gate=closed_gate(facts),
        tried=bool((facts.get("gate") or {}).get("reason")) or any(map(_is_path, facts)),
        accepted=any(_is_path(name) and (fact or {}).get("accepted") is True for name, fact in facts.items()),
        auth=facts.get(FOR_ALL) or {},
        daemon=daemon,
        now_ms=now_ms,
        hooks=read_faults(state),
    )


def _is_path(fact: str) -> bool:
    return fact.startswith("path:")


def tokens_of(facts: Mapping[str, Any], relay_url: str | None = None) -> dict[str, dict[str, Any]]:
    """What is known of the tokens, by name; of those of another relay than `relay_url` nothing. Pure."""
    known_url = (facts.get("gate") or {}).get("url")
    if relay_url is not None and known_url != relay_url:
        return {}
    return {
        name: fact
        for name, fact in facts.items()
        if (name == FOR_ALL or name.startswith("token:")) and isinstance(fact, dict)
    }


def outbox_files(state: StateDirectory) -> list[Path]:
    """Every outbox file; raises StoreError when the folder cannot be read."""
    try:
        return list(state.outbox_files())
    except OSError as error:
        raise StoreError(
            f"The state directory {str(state.path)!r} cannot be read: {error.strerror}. Nothing was changed. "
            "It can be read by the user whose daemon it is; another one is named with --state-dir."
        ) from error


def status_report(
    state: StateDirectory, now_ms: int | None = None, *, paths: Mapping[str, str] = KIND_PATHS
) -> dict[str, Any]:
    """What `status --json` and GET /v1/status answer; times are epoch milliseconds. Raises as `overview`."""
    return as_json(overview(state, time.time_ns() // 1_000_000 if now_ms is None else now_ms, paths=paths))


def as_json(seen: Overview) -> dict[str, Any]:
    """The overview as data (design section 8)."""
    gate, daemon = seen.gate, seen.daemon
    return {
        "agents": [_agent_json(line, seen.now_ms) for line in seen.outboxes],
        "relay": {
            "url": seen.relay_url,
            "gate": "closed" if gate else "open" if seen.tried else "unknown",
            "reason": gate and gate.reason,
            "since": gate and gate.since_ms,
            "auth": seen.auth.get("state") or None,
        },
        "daemon": daemon
        and {
            "pid": daemon.pid or None,
            "version": daemon.version or None,
            "uptimeS": max(0, seen.now_ms - daemon.started_at_ms) // 1000 if daemon.started_at_ms else 0,
        },
    } | ({"hooks": _hooks_json(seen.hooks)} if seen.hooks else {})


def _hooks_json(faults: HookFaults) -> dict[str, Any]:
    return {"lost": faults.lost, "lastAt": faults.last_at_ms, "last": faults.last}


def _line(
    state: StateDirectory,
    path: Path,
    told: Callable[[OutboxStatus], Explanation],
    sidecars: Sequence[Mapping[str, Any]],
) -> OutboxLine:
    try:
        status = status_of(state, path)
    except StoreError as error:
        return OutboxLine(path.stem, None, None, error)
    own = tuple(fields for fields in sidecars if fields.get("agent") == status.agent)
    return OutboxLine(status.agent, status, told(status), sidecars=own)


def status_of(state: StateDirectory, path: Path) -> OutboxStatus:
    """The status of one outbox; raises StoreError when its file cannot be opened or read."""
    with opened(state, path, busy_timeout_ms=_BUSY_TIMEOUT_MS) as box:
        return read_status(box)


@contextmanager
def opened(
    state: StateDirectory, path: Path, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS
) -> Iterator[OutboxFile]:
    """An outbox file, open while the block runs; raises StoreError when it cannot be used.

    Side files (-wal, -shm) that were not there before are gone afterwards: looking leaves nothing behind.
    """
    had_log = path.with_name(f"{path.name}-wal").exists()
    box = open_outbox(state, path, busy_timeout_ms=busy_timeout_ms)
    try:
        yield box
    finally:
        box.close(checkpoint=not had_log)


def _agent_json(line: OutboxLine, now_ms: int) -> dict[str, Any]:
    status = line.status
    counters = {
        "waiting": status and status.waiting,
        "inFlight": status and status.in_flight,
        "dead": status and status.dead,
        "delivered": status and status.delivered,
        "dropped": status and status.dropped,
        "bytes": status and status.waiting_bytes,
        "oldestAgeMs": max(0, now_ms - status.head.accepted_at_ms) if status and status.head else None,
    }
    sidecars = {"sidecars": [_sidecar_json(told) for told in line.sidecars]} if line.sidecars else {}
    return {"agent": line.agent, **counters, "blocked": _blocked_json(line), **sidecars}


def _sidecar_json(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: told.get(name) for name in _SIDECAR_FIELDS}


def _blocked_json(line: OutboxLine) -> dict[str, Any] | None:
    if line.trouble is not None:
        return {"reason": line.trouble.code, "since": None, "nextTryAt": None, "detail": str(line.trouble)}
    why = line.why
    if why is None or why.scope is Scope.NOTHING:
        return None
    return {
        "reason": why.reason,
        "since": why.since_ms,
        "nextTryAt": why.next_try_at_ms,
        "detail": why.detail,
    }
