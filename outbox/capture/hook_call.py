"""One call of a hook, from its JSON to the message made of it. Pure: moments and sizes are arguments."""

from __future__ import annotations

from outbox.capture.hook_body import body_of
from outbox.capture.hook_fit import fitting
from outbox.capture.hook_json import at, digest, json_text, one_line, parsed, with_strings
from outbox.capture.hook_table import Rule, Runner, event_name, rule_of
from outbox.errors import UsageError
from outbox.json_text import deeper_than, quoted
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from outbox.capture.hook_redact import Redaction
    from outbox.event import Limits

_ENVELOPE_BYTES = 16 * 1024  # what stands in a message beside body and hook: names, ids, files
_MOST_ID_CHARS = 200
_LEVELS_ABOVE = 2  # the message and its `payload`
_MOST_FILES = 20
_EARLIEST_MS = 946_684_800_000  # 2000-01-01: before it no runner was written
_LATEST_MS = 4_102_444_800_000  # 2100-01-01


class Call(NamedTuple):
    """A call that is to be recorded: what it says, and what becomes of it."""

    runner: Runner
    event: str
    rule: Rule
    text: str
    value: Mapping[str, Any]

    @property
    def transcript(self) -> str | None:
        """The file whose size tells two calls of a turn from one delivered twice; it is never read."""
        path = self.value.get("transcript_path", self.value.get("transcriptPath"))
        return path if self.rule.key == "turn" and isinstance(path, str) else None

    @property
    def session(self) -> str | None:
        """The session's id, as the runner gives it."""
        return session_of(self.runner, self.value)


class Message(NamedTuple):
    """What goes into the outbox for a call: the message's payload as JSON text, its key, its time.

    `value` is what the call says, without its secrets.
    """

    payload: str
    key: str | None
    occurred_at_ms: int
    value: Mapping[str, Any]

    @property
    def reason(self) -> str | None:
        """Why a session ended, in short."""
        reason = self.value.get("reason")
        return reason[:_MOST_ID_CHARS] if isinstance(reason, str) else None


def read_call(runner: Runner, text: str, given_event: str | None, record: Collection[str]) -> Call | None:
    """The call that a JSON text is; None for an event that is ignored and not among those to `record`.

    Raises UsageError: not one JSON object, or it names no event.
    """
    value = parsed(text)
    event = event_name(runner, value, given_event)
    if event is None:
        raise UsageError(f"no event name in it ({' or '.join(runner.name_fields)})")
    rule = rule_of(runner, event, value)
    if rule.ignored and event not in record:
        return None
    return Call(runner, event, rule, one_line(text), value)


def key_of(call: Call, transcript_bytes: int | None) -> str | None:
    """The call's stable key; None when nothing in it tells this call from another of the same words."""
    rule = call.rule
    if rule.key == "none" or (rule.key == "turn" and transcript_bytes is None):
        return None
    ids = [at(call.value, field) for field in rule.ids]
    if any(part is None or part == "" for part in ids):
        return None
    said = at(call.value, rule.part) if rule.part else call.value
    moment = transcript_bytes if rule.key == "turn" else None
    return f"hook:{call.runner.name}:{digest(call.runner.name, call.event, said, moment)}"


def message_of(
    call: Call, *, agent: str, key: str | None, started_ms: int, redaction: Redaction, limits: Limits
) -> Message:
    """The session message of a call, without its secrets, as large and as deep as a payload may be."""
    clean, value = _redacted(call, redaction)
    if deeper_than(clean, limits.max_nesting - _LEVELS_ABOVE):
        clean = quoted(clean)  # as a string it is not deep at all
    body, files = body_of(call.event, call.rule, value)
    body, hook, was_cut = fitting(body, clean, limits.max_payload_bytes - _ENVELOPE_BYTES)
    about: dict[str, object] = {"runner": call.runner.name, "event": call.event[:_MOST_ID_CHARS]}
    for name, found in (
        ("sessionId", session_of(call.runner, value)),
        ("agentId", value.get("agent_id")),
        ("agentType", value.get("agent_type")),
    ):
        if isinstance(found, str):
            about[name] = found[:_MOST_ID_CHARS]
    if files:
        about["attachments"] = [_short(file) for file in files[:_MOST_FILES]]
    if redaction.counts:
        about["redacted"] = dict(redaction.counts)
    if was_cut:
        about["cut"] = True
    head = json_text({"from": agent, "kind": "agent-hook", "role": call.rule.role})
    text = f'{head[:-1]},"body":{quoted(body)},"payload":{json_text(about)[:-1]},"hook":{hook}}}}}'
    return Message(text, key, occurred_at(call, started_ms), value)


def occurred_at(call: Call, started_ms: int) -> int:
    """When it happened: as the runner says, else when the hook started. Epoch milliseconds."""
    for field in call.runner.time_fields:
        if (moment := _epoch_ms(at(call.value, field))) is not None:
            return moment
    return started_ms


def session_of(runner: Runner, value: Mapping[str, Any]) -> str | None:
    """The id of the session that a call belongs to, if it says so."""
    found = (at(value, field) for field in runner.session_fields)
    return next((name for name in found if isinstance(name, str) and name), None)


def _redacted(call: Call, redaction: Redaction) -> tuple[str, Mapping[str, Any]]:
    shapes = redaction.suspects(call.text)
    if not shapes:
        return call.text, call.value
    clean = with_strings(call.text, lambda string: redaction.redacted(string, shapes))
    return clean, parsed(clean) if redaction.counts else call.value


def _short(file: Mapping[str, object]) -> dict[str, object]:
    return {name: part[:_MOST_ID_CHARS] if isinstance(part, str) else part for name, part in file.items()}


def _epoch_ms(moment: object) -> int | None:
    """Epoch milliseconds of a number of them, or of ISO 8601; None for what is neither, or absurd."""
    if isinstance(moment, str) and moment:
        from datetime import UTC, datetime  # noqa: PLC0415 - most calls have no time, and all would pay

        try:
            then = datetime.fromisoformat(moment)
        except ValueError:
            return None
        then = then if then.tzinfo else then.replace(tzinfo=UTC)
        moment = round(then.timestamp() * 1_000)
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        return None
    return int(moment) if _EARLIEST_MS <= moment < _LATEST_MS else None
