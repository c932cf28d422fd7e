"""Which hooks of each runner are ours, where its settings lie, and what stands in them. Pure.

How a settings file is changed without disturbing what else stands in it is hook_settings's.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.capture.hook_settings import with_entries, without_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Never WorktreeCreate: Claude Code asks that hook to make the worktree. Nor the events that decide something
# (PreToolUse, PermissionRequest): one broken entry there switches off every hook of the file.
_EVENTS: Mapping[str, tuple[str, ...]] = {
    "claude-code": (
        *("SessionStart", "UserPromptSubmit", "PostToolUse", "PostToolUseFailure", "PermissionDenied"),
        *("Notification", "Elicitation", "SubagentStart", "SubagentStop", "TaskCreated", "TaskCompleted"),
        *("PreCompact", "PostCompact", "Stop", "StopFailure", "SessionEnd"),
    ),
    "codex": (
        *("SessionStart", "UserPromptSubmit", "PostToolUse", "SubagentStart", "SubagentStop"),
        *("PreCompact", "PostCompact", "Stop", "Interrupt", "SessionEnd"),
    ),
    "gemini": ("SessionStart", "BeforeAgent", "AfterTool", "AfterAgent", "Notification", "SessionEnd"),
    "copilot": (
        *("sessionStart", "userPromptSubmitted", "postToolUse", "postToolUseFailure", "errorOccurred"),
        *("agentStop", "subagentStop", "sessionEnd"),
    ),
}
_TIMEOUTS = {"claude-code": 10, "codex": 3, "gemini": 5_000}  # seconds; Gemini counts milliseconds
_TOOL_EVENTS = frozenset(("PostToolUse", "PostToolUseFailure", "AfterTool"))


class Place(NamedTuple):
    """Where a runner looks for its hooks, below the home folder or the project's, and whose file that is.

    `own`: the file is ours alone. `comments`: the runner takes JSON with comments.
    """

    user: str
    project: str
    own: bool = False
    comments: bool = False


PLACES: Mapping[str, Place] = {
    "claude-code": Place(".claude/settings.json", ".claude/settings.json"),
    "codex": Place(".codex/hooks.json", ".codex/hooks.json"),
    "gemini": Place(".gemini/settings.json", ".gemini/settings.json", comments=True),
    "copilot": Place(".copilot/hooks/relay-outbox.json", ".github/hooks/relay-outbox.json", own=True),
    "opencode": Place(
        ".config/opencode/plugins/relay-outbox.js", ".opencode/plugins/relay-outbox.js", own=True
    ),
}


def installed(runner: str, text: str | None, command: Sequence[str], plugin: str) -> str:
    """The settings with our hooks in them; `text` is None where there is no file yet.

    `command` is what calls `outbox`, with the options that belong to it; `plugin` is the text of OpenCode's.
    Raises UsageError for settings that are not what this runner reads.
    """
    if runner == "opencode":
        return plugin.replace("[/* command */]", json.dumps([*command]))
    if runner == "copilot":
        return _copilot(command)
    entries = {event: _group(runner, event, shlex.join(command)) for event in _EVENTS[runner]}
    return with_entries(
        text, entries, lambda handler: _is_ours(runner, handler), comments=PLACES[runner].comments
    )


def uninstalled(runner: str, text: str) -> str | None:
    """The settings without our hooks; None when nothing is left, and the file was ours.

    Raises UsageError for settings that are not what this runner reads.
    """
    if PLACES[runner].own:
        return None
    return without_entries(text, lambda handler: _is_ours(runner, handler), comments=PLACES[runner].comments)


def _group(runner: str, event: str, command: str) -> dict[str, Any]:
    handler: dict[str, Any] = {"type": "command", "command": command, "timeout": _TIMEOUTS[runner]}
    if runner == "gemini":
        handler = {"name": "relay-outbox", **handler}
    matcher = {"matcher": "*"} if event in _TOOL_EVENTS else {}
    return {**matcher, "hooks": [handler]}


def _copilot(command: Sequence[str]) -> str:
    hooks = {
        event: [{"type": "command", "bash": shlex.join([*command, "--event", event]), "timeoutSec": 10}]
        for event in _EVENTS["copilot"]
    }
    return json.dumps({"version": 1, "hooks": hooks}, indent=2) + "\n"


def _is_ours(runner: str, handler: object) -> bool:
    """Whether a handler runs `outbox hook RUNNER`, wherever that lies and with whatever options."""
    command = handler.get("command") if isinstance(handler, dict) else None
    if not isinstance(command, str):
        return False
    try:
        words = shlex.split(command)
    except ValueError:
        return False
    places = [index for index, word in enumerate(words) if word == "hook" and index]
    return any(
        words[index - 1].rpartition("/")[2] == "outbox" and words[index + 1 : index + 2] == [runner]
        for index in places
    )
