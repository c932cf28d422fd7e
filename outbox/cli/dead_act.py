"""`outbox dead replay` and `outbox dead discard`: first it is settled which are meant, then it is done."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence

from outbox.api.client import LocalClient
from outbox.api.letters import (
    Act,
    Done,
    Picked,
    discarding,
    do_each,
    done_data,
    letter_data,
    picked,
    replaying,
)
from outbox.cli.by_socket import daemon_of_another
from outbox.cli.dead import letters_table
from outbox.cli.dead_select import choice_of
from outbox.cli.output import clean, count, number, say
from outbox.cli.progress import Advance, progress
from outbox.cli.where import now_ms, settings_to_look, state_of, tell_troubles
from outbox.errors import StoreError, UsageError
from outbox.event import uuid7
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile
from outbox.store.inspect import DeadLetter
from outbox.store.place import running_daemon

_REFUSED = 4


def act(args: argparse.Namespace) -> int:
    """Replay or discard; 4 when one of them could not be, 5 when a file could not be read."""
    if (client := daemon_of_another(args)) is not None:
        return _act_there(client, args)
    state = state_of(settings_to_look(args))
    meant, troubles = picked(state, *choice_of(args))
    letters = sum(len(one.letters) for one in meant)
    discards = args.dead_command == "discard"
    if not discards and args.edit is not None and letters != 1:
        raise UsageError(
            f"--edit changes the payload of one dead letter, and {number(letters)} are meant. Nothing was "
            "changed."
        )
    if args.dry_run or not letters:
        _tell_dry(meant, letters, discards=discards, as_json=args.json)
        return tell_troubles(troubles)
    if discards and not args.yes and letters > 1 and not _confirmed([one.agent for one in meant], letters):
        say("Nothing was discarded.")
        return _REFUSED
    with progress(args.dead_command, letters, shown=not args.json and letters > 1) as advance:
        done = list(_each(state, meant, discarding(now_ms()) if discards else _replaying(args), advance))
    status = _tell_discarded(done, args) if discards else _tell_replayed(done, state, args)
    return max(status, tell_troubles(troubles))


def _act_there(client: LocalClient, args: argparse.Namespace) -> int:
    from outbox.cli import by_socket_view  # noqa: PLC0415 - another user's way

    what, (agent, choice) = args.dead_command, choice_of(args)
    if what == "replay":
        by_socket_view.refuse(args.edit is not None or args.new_key, "--edit and --new-key")
    elif not args.dry_run and not args.yes:
        meant = dict(by_socket_view.dead_letters(client, agent, choice))
        letters = sum(map(len, meant.values()))
        if letters > 1 and not _confirmed(list(meant), letters):
            say("Nothing was discarded.")
            return _REFUSED
    return by_socket_view.act(client, what, agent, choice, dry=args.dry_run, as_json=args.json)


# Which ------------------------------------------------------------------------------------------------------


def _tell_dry(meant: list[Picked], letters: int, *, discards: bool, as_json: bool) -> None:
    if as_json:
        say(*(json.dumps(letter_data(one.agent, letter)) for one in meant for letter in one.letters))
    elif not letters:
        say("No dead letter fits. Nothing was changed.")
    else:
        for one in meant:
            say(*letters_table(one.agent, one.letters))
        what = "thrown away" if discards else "replayed"
        say(f"{count(letters, 'dead letter')} would be {what}. Nothing was changed.")


def _confirmed(agents: list[str], letters: int) -> bool:
    """Ask the person at the terminal; a script is not asked."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    whose = clean(agents[0]) if len(agents) == 1 else count(len(agents), "agent")
    sys.stderr.write(
        f"Discard {count(letters, 'dead letter')} of {whose}? They cannot be brought back. [y/N] "
    )
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


# Doing it ---------------------------------------------------------------------------------------------------


def _each(state: StateDirectory, letters: list[Picked], do: Act, advance: Advance) -> Iterator[Done]:
    for some in do_each(state, letters, do):
        yield from some
        advance(len(some))


def _replaying(args: argparse.Namespace) -> Act:
    if args.edit is None and not args.new_key:
        return replaying(now_ms())

    def under_new_keys(box: OutboxFile, letters: Sequence[DeadLetter]) -> list[Done]:
        return [_under_a_new_key(box, letter, args) for letter in letters]

    return under_new_keys


def _under_a_new_key(box: OutboxFile, letter: DeadLetter, args: argparse.Namespace) -> Done:
    from outbox.cli.dead_edit import replay_edited  # noqa: PLC0415 - rarely asked for

    now = now_ms()
    key = uuid7(now, os.urandom(10))
    try:
        seq, note = replay_edited(box, letter.seq, args.edit, now, key, afresh=args.new_key)
    except (UsageError, StoreError) as error:
        if args.edit is not None:
            raise
        return Done(box.agent, letter, error=error)
    return Done(box.agent, letter, seq, key, note)


# Telling ----------------------------------------------------------------------------------------------------


def _tell_discarded(done: list[Done], args: argparse.Namespace) -> int:
    good = [one for one in done if one.error is None]
    if args.json:
        say(*(json.dumps(done_data(one, replayed=False)) for one in good))
    else:
        say(
            f"{count(len(good), 'dead letter')} discarded. Keys stay known: a producer's repeat is not taken."
        )
    return _tell_errors(done, as_json=args.json)


def _tell_replayed(done: list[Done], state: StateDirectory, args: argparse.Namespace) -> int:
    good = [one for one in done if one.error is None]
    if args.json:
        say(*(json.dumps(done_data(one, replayed=True)) for one in good))
    elif good:
        say(*(clean(line) for line in _replayed_lines(good)))
        if running_daemon(state) is None:
            say("No daemon runs: they go out with outbox serve, or outbox flush.")
    return _tell_errors(done, as_json=args.json)


def _replayed_lines(good: list[Done]) -> Iterator[str]:
    first = good[0]
    key = "its key" if first.key == first.letter.key else f"the new key {first.key}"
    if len(good) == 1:
        yield (
            f"Dead letter {number(first.letter.seq)} of {first.agent} goes again as seq {number(first.seq)}, "
            f"behind what waits, with {key}."
        )
    else:
        keys = "their keys" if first.key == first.letter.key else "new keys"
        yield f"{number(len(good))} dead letters go again, behind what waits, with {keys}."
    yield from (f"seq {number(one.seq)} of {one.agent}: {one.note}" for one in good if one.note)


def _tell_errors(done: list[Done], *, as_json: bool) -> int:
    bad = [one for one in done if one.error is not None]
    for one in bad:
        told = json.dumps(done_data(one, replayed=False)) if as_json else str(one.error)
        say(clean(told), to=sys.stderr)
    return _REFUSED if bad else 0
