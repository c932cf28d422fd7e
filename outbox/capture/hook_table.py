"""What each agent runner's hook events become: one table a runner, as data. Pure.

How a body is found in a tool's answer is hook_body's; what is made of a row is hook_call's.
"""

from __future__ import annotations

from outbox.capture.hook_json import at
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Rule(NamedTuple):
    """What one event becomes.

    `role`: whose words they are. `body`: the fields to take it from, the first that is there; none: a made
    sentence. `answer`: the field that holds a tool's answer, looked at when no field of `body` is there.
    `key`: "call" when the fields `ids` name this one call, "turn" when they name a turn in which it may come
    again, "none" when nothing does; a field of `ids` that is missing makes it "none". `part`: the key is made
    of this part of the call alone. `ends`: an end of a session. `ignored`: recorded only on request.
    """

    role: str
    body: tuple[str, ...] = ()
    answer: str = ""
    key: str = "none"
    ids: tuple[str, ...] = ()
    part: str = ""
    ends: bool = False
    ignored: bool = False


class Runner(NamedTuple):
    """One agent runner: its events, where its JSON names the event, the session, the moment."""

    name: str
    events: Mapping[str, Rule]
    name_fields: tuple[str, ...]
    session_fields: tuple[str, ...]
    time_fields: tuple[str, ...] = ()
    ignored_groups: tuple[str, ...] = ()


UNKNOWN = Rule("status")
_IGNORED = Rule("status", ignored=True)

_TOOL_CALL = ("session_id", "tool_use_id")
_CLAUDE_TURN = ("session_id", "prompt_id")
_CLAUDE_WORDS = ("last_assistant_message",)

_CLAUDE_CODE = {
    "SessionStart": Rule("status", key="turn", ids=_CLAUDE_TURN),
    "SessionEnd": Rule("status", ends=True),
    "UserPromptSubmit": Rule("user", ("prompt",), key="call", ids=_CLAUDE_TURN),
    "PostToolUse": Rule("tool", answer="tool_response", key="call", ids=_TOOL_CALL),
    "PostToolUseFailure": Rule("tool", ("error",), key="call", ids=_TOOL_CALL),
    "PermissionRequest": Rule("status"),
    "PermissionDenied": Rule("tool", ("reason",), key="call", ids=_TOOL_CALL),
    "Stop": Rule("assistant", _CLAUDE_WORDS, key="turn", ids=(*_CLAUDE_TURN, "stop_hook_active")),
    "StopFailure": Rule("error", (*_CLAUDE_WORDS, "error_details", "error"), key="turn", ids=_CLAUDE_TURN),
    "SubagentStart": Rule("status", key="call", ids=("session_id", "agent_id")),
    "SubagentStop": Rule(
        "assistant", _CLAUDE_WORDS, key="turn", ids=(*_CLAUDE_TURN, "agent_id", "stop_hook_active")
    ),
    "Notification": Rule("status", ("message",)),
    "PreCompact": Rule("status", key="turn", ids=(*_CLAUDE_TURN, "trigger")),
    "PostCompact": Rule("system", ("compact_summary",), key="turn", ids=(*_CLAUDE_TURN, "trigger")),
    "TaskCreated": Rule("status", ("task_subject",), key="turn", ids=(*_CLAUDE_TURN, "task_id")),
    "TaskCompleted": Rule("status", ("task_subject",), key="turn", ids=(*_CLAUDE_TURN, "task_id")),
    "Elicitation": Rule("status", ("message",)),
    "PreToolUse": Rule("status", key="call", ids=_TOOL_CALL, ignored=True),
    "UserPromptExpansion": Rule("user", ("prompt",), ignored=True),
    **dict.fromkeys(
        (
            *("PostToolBatch", "MessageDisplay", "InstructionsLoaded", "ConfigChange", "CwdChanged"),
            *("FileChanged", "DirectoryAdded", "Setup", "PreModelSwitch", "WorktreeRemove"),
            *("PreSkillShellCommand", "WorktreeCreate"),
        ),
        _IGNORED,
    ),
}

_CODEX_TURN = ("session_id", "turn_id")

_CODEX = {
    "SessionStart": Rule("status"),
    "SessionEnd": Rule("status", ends=True),
    "UserPromptSubmit": Rule("user", ("prompt",), key="turn", ids=_CODEX_TURN),
    "PostToolUse": Rule("tool", answer="tool_response", key="call", ids=_TOOL_CALL),
    "PermissionRequest": Rule("status", ("tool_input/description",)),
    "Stop": Rule("assistant", _CLAUDE_WORDS, key="turn", ids=(*_CODEX_TURN, "stop_hook_active")),
    "SubagentStart": Rule("status", key="call", ids=("session_id", "agent_id")),
    "SubagentStop": Rule(
        "assistant", _CLAUDE_WORDS, key="turn", ids=(*_CODEX_TURN, "agent_id", "stop_hook_active")
    ),
    "PreCompact": Rule("status", key="turn", ids=(*_CODEX_TURN, "trigger")),
    "PostCompact": Rule("system", ("compact_summary",), key="turn", ids=(*_CODEX_TURN, "trigger")),
    "Interrupt": Rule("status", key="turn", ids=_CODEX_TURN),
    "Notification": Rule("status", ("message",)),
    "agent-turn-complete": Rule(
        "assistant", ("last-assistant-message",), key="call", ids=("thread-id", "turn-id")
    ),
    "PreToolUse": Rule("status", key="call", ids=_TOOL_CALL, ignored=True),
}

_MOMENT = ("session_id", "timestamp")
_GEMINI_STATUS = Rule("status", key="call", ids=_MOMENT)

_GEMINI = {
    "SessionStart": _GEMINI_STATUS,
    "SessionEnd": _GEMINI_STATUS._replace(ends=True),
    "BeforeAgent": Rule("user", ("prompt",), key="call", ids=_MOMENT),
    "AfterAgent": Rule("assistant", ("prompt_response",), key="call", ids=_MOMENT),
    "AfterTool": Rule("tool", ("tool_response/error/message",), "tool_response", key="call", ids=_MOMENT),
    "Notification": _GEMINI_STATUS._replace(body=("message",)),
    **dict.fromkeys(
        ("BeforeTool", "BeforeModel", "AfterModel", "BeforeToolSelection", "PreCompress"),
        _GEMINI_STATUS._replace(ignored=True),
    ),
}

_COPILOT_MOMENT = ("sessionId", "timestamp")
_COPILOT_STATUS = Rule("status", key="call", ids=_COPILOT_MOMENT)

_COPILOT = {
    "sessionStart": _COPILOT_STATUS,
    "sessionEnd": _COPILOT_STATUS._replace(ends=True),
    "userPromptSubmitted": _COPILOT_STATUS._replace(role="user", body=("prompt",)),
    "postToolUse": _COPILOT_STATUS._replace(role="tool", answer="toolResult"),
    "postToolUseFailure": _COPILOT_STATUS._replace(role="tool", body=("error/message", "error")),
    "errorOccurred": _COPILOT_STATUS._replace(role="error", body=("error/message", "error")),
    "agentStop": _COPILOT_STATUS._replace(role="assistant", body=("lastAssistantMessage",)),
    "subagentStart": _COPILOT_STATUS,
    "subagentStop": _COPILOT_STATUS._replace(role="assistant", body=("lastAssistantMessage",)),
    "permissionRequest": _COPILOT_STATUS,
    "notification": _COPILOT_STATUS._replace(body=("message",)),
    "preToolUse": _COPILOT_STATUS._replace(ignored=True),
}

# Registered under a capitalised name, Copilot gives the same events with names and fields in another dress.
_COPILOT_CAPITALS = {
    "UserPromptSubmit": "userPromptSubmitted",
    "UserPromptSubmitted": "userPromptSubmitted",
    "Stop": "agentStop",
}
_COPILOT_SNAKE = {
    "sessionId": "session_id",
    "toolResult": "tool_result",
    "lastAssistantMessage": "last_assistant_message",
}

_BY_ID = Rule("status", key="call", ids=("id",))

_OPENCODE = {
    "session.created": _BY_ID,
    "session.deleted": _BY_ID._replace(ends=True),
    "session.error": _BY_ID._replace(
        role="error", body=("properties/error/data/message", "properties/error/name")
    ),
    "session.idle": _BY_ID,
    "session.compacted": _BY_ID,
    "permission.asked": _BY_ID,
    "chat.message": Rule("user", answer="output/parts", key="call", ids=("input/messageID",)),
    "tool.execute.after": Rule(
        "tool", ("output/output",), key="call", ids=("input/sessionID", "input/callID")
    ),
    "message.part.updated": Rule("assistant", ignored=True),  # until it is finished: see `rule_of`
    **dict.fromkeys(
        (
            *("message.part.delta", "message.updated", "session.updated", "session.status"),
            "session.diff",
        ),
        _BY_ID._replace(ignored=True),
    ),
}
_OPENCODE_TEXT = Rule(
    "assistant", ("properties/part/text",), key="call", ids=("properties/part/id",), part="properties/part"
)
_OPENCODE_TOOL = Rule(
    "tool",
    ("properties/part/state/output", "properties/part/state/error"),
    key="call",
    ids=("properties/part/callID", "properties/part/state/status"),
    part="properties/part",
)

RUNNERS: dict[str, Runner] = {
    runner.name: runner
    for runner in (
        Runner("claude-code", _CLAUDE_CODE, ("hook_event_name",), ("session_id",)),
        Runner("codex", _CODEX, ("hook_event_name", "type"), ("session_id", "thread-id")),
        Runner("gemini", _GEMINI, ("hook_event_name",), ("session_id",), ("timestamp",)),
        Runner(
            "copilot", _COPILOT, ("hook_event_name", "hookName"), ("sessionId", "session_id"), ("timestamp",)
        ),
        Runner(
            "opencode",
            _OPENCODE,
            ("hook", "type"),
            (
                *("properties/sessionID", "properties/info/id", "input/sessionID"),
                *("properties/info/sessionID", "properties/part/sessionID", "output/message/sessionID"),
            ),
            (
                *("properties/part/time/end", "properties/part/state/time/end"),
                *("output/message/time/created", "properties/info/time/created", "properties/time"),
            ),
            ("file.", "lsp.", "tui.", "pty.", "server."),
        ),
    )
}


def event_name(runner: Runner, value: Mapping[str, Any], given: str | None = None) -> str | None:
    """The event's name: as given on the command line, or as the JSON says; None when nothing names it."""
    for name in (given, *(value.get(field) for field in runner.name_fields)):
        if isinstance(name, str) and name:
            return name
    return _copilot_name(value) if runner.name == "copilot" else None


def rule_of(runner: Runner, event: str, value: Mapping[str, Any]) -> Rule:
    """What this call becomes. An event that nobody knows is recorded as `UNKNOWN`."""
    if runner.name == "copilot":
        return _copilot_rule(event, value)
    rule = runner.events.get(event, UNKNOWN)
    if rule is UNKNOWN and event.startswith(runner.ignored_groups or ("\0",)):
        return _IGNORED
    if event == "UserPromptSubmit" and runner.name == "claude-code" and not _typed(value):
        return rule._replace(role="system")
    if event == "SubagentStop" and runner.name == "claude-code" and value.get("agent_type") == "":
        return rule._replace(ignored=True)  # a helper of the runner's own: nobody's words
    if event == "BeforeAgent" and value.get("prompt") == "":
        return rule._replace(ignored=True)  # in the middle of a turn: nobody typed anything
    if event == "message.part.updated":
        return _finished_part(value) or rule
    if event in {"session.created", "session.deleted"} and "id" not in value:
        return rule._replace(ids=("properties/info/id",))  # older releases number no events
    return rule


def _typed(value: Mapping[str, Any]) -> bool:
    """Whether a prompt is a person's: the runner hands in its own by the same event."""
    if value.get("source") not in (None, "user"):
        return False
    prompt = value.get("prompt")
    words = prompt.strip() if isinstance(prompt, str) else ""
    opening, closing = "<task-notification>", "</task-notification>"
    return not (words.startswith(opening) and words.find(closing) == len(words) - len(closing))


def _finished_part(value: Mapping[str, Any]) -> Rule | None:
    part = at(value, "properties/part")
    if at(part, "type") == "tool":
        return _OPENCODE_TOOL if at(part, "state/status") in ("completed", "error") else None
    if at(part, "time/end") is None:
        return None
    return _OPENCODE_TEXT if at(part, "type") == "text" else _OPENCODE_TEXT._replace(role="status")


def _copilot_rule(event: str, value: Mapping[str, Any]) -> Rule:
    name = _COPILOT_CAPITALS.get(event, event[:1].lower() + event[1:])
    rule = _COPILOT.get(name, UNKNOWN)
    if "session_id" not in value:
        return rule
    return rule._replace(
        ids=tuple(_COPILOT_SNAKE.get(name, name) for name in rule.ids),
        body=tuple(_COPILOT_SNAKE.get(name, name) for name in rule.body),
        answer=_COPILOT_SNAKE.get(rule.answer, rule.answer),
    )


def _copilot_name(value: Mapping[str, Any]) -> str:
    """The event's name as its fields tell it, where the settings file does not pass it."""
    for fields, name in (
        (("toolResult",), "postToolUse"),
        (("toolName", "error"), "postToolUseFailure"),
        (("toolName",), "preToolUse"),
        (("prompt",), "userPromptSubmitted"),
        (("source",), "sessionStart"),
        (("reason",), "sessionEnd"),
        (("error",), "errorOccurred"),
        (("agentName", "stopReason"), "subagentStop"),
        (("stopReason",), "agentStop"),
    ):
        if all(field in value for field in fields):
            return name
    return "unknown"
