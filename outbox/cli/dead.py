"""`outbox dead`: the dead letters, listed here; what is done with them stands in rooms of its own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from outbox.api.client import LocalClient
from outbox.api.letters import letter_data
from outbox.cli.by_socket import daemon_of_another
from outbox.cli.dead_select import add_choice, choice_of
from outbox.cli.output import clean, count, local_time, number, say, table, terminal_width
from outbox.cli.where import for_each, now_ms, settings_to_look, state_of, tell_troubles
from outbox.store.dead import chosen
from outbox.store.file import OutboxFile
from outbox.store.inspect import DeadLetter

EXAMPLE = """\
outbox dead list --agent reviewer
outbox dead show reviewer 17
outbox dead replay reviewer 17
outbox dead replay --reason no_endpoint --newer-than 2d
outbox dead replay reviewer 17 --edit corrected.json
outbox dead discard --kind insight --older-than 30d --dry-run
outbox dead export --reason rejected --output letters.jsonl"""

_HEADERS = ("agent", "seq", "kind", "reason", "status", "attempts", "failed", "detail")
_ABOUT = {
    "list": "each dead letter, oldest first; with --json one a line",
    "show": "one whole: what was sent, what was answered, what was tried",
    "replay": "send again: it goes behind what waits, with its key",
    "discard": "throw away; the keys stay known",
    "export": "write as JSON lines that `outbox import` takes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands."""
    commands = parser.add_subparsers(dest="dead_command", required=True, metavar="|".join(_ABOUT))
    for name, about in _ABOUT.items():
        examples = [line for line in EXAMPLE.splitlines() if line.startswith(f"outbox dead {name}")]
        below = commands.add_parser(
            name, help=about, description=about, epilog=f"example: {examples[0]}", allow_abbrev=False
        )
        _ARGUMENTS[name](below)


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, required=False)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("agent", metavar="AGENT", help="whose (after -- when the name starts with a dash)")
    parser.add_argument("seq", metavar="SEQ", help="its number, as `dead list` tells it")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, required=True)
    parser.add_argument("--dry-run", action="store_true", help="tell which, and change nothing")
    parser.add_argument(
        "--edit",
        metavar="FILE",
        nargs="?",
        const="",
        help="send this payload in its place, under a new key (- reads stdin; alone: $EDITOR); of one letter",
    )
    parser.add_argument(
        "--new-key", action="store_true", help="send it as a new event; what the relay has of it goes again"
    )


def _discard_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, required=True)
    parser.add_argument("--dry-run", action="store_true", help="tell which, and change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, required=False)
    parser.add_argument("--output", metavar="FILE", type=Path, help="a new file (default: stdout)")


_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "list": _list_arguments,
    "show": _show_arguments,
    "replay": _replay_arguments,
    "discard": _discard_arguments,
    "export": _export_arguments,
}


def run(args: argparse.Namespace) -> int:
    """Do what the sub-command says."""
    match args.dead_command:
        case "list":
            return _list(args)
        case "show":
            from outbox.cli.show import show  # noqa: PLC0415 - each loads what it needs

            return show(args, args.seq, dead=True)
        case "export":
            if daemon_of_another(args) is not None:
                from outbox.cli.by_socket_view import refuse  # noqa: PLC0415

                refuse(args, "dead export")
            from outbox.cli.dead_export import export  # noqa: PLC0415

            return export(args)
        case _:
            from outbox.cli.dead_act import act  # noqa: PLC0415

            return act(args)


def _list(args: argparse.Namespace) -> int:
    """List; 5 when a file could not be read."""
    if (client := daemon_of_another(args)) is not None:
        return _list_there(client, args)
    state = state_of(settings_to_look(args))
    agent, choice = choice_of(args)
    shown = 0

    def act(box: OutboxFile) -> None:
        nonlocal shown
        letters = chosen(box, choice)
        shown += len(letters)
        if args.json:
            say(*(json.dumps(letter_data(box.agent, letter)) for letter in letters))
        elif letters:
            say(*letters_table(box.agent, letters))

    troubles = for_each(state, agent, act)
    if not args.json:
        say(_summary(shown, agent))
    return tell_troubles(troubles)


def _list_there(client: LocalClient, args: argparse.Namespace) -> int:
    from outbox.cli import by_socket_view  # noqa: PLC0415 - another user's way

    agent, choice = choice_of(args)
    shown = 0
    for whose, letters in by_socket_view.dead_letters(client, agent, choice):
        shown += len(letters)
        data = (json.dumps(letter_data(whose, letter)) for letter in letters)
        say(*(data if args.json else letters_table(whose, letters)))
    if not args.json:
        say(_summary(shown, agent))
    return 0


def letters_table(agent: str, letters: list[DeadLetter]) -> list[str]:
    """Dead letters of one agent as a table."""
    rows = list(_rows(agent, letters))
    return table(rows, _HEADERS, right=("seq", "attempts"), width=terminal_width(sys.stdout))


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
