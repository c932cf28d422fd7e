"""`outbox demo`: a session, an outage in the middle, and what the relay holds in the end."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from outbox.cli.output import count, emit_json, say
from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from outbox.cli.demo_view import Lines, LiveTable
    from outbox.demo.play import Ending
    from outbox.demo.stage import Stage

EXAMPLE = "outbox demo\noutbox demo --keep"

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_LOOK_EVERY_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of `demo`."""
    parser.add_argument("--keep", action="store_true", help="stay up after the session, until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Play it; 0 when the relay holds all events, in order, once; else 1, and 130 when it was cut short."""
    if args.state_dir is not None:
        raise UsageError("The demo has a folder of its own. Nothing was started; leave --state-dir away.")
    _forget_the_host(os.environ)
    with _Signals() as signals:
        try:
            return _perform(args, signals.asked_to_stop)
        except OutboxError:
            if signals.asked_to_stop():  # Ctrl-C reaches the children too, and one may have been starting
                return _INTERRUPTED
            raise


def _forget_the_host(environ: MutableMapping[str, str]) -> None:
    """Neither the demo nor its children may meet the settings, the relay or the token of this host."""
    for name in [name for name in environ if name.startswith(("OUTBOX_", "AGENT_RELAY_"))]:
        del environ[name]


class _Signals:
    """Remembers that the person wants to stop, so that no child which is just being started is forgotten."""

    def __init__(self) -> None:
        self._asked = False

    def asked_to_stop(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True


def _perform(args: argparse.Namespace, asked_to_stop: Callable[[], bool]) -> int:
    from outbox.demo.play import Interrupted, Pace, Play  # noqa: PLC0415 - what it needs is for the demo alone
    from outbox.demo.session import AGENT, recorded_events  # noqa: PLC0415
    from outbox.demo.stage import Stage  # noqa: PLC0415
    from outbox.library import Outbox  # noqa: PLC0415

    events = recorded_events()
    with Stage() as stage, Outbox.open(AGENT, state_dir=stage.state_dir) as outbox:
        try:
            with _view(quiet=args.json) as view:
                view.tell(*_opening(stage, len(events)))
                ending = Play(stage, outbox, view, asked_to_stop).perform(events, Pace())
        except Interrupted as cut:
            say(_cut_short(cut.accepted, cut.waiting), to=sys.stderr)
            return _INTERRUPTED
        stage.keep_folder = bool(ending.faults)
        _report(ending, len(events), stage, as_json=args.json)
        if args.keep and not ending.faults:
            say(*_what_next(stage, AGENT), to=sys.stderr if args.json else None)
            while not asked_to_stop():
                time.sleep(_LOOK_EVERY_S)
    return 1 if ending.faults else 0


def _view(*, quiet: bool) -> LiveTable | Lines:
    from rich.console import Console  # noqa: PLC0415 - as above

    from outbox.cli.demo_view import Lines, LiveTable  # noqa: PLC0415

    console = Console()
    if console.is_terminal and not console.is_dumb_terminal and not quiet:
        return LiveTable(console)
    return Lines(to=sys.stderr if quiet else sys.stdout)


def _opening(stage: Stage, events: int) -> tuple[str, str]:
    who = f"The reference relay listens on {stage.relay.url} (pid {stage.relay.pid})"
    return (
        f"{who}, a daemon delivers to it (pid {stage.daemon.pid}).",
        f"A recorded session follows: {events} events, each on disk before the next. Ctrl-C ends it.",
    )


def _cut_short(accepted: int, waiting: int) -> str:
    return (
        f"Stopped. {count(accepted, 'event')} had been accepted, {accepted - waiting} delivered. "
        "Both processes are ended and the demo's folder is removed."
    )


def _report(ending: Ending, accepted: int, stage: Stage, *, as_json: bool) -> None:
    if as_json:
        found = {"held": ending.held, "repeats": ending.repeats, "faults": list(ending.faults)}
        emit_json({"accepted": accepted, **found})
    elif ending.faults:
        say(f"{count(accepted, 'event')} accepted; what the relay holds does not match:")
        say(*(f"  {fault}." for fault in ending.faults))
        say(f"The files and the daemon's log are kept in {stage.folder}.")
    else:
        again = f" ({ending.repeats:,} sent again, and known by their keys)" if ending.repeats else ""
        say(f"Read back from the relay: {ending.kinds}.")
        say(f"All {accepted:,} accepted events are there, in order, once{again}.")


def _what_next(stage: Stage, agent: str) -> tuple[str, ...]:
    outbox = _own_command()
    state_dir, database, token_file = (
        shlex.quote(str(path)) for path in (stage.state_dir, stage.relay_db, stage.token_file)
    )
    port = stage.relay.url.rpartition(":")[2]
    payload = """'{"from": "me", "to": "orchard", "body": "still here?"}'"""
    return (
        "",
        f"Relay and daemon stay up until Ctrl-C; their files are in {stage.folder}. In another terminal:",
        f"  export OUTBOX_STATE_DIR={state_dir}",
        f"  kill -9 {stage.relay.pid}     # the relay is gone",
        f"  {outbox} enqueue --agent {agent} --kind session-message --payload {payload}",
        f"  {outbox} status",
        f"  {outbox} why {agent}",
        f"  {outbox} relay --port {port} --db {database} --token-file {token_file}     # it is back",
    )


def _own_command() -> str:
    """How to call this very program from another terminal: it may not be on the PATH."""
    called, on_path = shutil.which(sys.argv[0]), shutil.which("outbox")
    if called is None:  # python -m outbox
        return f"{shlex.quote(sys.executable)} -m outbox"
    return (
        "outbox" if on_path and Path(on_path).samefile(called) else shlex.quote(str(Path(called).absolute()))
    )
