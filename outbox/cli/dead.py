"""`outbox dead list`: what could not be delivered, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from outbox.cli.output import clean, count, local_time, number, say, table, terminal_width
from outbox.cli.where import for_each, now_ms, settings_to_look, state_of, tell_troubles
from outbox.store.file import OutboxFile
from outbox.store.inspect import DeadLetter, dead_letters

EXAMPLE = "outbox dead list --agent reviewer"

_HEADERS = ("agent", "seq", "kind", "reason", "status", "attempts", "failed", "detail")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-command `list`."""
    commands = parser.add_subparsers(dest="dead_command", required=True, metavar="list")
    about = "each dead letter, oldest first; with --json one a line"
    listing = commands.add_parser("list", help=about, description=about, epilog=f"example: {EXAMPLE}")
    listing.add_argument("--agent", metavar="AGENT", help="those of one agent only")


def run(args: argparse.Namespace) -> int:
    """List; 5 when a file could not be read."""
    state = state_of(settings_to_look(args))
    shown = 0

    def act(box: OutboxFile) -> None:
        nonlocal shown
        letters = list(dead_letters(box))
        shown += len(letters)
        if args.json:
            say(*(json.dumps(_as_data(box.agent, letter)) for letter in letters))
        elif letters:
            rows = list(_rows(box.agent, letters))
            say(*table(rows, _HEADERS, right=("seq", "attempts"), width=terminal_width(sys.stdout)))

    troubles = for_each(state, args.agent, act)
    if not args.json:
        say(_summary(shown, args.agent))
    return tell_troubles(troubles)


def _rows(agent: str, letters: list[DeadLetter]) -> Iterator[tuple[str, ...]]:
    now = now_ms()
    for letter in letters:
        yield (
            agent,
            number(letter.seq),
            letter.kind,
            letter.reason,
            "" if letter.status is None else str(letter.status),
            str(letter.attempts),
            local_time(letter.failed_at_ms, now),
            letter.detail,
        )


def _summary(shown: int, agent: str | None) -> str:
    whose = f" of {clean(agent)}" if agent is not None else ""
    if not shown:
        return f"No dead letters{whose}."
    return f"{count(shown, 'dead letter')}{whose}, kept with what was sent and what was answered."


def _as_data(agent: str, letter: DeadLetter) -> dict[str, object]:
    return {
        "agent": agent,
        "seq": letter.seq,
        "kind": letter.kind,
        "idempotencyKey": letter.key,
        "occurredAt": letter.occurred_at_ms,
        "reason": letter.reason,
        "status": letter.status,
        "detail": letter.detail,
        "attempts": letter.attempts,
        "failedAt": letter.failed_at_ms,
    }
