"""The relay's MCP endpoint, in its decisions: protocol revision 2026-07-28, stateless, three tools.

Pure: a request is read into a call or an answer; running a tool is a function of its arguments. The effect
(the stored call) is the caller's part.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relay_client.reference import json_text
from relay_client.reference.incoming import Incoming, Invalid, is_key
from relay_client.reference.replies import JSON, Reply, json_bytes

REVISION = "2026-07-28"
IDEMPOTENCY_KEY = "relay-outbox/idempotencyKey"

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022

_VERSION_FIELD = "io.modelcontextprotocol/protocolVersion"
_CAPABILITIES_FIELD = "io.modelcontextprotocol/clientCapabilities"
_SERVER = {"name": "relay-outbox-reference", "version": "1"}
_TOOLS = [
    {
        "name": "note_add",
        "description": "Keeps its arguments; the same idempotency key keeps them once.",
        "inputSchema": {"type": "object"},
    },
    {
        "name": "echo",
        "description": "Answers with the JSON text of its arguments.",
        "inputSchema": {"type": "object"},
    },
    {
        "name": "fail",
        "description": "Runs, and says no (isError).",
        "inputSchema": {"type": "object"},
    },
]
_TOOL_NAMES = frozenset(tool["name"] for tool in _TOOLS)
_LISTINGS: Mapping[str, Mapping[str, Any]] = {
    "server/discover": {
        "supportedVersions": [REVISION],
        "capabilities": {"tools": {}},
        "serverInfo": _SERVER,
    },
    "tools/list": {"tools": _TOOLS},
}


@dataclass(frozen=True, slots=True)
class Call:
    """A `tools/call` that may run. `id_text` and `arguments` are JSON text, as written in the request."""

    id_text: str
    tool: str
    arguments: str
    key: str | None
    text: str


def read(incoming: Incoming) -> Call | Reply:
    """Return the call a request asks for, or the answer to everything else."""
    try:
        parsed = incoming.parsed()
    except json_text.Malformed as error:
        return failure("null", PARSE_ERROR, str(error), status=400)
    text, value = parsed.text, parsed.value
    if (
        not isinstance(value, dict)
        or value.get("jsonrpc") != "2.0"
        or not isinstance(value.get("method"), str)
    ):
        return failure("null", INVALID_REQUEST, "One JSON-RPC 2.0 request is expected.", status=400)
    parts = json_text.members(text)
    id_text = parts.get("id", "")
    if not id_text:
        return Reply(202)
    if isinstance(value["id"], bool) or not isinstance(value["id"], int | str):
        return failure("null", INVALID_REQUEST, "id must be a string or an integer.", status=400)
    params = value.get("params", {})
    if not isinstance(params, dict):
        return failure(id_text, INVALID_PARAMS, "params must be an object.", status=400)
    wrong = _check_metadata(incoming, value["method"], params, id_text)
    if wrong is not None:
        return wrong
    if value["method"] in _LISTINGS:
        listing = {**_LISTINGS[value["method"]], "ttlMs": 300_000, "cacheScope": "public"}
        return result(id_text, _complete(listing))
    if value["method"] != "tools/call":
        return failure(id_text, METHOD_NOT_FOUND, f"No method {value['method']!r} here.", status=404)
    return _read_call(incoming, params, json_text.members(parts["params"]), id_text=id_text, text=text)


def run(call: Call, n: int) -> str:
    """Return the JSON text of a tool's result; `n` is the number under which the call is kept."""
    said = {
        "note_add": f"note {n} kept: {call.arguments}",
        "echo": call.arguments,
        "fail": "This tool always fails.",
    }[call.tool]
    return _complete({"content": [{"type": "text", "text": said}], "isError": call.tool == "fail"})


def result(id_text: str, result_text: str) -> Reply:
    """Return a JSON-RPC result."""
    return Reply(200, f'{{"jsonrpc":"2.0","id":{id_text},"result":{result_text}}}'.encode(), JSON)


def failure(id_text: str, code: int, message: str, *, status: int = 200, data: Any = None) -> Reply:
    """Return a JSON-RPC error; errors of the transport come with an HTTP status of their own."""
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    head = f'{{"jsonrpc":"2.0","id":{id_text},"error":'.encode()
    return Reply(status, head + json_bytes(error) + b"}", JSON)


def _complete(members: Mapping[str, Any]) -> str:
    meta = {"io.modelcontextprotocol/serverInfo": _SERVER}
    return json.dumps({"resultType": "complete", **members, "_meta": meta})


def _check_metadata(incoming: Incoming, method: str, params: Mapping[str, Any], id_text: str) -> Reply | None:
    """Check what the revision wants on every request (streamable HTTP, "Server Validation")."""
    headers = incoming.headers
    version = headers.get("mcp-protocol-version")
    if (version is None and method == "initialize") or version not in (None, REVISION):
        data = {"supported": [REVISION], "requested": version or "a session"}
        message = f"This relay speaks MCP {REVISION} only, without sessions."
        return failure(id_text, UNSUPPORTED_VERSION, message, status=400, data=data)
    meta = params.get("_meta")
    if not isinstance(meta, dict) or _VERSION_FIELD not in meta:
        return failure(id_text, INVALID_PARAMS, f"_meta must name {_VERSION_FIELD}.", status=400)
    if not isinstance(meta.get(_CAPABILITIES_FIELD), dict):
        return failure(id_text, INVALID_PARAMS, f"_meta must hold {_CAPABILITIES_FIELD}.", status=400)
    wanted = {"MCP-Protocol-Version": meta[_VERSION_FIELD], "Mcp-Method": method}
    if method == "tools/call":
        wanted["Mcp-Name"] = params.get("name")
    for name, value in wanted.items():
        given = headers.get(name.lower())
        if given is None or (_decoded(given) if name == "Mcp-Name" else given) != value:
            message = f"Header mismatch: {name} must be there and agree with the body."
            return failure(id_text, HEADER_MISMATCH, message, status=400)
    return None


def _decoded(header: str) -> str | None:
    """Return a header's value, also of the form `=?base64?…?=` (Value Encoding); None for a broken one."""
    if not (header.startswith("=?base64?") and header.endswith("?=")):
        return header
    try:
        return base64.b64decode(header[9:-2], validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None


def _read_call(
    incoming: Incoming, params: Mapping[str, Any], parts: Mapping[str, str], *, id_text: str, text: str
) -> Call | Reply:
    tool = params.get("name")
    if tool not in _TOOL_NAMES:
        return failure(id_text, INVALID_PARAMS, f"Unknown tool: {tool}")
    if not isinstance(params.get("arguments", {}), dict):
        return failure(id_text, INVALID_PARAMS, "arguments must be an object.")
    try:
        header_key = incoming.header_key()
    except Invalid as error:
        return failure(id_text, INVALID_PARAMS, str(error))
    key = params["_meta"].get(IDEMPOTENCY_KEY, header_key)
    if key is not None and (not is_key(key) or header_key not in (None, key)):
        return failure(id_text, INVALID_PARAMS, f"{IDEMPOTENCY_KEY} and Idempotency-Key must agree.")
    return Call(id_text, str(tool), parts.get("arguments", "{}"), key, text)
