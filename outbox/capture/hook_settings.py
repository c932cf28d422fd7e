"""Entries in the `hooks` of a runner's JSON settings: put in and taken out as text, all else stays. Pure.

What was empty before is filled without a blank behind its bracket; what is made new begins on a line of its
own. So taking out knows what to leave and what to remove, and gives back the file byte for byte.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined] # public, only its stub is missing
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_blanks = re.compile(r"[ \t\n\r]*").match
_scalar = re.compile(r"[^\s,\]}]+").match
_comment_or_string = re.compile(r'"(?:[^"\\]|\\.)*+"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_indent = re.compile(r"\n([ \t]+)\S").search


class Node(NamedTuple):
    """A value in the text, from its first character to behind its last, with what stands in it."""

    start: int
    end: int
    children: list[Child]
    value: Any


class Child(NamedTuple):
    """An element, or a member from its name on."""

    name: str | None
    start: int
    node: Node


def with_entries(
    text: str | None,
    groups: Mapping[str, Mapping[str, Any]],
    is_ours: Callable[[object], bool],
    *,
    comments: bool = False,
) -> str:
    """The settings with one group of ours for each event, and none of ours besides.

    Raises UsageError: the settings are no JSON, or `hooks` has another shape than the runner reads.
    """
    if text is None or not text.strip():
        hooks = {event: [group] for event, group in groups.items()}
        return json.dumps({"hooks": hooks}, indent=2) + "\n"
    if _is_complete(_root(text, comments), groups, is_ours):
        return text
    cleared = without_entries(text, is_ours, comments=comments)
    if cleared is None:
        return with_entries(None, groups, is_ours)
    for event, group in groups.items():
        cleared = _with_group(cleared, event, group, comments=comments)
    return cleared


def _with_group(text: str, event: str, group: Mapping[str, Any], *, comments: bool) -> str:
    root = _root(text, comments)
    hooks = _member(root, "hooks")
    if hooks is None:
        holder, lines = root, _member_lines(text, {"hooks": {event: [group]}}, 1)
    elif (groups := _member(hooks, event)) is None:
        holder, lines = hooks, _member_lines(text, {event: [group]}, 2)
    else:
        holder, lines = groups, _lines(text, group, 3)
    return _inserted(text, holder, lines)


def without_entries(text: str, is_ours: Callable[[object], bool], *, comments: bool = False) -> str | None:
    """The settings without any handler of ours, and without what was made for them; None: nothing is left.

    Raises UsageError as `with_entries`.
    """
    while True:
        path = _way_to_ours(_root(text, comments), is_ours)
        if path is None:
            return text
        shorter = _removed(text, path)
        if shorter is None:
            return None
        text = shorter


def _way_to_ours(root: Node, is_ours: Callable[[object], bool]) -> list[tuple[Node, int]] | None:
    """The containers down to the first handler of ours, each with the place in it."""
    for at_hooks, hooks in enumerate(root.children):
        if hooks.name != "hooks":
            continue
        for at_event, event in enumerate(hooks.node.children):
            for at_group, group in enumerate(event.node.children):
                for at_list, handlers in enumerate(group.node.children):
                    if handlers.name != "hooks":
                        continue
                    for at_handler, handler in enumerate(handlers.node.children):
                        if is_ours(handler.node.value):
                            return [
                                *((root, at_hooks), (hooks.node, at_event), (event.node, at_group)),
                                *((group.node, at_list), (handlers.node, at_handler)),
                            ]
    return None


def _removed(text: str, path: list[tuple[Node, int]]) -> str | None:
    """The text without the innermost of the path, and without what holds nothing else and was made for it."""
    made_for_it = len(path) - 1
    group, _ = path[3]
    if len(path[4][0].children) == 1:
        made_for_it = 2 if len(group.children) <= 2 else made_for_it  # the whole group: matcher and handlers
        while (
            made_for_it and len(path[made_for_it][0].children) == 1 and _is_made(text, path[made_for_it][0])
        ):
            made_for_it -= 1
    holder, index = path[made_for_it]
    if made_for_it == 0 and len(holder.children) == 1 and _is_made(text, holder):
        return None
    return _cut_out(text, holder, index)


def _is_made(text: str, node: Node) -> bool:
    return text[node.start + 1] in "\r\n"


def _cut_out(text: str, holder: Node, index: int) -> str:
    child = holder.children[index]
    if index:
        return text[: holder.children[index - 1].node.end] + text[child.node.end :]
    if len(holder.children) > 1:
        return text[: child.start] + text[holder.children[1].start :]
    return text[: holder.start + 1] + text[child.node.end :]


def _inserted(text: str, holder: Node, piece: str) -> str:
    if holder.children:
        at = holder.children[-1].node.end
        return f"{text[:at]},{piece}{text[at:]}"
    at = holder.start + 1
    return text[:at] + piece.lstrip() + text[at:]


def _member_lines(text: str, member: Mapping[str, Any], level: int) -> str:
    """A name with its value, on lines of their own, as the text indents its own."""
    lines = _lines(text, member, level - 1)
    end = _newline(text)
    return lines[lines.index(end, 1) : lines.rindex(end)]


def _lines(text: str, value: object, level: int) -> str:
    unit = found[1] if (found := _indent(text)) else "  "
    lines = json.dumps(value, indent=unit, ensure_ascii=False).split("\n")
    return "".join(f"{_newline(text)}{unit * level}{line}" for line in lines)


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _is_complete(
    root: Node, groups: Mapping[str, Mapping[str, Any]], is_ours: Callable[[object], bool]
) -> bool:
    """Whether exactly these entries of ours stand there already."""
    hooks = root.value.get("hooks")
    found: dict[str, list[object]] = {}
    for event, list_of_groups in (hooks or {}).items():
        for group in list_of_groups:
            if any(is_ours(handler) for handler in group["hooks"]):
                found.setdefault(event, []).append(group)
    return found == {event: [group] for event, group in groups.items()}


def _member(node: Node, name: str) -> Node | None:
    return next((child.node for child in node.children if child.name == name), None)


def _root(text: str, comments: bool) -> Node:
    """The settings as a tree; raises UsageError for what is no JSON, or not of the runner's shape."""
    plain = _comment_or_string.sub(_without_comment, text) if comments else text
    try:
        value = json.loads(plain)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("not a JSON object")
    hooks = value.get("hooks", {})
    if not isinstance(hooks, dict) or not all(
        isinstance(groups, list) and all(_is_group(group) for group in groups) for groups in hooks.values()
    ):
        raise UsageError('"hooks" does not have the shape {EVENT: [{"hooks": [...]}]}')
    return _node(plain, _blanks(plain, 0).end())  # type: ignore[union-attr] # it matches the empty text too


def _is_group(group: object) -> bool:
    return isinstance(group, dict) and isinstance(group.get("hooks"), list)


def _without_comment(found: re.Match[str]) -> str:
    """Blanks in the place of a comment, so that every position stays what it was."""
    return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])


def _node(text: str, start: int) -> Node:
    """The value that begins at `start`, in a text that is known to be JSON."""
    if text[start] == '"':
        value, end = scanstring(text, start + 1)
        return Node(start, end, [], value)
    if text[start] not in "{[":
        end = _scalar(text, start).end()  # type: ignore[union-attr] # a value stands here
        return Node(start, end, [], json.loads(text[start:end]))
    children: list[Child] = []
    position = _next(text, start + 1)
    while text[position] not in "}]":
        begins, name = position, None
        if text[start] == "{":
            name, position = scanstring(text, position + 1)
            position = _next(text, _next(text, position) + 1)
        node = _node(text, position)
        children.append(Child(name, begins, node))
        position = _next(text, node.end)
        if text[position] == ",":
            position = _next(text, position + 1)
    values = [child.node.value for child in children]
    names = [child.name for child in children]
    value = dict(zip(names, values, strict=True)) if text[start] == "{" else values
    return Node(start, position + 1, children, value)


def _next(text: str, position: int) -> int:
    return _blanks(text, position).end()  # type: ignore[union-attr] # it matches the empty text too
