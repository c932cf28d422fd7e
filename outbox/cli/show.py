"""`outbox show AGENT SEQ|KEY`: one event with all that is known of it, wherever it is."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.api.report import opened
from outbox.cli.output import age, bytes_text, clean, count, local_time, number, say
from outbox.cli.where import existing, now_ms, settings_to_look, state_of
from outbox.errors import UsageError
from outbox.json_text import quoted
from outbox.outcome import State
from outbox.record import Record, Remembered, event_fields, payload_of
from outbox.record_line import joined, one_line
from outbox.store.records import Found, find

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
    state = state_of(settings_to_look(args))
    with opened(state, existing(state, args.agent)) as box:
        found = find(box, which.replace(",", "") if _is_number(which) else which)
        if found is None or (dead and found.state != State.DEAD):
            raise UsageError(_unknown(args.agent, which, found))
        if args.json:
            say(as_json(box.agent, found))
        else:
            say(*(clean(line) for line in _lines(box.agent, found)))
    return 0


def _is_number(word: str) -> bool:
    digits = word.replace(",", "")  # messages write 10,234
    return digits.isascii() and digits.isdigit()


def _unknown(agent: str, which: str, found: Found | None) -> str:
    if found is not None:
        return f"Event {which!r} of {agent!r} is no dead letter; it is {found.state}. See: outbox show"
    return (
        f"No event {which!r} of {agent!r} is known. It was never accepted, or was delivered so long ago that "
        "its receipt is gone, or it was a dead letter that was replayed under a new number. "
        "See: outbox list, outbox dead list"
    )


# As data ----------------------------------------------------------------------------------------------------


def as_json(agent: str, found: Found) -> str:
    """All of it as one line of JSON in ASCII; the payload keeps its own text but for escapes and breaks."""
    record = found.record
    fields = {"agent": quoted(agent), "seq": str(record.seq), "state": quoted(found.state)}
    fields |= _receipt(record) if isinstance(record, Remembered) else _record(agent, record)
    return _ascii(joined(fields))


def _receipt(receipt: Remembered) -> dict[str, str]:
    return {
        "kind": quoted(receipt.kind),
        "idempotencyKey": quoted(receipt.key),
        "at": str(receipt.at_ms),
        "result": "null" if receipt.result is None else quoted(receipt.result),
    }


def _record(agent: str, record: Record) -> dict[str, str]:
    event, tries, letter = record.event, record.tries, record.letter
    fields = event_fields(event)
    fields["acceptedAt"] = str(record.accepted_at_ms)
    fields["payload"] = one_line(payload_of(record, agent)) if record.sound else "null"
    if event.replayed_from is not None:
        fields["replayedFrom"] = str(event.replayed_from)
    fields["attempts"], fields["sends"] = str(tries.attempts), str(tries.sends)
    fields["history"] = json.dumps([_named(entry) for entry in _history(record)])
    if tries.progress is not None:
        fields["progress"] = tries.progress
    if letter is not None:
        texts = {"code": letter.code, "detail": letter.detail, "answer": letter.answer, "path": letter.path}
        fields["reason"] = quoted(letter.reason)
        fields["status"] = "null" if letter.status is None else str(letter.status)
        fields |= {name: quoted(text) for name, text in texts.items()}
        fields["failedAt"] = str(letter.failed_at_ms)
    return fields


def _history(record: Record) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(record.tries.history)
    return entries


def _named(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"at" if name == "at_ms" else name: value for name, value in entry.items()}


def _ascii(text: str) -> str:
    """JSON with everything beyond ASCII as escapes; such characters stand in strings only."""
    return text if text.isascii() else re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)


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
    yield from ("history", *(_told(entry, now) for entry in _history(record))) if _history(record) else ()
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
