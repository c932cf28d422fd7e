"""The flush: everything out before a deadline, through the daemon where one runs, else by ourselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox.api.client import LocalClient
from outbox.daemon.compose import build_engine
from outbox.delivery.engine import Engine
from outbox.delivery.shared import Log, silent
from outbox.errors import OutboxError, StoreError, Unavailable
from outbox.library import FlushResult
from outbox.setting_keys import Settings
from outbox.settings import load
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import OutboxStatus, read_status
from outbox.store.place import running_daemon

_STEP_S = 0.02
_ASK_AGAIN_S = 0.05
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
    report, _ = flush_outboxes(state, agent, timeout_s, lambda: load(environ=os.environ), threads=0)
    return FlushResult(report.delivered, report.left, report.dead, report.in_the_way)


def flush_outboxes(
    state: StateDirectory,
    agent: str | None,
    timeout_s: float,
    settings: Callable[[], Settings],
    *,
    threads: int = _FLUSH_THREADS,
) -> tuple[FlushReport, bool]:
    """Flush one agent, or all with None; the report, and whether a daemon made it.

    A daemon that is just starting is waited for; where one ends meanwhile we go on by ourselves, with
    `settings()`.

    Raises:
        Unavailable: the daemon is there and does not answer.
        ConfigError: none is there, and no relay is set.
    """
    end = time.monotonic() + timeout_s
    while daemon := running_daemon(state):
        try:
            return ask_daemon(daemon.socket, agent, max(0.0, end - time.monotonic())), True
        except Unavailable:
            if time.monotonic() >= end and running_daemon(state):
                raise
        time.sleep(_ASK_AGAIN_S)
    left_s = max(0.0, end - time.monotonic())
    agents = None if agent is None else [agent]
    return flush_state(settings(), state, agents, left_s, threads=threads), False


def ask_daemon(socket: Path, agent: str | None, timeout_s: float) -> FlushReport:
    """Let the running daemon flush; raises Unavailable when it does not answer."""
    client = LocalClient(socket)
    status, answer = client.post("/v1/flush", {"agent": agent, "timeoutS": timeout_s}, timeout_s + 5)
    if status == 200:
        return report_from_json(answer)
    if status == 503:
        raise Unavailable("The daemon is about to end. What waits stays on disk. See: outbox status")
    raise OutboxError(f"The daemon could not flush: {answer}. What waits stays on disk.")


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

    With no `threads` this one does it. What another process is sending is left to it. Raises ConfigError when
    no relay is set.
    """
    end = time.monotonic() + timeout_s
    engine = build_engine(settings, state, log=log)
    try:
        if agents is None:
            paths = list(state.outbox_files())
        else:
            paths = [path for path in map(state.outbox_path, agents) if path.exists()]
        flush = Flush(engine, state, paths)
        engine.begin_flush(end)
        if threads:
            engine.start(min(threads, max(1, len(paths))))
        flush.wait(end)
        return flush.report()
    finally:
        dismiss(engine, 1.0)


def dismiss(engine: Engine, wait_s: float) -> None:
    """End an engine for good: what is under way is cut off and waits again as it was.

    The relay is told of the end of MCP sessions, for a second at most and not beyond the deadline of a flush.
    """
    engine.stop(0.0)
    engine.delivery.mcp.close(deadline=engine.delivery.deadline)
    engine.delivery.client.abort()
    engine.delivery.tokens.abort()
    engine.stop(wait_s)
    engine.resign()
    engine.delivery.files.close()
    engine.delivery.gate.close_state()
    engine.delivery.client.close()
    engine.delivery.tokens.close()


class Flush:
    """One flush of some outboxes by an engine: how they stood before, and what became of it."""

    def __init__(self, engine: Engine, state: StateDirectory, paths: Sequence[Path]) -> None:
        """Take stock. What hurries the engine is the caller's `begin_flush`, after this."""
        self._engine = engine
        self._state = state
        self._before = _stock(state, paths)
        self._end = "the time was over"

    def wait(self, end: float, *, enough: Callable[[], bool] = lambda: False) -> None:
        """Until nothing of these outboxes can be sent before `end` (monotonic seconds), or `enough`.

        Where the engine has no threads this one takes the turns.
        """
        engine, until_ms = self._engine, int(end * 1_000)
        for path in self._before:
            engine.wake(path)
        while time.monotonic() < end:
            if enough():
                self._end = "a signal ended the flush"
                return
            if not engine.has_threads and engine.step():
                continue
            if all(engine.rests(path, until_ms) for path in self._before):
                return
            time.sleep(min(_STEP_S, max(0.0, end - time.monotonic())))

    def report(self) -> FlushReport:
        """How they stand now."""
        return _report(self._before, _stock(self._state, list(self._before)), self._obstacle)

    def _obstacle(self, status: OutboxStatus) -> str:
        """What stands in the way of what is left: a person, the agent's own wait, the path, or the relay."""
        if status.paused_at_ms is not None:
            return "paused by a person (outbox resume)"
        if status.blocked is not None:
            return f"{status.blocked.reason}: {status.blocked.detail}".rstrip(": ")
        delivery, head = self._engine.delivery, status.head
        path = delivery.routes.kinds.get(head.kind, "") if head else ""
        return delivery.gate.trouble(path) or self._end


def waiting(state: StateDirectory, paths: Sequence[Path]) -> dict[str, int]:
    """How many events each agent has left, those with none left out."""
    return {status.agent: status.waiting for status in _stock(state, paths).values() if status.waiting}


def _stock(state: StateDirectory, paths: Sequence[Path]) -> dict[Path, OutboxStatus]:
    return {path: status for path in paths if (status := _status(state, path))}


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
    before: Mapping[Path, OutboxStatus],
    after: Mapping[Path, OutboxStatus],
    obstacle: Callable[[OutboxStatus], str],
) -> FlushReport:
    agents = {
        now.agent: (now.delivered - before[path].delivered, now.waiting)
        for path, now in after.items()
        if before[path].waiting or now.waiting
    }
    return FlushReport(
        delivered=sum(done for done, _ in agents.values()),
        left=sum(left for _, left in agents.values()),
        dead=sum(max(0, now.dead - before[path].dead) for path, now in after.items()),
        in_the_way={now.agent: obstacle(now) for now in after.values() if now.waiting},
        agents=agents,
    )


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
