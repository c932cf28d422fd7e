"""`outbox show AGENT SEQ|KEY`: one event with all that is known of it, wherever it is."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.api.letters import event_text, history_of, shown
from outbox.cli.by_socket import daemon_of_another
from outbox.cli.output import age, bytes_text, clean, count, local_time, number, say
from outbox.cli.where import now_ms, settings_to_look, state_of
from outbox.record import Record, Remembered, event_fields, payload_of
from outbox.store.records import Found

EXAMPLE = """\
outbox show builder 10234
outbox show builder 01999d2c-6d5e-7d1c-9f3e-5a0b6f3c2d11 --json"""

_PART = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_STATES = {
    "waiting": "waits",
    "in_flight": "is in flight",
    "dead": "is a dead letter",
    "tool_error": "was settled: the tool ran and said no",
}
_CORRELATION = ("accountId", "runId", "stepId", "parentId", "conversationId", "metadata")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose event, and which."""
    parser.add_argument(
        "agent", metavar="AGENT", help="whose event (after -- when the name starts with a dash)"
    )
    parser.add_argument("which", metavar="SEQ|KEY", help="its number, or its idempotency key")


def run(args: argparse.Namespace) -> int:
    """Show it; raises UsageError when no such event is known."""
    return show(args, args.which)


def show(args: argparse.Namespace, which: str, *, dead: bool = False) -> int:
    """Show the event; with `dead` only a dead letter counts."""
    if (client := daemon_of_another(args)) is not None:
        from outbox.cli import by_socket_view as there  # noqa: PLC0415 - another user's way

        return there.show(client, args.agent, which, dead=dead, as_json=args.json, now_ms=now_ms())
    state = state_of(settings_to_look(args))
    agent, found = shown(state, args.agent, which, dead=dead)
    say(*([event_text(agent, found)] if args.json else (clean(line) for line in _lines(agent, found))))
    return 0


# For a person -----------------------------------------------------------------------------------------------


def _lines(agent: str, found: Found) -> Iterator[str]:
    record, now = found.record, now_ms()
    kind = record.kind if isinstance(record, Remembered) else record.event.kind
    state = _STATES.get(found.state, f"was {found.state}")
    yield f"{agent}: event {number(record.seq)} ({kind}) {state}."
    if isinstance(record, Remembered):
        yield from _facts({"key": record.key, "since": _when(record.at_ms, now)})
        if record.result is not None:
            yield from ("result", *_result(record.result))
        return
    yield from _facts(_event_facts(record, now))
    yield from ("history", *(_told(entry, now) for entry in history_of(record))) if history_of(record) else ()
    if record.letter is not None and record.letter.answer:
        yield from ("answer", *(f"  {line}" for line in record.letter.answer.splitlines()))
    if record.sound:
        yield from ("payload", *indented(payload_of(record, agent)))
    else:
        yield "The stored text is not what was accepted: it is damaged, and cannot be shown or sent."


def _facts(facts: Mapping[str, str]) -> Iterator[str]:
    yield from (f"{name:<12} {text}" for name, text in facts.items() if text)


def _event_facts(record: Record, now: int) -> dict[str, str]:
    event, letter = record.event, record.letter
    fields = event_fields(event)
    attempts = count(record.tries.attempts, "attempt") if record.tries.attempts else "no attempt"
    sent = f"sent {count(record.tries.sends, 'time')}; {attempts} counted against it"
    facts = {
        "key": event.key,
        "occurred": local_time(event.occurred_at_ms, now, seconds=True),
        "accepted": _when(record.accepted_at_ms, now),
        "size": bytes_text(len(event.wire_payload)),
        "tried": sent if record.tries.sends or record.tries.attempts else "",
        "belongs to": ", ".join(f"{name} {fields[name]}" for name in _CORRELATION if name in fields),
        "replaces": f"earlier waiting ones of {fields['dedupeKey']}" if "dedupeKey" in fields else "",
        "trace": event.traceparent or "",
        "retry": event.retry or "",
        "progress": record.tries.progress or "",
        "replayed": "" if event.replayed_from is None else f"from seq {number(event.replayed_from)}",
    }
    if letter is not None:
        code = "" if letter.detail.startswith(letter.code) else letter.code
        answered = " ".join(filter(None, (str(letter.status or ""), code, letter.detail)))
        facts["dead since"] = _when(letter.failed_at_ms, now)
        facts["reason"] = f"{letter.reason}: {answered}" if answered else letter.reason
        facts["path"] = letter.path
    return facts


def _when(at_ms: int, now: int) -> str:
    return f"{local_time(at_ms, now, seconds=True)} ({age(now - at_ms)} ago)"


def _told(entry: Mapping[str, Any], now: int) -> str:
    at_ms = entry.get("at_ms")
    at = local_time(at_ms, now, seconds=True) if isinstance(at_ms, int) else "?"
    names = ["reason", "status", "code", "detail", "path"]
    if str(entry.get("detail", "")).startswith(str(entry.get("code"))):
        names.remove("code")
    rest = (entry.get(name) for name in names)
    return "  ".join(("", at, *(str(part) for part in rest if part is not None)))


def _result(text: str) -> list[str]:
    """A tool's result; a long one was cut when it was kept, and is no JSON then."""
    try:
        json.loads(text)
    except ValueError:
        return [text]
    return indented(text)


def indented(text: str) -> list[str]:
    """JSON text on several lines, two blanks a level; every value keeps its own text."""
    lines, depth = [""], 0
    for part in _PART.findall(text):
        if part in "}]":
            depth -= 1
            if lines[-1][-1:] not in ("{", "["):
                lines.append("  " * depth)
        elif lines[-1][-1:] in ("{", "[", ","):
            lines.append("  " * depth)
        lines[-1] += ": " if part == ":" else part
        if part in "{[":
            depth += 1
    return lines
