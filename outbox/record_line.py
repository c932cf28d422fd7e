"""A record as one line of JSON in an export, and back. Pure.

A record keeps what its event is for ever: key, times, and the text that is sent. Where that text follows from
the payload it is left out of the line and made again, else it stands beside it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.errors import UsageError
from outbox.event import Accepted, Limits, accept, parse_event
from outbox.event_checks import check_agent, check_key, check_time
from outbox.gap import GAP_KIND
from outbox.json_text import dump, elements, last_values, plain_value, quoted, text_value
from outbox.outcome import Reason, State
from outbox.record import Letter, Record, Remembered, Tries, event_fields, payload_of
from outbox.wire_text import KEY, TIME, Stamp, key_scope, make_wire, original_payload, wire_key

FORMAT = 1
HEADER = "outbox-export"

# Numbers stay far below 2^63, so that none is ever missing for the events that come after an import.
MOST_SEQ = 10**15
_DIGEST_BYTES = 16
_TEXTS = ("code", "detail", "answer", "path")
_is_whole = re.compile(r"[0-9]{1,19}").fullmatch
_is_digest = re.compile(r"[0-9a-f]{32}").fullmatch


def joined(fields: Mapping[str, str]) -> str:
    """One JSON object of these members, whose values are JSON texts."""
    return "{" + ",".join(f"{quoted(name)}:{text}" for name, text in fields.items()) + "}"


def one_line(text: str) -> str:
    """JSON text without line breaks, which can only stand between its values, never inside one."""
    return text.replace("\n", " ").replace("\r", " ")


def one_value(text: str) -> str:
    """The text of the one JSON value that `text` is, without the blanks around it; raises UsageError."""
    text = text.strip(" \t\r\n")
    if not text:
        raise UsageError("not JSON: there is no value", code="not_json")
    if text.startswith("{"):
        last_values(text)
    elif len(elements(text if text.startswith("[") else f"[{text}]")) != 1 and not text.startswith("["):
        raise UsageError("not JSON: more than one value", code="not_json")
    return text


# Writing ----------------------------------------------------------------------------------------------------


def header_line(exported_at_ms: int) -> str:
    """The first line of an export."""
    return dump({"type": HEADER, "version": FORMAT, "exportedAt": exported_at_ms})


def agent_line(agent: str, stream: str, paused_at_ms: int | None) -> str:
    """The line before an agent's records."""
    paused = {} if paused_at_ms is None else {"pausedAt": paused_at_ms}
    return dump({"type": "agent", "agent": agent, "stream": stream, **paused})


def end_line(records: int) -> str:
    """The last line of an export: without it, the file was cut off."""
    return dump({"type": "end", "records": records})


def record_line(agent: str, record: Record | Remembered) -> str:
    """A record as one line of JSON."""
    if isinstance(record, Remembered):
        return _receipt_line(agent, record)
    event, letter = record.event, record.letter
    kind = "gap" if record.is_gap else "event" if letter is None else "dead"
    fields = {"type": quoted(kind), "agent": quoted(agent), "seq": str(record.seq), **event_fields(event)}
    if record.sound:
        payload = one_line(payload_of(record, agent))
        fields["payload"] = payload
        if _stamped_again(record, agent, payload).wire_payload != event.wire_payload:
            fields["wire"] = quoted(event.wire_payload.decode())
    else:
        fields["raw"] = quoted(base64.b64encode(event.wire_payload).decode())
    fields["acceptedAt"] = str(record.accepted_at_ms)
    fields |= _bookkeeping(event) | _tries_fields(record.tries)
    if letter is not None:
        fields |= _letter_fields(letter)
    return joined(fields)


def _stamped_again(record: Record, agent: str, payload: str) -> Accepted:
    event = record.event
    scope = key_scope(agent) if event.scoped else ""
    kind = "session-message" if record.is_gap else event.kind
    text, shape, tool, _ = make_wire(kind, payload, Stamp(event.occurred_at_ms, scope + event.key, scope))
    shape = "gap" if record.is_gap else shape
    return event._replace(wire_payload=text.encode(), shape=shape, tool=tool)


def _bookkeeping(event: Accepted) -> dict[str, str]:
    given = {
        "digest": quoted(event.digest.hex()) if len(event.digest) == _DIGEST_BYTES else None,
        "scoped": "true" if event.scoped else None,
        "notes": dump(dict(event.notes)) if event.notes else None,
        "replayedFrom": None if event.replayed_from is None else str(event.replayed_from),
    }
    return {name: text for name, text in given.items() if text is not None}


def _tries_fields(tries: Tries) -> dict[str, str]:
    counts = {"sends": tries.sends, "attempts": tries.attempts, "crashes": tries.crashes}
    fields = {name: str(count) for name, count in counts.items() if count}
    if tries.first_try_at_ms is not None:
        fields["firstTryAt"] = str(tries.first_try_at_ms)
    if tries.history != "[]":
        fields["history"] = tries.history
    if tries.progress is not None:
        fields["progress"] = tries.progress
    return fields


def _letter_fields(letter: Letter) -> dict[str, str]:
    fields = {"reason": quoted(letter.reason)}
    if letter.status is not None:
        fields["status"] = str(letter.status)
    texts = {"code": letter.code, "detail": letter.detail, "answer": letter.answer, "path": letter.path}
    fields |= {name: quoted(text) for name, text in texts.items() if text}
    return {**fields, "failedAt": str(letter.failed_at_ms)}


def _receipt_line(agent: str, receipt: Remembered) -> str:
    return dump(
        {
            "type": "receipt",
            "agent": agent,
            "seq": receipt.seq,
            "kind": receipt.kind,
            KEY: receipt.key,
            "digest": receipt.digest.hex(),
            "state": receipt.state,
            "at": receipt.at_ms,
            **({} if receipt.result is None else {"result": receipt.result}),
        }
    )


# Reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an export, taken apart: what it is, whose, and its other fields as JSON texts."""

    type: str
    agent: str
    fields: dict[str, str]


def read_line(text: str | bytes) -> Line:
    """Take a line of an export apart; raises UsageError for one that is none, or of a newer format."""
    try:
        values = last_values(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8: byte {error.start + 1}", code="not_json") from None
    kind = text_value(values.pop("type", "null"))
    if kind == HEADER:
        if values.get("version") != str(FORMAT):
            raise UsageError(
                f"the export has format {values.get('version', '?')[:20]}, and this release reads {FORMAT}; "
                "upgrade relay-outbox to import it",
                code="too_new",
            )
        return Line(HEADER, "", values)
    if kind == "end":
        return Line("end", "", values)
    if kind not in ("agent", "event", "dead", "gap", "receipt"):
        raise UsageError("no line of an export: its type is agent, event, dead, gap, receipt or end")
    return Line(kind, check_agent(text_value(values.pop("agent", "null"))), values)


def is_header(text: bytes) -> bool:
    """Whether a file that begins with this line is an export."""
    try:
        return text_value(last_values(text.decode()).get("type", "null")) == HEADER
    except (UsageError, UnicodeDecodeError):
        return False


def read_record(line: Line, limits: Limits) -> Record | Remembered:
    """The record that a line holds, checked as an event is at acceptance. Raises UsageError.

    The body limit is not applied again: what was accepted does not change any more.
    """
    fields = dict(line.fields)
    if line.type == "receipt":
        return _read_receipt(fields)
    seq = _whole(fields, "seq", 0, most=MOST_SEQ)
    accepted_at_ms = _whole(fields, "acceptedAt", None)
    tries = _read_tries(fields)
    letter = _read_letter(fields) if line.type == "dead" else None
    if letter is not None and letter.reason == Reason.UNKNOWN_KIND:  # it waits for a release that knows it
        limits = limits._replace(custom_kinds=(*limits.custom_kinds, _text(fields, "kind") or ""))
    if letter is not None and letter.reason == Reason.DAMAGED:
        event = _read_damaged(fields)
    elif line.type == "gap":
        event = _read_gap(fields)
    else:
        event = _read_event(line.agent, fields, limits)
    return Record(event, seq, accepted_at_ms, tries, letter, sound="raw" not in line.fields)


def _text(fields: Mapping[str, str], name: str) -> str | None:
    """A text as UTF-8 can hold it: JSON may have halves of surrogate pairs, which become question marks."""
    text = text_value(fields.get(name, "null"))
    return text if text is None else text.encode("utf-8", "replace").decode()


def _read_event(agent: str, fields: dict[str, str], limits: Limits) -> Accepted:
    wire, digest = fields.pop("wire", None), _digest(fields)
    notes, scoped = _object(fields, "notes"), fields.pop("scoped", "false") == "true"
    replayed_from = _whole(fields, "replayedFrom", None) if "replayedFrom" in fields else None
    if fields.get(KEY, "null") == "null" or fields.get(TIME, "null") == "null":
        raise UsageError(f"{KEY} and {TIME} belong to every event of an export")
    draft = parse_event(joined(fields), limits)
    own = limits._replace(message_body_max_chars=None, key_scope="agent" if scoped else "none")
    event = accept(draft, limits=own, agent=agent, now_ms=0, new_key="")
    if wire is not None:
        text = text_value(wire) or ""
        _check_wire(event, agent, draft.payload_text, text)
        event = event._replace(wire_payload=text.encode())
    return event._replace(
        digest=digest or event.digest, notes={**event.notes, **notes}, replayed_from=replayed_from
    )


def _check_wire(event: Accepted, agent: str, payload: str, wire: str) -> None:
    """The text that is sent must be the event's own: its payload, with its key and its time."""
    wrong = UsageError('"wire" is not the text of this event: payload, key or time differ')
    key = wire_key(event.key, agent, event.scoped)
    try:
        given = original_payload(
            event.kind, event.shape, wire.encode(), key=key, occurred_at_ms=event.occurred_at_ms
        )
        stamp = last_values(wire)
    except (UsageError, KeyError, StopIteration, UnicodeEncodeError):
        raise wrong from None
    stamped = event.shape in {"batch", "tool"} or (
        stamp.get(KEY) == quoted(key) and stamp.get(TIME) == str(event.occurred_at_ms)
    )
    if one_line(given.decode()) != payload or not stamped:
        raise wrong


def _read_gap(fields: dict[str, str]) -> Accepted:
    payload = fields.get("payload", "")
    if not payload.startswith("{"):
        raise UsageError("the payload of a gap is the object that tells of it")
    at_ms, key = check_time(_whole(fields, TIME, None)), check_key(text_value(fields.get(KEY, "null")))
    text = make_wire("session-message", payload, Stamp(at_ms, key)).text
    return Accepted(GAP_KIND, key, text.encode(), "gap", at_ms, b"")


def _read_damaged(fields: dict[str, str]) -> Accepted:
    """A dead letter whose text is not what was stored: it is kept as it is, and never sent."""
    try:
        raw = base64.b64decode(text_value(fields.get("raw", '""')) or "", validate=True)
    except ValueError:
        raise UsageError('"raw" is not base64') from None
    key, at_ms = check_key(text_value(fields.get(KEY, "null"))), _whole(fields, TIME, None)
    return Accepted((_text(fields, "kind") or "")[:200], key, raw, "object", at_ms, _digest(fields))


def _read_receipt(fields: dict[str, str]) -> Remembered:
    state = text_value(fields.get("state", "null"))
    if state not in _GONE:
        raise UsageError(f"the state of a receipt is one of {', '.join(_GONE)}")
    return Remembered(
        check_key(text_value(fields.get(KEY, "null"))),
        _whole(fields, "seq", 0, most=MOST_SEQ),
        _text(fields, "kind") or "",
        _digest(fields),
        state,
        _whole(fields, "at", None),
        _text(fields, "result"),
    )


_GONE = [
    str(state)
    for state in (State.DELIVERED, State.TOOL_ERROR, State.REPLACED, State.DROPPED, State.DISCARDED)
]


def _read_tries(fields: dict[str, str]) -> Tries:
    history = fields.pop("history", "[]")
    if not history.startswith("[") or not all(entry.startswith("{") for entry in elements(history)):
        raise UsageError("history is an array of objects")
    progress = fields.pop("progress", "null")
    if progress[0] not in "{n":
        raise UsageError("progress is an object")
    sends, attempts, crashes = (_whole(fields, name, 0) for name in ("sends", "attempts", "crashes"))
    first_try_at_ms = _whole(fields, "firstTryAt", None) if "firstTryAt" in fields else None
    return Tries(sends, attempts, crashes, first_try_at_ms, history, None if progress == "null" else progress)


def _read_letter(fields: dict[str, str]) -> Letter:
    reason = text_value(fields.pop("reason", "null"))
    if reason not in list(Reason):
        raise UsageError(f"the reason of a dead letter is one of {', '.join(Reason)}")
    status = _whole(fields, "status", None, most=999) if "status" in fields else None
    texts = [_text(fields, name) or "" for name in _TEXTS]
    for name in _TEXTS:
        fields.pop(name, None)
    return Letter(str(reason), _whole(fields, "failedAt", None), status, *texts)


def _digest(fields: dict[str, str]) -> bytes:
    text = text_value(fields.pop("digest", '""'))
    if text and not _is_digest(text):
        raise UsageError("digest is 32 hex digits")
    return bytes.fromhex(text or "")


def _object(fields: dict[str, str], name: str) -> dict[str, Any]:
    text = fields.pop(name, "{}")
    if not text.startswith("{"):
        raise UsageError(f"{name} is an object")
    return dict(plain_value(text, name))


def _whole(fields: dict[str, str], name: str, default: int | None, *, most: int = 2**63 - 1) -> int:
    """A whole number that is taken out of the fields; without a default it must be there."""
    text = fields.pop(name, None)
    if text is None and default is not None:
        return default
    if text is None or not _is_whole(text) or int(text) > most:
        shown = "missing" if text is None else f"{text[:40]}, no whole number from 0 to {most:,}"
        raise UsageError(f"{name} is {shown}")
    return int(text)
