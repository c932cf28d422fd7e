"""The recorded session of a coding agent (session.jsonl: its hook calls, in order of time) as events.

It understands this one session, not what hooks may send in general.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

AGENT = "orchard"
PERSON = "person"
_NOTE_FOLLOWS_TOOL = "mcp__almanac__ripening"
_NOTE = {"title": "Pears", "text": "Pears ripen in weeks 33 to 35; the report knows only two of them."}

# Which field is the text of a hook call, and in whose role; the other events get a text made from their name.
_TEXTS = {
    "UserPromptSubmit": ("user", "prompt"),
    "Stop": ("assistant", "last_assistant_message"),
    "StopFailure": ("error", "last_assistant_message"),
    "SubagentStop": ("assistant", "last_assistant_message"),
    "PostToolUseFailure": ("tool", "error"),
    "PostCompact": ("system", "compact_summary"),
    "Notification": ("status", "message"),
    "TaskCreated": ("status", "task_subject"),
    "TaskCompleted": ("status", "task_subject"),
}


@dataclass(frozen=True, slots=True)
class DemoEvent:
    """An event to be, and what to show of it: who speaks, and the words as they are (not safe to print)."""

    kind: str
    payload: Mapping[str, Any]
    speaker: str
    text: str


def recorded_events() -> list[DemoEvent]:
    """The events of the session that comes with the package."""
    text = files("outbox.demo").joinpath("session.jsonl").read_text(encoding="utf-8")
    return events_of(json.loads(line) for line in text.split("\n") if line)


def events_of(hooks: Iterable[Mapping[str, Any]]) -> list[DemoEvent]:
    """A message for each hook call that says something, one tool call, an insight at the session's end."""
    events = []
    for hook in hooks:
        if not _says_something(hook):
            continue
        events.append(_message(hook))
        if hook.get("tool_name") == _NOTE_FOLLOWS_TOOL:
            events.append(_tool_call())
        if hook["hook_event_name"] == "SessionEnd":
            events.append(_insight(hook, len(events)))
    return events


def _says_something(hook: Mapping[str, Any]) -> bool:
    """Not so: a tool before it runs (its result comes), and a helper of the runner itself (agent_type "")."""
    return hook["hook_event_name"] != "PreToolUse" and hook.get("agent_type") != ""


def _message(hook: Mapping[str, Any]) -> DemoEvent:
    role, text = _role_and_text(hook)
    speaker = hook["tool_name"] if role == "tool" else PERSON if role == "user" else AGENT
    listener = PERSON if role == "assistant" else AGENT
    payload = {"from": speaker, "to": listener, "kind": role, "body": text, "payload": {"hook": hook}}
    return DemoEvent("session-message", payload, speaker, text)


def _role_and_text(hook: Mapping[str, Any]) -> tuple[str, str]:
    event = hook["hook_event_name"]
    if event == "PostToolUse":
        return "tool", _tool_text(hook["tool_name"], hook["tool_response"])
    if event not in _TEXTS:
        return "status", f"{event} {hook.get('source') or hook.get('reason') or ''}".rstrip()
    role, field = _TEXTS[event]
    text = hook[field]
    return ("system" if role == "user" and text.startswith("<task-notification>") else role), text


def _tool_text(tool: str, response: Any) -> str:
    """What a tool said; a picture is named, never copied into the text."""
    if isinstance(response, list):
        return "\n".join(_block_text(block) for block in response)
    if "stdout" in response:
        return "\n".join(filter(None, (response["stdout"], response["stderr"])))
    content = response.get("content") or response.get("file", {}).get("content")
    if isinstance(content, list):
        return _tool_text(tool, content)
    return content or f"{tool} done"


def _block_text(block: Mapping[str, Any]) -> str:
    if block["type"] == "text":
        return str(block["text"])
    source = block["source"]
    return f"({source['media_type']}, {len(source['data'])} characters of {source['type']})"


def _tool_call() -> DemoEvent:
    call = {"tool": "note_add", "arguments": _NOTE}
    return DemoEvent("mcp-tool-call", call, "note_add", _NOTE["text"])


def _insight(hook: Mapping[str, Any], told: int) -> DemoEvent:
    text = f"The session ended ({hook['reason']}) after {told} events."
    payload = {"agentId": AGENT, "sessionId": hook["session_id"], "type": "session-end", "text": text}
    return DemoEvent("insight", payload, AGENT, text)
