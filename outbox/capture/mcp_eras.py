"""The two eras of MCP, and how a message of the one is said in the other. Pure.

`sessions`: `initialize` once, then requests under an `Mcp-Session-Id` (2025-03-26 to 2025-11-25).
`stateless`: no handshake, version and capabilities in each request's `_meta` (2026-07-28).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outbox.capture.mcp_message import Message, plain, within
from outbox.json_text import last_values, quoted, text_value, with_members
from relay_client.mcp import ACCEPT, PROTOCOL_VERSION, SESSION_VERSIONS, encode_name

LATEST_SESSION_VERSION = SESSION_VERSIONS[0]

VERSION_FIELD = "io.modelcontextprotocol/protocolVersion"
_INFO_FIELD = "io.modelcontextprotocol/clientInfo"
_CAPABILITIES_FIELD = "io.modelcontextprotocol/clientCapabilities"
_SERVER_FIELD = "io.modelcontextprotocol/serverInfo"

# The parameter of a request that travels as `Mcp-Name` too (Streamable HTTP, "Standard Headers").
_NAMED_BY = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_CACHEABLE = frozenset(
    ("tools/list", "prompts/list", "resources/list", "resources/templates/list", "resources/read")
)
_STAYS_FRESH_MS = 0
_IN_A_FIELD = re.compile(r"[\x21-\x7e]+")

Fields = list[tuple[str, str]]


class Era(enum.StrEnum):
    """How one side speaks."""

    SESSIONS = "sessions"
    STATELESS = "stateless"


@dataclass(frozen=True, slots=True)
class Client:
    """Who the client said it is; the texts are JSON."""

    version: str = LATEST_SESSION_VERSION
    info: str = '{"name":"relay-outbox","version":"0"}'
    capabilities: str = "{}"

    def initialize_params(self) -> str:
        """The params of `initialize`."""
        return (
            f'{{"protocolVersion":{quoted(self.version)},"capabilities":{self.capabilities},'
            f'"clientInfo":{self.info}}}'
        )

    def meta(self) -> dict[str, str]:
        """What the stateless era wants in each request's `_meta`."""
        return {
            VERSION_FIELD: quoted(PROTOCOL_VERSION),
            _INFO_FIELD: self.info,
            _CAPABILITIES_FIELD: self.capabilities,
        }


@dataclass(frozen=True, slots=True)
class Hello:
    """What a relay said of itself: the result of `server/discover` or of `initialize`, as JSON text."""

    era: Era
    result: str

    @property
    def version(self) -> str:
        """The revision that is spoken with it."""
        if self.era is Era.STATELESS:
            return PROTOCOL_VERSION
        said = text_value(within(self.result, "protocolVersion") or "null") or ""
        return said if _IN_A_FIELD.fullmatch(said) else LATEST_SESSION_VERSION


def era_of(request: Message) -> Era:
    """The era in which a client's request is written."""
    return Era.STATELESS if request.member("_meta", VERSION_FIELD) is not None else Era.SESSIONS


def client_of(initialize: Message) -> Client:
    """Who a client is, by its `initialize`."""
    usual = Client()
    return Client(
        initialize.string("protocolVersion") or usual.version,
        initialize.member("clientInfo") or usual.info,
        initialize.member("capabilities") or usual.capabilities,
    )


def client_of_meta(request: Message) -> Client:
    """Who a client of the stateless era is, for a relay that wants to be initialized."""
    usual = Client()
    return Client(
        usual.version, request.member("_meta", _INFO_FIELD) or usual.info, usual.capabilities
    )  # what it can do is said in words of the other era: nothing is promised in its name


def initialize_result(hello: Hello | None, asked_version: str, own_info: Mapping[str, str]) -> str:
    """What `initialize` is answered with: the relay's own result, or what it comes to in the era of sessions.

    Without a relay (`None`) the proxy stands for itself.
    """
    version = asked_version if asked_version in SESSION_VERSIONS else LATEST_SESSION_VERSION
    if hello is not None and hello.era is Era.SESSIONS:
        return with_tools(hello.result)
    found = last_values(hello.result) if hello is not None else {}
    info = found.get("serverInfo") or within(hello.result if hello else "{}", "_meta", _SERVER_FIELD)
    parts = [
        f'"protocolVersion":{quoted(version)}',
        f'"capabilities":{_capabilities_of_sessions(found.get("capabilities"))}',
        f'"serverInfo":{info or plain(dict(own_info))}',
    ]
    if text_value(found.get("instructions", "null")):
        parts.append(f'"instructions":{found["instructions"]}')
    return f"{{{','.join(parts)}}}"


def discover_result(own_info: Mapping[str, str]) -> str:
    """What `server/discover` is answered with while nothing is known of the relay."""
    return plain(
        {
            "resultType": "complete",
            "supportedVersions": [PROTOCOL_VERSION],
            "capabilities": {"tools": {}},
            "serverInfo": dict(own_info),
            "ttlMs": _STAYS_FRESH_MS,
            "cacheScope": "private",
            "_meta": {_SERVER_FIELD: dict(own_info)},
        }
    )


def with_tools(result: str) -> str:
    """A result of `initialize` or `server/discover` that promises tools: the proxy has some of its own."""
    capabilities = within(result, "capabilities")
    if within(result, "capabilities", "tools") is not None:
        return result
    return with_members(result, {"capabilities": with_members(capabilities or "{}", {"tools": "{}"})})


def speaks_stateless(discovered: str) -> bool:
    """Whether a result of `server/discover` names the revision that is spoken here."""
    return quoted(PROTOCOL_VERSION) in (within(discovered, "supportedVersions") or "")


def result_for(era: Era, method: str, result: str) -> str:
    """A relay's result as a client of this era reads it.

    The stateless era wants `resultType` everywhere, and `ttlMs` and `cacheScope` on what may be cached.
    """
    if era is Era.SESSIONS or not result.startswith("{"):
        return result
    wanted = {"resultType": '"complete"'}
    if method in _CACHEABLE:
        wanted |= {"ttlMs": str(_STAYS_FRESH_MS), "cacheScope": '"private"'}
    there = last_values(result)
    missing: dict[str, str | None] = {name: text for name, text in wanted.items() if name not in there}
    return with_members(result, missing) if missing else result


def wants_input(result: str) -> bool:
    """Whether a result of the stateless era asks the client for something."""
    return within(result, "resultType") == '"input_required"'


def stateless_fields(request: Message) -> Fields:
    """The header fields of a stateless request, which repeat what stands in it."""
    version = request.string("_meta", VERSION_FIELD) or PROTOCOL_VERSION
    fields = [("Accept", ACCEPT), ("MCP-Protocol-Version", version), ("Mcp-Method", request.method)]
    named_by = _NAMED_BY.get(request.method)
    if named_by is not None:
        fields.append(("Mcp-Name", encode_name(request.string(named_by))))
    return fields


def session_fields(version: str, session_id: str | None) -> Fields:
    """The header fields of a request within a session."""
    fields = [("Accept", ACCEPT), ("MCP-Protocol-Version", version)]
    return fields if session_id is None else [*fields, ("Mcp-Session-Id", session_id)]


def _capabilities_of_sessions(text: str | None) -> str:
    """Without what has other methods there: subscriptions, logging. Tools there are in any case: ours.

    Their list changes when the relay comes back and has others than were remembered.
    """
    found = last_values(text) if text and text.startswith("{") else {}
    kept = [name for name in ("prompts", "resources", "completions") if name in found]
    said: dict[str, dict[str, bool]] = {name: {} for name in kept}
    return plain({"tools": {"listChanged": True}} | said)
