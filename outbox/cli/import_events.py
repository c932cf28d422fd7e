"""`outbox import FILE|DIR`: takes in what was exported, another outbox, or a seed runner's file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from outbox.cli.import_intake import TakingIn, summary
from outbox.cli.import_source import (
    Found,
    NumberedLine,
    is_export,
    of_directory,
    of_export,
    of_outbox,
    of_seed,
    opened_seed,
)
from outbox.cli.import_workplace import workplace
from outbox.cli.intake import Intake, read_chunks
from outbox.cli.output import clean, emit_json, say
from outbox.cli.progress import progress
from outbox.cli.where import checked_agent, now_ms, settings_of, state_of
from outbox.errors import UsageError
from outbox.json_text import split_lines
from outbox.library import Outbox
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.schema import APPLICATION_ID
from outbox.store.seed import MAGIC, application_id, seed_files

EXAMPLE = """\
outbox import moved.jsonl
outbox import --agent builder /var/lib/old-runner/builder.sqlite"""

_MOST_LINE_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_STDIN = Path("-")


@dataclass(frozen=True, slots=True)
class Source:
    """What is taken in; how much it is, where that is known; what a person should know afterwards."""

    found: Generator[Found, None, None]
    total: int | None = None
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to take, and whose it is."""
    parser.add_argument(
        "source",
        metavar="FILE|DIR",
        type=Path,
        help="an export, or events as JSON lines (- reads stdin); another state directory, or one outbox "
        "file of it; a seed runner's file",
    )
    parser.add_argument(
        "--agent", metavar="A", help="what is this agent's; or whose it is, where the source does not say so"
    )


def run(args: argparse.Namespace) -> int:
    """Take in; 0, or 4 when something was not taken, 5 for a damaged file, 6 while somebody sends from it."""
    settings = settings_of(args)
    state, source = state_of(settings), args.source
    agent = None if args.agent is None else checked_agent(args.agent)
    _require_another(state, source)
    state.create(allow_network_fs=settings.daemon.allow_network_fs)
    if source.is_dir() or _is_database(source):
        with workplace(state) as folder, _files(source, agent, folder) as copies:
            return _take_records(copies, settings, state, args)
    with _lines(source) as lines:
        first = next(lines, None)
        whole = lines if first is None else chain([first], lines)
        if first is None or (isinstance(first[1], bytes) and is_export(first[1])):
            return _take_records(Source(of_export(whole, agent)), settings, state, args)
        return _take_events(whole, settings, state, args)


def _require_another(state: StateDirectory, source: Path) -> None:
    """Raise UsageError for a source that is not there, or is itself what is to be filled."""
    if source != _STDIN and not source.exists():
        raise UsageError(f"There is no {str(source)!r}. Nothing was taken.")
    own, theirs = (state.path, source) if source.is_dir() else (state.agents, source.parent)
    if source != _STDIN and own.exists() and own.samefile(theirs):
        raise UsageError(
            f"{str(source)!r} belongs to the state directory that it would be taken into. Nothing was taken."
        )


# Lines ------------------------------------------------------------------------------------------------------


@contextmanager
def _lines(source: Path) -> Iterator[Iterator[NumberedLine]]:
    """The lines of a file or of stdin, with their numbers."""
    if source != _STDIN:
        with source.open("rb") as file:
            yield split_lines(iter(lambda: file.read(_CHUNK_BYTES), b""), _MOST_LINE_BYTES)
    elif sys.stdin is None:
        raise UsageError("stdin is closed. Nothing was taken.")
    else:
        yield split_lines(read_chunks(sys.stdin.fileno(), lambda: None), _MOST_LINE_BYTES)


def _take_events(
    lines: Iterator[NumberedLine], settings: Settings, state: StateDirectory, args: argparse.Namespace
) -> int:
    """Events as a producer writes them: taken as `enqueue` takes them."""
    agent = _named(args.agent, "events as a producer writes them")
    allowed = settings.daemon.allow_network_fs
    with Outbox.open(agent, state_dir=state.path, allow_network_fs=allowed) as outbox:
        intake = Intake(outbox, as_json=args.json)
        for line_number, line in lines:
            if not intake.add(line_number, line):
                break
        intake.commit()
        return intake.finish()


def _named(agent: str | None, what: str) -> str:
    if agent is None:
        raise UsageError(
            f"The source has {what}, and does not say whose. Nothing was taken. Name it: --agent"
        )
    return agent


# Files of SQLite --------------------------------------------------------------------------------------------


def _is_database(source: Path) -> bool:
    if source == _STDIN or not source.is_file():
        return False
    with source.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@contextmanager
def _files(source: Path, agent: str | None, folder: Path) -> Iterator[Source]:
    """Another state directory, one outbox file, or a seed runner's, read from copies."""
    if source.is_dir():
        yield Source(of_directory(_state_at(source), agent, folder), advice=_THEIRS)
    elif application_id(source) == APPLICATION_ID:
        yield Source(of_outbox(source.absolute(), agent, folder), advice=_THEIRS)
    else:
        owner = _named(agent, "the rows of a seed runner")
        with opened_seed(source, folder) as seed:
            advice = f"The file was not changed. Once all is delivered, remove it: {source}"
            yield Source(of_seed(seed, owner, now_ms()), seed.count, advice)


_THEIRS = "Nothing there was changed. Do not let a daemon deliver from there again: it would all go twice."


def _state_at(source: Path) -> StateDirectory:
    state = StateDirectory(source.absolute())
    if not state.agents.is_dir():
        seeds = ", ".join(path.name for path in seed_files(source))
        hint = f" Import the files of seed runners one by one: {seeds}" if seeds else ""
        raise UsageError(f"{str(source)!r} is no state directory: there is no agents/ in it.{hint}")
    return state


# Taking in --------------------------------------------------------------------------------------------------


def _take_records(source: Source, settings: Settings, state: StateDirectory, args: argparse.Namespace) -> int:
    limits, bounds = settings.limits(), settings.bounds()
    with (
        progress("import", source.total, shown=not args.json) as advance,
        TakingIn(state, limits, bounds, as_json=args.json, advance=advance) as taking,
    ):
        with closing(source.found) as items:
            for found in items:
                taking.add(found)
        status = taking.finish()
    counts = taking.counts
    if args.agent is not None and not counts:
        raise UsageError(f"Nothing of {args.agent!r} stands in {str(args.source)!r}. Nothing was taken.")
    if args.json:
        emit_json({name: counts[name] for name in ("events", "dead", "gaps", "receipts", "known", "refused")})
    else:
        taken = counts["events"] + counts["dead"]
        say(summary(counts), *([clean(source.advice)] if taken and source.advice else ()))
    return status
