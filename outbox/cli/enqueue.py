"""`outbox enqueue`: events from stdin, a JSON line each, or one from the command line, onto the disk.

What lines become, and when they are committed, is intake.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from outbox.api.reach import Place, place_of
from outbox.cli.intake import REFUSED, Intake, Taking, not_taken, read_chunks, receipt_json
from outbox.cli.output import clean, emit_json, number, say
from outbox.errors import OutboxError, UsageError
from outbox.event import Limits, check_agent
from outbox.json_text import quoted, split_lines
from outbox.library import Outbox, read_rules
from outbox.store.directory import StateDirectory

EXAMPLE = """\
outbox enqueue --agent builder < events.jsonl
outbox enqueue --agent builder --kind insight --payload '{"text": "tests pass"}'"""

_AGENT_VARIABLE = "OUTBOX_AGENT"
_ENVELOPE_BYTES = 1024 * 1024  # what may stand beside a payload on its line

# The flags of one event, and the names of the same in JSON; those whose value is JSON text itself.
_FIELDS = {
    "mode": ("mode", "append (the default) or coalesce"),
    "dedupe_key": ("dedupeKey", "with --mode coalesce: removes earlier waiting ones of the same key"),
    "occurred_at": ("occurredAt", "when it happened, in epoch milliseconds (default: now)"),
    "idempotency_key": ("idempotencyKey", "the producer's own key (default: a new UUID)"),
    "retry": ("retry", 'how it is retried, as JSON: {"maxAttempts": 3}'),
    "account_id": ("accountId", "correlation"),
    "run_id": ("runId", "correlation"),
    "step_id": ("stepId", "correlation"),
    "parent_id": ("parentId", "correlation"),
    "conversation_id": ("conversationId", "correlation"),
    "metadata": ("metadata", "correlation, as a JSON object"),
    "traceparent": ("traceparent", "the trace it belongs to (W3C Trace Context)"),
    "tracestate": ("tracestate", "the vendors' part of it"),
}
_JSON_FIELDS = frozenset(("retry", "metadata"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose events, and the fields of one event."""
    parser.add_argument("--agent", metavar="A", help=f"whose events (default: ${_AGENT_VARIABLE})")
    one = parser.add_argument_group("one event, instead of lines on stdin")
    one.add_argument("--kind", metavar="K", help="its kind: session-message, insight, …")
    one.add_argument("--payload", metavar="JSON", help="its payload, any JSON value")
    for flag, (_, about) in _FIELDS.items():
        one.add_argument(f"--{flag.replace('_', '-')}", metavar="V", help=about)


def run(args: argparse.Namespace) -> int:
    """Take what is given; 0, or 4 when something was refused. What was told as accepted is durable."""
    agent = os.environ.get(_AGENT_VARIABLE) if args.agent is None else args.agent
    if agent is None:
        raise UsageError(
            f"Whose events? Nothing was stored. Name the agent with --agent, or in ${_AGENT_VARIABLE}."
        )
    try:
        check_agent(agent)
    except UsageError as error:
        raise UsageError(f"{error}. Nothing was stored. A name is 1 to 512 bytes of UTF-8.") from None
    event = _event_text(args)
    place = _place(args)
    if place.socket is not None:
        return _hand_over(agent, event, place, args)
    with Outbox.open(agent, state_dir=place.state, allow_network_fs=_network_fs_allowed()) as outbox:
        return _take_lines(outbox, place, args) if event is None else _take_one(outbox, event, args)


def _hand_over(agent: str, event: str | None, place: Place, args: argparse.Namespace) -> int:
    """By the socket of a daemon of another user; what waits here meanwhile is told of."""
    from outbox.cli.by_socket import kept_note, remote_outbox  # noqa: PLC0415 - another user's way

    outbox = remote_outbox(agent, place)
    try:
        return _take_lines(outbox, place, args) if event is None else _take_one(outbox, event, args)
    finally:
        if outbox.kept:
            say(clean(kept_note(outbox, place)), to=sys.stderr)


def _take_lines(outbox: Taking, place: Place, args: argparse.Namespace) -> int:
    if sys.stdin is None:
        raise UsageError("stdin is closed. Nothing was stored. Give events as JSON lines, or one by --kind.")
    if sys.stdin.isatty():
        say("Reading events from the terminal, one JSON object a line; Ctrl-D ends it.", to=sys.stderr)
    limits = Limits() if place.state is None else read_rules(StateDirectory(place.state))[0]
    intake = Intake(outbox, as_json=args.json)
    chunks = read_chunks(sys.stdin.fileno(), before_waiting=intake.commit)
    try:
        for line_number, line in split_lines(chunks, limits.max_payload_bytes + _ENVELOPE_BYTES):
            if not intake.add(line_number, line):
                break
        intake.commit()
    except KeyboardInterrupt:
        intake.finish()  # what was taken stays taken, and its producer should know
        raise
    return intake.finish()


def _take_one(outbox: Taking, event: str, args: argparse.Namespace) -> int:
    (result,) = outbox.enqueue_many([event])
    if isinstance(result, OutboxError):
        if result.code == "key_reused":  # well formed, and refused by what is stored
            say(clean(str(result)), to=sys.stderr)
            return REFUSED
        raise UsageError(not_taken(result), code=result.code) if isinstance(result, UsageError) else result
    if args.json:
        emit_json(receipt_json(result, 1))
    elif result.duplicate:
        say(f"Known already: seq {number(result.seq)}, {result.state}. Nothing was stored twice.")
    else:
        say(f"1 event accepted, seq {number(result.seq)}.")
    return 0


def _event_text(args: argparse.Namespace) -> str | None:
    """The event that the flags describe, as its JSON text; None when there is none among them."""
    given = {flag: value for flag in _FIELDS if (value := getattr(args, flag)) is not None}
    if args.kind is None and args.payload is None and not given:
        return None
    if args.kind is None or args.payload is None:
        raise UsageError(
            "One event needs both --kind and --payload (null for one without content). Nothing was stored. "
            "Without any of an event's flags, lines are read from stdin."
        )
    members = [f'"kind":{quoted(args.kind)}', f'"payload":{_json_text("payload", args.payload)}']
    for flag, value in given.items():
        text = _json_text(flag, value) if flag in _JSON_FIELDS else _plain_text(flag, value)
        members.append(f'"{_FIELDS[flag][0]}":{text}')
    return "{" + ",".join(members) + "}"


def _plain_text(flag: str, text: str) -> str:
    """A word; a time in digits is a number, and of any other the event's own check says what it should be."""
    is_number = flag == "occurred_at" and text.isascii() and text.isdigit()
    return (text.lstrip("0") or "0") if is_number else quoted(text)


def _json_text(flag: str, text: str) -> str:
    """The text, which must be exactly one JSON value; numbers are not computed with."""

    def no_number(name: str) -> None:
        raise ValueError(f"{name} is no JSON number")

    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--{flag.replace('_', '-')} is not JSON: {error}. Nothing was stored. "
            "Text stands in double quotes, and all of it in single ones for the shell.",
            code="not_json",
        ) from None
    return text


def _place(args: argparse.Namespace) -> Place:
    """Where to store. A producer reads no file of configuration, unless one is named."""
    if args.config is not None:
        from outbox.cli.where import settings_of, state_of  # noqa: PLC0415 - the rare case

        return Place(state_of(settings_of(args)).path)
    return place_of(os.environ, args.state_dir)


def _network_fs_allowed() -> bool:
    return os.environ.get("OUTBOX_DAEMON_ALLOW_NETWORK_FS", "").strip().lower() in {"true", "yes", "on", "1"}
