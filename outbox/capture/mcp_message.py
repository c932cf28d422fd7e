"""JSON-RPC 2.0 messages as texts: a line read into its parts, answers joined around texts as they came. Pure.

Nothing here makes a value into text again that came as text: ids, arguments and results stay as given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from outbox.errors import UsageError
from outbox.json_text import elements, last_values, quoted, text_value, with_members

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

_OBJECT = "{}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message; everything but `method` is JSON text.

    A request has `id` and `method`, a notification no `id` (None), an answer no `method` ("").
    """

    text: str
    id: str | None
    method: str
    params: str = _OBJECT

    @property
    def is_request(self) -> bool:
        """Whether it wants an answer."""
        return self.id is not None and bool(self.method)

    @property
    def is_answer(self) -> bool:
        """Whether it answers a request of ours or of the relay's."""
        return not self.method

    def member(self, *path: str) -> str | None:
        """The text of a value within the params, None when there is none."""
        return within(self.params, *path)

    def string(self, *path: str) -> str:
        """A string within the params, "" when there is none."""
        return text_value(self.member(*path) or "null") or ""


class NotAMessage(ValueError):
    """A line that is no message; `answer` is what JSON-RPC 2.0 (section 5.1) says to it."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.answer = failure("null", code, reason)


def read_message(line: bytes | str) -> Message:
    """One line of the stdio transport, or the text of one message in an HTTP answer.

    Raises:
        NotAMessage: no JSON, a batch (which MCP has none of since 2025-06-18), or no JSON-RPC 2.0.
    """
    try:
        text = (line.decode() if isinstance(line, bytes) else line).strip(" \t\r\n")
    except UnicodeDecodeError as error:
        raise NotAMessage(PARSE_ERROR, f"The line is not UTF-8 (byte {error.start + 1}).") from None
    if text.startswith("["):
        raise NotAMessage(INVALID_REQUEST, "MCP has no batches: send one message a line.")
    try:
        parts = last_values(text)
    except UsageError as error:
        raise NotAMessage(
            PARSE_ERROR if error.code in {"not_json", "too_deep"} else INVALID_REQUEST,
            f"No message: {error}.",
        ) from None
    return _message(text, parts)


def _message(text: str, parts: Mapping[str, str]) -> Message:
    own_id = parts.get("id")
    if text_value(parts.get("jsonrpc", "null")) != "2.0":
        raise NotAMessage(INVALID_REQUEST, 'One JSON-RPC message is expected: "jsonrpc" is not "2.0".')
    if own_id is not None and own_id[0] not in '"-0123456789' and "error" not in parts:
        raise NotAMessage(INVALID_REQUEST, "The id of a request is a string or a number.")
    if "method" not in parts:
        if own_id is None or not parts.keys() & {"result", "error"}:
            raise NotAMessage(INVALID_REQUEST, "Neither a method nor an answer stands in it.")
        return Message(text, own_id, "")
    method, params = text_value(parts["method"]), parts.get("params", _OBJECT)
    if not method or not params.startswith("{"):
        raise NotAMessage(INVALID_REQUEST, "The method is a name, and params are an object.")
    return Message(text, own_id, method, params)


def within(text: str, *path: str) -> str | None:
    """The text of a value inside an object; None when there is none, or something on the way is no object."""
    found: str | None = text
    for name in path:
        if found is None or not found.startswith("{"):
            return None
        found = last_values(found).get(name)
    return found


def same_id(one: str | None, other: str | None) -> bool:
    """Whether two ids are the same JSON value: "1" is not 1, and an escape is no other letter."""
    if one is None or other is None:
        return False
    if one == other:
        return True
    return one[:1] == other[:1] == '"' and text_value(one) == text_value(other)


def request(own_id: str, method: str, params: str) -> str:
    """The text of a request; `own_id` is JSON text."""
    return f'{{"jsonrpc":"2.0","id":{own_id},"method":{quoted(method)},"params":{params}}}'


def notification(method: str) -> str:
    """The text of a notification without params."""
    return f'{{"jsonrpc":"2.0","method":{quoted(method)}}}'


def answer(own_id: str, result: str) -> str:
    """The text of a successful answer; both are JSON text."""
    return f'{{"jsonrpc":"2.0","id":{own_id},"result":{result}}}'


def failure(own_id: str, code: int, message: str) -> str:
    """The text of an answer that is an error."""
    return f'{{"jsonrpc":"2.0","id":{own_id},"error":{{"code":{code},"message":{quoted(message)}}}}}'


def with_id(text: str, own_id: str) -> str:
    """The same message under this id."""
    return with_members(text, {"id": own_id})


def with_params(message: Message, params: str) -> Message:
    """The same message with other params."""
    return Message(with_members(message.text, {"params": params}), message.id, message.method, params)


def with_member(text: str, values: Mapping[str, str | None]) -> str:
    """An object with these members (JSON texts), or without those that are None."""
    return with_members(text, values)


def with_meta(params: str, fields: Mapping[str, str]) -> str:
    """Params with these members (JSON texts) in `_meta`, beside what stands there."""
    meta = within(params, "_meta") or _OBJECT
    return with_members(
        params, {"_meta": with_members(meta if meta.startswith("{") else _OBJECT, dict(fields))}
    )


def on_one_line(text: str) -> str:
    """JSON text without line breaks, which in JSON can only stand between values."""
    return text.replace("\r", " ").replace("\n", " ") if "\n" in text or "\r" in text else text


def objects(array: str | None) -> list[str]:
    """The texts of the objects in an array; none for anything else."""
    return [text for text in elements(array) if text.startswith("{")] if array and array[0] == "[" else []


def plain(value: object) -> str:
    """A value of our own as JSON text, in ASCII."""
    return json.dumps(value, separators=(",", ":"))
