"""The flush: everything out before a deadline, through the daemon where one runs, else by ourselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox.api.client import LocalClient
from outbox.daemon.compose import Log, build_engine, silent
from outbox.store.place import running_daemon
from outbox.delivery.engine import Engine
from outbox.errors import OutboxError, StoreError
from outbox.library import FlushResult
from outbox.settings import load
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import OutboxStatus, read_status

_STEP_S = 0.02
_FLUSH_THREADS = 8


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush did; `agents` maps each agent to the events delivered and left."""

    delivered: int
    left: int
    dead: int
    in_the_way: Mapping[str, str] = field(default_factory=dict)
    agents: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def flush_agent(state: StateDirectory, agent: str, *, timeout_s: float) -> FlushResult:
    """`Outbox.flush`: one agent, in the calling thread (threads cannot be started from `atexit`)."""
    if daemon := running_daemon(state):
        report = ask_daemon(daemon.socket, agent, timeout_s)
    else:
        report = flush_state(load(environ=os.environ), state, [agent], timeout_s, threads=0)
    return FlushResult(report.delivered, report.left, report.dead, report.in_the_way)


def ask_daemon(socket: Path, agent: str | None, timeout_s: float) -> FlushReport:
    """Let the running daemon flush; raises Unavailable when it does not answer."""
    client = LocalClient(socket)
    status, answer = client.post("/v1/flush", {"agent": agent, "timeoutS": timeout_s}, timeout_s + 5)
    if status != 200:
        raise OutboxError(f"The daemon could not flush: {answer}. What waits stays on disk.")
    return report_from_json(answer)


def flush_state(
    settings: Settings,
    state: StateDirectory,
    agents: Sequence[str] | None,
    timeout_s: float,
    *,
    threads: int = _FLUSH_THREADS,
    log: Log = silent,
) -> FlushReport:
    """Send what waits in these outboxes (all of them with None), without a daemon, for at most `timeout_s`.

    Raises ConfigError when no relay is set. What another process is sending is left to it.
    """
    end = time.monotonic() + timeout_s
    engine = build_engine(settings, state, log=log)
    try:
        if agents is None:
            paths = list(state.outbox_files())
        else:
            paths = [path for path in map(state.outbox_path, agents) if path.exists()]
        for path in paths:
            engine.wake(path)
        return run_flush(engine, state, paths, end, threads=threads)
    finally:
        engine.delivery.client.abort()
        engine.stop(1.0)
        engine.resign()
        engine.delivery.files.close()
        engine.delivery.gate.close_state()
        engine.delivery.client.close()


def run_flush(
    engine: Engine,
    state: StateDirectory,
    paths: Sequence[Path],
    end: float,
    *,
    threads: int = 0,
    enough: Callable[[], bool] = lambda: False,
) -> FlushReport:
    """Flush with an engine that is there, until `end` (monotonic seconds) or `enough`.

    With `threads` None the engine's own worker threads do it; with 0 this thread.
    """
    before = {path: status for path in paths if (status := _status(state, path))}
    engine.begin_flush(end)
    if threads:
        engine.start(min(threads, max(1, len(paths))))
    own = threads == 0 and not engine.has_threads
    try:
        _wait(engine, paths, end, own=own, enough=enough)
    finally:
        if not own and threads:
            engine.stop(max(0.0, end - time.monotonic()) + 0.2)
        engine.end_flush()
    after = {path: status for path in before if (status := _status(state, path))}
    return _report(engine, before, after)


def _wait(engine: Engine, paths: Sequence[Path], end: float, *, own: bool, enough: Callable[[], bool]) -> None:
    until_ms = int(end * 1_000)
    while time.monotonic() < end and not enough():
        if own and engine.step():
            continue
        if all(engine.rests(path, until_ms) for path in paths):
            return
        time.sleep(min(_STEP_S, max(0.0, end - time.monotonic())))


def _status(state: StateDirectory, path: Path) -> OutboxStatus | None:
    try:
        box = open_outbox(state, path)
    except StoreError:
        return None
    try:
        return read_status(box)
    finally:
        box.close()


def _report(
    engine: Engine, before: Mapping[Path, OutboxStatus], after: Mapping[Path, OutboxStatus]
) -> FlushReport:
    agents = {
        now.agent: (now.delivered - before[path].delivered, now.waiting)
        for path, now in after.items()
        if before[path].waiting or now.waiting
    }
    relay = engine.delivery.gate.relay
    in_the_way = {
        now.agent: _obstacle(now, f"{relay.reason}: {relay.detail}" if relay.reason else "")
        for now in after.values()
        if now.waiting
    }
    return FlushReport(
        delivered=sum(done for done, _ in agents.values()),
        left=sum(left for _, left in agents.values()),
        dead=sum(max(0, now.dead - before[path].dead) for path, now in after.items()),
        in_the_way=in_the_way,
        agents=agents,
    )


def _obstacle(status: OutboxStatus, relay: str) -> str:
    if status.paused_at_ms is not None:
        return "paused by a person"
    if status.blocked is not None:
        return f"{status.blocked.reason}: {status.blocked.detail}".rstrip(": ")
    return relay or "the time was over"


def report_to_json(report: FlushReport) -> dict[str, Any]:
    """As the local socket tells it."""
    return {
        "delivered": report.delivered,
        "left": report.left,
        "dead": report.dead,
        "inTheWay": dict(report.in_the_way),
        "agents": {agent: list(counts) for agent, counts in report.agents.items()},
    }


def report_from_json(raw: Mapping[str, Any]) -> FlushReport:
    """The opposite of `report_to_json`."""
    return FlushReport(
        raw["delivered"],
        raw["left"],
        raw["dead"],
        raw["inTheWay"],
        {agent: (done, left) for agent, (done, left) in raw["agents"].items()},
    )
