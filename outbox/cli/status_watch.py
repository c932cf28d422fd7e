"""`outbox status --watch`: a view that is drawn anew every second, or in a pipe a line for each change."""

from __future__ import annotations

import dataclasses
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from outbox.api.report import OutboxLine, Overview, as_json
from outbox.cli.output import clean, count, emit_json, local_time, number, say
from outbox.cli.status import agent_lines, head_lines, notes, state_of_head

_EVERY_S = 1.0
_LINES_AROUND = 8  # the relay, the token, the daemon, the headers, what to look at next
_VOLATILE = ("oldestAgeMs", "uptimeS", "nextTryAt")


class View(Protocol):
    """Shows one look after the other."""

    def show(self, seen: Overview) -> None:
        """Show how everything stands now."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def watch(look: Callable[[], Overview], *, as_data: bool) -> int:
    """Look and show every second until Ctrl-C; 0. Raises what `look` raises."""
    try:
        with _view(as_data=as_data) as view:
            while True:
                view.show(look())
                _wait()
    except KeyboardInterrupt:
        return 0


def _wait() -> None:
    """A second; raises BrokenPipeError as soon as nobody reads: with nothing to say we would never notice."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        time.sleep(_EVERY_S)
        return
    poll = select.poll()
    poll.register(stdout, 0)
    if any(found & select.POLLERR for _, found in poll.poll(_EVERY_S * 1_000)):
        raise BrokenPipeError


def _view(*, as_data: bool) -> View:
    if as_data:
        return DataLines()
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 - rich is for terminals

        console = Console()
        if not console.is_dumb_terminal:
            from outbox.cli.status_view import LiveStatus  # noqa: PLC0415 - as above

            return LiveStatus(console)
    return PlainLines()


class PlainLines:
    """A line for each thing that changed, with its time; at first one for everything."""

    def __init__(self) -> None:
        """Nothing was shown yet."""
        self._shown: Mapping[str, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, seen: Overview) -> None:
        """Print what changed."""
        now = {subject: what for subject, what, _ in _subjects(seen)}
        clock = local_time(seen.now_ms, seen.now_ms, seconds=True)
        for subject, what, line in _subjects(seen):
            if subject not in self._shown or self._shown[subject] != what:
                say(f"{clock} {line}")
        for gone in self._shown.keys() - now.keys():
            say(f"{clock} {clean(gone)}: no outbox any more")
        self._shown = now


class DataLines:
    """The data of `status --json`, a line each time that something in it changed besides its ages."""

    def __init__(self) -> None:
        """Nothing was shown yet."""
        self._shown: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, seen: Overview) -> None:
        """Print it if it changed."""
        data = as_json(seen)
        steady = _steady(data)
        if steady != self._shown:
            self._shown = steady
            emit_json(data)


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _steady(item) for name, item in value.items() if name not in _VOLATILE}
    return [_steady(item) for item in value] if isinstance(value, list) else value


def _subjects(seen: Overview) -> Iterator[tuple[str, object, str]]:
    """Each thing that can change: what it is called, how it is now, and the line about it."""
    relay, *token, daemon = (" ".join(line.split()) for line in head_lines(seen))
    gate = seen.gate and (seen.gate.reason, seen.gate.since_ms)
    yield "the relay", (seen.relay_url, seen.tried, gate), relay
    if token:
        yield "the token", (seen.auth.get("source"), seen.auth.get("state")), token[0]
    yield "the daemon", seen.daemon and seen.daemon.pid, daemon
    for outbox in seen.outboxes:
        line = _agent_line(outbox)
        yield f"agent {outbox.agent}", line, line


def _agent_line(line: OutboxLine) -> str:
    status, agent = line.status, clean(line.agent)
    if status is None or line.why is None:
        return f"agent {agent}: cannot be read: {line.trouble.code if line.trouble else 'unknown'}"
    figures = f"{number(status.waiting)} waiting, {number(status.delivered)} delivered"
    dead = f", {count(status.dead, 'dead letter')}" if status.dead else ""
    return f"agent {agent}: {figures}{dead}; {clean(state_of_head(line.why))}"


def picture(seen: Overview, width: int, height: int) -> list[str]:
    """One moment on a terminal: as `status` tells it, those with most to send first, as many as fit."""
    busiest = sorted(seen.outboxes, key=lambda line: -line.status.waiting if line.status else 0)
    fits = max(3, height - _LINES_AROUND)
    shown = dataclasses.replace(seen, outboxes=busiest[:fits])
    lines = [*head_lines(seen), ""]
    if seen.outboxes:
        lines += agent_lines(shown, width)
    if len(busiest) > fits:
        lines.append(f"and {count(len(busiest) - fits, 'agent')} more: outbox status")
    return [*lines, *notes(seen)]
