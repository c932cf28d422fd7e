"""`outbox export [FILE]`: everything of all agents, or of one, as JSON lines that `outbox import` takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from outbox.cli.output import clean, count, say
from outbox.cli.progress import progress
from outbox.cli.where import checked_agent, for_each, now_ms, settings_to_look, state_of, tell_troubles
from outbox.errors import UsageError
from outbox.record import Record, Remembered
from outbox.record_line import agent_line, end_line, header_line, record_line
from outbox.store.directory import StateDirectory, sync_folder
from outbox.store.file import OutboxFile
from outbox.store.place import running_daemon
from outbox.store.records import about, everything

EXAMPLE = """\
outbox export moved.jsonl
outbox export --agent builder builder.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose, and where to."""
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="a new file (default: stdout)")
    parser.add_argument("--agent", metavar="A", help="one agent only")


def run(args: argparse.Namespace) -> int:
    """Write it; 5 when a file could not be read, or not to its end."""
    state = state_of(settings_to_look(args))
    agent = None if args.agent is None else checked_agent(args.agent)
    _warn_of_daemon(state)
    with (
        writing(args.file) as export,
        progress("export", None, shown=args.file is not None and not args.json) as advance,
    ):

        def act(box: OutboxFile) -> None:
            with box.snapshot():
                export.begin(box)
                for record in everything(box):
                    export.add(box.agent, record)
                    advance(1)

        troubles = for_each(state, agent, act)
    tell_export(export, args.file, as_json=args.json)
    return tell_troubles(troubles)


def _warn_of_daemon(state: StateDirectory) -> None:
    if running_daemon(state) is not None:
        say(
            "note: a daemon delivers meanwhile. What it delivers after this would go again from where "
            "the export is taken in. To move a host, stop it first: outbox stop",
            to=sys.stderr,
        )


class Export:
    """An export under way: lines that are written, and how many of each sort."""

    def __init__(self, file: BinaryIO) -> None:
        """Write the header."""
        self.counts: Counter[str] = Counter()
        self._file = file
        self._write(header_line(now_ms()))

    def begin(self, box: OutboxFile) -> None:
        """The records of this outbox come next; inside its snapshot."""
        known = about(box)
        self._write(agent_line(box.agent, known.stream, known.paused_at_ms))
        self.counts["agents"] += 1

    def add(self, agent: str, record: Record | Remembered) -> None:
        """One record."""
        self._write(record_line(agent, record))
        self.counts[_sort_of(record)] += 1

    def end(self) -> None:
        """The last line, without which it would count as cut off."""
        self._write(end_line(self.counts.total() - self.counts["agents"]))

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")


def _sort_of(record: Record | Remembered) -> str:
    if isinstance(record, Remembered):
        return "receipts"
    return "gaps" if record.is_gap else "events" if record.letter is None else "dead"


@contextmanager
def writing(path: Path | None) -> Iterator[Export]:
    """An export to a new file (mode 0600), which is there once it is whole; or to stdout.

    Raises UsageError when the file is there already.
    """
    if path is None:
        sys.stdout.flush()
        export = Export(sys.stdout.buffer)
        yield export
        export.end()
        sys.stdout.buffer.flush()
        return
    if os.path.lexists(path):
        raise UsageError(f"{str(path)!r} is there already. Nothing was written; name a new file.")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(
            os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            export = Export(file)
            yield export
            export.end()
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.absolute().parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def tell_export(export: Export, path: Path | None, *, as_json: bool) -> None:
    """What was written: on stdout, or on stderr when the export itself is there."""
    counts, to = export.counts, sys.stderr if path is None else sys.stdout
    if as_json:
        names = ("agents", "events", "dead", "gaps", "receipts")
        say(json.dumps({name: counts[name] for name in names}), to=to)
        return
    what = f"{count(counts['events'], 'event')}, {count(counts['dead'], 'dead letter')}"
    receipts = f" and {count(counts['receipts'], 'receipt')}" if counts["receipts"] else ""
    where = "" if path is None else f" to {clean(str(path))}"
    say(
        f"{what}{receipts} of {count(counts['agents'], 'agent')} exported{where}. "
        "To take it in: outbox import",
        to=to,
    )
