"""`outbox pause [AGENT]`: events are accepted and kept, and none is sent."""

from __future__ import annotations

import argparse

from outbox.api.reasons import command_word
from outbox.cli.output import clean, count, emit_json, say
from outbox.cli.where import for_each, now_ms, settings_to_look, state_of, tell_troubles
from outbox.store.file import OutboxFile
from outbox.store.people import pause
from outbox.store.wake import wake_daemon

EXAMPLE = "outbox pause builder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The agent."""
    parser.add_argument(
        "agent", metavar="AGENT", nargs="?", help="whose events; default: those of all agents"
    )


def run(args: argparse.Namespace) -> int:
    """Pause one agent, or all that have an outbox by now."""
    state = state_of(settings_to_look(args))
    paused: list[str] = []

    def act(box: OutboxFile) -> None:
        pause(box, now_ms())
        paused.append(box.agent)
        wake_daemon(state.wake_socket, box.path.name)

    troubles = for_each(state, args.agent, act)
    if args.json:
        emit_json({"paused": paused})
    elif args.agent is not None:
        say(f"{clean(args.agent)} is paused: its events are accepted and kept, and none is sent.")
        say(f"To go on: outbox resume {command_word(args.agent)}")
    else:
        say(f"{count(len(paused), 'agent')} paused: events are accepted and kept, and none is sent.")
        say("To go on: outbox resume")
    return tell_troubles(troubles)
