"""`outbox flush`: everything out before a deadline, through the daemon where one runs, else by ourselves."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from outbox.api.reach import Place
from outbox.api.reasons import command_word
from outbox.cli.arguments import seconds
from outbox.cli.by_socket import forward_all, here
from outbox.cli.output import clean, count, emit_json, number, say
from outbox.cli.where import checked_agent, settings_of, state_of
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.place import running_daemon

if TYPE_CHECKING:
    from outbox.daemon.flush import FlushReport

EXAMPLE = "outbox flush --agent builder --timeout 10"

_NOT_ALL = 3
_THERE_S = 10.0
_BAR_CELLS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose events, and how long."""
    parser.add_argument("--agent", metavar="A", help="those of one agent only")
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="seconds (default: the setting daemon.flush_timeout_s)"
    )
    own = parser.add_argument_group("where no daemon runs")
    own.add_argument("--relay", metavar="URL", help="the relay's address (default: the setting relay.url)")
    own.add_argument("--token-file", metavar="FILE", help="a file with its token")


def run(args: argparse.Namespace) -> int:
    """Flush; 0 when nothing is left, else 3."""
    if (place := here(args)) is not None and place.socket is not None:
        return _flush_there(place, args)
    settings = settings_of(args)
    state = state_of(settings)
    timeout_s = settings.daemon.flush_timeout_s if args.timeout is None else args.timeout
    agent = None if args.agent is None else checked_agent(args.agent)
    live = not args.json and sys.stdout.isatty()
    try:
        with _watched(state, agent) if live else nullcontext():
            report, by_daemon = _flush(settings, state, agent, timeout_s)
    except KeyboardInterrupt:
        say("Interrupted. What was not delivered stays on disk. See: outbox status", to=sys.stderr)
        raise
    if args.json:
        emit_json({"delivered": report.delivered, "left": report.left, "dead": report.dead})
    else:
        say(*_lines(report, bars=live), _summary(report, by_daemon=by_daemon))
    return _NOT_ALL if report.left else 0


def _flush_there(place: Place, args: argparse.Namespace) -> int:
    """By the socket of a daemon of another user, which first gets what waits on our own disk."""
    from outbox.cli.by_socket import flushed_there  # noqa: PLC0415 - another user's way
    from outbox.daemon.flush import FlushReport, report_from_json  # noqa: PLC0415 - as below

    agent = None if args.agent is None else checked_agent(args.agent)
    timeout_s = _THERE_S if args.timeout is None else args.timeout
    end = time.monotonic() + timeout_s
    forwarded = forward_all(place, agent, timeout_s)
    assert place.socket is not None  # noqa: S101 - looked at by the caller
    told = flushed_there(place.socket, agent, max(0.0, end - time.monotonic()))
    report = FlushReport(0, 0, 0) if told is None else report_from_json(told)
    left = report.left + forwarded.left
    if args.json:
        emit_json({"delivered": report.delivered, "left": left, "dead": report.dead})
    else:
        say(*_lines(report, bars=False), _summary(report, by_daemon=True))
        if forwarded.left:
            waits = count(forwarded.left, "event waits", "events wait")
            say(clean(f"{waits} below {str(place.state)!r} still: {forwarded.why}"), to=sys.stderr)
    return _NOT_ALL if left else 0


def _flush(
    settings: Settings, state: StateDirectory, agent: str | None, timeout_s: float
) -> tuple[FlushReport, bool]:
    """The report, and whether a daemon made it. An agent without an outbox has nothing to send."""
    end = time.monotonic() + timeout_s
    from outbox.daemon.flush import FlushReport, flush_outboxes  # noqa: PLC0415 - what sends is heavy

    by_daemon = running_daemon(state) is not None
    if not by_daemon:
        settings.require_relay_url()
    paths = list(state.outbox_files()) if agent is None else [state.outbox_path(agent)]
    if not any(path.exists() for path in paths):
        return FlushReport(0, 0, 0), by_daemon
    left_s = max(0.0, end - time.monotonic())  # loading what sends is part of the time
    return flush_outboxes(state, agent, left_s, lambda: settings)


def _watched(state: StateDirectory, agent: str | None) -> AbstractContextManager[object]:
    from outbox.cli.flush_view import FlushView  # noqa: PLC0415 - rich is for terminals

    return FlushView(state, agent)


def _lines(report: FlushReport, *, bars: bool) -> Iterator[str]:
    wide = max(map(len, report.agents), default=0)
    for agent, (delivered, left) in report.agents.items():
        text = "done" if not left else report.in_the_way.get(agent, "the time was over")
        yield clean(progress_line(agent, delivered, delivered + left, text, wide=wide, bars=bars))


def progress_line(agent: str, done: int, total: int, text: str, *, wide: int, bars: bool) -> str:
    """How far one agent is: "builder    412/412  ████  done"."""
    bar = (
        ("█" * (_BAR_CELLS * done // total if total else _BAR_CELLS)).ljust(_BAR_CELLS) + "  " if bars else ""
    )
    return f"{agent:<{wide}}  {number(done):>7}/{number(total):<7}  {bar}{text}"


def _summary(report: FlushReport, *, by_daemon: bool) -> str:
    dead = f" {count(report.dead, 'new dead letter')}: outbox dead list" if report.dead else ""
    if not report.left:
        return f"{number(report.delivered)} delivered, nothing left.{dead}"
    dead = f"{dead}." if dead else ""
    later = "The daemon goes on." if by_daemon else "What is left goes out with the next daemon or flush."
    if report.in_the_way:
        later += f" More: outbox why {command_word(next(iter(report.in_the_way)))}"
    return f"{number(report.delivered)} delivered, {number(report.left)} left on disk.{dead} {later}"
