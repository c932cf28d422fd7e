"""The texts of the MCP calls, and the answer among messages: revision 2026-07-28, stateless. Pure.

A stored call is never taken apart: the request is joined around its text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

PROTOCOL_VERSION = "2026-07-28"
KEY_FIELD = "relay-outbox/idempotencyKey"
ACCEPT = "application/json, text/event-stream"

_PLAIN = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_LOOKS_ENCODED = re.compile(r"=\?base64\?.*\?=")


def tool_call_body(params: bytes, *, request_id: str, key: str | None, version: str) -> bytes:
    """The request around `params`, the stored text `{"name": …, "arguments": …}`, kept byte for byte.

    Raises:
        ValueError: `params` is no text of a JSON object with a member in it.
    """
    text = params.strip()
    if not (text.startswith(b"{") and text.endswith(b"}") and text[1:-1].strip()):
        raise ValueError("the params of a tool call are a JSON object with a name")
    return b'%b,"params":%b,"_meta":%b}}' % (
        _opening("tools/call", request_id),
        text[:-1],
        _meta(key, version),
    )


def tools_list_body(*, request_id: str, version: str) -> bytes:
    """A `tools/list` request."""
    return b'%b,"params":{"_meta":%b}}' % (_opening("tools/list", request_id), _meta(None, version))


def request_fields(method: str, tool: str | None = None) -> list[tuple[str, str]]:
    """The header fields of a request; `Mcp-Name` for a tool."""
    fields = [("Accept", ACCEPT), ("MCP-Protocol-Version", PROTOCOL_VERSION), ("Mcp-Method", method)]
    return fields if tool is None else [*fields, ("Mcp-Name", encode_name(tool))]


def encode_name(name: str) -> str:
    """A name as `Mcp-Name` carries it: as it is when that is safe, else `=?base64?…?=` of its UTF-8.

    Streamable HTTP, "Value Encoding": not ASCII, control characters, white space at an end, or what itself
    looks encoded.
    """
    if _PLAIN.fullmatch(name) and not _LOOKS_ENCODED.fullmatch(name):
        return name
    return f"=?base64?{base64.b64encode(name.encode('utf-8', 'surrogatepass')).decode('ascii')}?="


def answer_to(value: Any, request_id: str) -> Mapping[str, Any] | None:
    """The JSON-RPC answer to `request_id` in a parsed body: the message itself, or one of an array.

    An error without an id, or with null, is an answer too: the request's id could not be read.
    """
    for message in value if isinstance(value, list) else [value]:
        if not isinstance(message, dict):
            continue
        if "result" in message and message.get("id") == request_id:
            return message
        if "error" in message and message.get("id") in (request_id, None):
            return message
    return None


def _opening(method: str, request_id: str) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"method":"%b"' % (_text(request_id), method.encode("ascii"))


def _meta(key: str | None, version: str) -> bytes:
    meta: dict[str, Any] = {
        "io.modelcontextprotocol/protocolVersion": PROTOCOL_VERSION,
        "io.modelcontextprotocol/clientInfo": {"name": "relay-outbox", "version": version},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    if key:
        meta[KEY_FIELD] = key
    return _text(meta)


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
