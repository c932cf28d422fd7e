"""`outbox dead replay` and `outbox dead discard`: first it is settled which are meant, then it is done."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outbox.api.report import opened
from outbox.cli.dead import as_data, letters_table
from outbox.cli.dead_select import choice_of
from outbox.cli.output import clean, count, number, say
from outbox.cli.progress import Advance, progress
from outbox.cli.where import for_each, now_ms, settings_to_look, state_of, tell_troubles
from outbox.errors import OutboxError, StoreError, UsageError
from outbox.event import uuid7
from outbox.store.dead import Choice, chosen, discard_each, replay_each
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile
from outbox.store.inspect import DeadLetter
from outbox.store.place import running_daemon
from outbox.store.wake import wake_daemon

_REFUSED = 4
_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Picked:
    """The dead letters of one agent that are meant."""

    agent: str
    path: Path
    letters: list[DeadLetter]


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one: its new seq when it is replayed, and what the relay gets again; or why not."""

    agent: str
    letter: DeadLetter
    seq: int = 0
    key: str = ""
    note: str = ""
    error: OutboxError | None = None


Act = Callable[[OutboxFile, Sequence[DeadLetter]], list[Done]]


def act(args: argparse.Namespace) -> int:
    """Replay or discard; 4 when one of them could not be, 5 when a file could not be read."""
    state = state_of(settings_to_look(args))
    picked, troubles = _picked(state, *choice_of(args))
    letters = sum(len(one.letters) for one in picked)
    discards = args.dead_command == "discard"
    if not discards and args.edit is not None and letters != 1:
        raise UsageError(
            f"--edit changes the payload of one dead letter, and {number(letters)} are meant. Nothing was "
            "changed."
        )
    if args.dry_run or not letters:
        _tell_dry(picked, letters, discards=discards, as_json=args.json)
        return tell_troubles(troubles)
    if discards and not args.yes and letters > 1 and not _confirmed(picked, letters):
        say("Nothing was discarded.")
        return _REFUSED
    with progress(args.dead_command, letters, shown=not args.json and letters > 1) as advance:
        done = list(_each(state, picked, _discarding if discards else _replaying(args), advance))
    status = _tell_discarded(done, args) if discards else _tell_replayed(done, state, args)
    return max(status, tell_troubles(troubles))


# Which ------------------------------------------------------------------------------------------------------


def _picked(
    state: StateDirectory, agent: str | None, choice: Choice
) -> tuple[list[Picked], list[tuple[Path, StoreError]]]:
    picked: list[Picked] = []

    def look(box: OutboxFile) -> None:
        letters = chosen(box, choice)
        missing = set(choice.seqs or ()) - {letter.seq for letter in letters}
        if missing:
            seqs = ", ".join(map(number, sorted(missing)))
            raise UsageError(
                f"There is no dead letter {seqs} of {box.agent!r} that fits. Nothing was changed. What there "
                "is: outbox dead list. What became of an event: outbox show"
            )
        if letters:
            picked.append(Picked(box.agent, box.path, letters))

    return picked, for_each(state, agent, look)


def _tell_dry(picked: list[Picked], letters: int, *, discards: bool, as_json: bool) -> None:
    if as_json:
        say(*(json.dumps(as_data(one.agent, letter)) for one in picked for letter in one.letters))
    elif not letters:
        say("No dead letter fits. Nothing was changed.")
    else:
        for one in picked:
            say(*letters_table(one.agent, one.letters))
        what = "thrown away" if discards else "replayed"
        say(f"{count(letters, 'dead letter')} would be {what}. Nothing was changed.")


def _confirmed(picked: list[Picked], letters: int) -> bool:
    """Ask the person at the terminal; a script is not asked."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    whose = clean(picked[0].agent) if len(picked) == 1 else count(len(picked), "agent")
    sys.stderr.write(
        f"Discard {count(letters, 'dead letter')} of {whose}? They cannot be brought back. [y/N] "
    )
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


# Doing it ---------------------------------------------------------------------------------------------------


def _each(state: StateDirectory, picked: list[Picked], do: Act, advance: Advance) -> Iterator[Done]:
    for one in picked:
        with opened(state, one.path) as box:
            for start in range(0, len(one.letters), _AT_ONCE):
                some = one.letters[start : start + _AT_ONCE]
                yield from do(box, some)
                advance(len(some))
        wake_daemon(state.wake_socket, one.path.name)


def _discarding(box: OutboxFile, letters: Sequence[DeadLetter]) -> list[Done]:
    results = discard_each(box, [letter.seq for letter in letters], now_ms())
    return [_done(box.agent, letter, result) for letter, result in zip(letters, results, strict=True)]


def _replaying(args: argparse.Namespace) -> Act:
    if args.edit is None and not args.new_key:
        return _as_they_were

    def under_new_keys(box: OutboxFile, letters: Sequence[DeadLetter]) -> list[Done]:
        return [_under_a_new_key(box, letter, args) for letter in letters]

    return under_new_keys


def _as_they_were(box: OutboxFile, letters: Sequence[DeadLetter]) -> list[Done]:
    results = replay_each(box, [letter.seq for letter in letters], now_ms())
    return [_done(box.agent, letter, result) for letter, result in zip(letters, results, strict=True)]


def _done(agent: str, letter: DeadLetter, result: int | UsageError) -> Done:
    if isinstance(result, UsageError):
        return Done(agent, letter, error=result)
    return Done(agent, letter, result, letter.key)


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
        for one in good:
            fields = {"agent": one.agent, "seq": one.letter.seq, "idempotencyKey": one.key}
            say(json.dumps({**fields, "state": "discarded"}))
    else:
        say(
            f"{count(len(good), 'dead letter')} discarded. Keys stay known: a producer's repeat is not taken."
        )
    return _tell_errors(done, as_json=args.json)


def _tell_replayed(done: list[Done], state: StateDirectory, args: argparse.Namespace) -> int:
    good = [one for one in done if one.error is None]
    for one in good if args.json else ():
        fields = {"agent": one.agent, "seq": one.letter.seq, "newSeq": one.seq, "idempotencyKey": one.key}
        say(json.dumps(fields))
    if not args.json and good:
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
        error = one.error
        fields = {"agent": one.agent, "seq": one.letter.seq}
        code = error.code if error else ""
        told = (
            json.dumps({**fields, "error": {"code": code, "message": str(error)}}) if as_json else str(error)
        )
        say(clean(told), to=sys.stderr)
    return _REFUSED if bad else 0
