"""What `import` reads from: an export, another outbox, a seed runner's file. Each becomes items, in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outbox.cli.output import number
from outbox.errors import OutboxError, StoreError, StoreHeld, UsageError
from outbox.event import Limits
from outbox.record import Record, Remembered
from outbox.record_line import HEADER, Line, is_header, read_line, read_record, record_line
from outbox.store.at_rest import copy_at_rest
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile
from outbox.store.foreign import living_daemon, opened_copy
from outbox.store.records import about, everything
from outbox.store.seed import SeedFile, SeedRow, require_no_runner, seed_record


@dataclass(frozen=True, slots=True)
class Item:
    """One record, and where it stands; `read` checks it by the limits of the outbox that it goes to."""

    place: str
    agent: str
    read: Callable[[Limits], Record | Remembered]


@dataclass(frozen=True, slots=True)
class Paused:
    """A person paused this agent where it comes from."""

    agent: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """What cannot be taken, and where it stands."""

    place: str
    error: OutboxError


INCOMPLETE = "incomplete"  # the code of an error about no record, but about those that are missing
Found = Item | Paused | Refused
NumberedLine = tuple[int, bytes | UsageError]


# Exports ----------------------------------------------------------------------------------------------------


def is_export(first: bytes) -> bool:
    """Whether a file that begins with this line is an export, or a part of one without its header."""
    try:
        return is_header(first) or bool(read_line(first).agent)
    except UsageError:
        return False


def of_export(lines: Iterable[NumberedLine], agent: str | None) -> Generator[Found, None, None]:
    """The records of an export, or of one agent in it; raises UsageError for a newer format."""
    count: int | None = None  # since the header; None outside a whole export
    for line_number, text in lines:
        place = f"line {number(line_number)}"
        line = text if isinstance(text, UsageError) else _line(text)
        if isinstance(line, UsageError):
            yield Refused(place, line)
        elif line.type == HEADER:
            yield from _cut_off(place, count)
            count = 0
        elif line.type == "end":
            yield from _incomplete(place, line, count)
            count = None
        else:
            count = None if count is None else count + (line.type != "agent")
            if agent in {None, line.agent}:
                yield from _of_line(place, line)
    yield from _cut_off("its end", count)


def _line(text: bytes) -> Line | UsageError:
    try:
        return read_line(text)
    except UsageError as error:
        if error.code == "too_new":
            raise UsageError(
                f"A newer release wrote this: {error}. Nothing was taken.", code=error.code
            ) from None
        return error


def _of_line(place: str, line: Line) -> Iterator[Found]:
    if line.type != "agent":
        yield Item(place, line.agent, partial(read_record, line))
    elif (paused := line.fields.get("pausedAt", "")).isdigit():
        yield Paused(line.agent, int(paused[:18]))


def _cut_off(place: str, count: int | None) -> Iterator[Refused]:
    if count is not None:
        text = "The export is cut off: its last line is missing. What stands in it is taken; export anew."
        yield Refused(place, UsageError(text, code=INCOMPLETE))


def _incomplete(place: str, line: Line, count: int | None) -> Iterator[Refused]:
    said = line.fields.get("records", "")
    if count is not None and said != str(count):
        text = f"{said[:20]} records were exported, and {count} stand here. What stands here is taken."
        yield Refused(place, UsageError(text, code=INCOMPLETE))


# Other outboxes ---------------------------------------------------------------------------------------------


def of_directory(state: StateDirectory, agent: str | None, workplace: Path) -> Generator[Found, None, None]:
    """The records of every outbox of another state directory, or of one of them.

    Raises StoreHeld while its daemon lives. A file that cannot be used does not stop the others.
    """
    daemon = living_daemon(state)
    if daemon is not None:
        who = f" (pid {daemon.pid})" if daemon.pid else ""
        raise StoreHeld(
            f"The daemon of {str(state.path)!r} is running{who}. Nothing was taken, since it would be sent "
            f"twice. Stop it (outbox stop --state-dir {state.path}), and import again."
        )
    paths = list(state.outbox_files()) if agent is None else [state.outbox_path(agent)]
    for path in paths:
        if agent is None or path.exists():
            yield from of_outbox(path, agent, workplace)


def of_outbox(path: Path, agent: str | None, workplace: Path) -> Generator[Found, None, None]:
    """The records of one outbox file; raises UsageError when it is another agent's."""
    try:
        with opened_copy(path, workplace) as box:
            if agent not in {None, box.agent}:
                raise UsageError(
                    f"The file {path.name} holds the events of {box.agent!r}, not of {agent!r}. "
                    "Nothing was taken."
                )
            yield from _of_box(box)
    except StoreError as error:
        yield Refused(path.name, error)


def _of_box(box: OutboxFile) -> Iterator[Found]:
    agent = box.agent
    with box.snapshot():
        paused_at_ms = about(box).paused_at_ms
        if paused_at_ms is not None:
            yield Paused(agent, paused_at_ms)
        for record in everything(box):
            yield Item(f"seq {number(record.seq)} of {agent}", agent, partial(_checked, agent, record))


def _checked(agent: str, record: Record | Remembered, limits: Limits) -> Record | Remembered:
    return read_record(read_line(record_line(agent, record)), limits)


# Seed runners -----------------------------------------------------------------------------------------------


@contextmanager
def opened_seed(path: Path, workplace: Path) -> Iterator[SeedFile]:
    """A copy of a seed runner's file; raises StoreHeld while its runner has the file open."""
    require_no_runner(path)
    copy = workplace / "seed.sqlite"
    copy_at_rest(path, copy)
    require_no_runner(path)
    with SeedFile(copy) as seed:
        yield seed


def of_seed(seed: SeedFile, agent: str, now_ms: int) -> Generator[Found, None, None]:
    """Its rows, whose agent it does not know."""
    try:
        for row in seed.rows():
            yield Item(f"row {row.seq}", agent, _reader(row, agent, now_ms))
    except StoreError as error:
        yield Refused("the file", error)


def _reader(row: SeedRow, agent: str, now_ms: int) -> Callable[[Limits], Record]:
    return lambda limits: seed_record(row, agent, limits, now_ms)
