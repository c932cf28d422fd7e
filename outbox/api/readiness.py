"""Whether events can be accepted, and of each agent whether its events leave."""

from __future__ import annotations

import os
import time
from typing import Any

from outbox.api.obstacle import Scope
from outbox.api.report import OutboxLine, overview
from outbox.api.served import Served
from outbox.errors import StoreError

_BOUND = "bounds.min_free_disk_bytes"


def readiness(daemon: Served) -> dict[str, Any]:
    """`ready` is about taking events; `agents` says of each whether they leave, and why not."""
    reason, detail = _obstacle(daemon)
    try:
        lines = overview(daemon.state, time.time_ns() // 1_000_000, paths=daemon.kind_paths).outboxes
    except StoreError as error:
        lines = []
        reason, detail = reason or error.code, detail or str(error)
    return {
        "ready": reason is None,
        "reason": reason,
        "detail": detail,
        "agents": [_agent(line) for line in lines],
    }


def _obstacle(daemon: Served) -> tuple[str | None, str]:
    """Why nothing can be accepted at all, if that is so."""
    state = daemon.state
    try:
        disk = os.statvfs(state.agents)
    except OSError as error:
        return "store", f"The state directory {str(state.path)!r} cannot be used: {error.strerror}."
    if not os.access(state.agents, os.W_OK | os.X_OK):
        return "store", f"The state directory {str(state.path)!r} cannot be written."
    free = disk.f_bavail * disk.f_frsize
    if free < daemon.least_free_bytes:
        least = daemon.least_free_bytes
        said = f"Only {free:,} bytes are free below {str(state.path)!r}; {least:,} are to stay so."
        return "full", f"{said} What waits goes on being delivered. Make space, or lower {_BOUND}."
    return None, ""


def _agent(line: OutboxLine) -> dict[str, Any]:
    if line.trouble is not None:
        return {
            "agent": line.agent,
            "leaves": False,
            "reason": line.trouble.code,
            "detail": str(line.trouble),
        }
    why = line.why
    if why is None or why.scope is Scope.NOTHING:
        return {"agent": line.agent, "leaves": True, "reason": None, "detail": ""}
    return {"agent": line.agent, "leaves": False, "reason": why.reason, "detail": " ".join(why.lines)}
