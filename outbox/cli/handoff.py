"""`outbox handoff`: tell the sidecar of `outbox run --self-resume` that its command is about to hand over."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from outbox.cli.output import clean, emit_json, say
from outbox.cli.where import settings_to_look, state_of
from outbox.errors import OutboxError, StoreError, UsageError
from outbox.sidecar.control import announce
from outbox.sidecar.handoff import COMPACTED, VARIABLE, note_in
from outbox.sidecar.record import Place, living
from outbox.store.directory import StateDirectory

EXAMPLE = (
    "outbox handoff begin --command-id 01J9Z --generation 3 --wait\noutbox handoff compacted --agent builder"
)


class HandoffRefused(OutboxError):
    """The hand-off came to nothing."""

    exit_status = 4

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`begin` and `compacted`, each for one sidecar."""
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    begin = acts.add_parser("begin", help="announce a hand-off: when the command ends now, it starts again")
    begin.add_argument("--command-id", required=True, metavar="ID", help="whose hand-off this is")
    begin.add_argument("--generation", type=int, metavar="N", help="which one of them")
    begin.add_argument("--wait", action="store_true", help="wait for its end, and tell how it went")
    compacted = acts.add_parser("compacted", help="note that the command's conversation was compacted")
    for act in (begin, compacted):
        act.add_argument(
            "--agent", metavar="A", help="whose command (default: the one around us, else the only one)"
        )


def run(args: argparse.Namespace) -> int:
    """Tell the sidecar; 0, 4 when the hand-off comes to nothing, 2 where none is meant, 69: no answer."""
    state = state_of(settings_to_look(args))
    place, told = sidecar_of(state, args.agent or None)
    if args.act == "compacted":
        if not note_in(place.notes, {"note": COMPACTED}):
            raise StoreError(
                f"The compaction could not be noted in {str(place.notes)!r}: the sidecar of "
                f"{told.get('agent')!r} has just ended, or the disk takes nothing. After a hand-off its "
                "command would start fresh; events are not affected. See: outbox status"
            )
        emit_json({"noted": True}) if args.json else say("Noted for the next hand-off.")
        return 0
    answer = announce(place.control, args.command_id, args.generation, wait=args.wait)
    if "error" in answer:
        if args.json:
            emit_json(answer)
            return HandoffRefused.exit_status
        raise HandoffRefused(str(answer["error"].get("message")), str(answer["error"].get("code")))
    if args.json:
        emit_json(answer)
    else:
        say(clean(_in_words(answer)))
    return 0


def sidecar_of(state: StateDirectory, agent: str | None) -> tuple[Place, Mapping[str, Any]]:
    """The self-resuming sidecar that is meant; raises UsageError when none or several could be."""
    found = [(place, told) for place, told in living(state.path) if told.get("selfResume") is True]
    around = [each for each in found if each[0].name == os.environ.get(VARIABLE)]
    if agent is not None:
        found = [each for each in found if each[1].get("agent") == agent]
    elif around:
        found = around
    if len(found) == 1:
        return found[0]
    whose = f"of agent {agent!r} " if agent is not None else ""
    if not found:
        raise UsageError(
            f"No sidecar {whose}with self-resume runs on {str(state.path)!r}. Nothing was announced. "
            "Start one: outbox run --self-resume -- COMMAND",
            code="unknown_agent",
        )
    agents = ", ".join(sorted({repr(told.get("agent")) for _, told in found}))
    raise UsageError(
        f"Several sidecars {whose}with self-resume run here ({agents}). Nothing was announced. Say which one "
        f"with --agent, or by its {VARIABLE} in the environment."
    )


def _in_words(answer: Mapping[str, Any]) -> str:
    if answer.get("state") == "recovered":
        session = f", session {answer['sessionId']}" if answer.get("sessionId") else ""
        return f"Recovered by {answer.get('via')}{session}."
    return f"Hand-off {answer.get('commandId')} is announced: when the command ends now, it starts again."
