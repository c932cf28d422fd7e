"""`outbox skip AGENT SEQ`: a person sets a waiting event aside."""

from __future__ import annotations

import argparse

from outbox.api.report import opened
from outbox.cli.output import clean, emit_json, number, say
from outbox.cli.where import existing, now_ms, settings_to_look, state_of
from outbox.store.people import skip
from outbox.store.wake import wake_daemon

EXAMPLE = "outbox skip builder 10234"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose event, and which."""
    parser.add_argument(
        "agent", metavar="AGENT", help="whose event (after -- when the name starts with a dash)"
    )
    parser.add_argument("seq", metavar="SEQ", type=_seq, help="its number, as `why` and receipts tell it")


def run(args: argparse.Namespace) -> int:
    """Skip; raises UsageError when no such event waits, or it is in flight."""
    state = state_of(settings_to_look(args))
    path = existing(state, args.agent)
    with opened(state, path) as box:
        skip(box, args.seq, now_ms())
    wake_daemon(state.wake_socket, path.name)
    if args.json:
        emit_json({"agent": args.agent, "seq": args.seq, "state": "dead"})
    else:
        say(
            f"Event {number(args.seq)} of {clean(args.agent)} is a dead letter now, and is kept; "
            "what is behind it goes on. See: outbox dead list"
        )
    return 0


def _seq(text: str) -> int:
    digits = text.replace(",", "")  # messages write 10,234
    if not (digits.isascii() and digits.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no sequence number")
    return int(digits)
