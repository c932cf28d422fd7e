"""Events: validated, given a key and a time, and turned into their wire text, once, at acceptance.

No I/O, no clock, no randomness in here: the moment and the key are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BUILT_IN_KINDS: Mapping[str, str] = {
    "session-message": "/api/messages",
    "session-message-batch": "/api/messages/batch",
    "insight": "/api/insights/observations",
    "continuation-archive": "/api/continuation-archives",
    "mcp-tool-call": "/api/mcp",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a producer checks before it accepts; stands in the outbox file itself."""

    max_payload_bytes: int = 8 * 1024 * 1024
    max_nesting: int = 500
    message_body_max_chars: int | None = None
    custom_kinds: tuple[str, ...] = ()
    key_scope: str = "none"


@dataclass(frozen=True, slots=True)
class Draft:
    """An event as a producer gave it: checked, not yet accepted. `payload_text` is the payload's own JSON."""

    kind: str
    payload_text: str
    mode: str = "append"
    dedupe_key: str | None = None
    occurred_at_ms: int | None = None
    idempotency_key: str | None = None
    retry: str | None = None
    correlation: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """An event in the form in which it is stored and sent; nothing in it changes any more."""

    kind: str
    key: str
    wire_payload: bytes
    shape: str
    occurred_at_ms: int
    digest: bytes
    mode: str = "append"
    dedupe_key: str | None = None
    scoped: bool = False
    tool: str | None = None
    retry: str | None = None
    correlation: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    notes: Mapping[str, int] = field(default_factory=dict)
