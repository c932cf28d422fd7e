"""`outbox resume [AGENT]`: go on, and give the relay's paths another chance."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from outbox.api.client import LocalClient
from outbox.cli.output import clean, count, emit_json, say
from outbox.cli.where import for_each, settings_to_look, state_of, tell_troubles
from outbox.errors import Unavailable
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile
from outbox.store.people import resume
from outbox.store.place import RunningDaemon, running_daemon
from outbox.store.relay_state import RelayState
from outbox.store.wake import wake_daemon

EXAMPLE = "outbox resume builder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The agent."""
    parser.add_argument(
        "agent", metavar="AGENT", nargs="?", help="whose events; default: those of all agents"
    )


def run(args: argparse.Namespace) -> int:
    """Resume one agent, or all; a daemon that runs is asked to forget its waits too."""
    state = state_of(settings_to_look(args))
    resumed: list[str] = []

    def act(box: OutboxFile) -> None:
        resume(box)
        resumed.append(box.agent)
        wake_daemon(state.wake_socket, box.path.name)

    troubles = for_each(state, args.agent, act)
    daemon = running_daemon(state)
    if daemon is not None:
        _tell(daemon, args.agent)
    else:
        _forgive(state)
    if args.json:
        emit_json({"resumed": resumed})
    else:
        _say(args.agent, len(resumed), sent=daemon is not None)
    return tell_troubles(troubles)


def _tell(daemon: RunningDaemon, agent: str | None) -> None:
    status, answer = LocalClient(daemon.socket).post("/v1/resume", {"agent": agent})
    if status != 200:
        raise Unavailable(
            f"The daemon did not go on: {answer}. The pause itself is over. To start afresh, restart it."
        )


def _forgive(state: StateDirectory) -> None:
    """Budgets and dead ends of the relay's paths start afresh, as a daemon would have it."""
    if not state.relay_state.exists():
        return
    relay_state = RelayState(state.relay_state)
    try:
        relay_state.write(forgiven(relay_state.read()))
    finally:
        relay_state.close()


def forgiven(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of paths that change when a person says go on. Pure."""
    afresh = {"inARow": 0, "deadEnd": False, "offUntil": 0}
    return {name: fact | afresh for name, fact in facts.items() if name.startswith("path:")}


def _say(agent: str | None, resumed: int, *, sent: bool) -> None:
    who = f"{clean(agent)} goes" if agent is not None else f"{count(resumed, 'agent goes', 'agents go')}"
    say(f"{who} on; what was held back is tried again.")
    if not sent:
        say("No daemon runs: what waits goes out with the next outbox serve, or outbox flush.")
