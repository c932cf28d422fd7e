"""`outbox list [AGENT]`: what waits or is in flight, in the order in which it goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice

from outbox.api.client import LocalClient
from outbox.api.letters import STATES, listed_data
from outbox.cli.by_socket import daemon_of_another
from outbox.cli.output import age, bytes_text, clean, count, number, say, table, terminal_width
from outbox.cli.where import for_each, now_ms, settings_to_look, state_of, tell_troubles
from outbox.store.file import OutboxFile
from outbox.store.records import Listed, listed

EXAMPLE = """\
outbox list builder
outbox list --state in-flight --json"""

_HEADERS = ("agent", "seq", "kind", "key", "age", "attempts", "size", "state")
_RIGHT = ("seq", "age", "attempts", "size")
_PAGE = 500
_LINES = 50  # for a person, unless --limit says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which events."""
    parser.add_argument(
        "agent", metavar="AGENT", nargs="?", help="whose events; default: those of all agents"
    )
    parser.add_argument("--state", choices=list(STATES), help="those that wait, or those in flight, only")
    parser.add_argument("--kind", metavar="K", help="those of one kind only")
    parser.add_argument(
        "--limit", metavar="N", type=_limit, help=f"at most so many (default: {_LINES}; with --json all)"
    )


def run(args: argparse.Namespace) -> int:
    """List; 5 when a file could not be read."""
    if (client := daemon_of_another(args)) is not None:
        return _list_there(client, args)
    state = state_of(settings_to_look(args))
    left = args.limit if args.limit is not None else None if args.json else _LINES
    rows: list[tuple[str, ...]] = []
    more = False

    def act(box: OutboxFile) -> None:
        nonlocal left, more
        events = listed(box, kind=args.kind, state=STATES.get(args.state))
        while page := list(islice(events, _PAGE if left is None else min(left, _PAGE))):
            left = None if left is None else left - len(page)
            if args.json:
                say(*(json.dumps(listed_data(box.agent, event)) for event in page))
            else:
                rows.extend(_row(box.agent, event) for event in page)
        more = more or next(events, None) is not None

    troubles = for_each(state, args.agent, act)
    if not args.json:
        say(*_lines(rows, more=more))
    return tell_troubles(troubles)


def _list_there(client: LocalClient, args: argparse.Namespace) -> int:
    from outbox.cli import by_socket_view  # noqa: PLC0415 - another user's way

    most = args.limit if args.limit is not None else None if args.json else _LINES
    rows: list[tuple[str, ...]] = []
    more = False
    for agent, page, there in by_socket_view.listed(
        client, args.agent, kind=args.kind, state=args.state, most=most
    ):
        more = there
        if args.json:
            say(*(json.dumps(listed_data(agent, event)) for event in page))
        rows.extend(_row(agent, event) for event in page)
    if not args.json:
        say(*_lines(rows, more=more))
    return 0


def _lines(rows: list[tuple[str, ...]], *, more: bool) -> Iterator[str]:
    if not rows:
        yield "Nothing waits." if not more else "More waits: outbox list --limit N"
        return
    yield from table(rows, _HEADERS, right=_RIGHT, width=terminal_width(sys.stdout))
    if more:
        yield clean(f"The first {count(len(rows), 'event')}; there are more: outbox list --limit N")


def _row(agent: str, event: Listed) -> tuple[str, ...]:
    return (
        agent,
        number(event.seq),
        event.kind,
        event.key,
        age(now_ms() - event.accepted_at_ms),
        number(event.attempts),
        bytes_text(event.size_bytes),
        "in flight" if event.in_flight else "waits",
    )


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of events")
    return int(text)
