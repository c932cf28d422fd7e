"""`outbox status`: how everything stands, with a daemon and without one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.api.explain import Explanation
from outbox.api.obstacle import Obstacle, Scope
from outbox.api.report import OutboxLine, Overview, as_json, overview
from outbox.cli.auth import token_lines
from outbox.cli.by_socket import daemon_of_another
from outbox.cli.output import age, clean, count, emit_json, local_time, number, say, table, terminal_width
from outbox.cli.seeds import seed_advice, seeds_found
from outbox.cli.where import now_ms, settings_to_look, state_of
from outbox.policy import DAY_MS

EXAMPLE = "outbox status --json\noutbox status --watch"

_HEADERS: tuple[str, ...] = ("agent", "waiting", "oldest", "in flight", "delivered", "dead", "state")
_RIGHT = ("waiting", "oldest", "in flight", "delivered", "dead")
_LEAST_TELLING = ("in flight", "delivered", "oldest")
_STATES = {"empty": "nothing waits", "in_flight": "is being sent", "ready": "goes out now"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to go on looking."""
    parser.add_argument(
        "--watch",
        action="store_true",
        help="look again every second until Ctrl-C: a live view on a terminal, else a line for each change",
    )


def run(args: argparse.Namespace) -> int:
    """Look, and tell."""
    if (client := daemon_of_another(args)) is not None:
        from outbox.cli import by_socket_view  # noqa: PLC0415 - another user's way

        by_socket_view.refuse(args.watch, "--watch")
        return by_socket_view.status(client, as_json=args.json, now_ms=now_ms())
    settings = settings_to_look(args)
    state = state_of(settings)

    def look() -> Overview:
        return overview(state, now_ms(), relay_url=settings.relay.url, paths=settings.kind_paths())

    if args.watch:
        from outbox.cli.status_watch import watch  # noqa: PLC0415 - a look at once needs none of it

        return watch(look, as_data=args.json)
    seen, seeds = look(), seeds_found(os.environ)
    if args.json:
        emit_json(as_json(seen) | ({"seedFiles": [str(path) for path in seeds]} if seeds else {}))
        return 0
    say(*head_lines(seen), *(clean(seed_advice(path)) for path in seeds))
    if not seen.outboxes:
        say(*notes(seen))
        say(f"No outbox yet below {clean(str(state.path))}: an agent's first event makes one.")
        return 0
    say(*agent_lines(seen, terminal_width(sys.stdout)), *notes(seen))
    return 0


def head_lines(seen: Overview) -> list[str]:
    """The relay, the token, the daemon."""
    return [clean(_relay(seen)), *(clean(line) for line in _token(seen)), clean(_daemon(seen))]


def agent_lines(seen: Overview, width: int | None) -> list[str]:
    """The table of agents, headers first. On a narrow terminal columns go, so that the state can be read."""
    headers, rows = _HEADERS, [_row(line, seen.now_ms) for line in seen.outboxes]
    for least in _LEAST_TELLING:
        whole = table(rows, headers, right=_RIGHT)
        if table(rows, headers, right=_RIGHT, width=width) == whole:
            return whole
        at = headers.index(least)
        headers = headers[:at] + headers[at + 1 :]
        rows = [row[:at] + row[at + 1 :] for row in rows]
    return table(rows, headers, right=_RIGHT, width=width)


def _relay(seen: Overview) -> str:
    url = seen.relay_url or "not set (relay.url, OUTBOX_RELAY_URL)"
    if seen.gate is not None:
        return f"relay   {url}   {_closed(seen.gate, seen.now_ms)}"
    if seen.tried and not seen.accepted:
        return f"relay   {url}   answers, and has accepted nothing yet"
    return f"relay   {url}   {'works' if seen.accepted else 'not tried yet'}"


def _closed(gate: Obstacle, now: int) -> str:
    since = gate.since_ms or now
    detail = f": {gate.detail}" if gate.detail else ""
    wait_ms = (gate.next_try_at_ms or 0) - now
    coming = f"; next try in {age(wait_ms)}" if wait_ms >= 1_000 else ""
    reason = gate.reason.replace("_", " ")
    return f"closed since {local_time(since, now)} ({age(now - since)}), {reason}{detail}{coming}"


def _token(seen: Overview) -> Iterator[str]:
    if seen.auth:
        yield from token_lines(seen.auth, seen.now_ms)


def _daemon(seen: Overview) -> str:
    daemon = seen.daemon
    if daemon is None:
        return "daemon  none runs: what waits stays on disk until outbox serve, or outbox flush"
    if not daemon.pid:
        return "daemon  is starting"
    return f"daemon  pid {daemon.pid}, {daemon.version}, up {age(seen.now_ms - daemon.started_at_ms)}"


def _row(line: OutboxLine, now: int) -> tuple[str, ...]:
    status = line.status
    if status is None or line.why is None:
        code = line.trouble.code.replace("_", " ") if line.trouble else "unknown"
        return (line.agent, "?", "", "?", "?", "?", f"cannot be read: {code}")
    oldest = age(now - status.head.accepted_at_ms) if status.head else ""
    counters = (number(status.in_flight), number(status.delivered), number(status.dead))
    return (line.agent, number(status.waiting), oldest, *counters, state_of_head(line.why))


def state_of_head(why: Explanation) -> str:
    """What the head of an outbox waits for, in a few words."""
    match why.scope:
        case Scope.NOTHING:
            return _STATES[why.reason]
        case Scope.PERSON:
            return "paused"
        case Scope.SENDER:
            return "waits for a daemon"
        case Scope.RELAY:
            return "waits for the relay"
        case Scope.PATH:
            return f"waits for {why.path}"
        case _:
            return f"held: {why.reason.replace('_', ' ')}"


def notes(seen: Overview) -> Iterator[str]:
    """What a person should look at next."""
    lines = seen.outboxes
    dropped = sum(line.status.dropped for line in lines if line.status)
    dead = sum(line.status.dead for line in lines if line.status)
    yield from (clean(str(line.trouble)) for line in lines if line.trouble)
    if dropped:
        yield f"{count(dropped, 'event')} dropped by a bound; the relay is told in their place."
    if dead:
        yield f"{count(dead, 'dead letter')}: outbox dead list"
    yield from (clean(_sidecar(line.agent, told, seen.now_ms)) for line in lines for told in line.sidecars)
    if seen.hooks and seen.now_ms - seen.hooks.last_at_ms < DAY_MS:
        last_at = local_time(seen.hooks.last_at_ms, seen.now_ms)
        lost = count(seen.hooks.lost, "call")
        yield clean(f"Hooks could not record {lost}, the last at {last_at}: {seen.hooks.last}")


def _sidecar(agent: str, told: Mapping[str, Any], now: int) -> str:
    """What runs for this agent: "builder: claude (pid 4711) under outbox run since 14:02"."""
    command, tmux, handoff = told.get("command") or {}, told.get("tmux"), told.get("handoff")
    since = f" since {local_time(command['startedAt'], now)}" if command.get("startedAt") else ""
    line = f"{agent}: {command.get('name')} (pid {command.get('pid')}) under outbox run{since}"
    line += f", started again {count(told['restarts'], 'time')}" if told.get("restarts") else ""
    line += f", tmux {tmux.get('session')} ({tmux.get('socket')})" if tmux else ""
    return line + (f", hand-off {handoff.get('commandId')} is open" if handoff else "")
