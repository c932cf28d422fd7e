"""Which dead letters a command means: by number, reason, kind, age and agent, or all."""

from __future__ import annotations

import argparse
import re

from outbox.cli.where import checked_agent, now_ms
from outbox.errors import UsageError
from outbox.outcome import Reason
from outbox.policy import DAY_MS, HOUR_MS, MINUTE_MS
from outbox.store.dead import Choice

_UNITS_MS = {"s": 1_000, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS, "w": 7 * DAY_MS}
_is_age = re.compile(r"([0-9]{1,9})([smhdw])").fullmatch
_is_seq = re.compile(r"[0-9][0-9,]{0,23}").fullmatch


def add_choice(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The words and options that choose; where none is `required`, all are meant without any."""
    parser.set_defaults(choice_required=required)
    parser.add_argument("words", metavar="AGENT SEQ", nargs="*", help="whose, and their numbers")
    parser.add_argument("--agent", metavar="A", help="those of one agent")
    parser.add_argument(
        "--reason", metavar="R", action="append", choices=list(Reason), help="with this reason"
    )
    parser.add_argument("--kind", metavar="K", action="append", help="of this kind")
    parser.add_argument(
        "--older-than", metavar="AGE", type=_age_ms, help="dead for longer: 90s, 15m, 2h, 3d or 1w"
    )
    parser.add_argument("--newer-than", metavar="AGE", type=_age_ms, help="dead for less")
    parser.add_argument("--all", action="store_true", help="all of them")


def choice_of(args: argparse.Namespace) -> tuple[str | None, Choice]:
    """The one agent that is meant, or None for all, and which dead letters; raises UsageError."""
    agent, words = args.agent, list(args.words)
    if agent is None and words and not _is_seq(words[0]):
        agent = words.pop(0)
    seqs = tuple(_seq(word) for word in words)
    if seqs and agent is None:
        raise UsageError("Whose? Nothing was changed. Numbers are an agent's own: name it before them.")
    now = now_ms()
    choice = Choice(
        seqs or None,
        _given(args.reason),
        _given(args.kind),
        None if args.older_than is None else now - args.older_than,
        None if args.newer_than is None else now - args.newer_than,
    )
    if args.choice_required and choice == Choice() and agent is None and not args.all:
        raise UsageError(
            "Which dead letters? Nothing was changed. Name an agent and numbers, or choose with --reason, "
            "--kind, --older-than, --newer-than, --agent or --all. See: outbox dead list"
        )
    return None if agent is None else checked_agent(agent), choice


def _given(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(map(str, values))


def _seq(word: str) -> int:
    if not _is_seq(word):
        raise UsageError(
            f"{word!r} is no number of a dead letter. Nothing was changed. See: outbox dead list"
        )
    return min(int(word.replace(",", "")), 2**63 - 1)


def _age_ms(text: str) -> int:
    found = _is_age(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time; write 90s, 15m, 2h, 3d or 1w")
    return int(found[1]) * _UNITS_MS[found[2]]
