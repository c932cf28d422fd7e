"""The body of a message: the field that holds it, a tool's answer, or a short sentence of our own. Pure.

Text is kept as it is. Pictures and files are named by media type and size, and never copied into the body.
"""

from __future__ import annotations

from outbox.capture.hook_json import at, json_text
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from outbox.capture.hook_table import Rule

_ANSWERS = ("llmContent", "textResultForLlm", "text_result_for_llm", "content", "output", "result", "text")
_DETAILS = (
    *("tool_name", "toolName", "properties/permission", "source", "reason", "trigger", "agent_type"),
    *("agentName", "stopReason", "error", "properties/info/title"),
)
_MOST_DETAIL_CHARS = 80


class Body(NamedTuple):
    """A body, and the pictures and files that belong to it: `{"mediaType", "bytes", "name"}`."""

    text: str
    attachments: list[dict[str, object]]


def body_of(event: str, rule: Rule, value: Mapping[str, Any]) -> Body:
    """The body of this call; never fails, whatever types the fields have."""
    for field in rule.body:
        if (found := at(value, field)) is not None:
            return Body(found if isinstance(found, str) else json_text(found), [])
    files: list[dict[str, object]] = []
    text = _answer(at(value, rule.answer), files) if rule.answer else None
    return Body(_made(event, value, files) if text is None else text, files)


def _answer(value: object, files: list[dict[str, object]]) -> str | None:
    """The text of a tool's answer; None when it has none of its own."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return _blocks(value, files)
    if not isinstance(value, dict):
        return json_text(value)
    if value.get("isImage") is True:
        files.append(_named("image", value.get("stdout"), None))
        return None
    streams = [part for part in (value.get("stdout"), value.get("stderr")) if isinstance(part, str)]
    if streams:
        return "\n".join(filter(None, streams))
    if isinstance(value.get("file"), dict):
        return _file(value["type"] if isinstance(value.get("type"), str) else "file", value["file"], files)
    if "filePath" in value:
        return None  # a file was changed: what it was changed to is no answer
    for name in _ANSWERS:
        if (found := value.get(name)) is not None:
            return _answer(found, files)
    return json_text(value) if value else None


def _blocks(blocks: list[Any], files: list[dict[str, object]]) -> str | None:
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, dict) and (file := _attachment(block)) is not None:
            files.append(file)
        elif isinstance(block, dict) and isinstance(block.get("text"), str):
            texts.append(block["text"])
    if texts:
        return "\n".join(filter(None, texts))
    return None if files or not blocks else json_text(blocks)


def _attachment(block: Mapping[str, Any]) -> dict[str, object] | None:
    """The name of a block that is a picture, a sound or a file: of MCP, Gemini, OpenCode, Claude."""
    kind = block.get("type")
    if isinstance(inline := block.get("inlineData") or block.get("fileData"), dict):
        return _named(inline.get("mimeType"), inline.get("data"), inline.get("fileUri"))
    if isinstance(source := block.get("source"), dict):
        return _named(source.get("media_type") or kind, source.get("data"), source.get("url"))
    if isinstance(resource := block.get("resource"), dict):
        content = resource.get("blob") or resource.get("text")
        return _named(resource.get("mimeType"), content, resource.get("uri"), coded="blob" in resource)
    if kind == "resource_link":
        return _named(block.get("mimeType"), None, block.get("uri"))
    if kind == "file" or "mime" in block:
        return _named(block.get("mime"), block.get("url"), block.get("filename"))
    if kind in ("image", "audio") or "data" in block:
        return _named(block.get("mimeType") or kind, block.get("data"), None)
    return None


def _file(kind: str, file: Mapping[str, Any], files: list[dict[str, object]]) -> str | None:
    if isinstance(file.get("content"), str):
        return str(file["content"])
    if "base64" in file:
        files.append(_named(file.get("type") or kind, file["base64"], file.get("filePath")))
        return None
    return json_text(file)


def _named(media_type: object, data: object, name: object, *, coded: bool = True) -> dict[str, object]:
    """A file by its name; `coded` says that its content is base64, perhaps as a data URL."""
    file: dict[str, object] = {"mediaType": media_type if isinstance(media_type, str) else "unknown"}
    if isinstance(data, str):
        content = data[data.find(",") + 1 :] if data.startswith("data:") else data
        padding = content.count("=", -2) if coded else 0
        file["bytes"] = len(content) * 3 // 4 - padding if coded else len(content.encode("utf-8", "replace"))
    if isinstance(name, str):
        file["name"] = name
    return file


def _made(event: str, value: Mapping[str, Any], files: list[dict[str, object]]) -> str:
    """A short sentence: the event, and what tells it from others of its name."""
    details = [found for name in _DETAILS if isinstance(found := at(value, name), str) and found]
    what = ", ".join(detail[:_MOST_DETAIL_CHARS] for detail in details)
    if files:
        what += "; " if what else ""
        what += "; ".join(
            f"{file['mediaType']}, {file['bytes']:,} bytes" if "bytes" in file else f"{file['mediaType']}"
            for file in files
        )
    elif isinstance(path := at(value, "tool_input/file_path"), str):
        what += f": {path[:_MOST_DETAIL_CHARS]}"
    return f"{event} ({what})" if what else event
