"""The texts of the MCP calls of both eras, and the answer among messages. Pure.

Revision 2026-07-28 is stateless; those before it have sessions. A stored call is never taken apart: the
request is joined around its text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROTOCOL_VERSION = "2026-07-28"
SESSION_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # newest first
KEY_FIELD = "relay-outbox/idempotencyKey"
ACCEPT = "application/json, text/event-stream"

_PLAIN = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_LOOKS_ENCODED = re.compile(r"=\?base64\?.*\?=")
_SESSION_ID = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Session:
    """What `initialize` agreed on: a revision, and the session's id where the server gave one."""

    version: str
    id: str | None = None


def tool_call_body(params: bytes, *, request_id: str, key: str | None, version: str) -> bytes:
    """The request around `params`, the stored text `{"name": …, "arguments": …}`, kept byte for byte.

    Raises:
        ValueError: `params` is no text of a JSON object with a member in it.
    """
    meta = _meta(key, version)
    return b'%b,"params":%b,"_meta":%b}}' % (_opening("tools/call", request_id), _inside(params), meta)


def tools_list_body(*, request_id: str, version: str, cursor: str | None = None) -> bytes:
    """A `tools/list` request; `cursor` asks for a further page."""
    page = b"" if cursor is None else b'"cursor":%b,' % _text(cursor)
    meta = _meta(None, version)
    return b'%b,"params":{%b"_meta":%b}}' % (_opening("tools/list", request_id), page, meta)


def initialize_body(*, request_id: str, version: str) -> bytes:
    """The request that opens a session; offers the newest revision that has sessions."""
    params = {
        "protocolVersion": SESSION_VERSIONS[0],
        "capabilities": {},
        "clientInfo": {"name": "relay-outbox", "version": version},
    }
    return b'%b,"params":%b}' % (_opening("initialize", request_id), _text(params))


def initialized_body() -> bytes:
    """The notification that ends the opening of a session."""
    return b'{"jsonrpc":"2.0","method":"notifications/initialized"}'


def session_call_body(params: bytes, *, request_id: str, key: str | None) -> bytes:
    """As `tool_call_body`, for a session: it knows who we are already.

    Raises:
        ValueError: as there.
    """
    meta = _text({KEY_FIELD: key} if key else {})
    return b'%b,"params":%b,"_meta":%b}}' % (_opening("tools/call", request_id), _inside(params), meta)


def request_fields(method: str, tool: str | None = None) -> list[tuple[str, str]]:
    """The header fields of a request; `Mcp-Name` for a tool."""
    fields = [("Accept", ACCEPT), ("MCP-Protocol-Version", PROTOCOL_VERSION), ("Mcp-Method", method)]
    return fields if tool is None else [*fields, ("Mcp-Name", encode_name(tool))]


def session_fields(session: Session | None) -> list[tuple[str, str]]:
    """The header fields of a request in a session; None: of the one that opens it."""
    fields = [("Accept", ACCEPT)]
    if session is None:
        return fields
    fields.append(("MCP-Protocol-Version", session.version))
    return fields if session.id is None else [*fields, ("Mcp-Session-Id", session.id)]


def opened_session(message: Mapping[str, Any] | None, session_id: str | None) -> Session | None:
    """The session that the answer to `initialize` opens; None when it opens none that can be used here."""
    result = message.get("result") if message else None
    version = result.get("protocolVersion") if isinstance(result, dict) else None
    if version not in SESSION_VERSIONS or (session_id is not None and not _SESSION_ID.fullmatch(session_id)):
        return None
    return Session(version, session_id)


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


def _inside(params: bytes) -> bytes:
    """The text of an object without its last brace, so that a member can follow."""
    text = params.strip()
    if not (text.startswith(b"{") and text.endswith(b"}") and text[1:-1].strip()):
        raise ValueError("the params of a tool call are a JSON object with a name")
    return text[:-1]


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
