"""The rules that producers follow, as they stand in the outbox file: limits of events, bounds."""

from __future__ import annotations

import json

from outbox.bounds import Bounds
from outbox.event import Limits


def encode_rules(limits: Limits, bounds: Bounds) -> str:
    """The rules as JSON text."""
    return json.dumps(
        {
            "maxPayloadBytes": limits.max_payload_bytes,
            "maxNesting": limits.max_nesting,
            "messageBodyMaxChars": limits.message_body_max_chars,
            "customKinds": list(limits.custom_kinds),
            "keyScope": limits.key_scope,
            "bounds": bounds.to_json(),
        },
        separators=(",", ":"),
    )


def decode_rules(text: str) -> tuple[Limits, Bounds]:
    """The opposite of `encode_rules`.

    Another release may have written them: unknown names are passed over; what is missing, or no rule, has its
    default. A text that cannot be read at all counts as no rules; the daemon writes them anew when it starts.
    """
    try:
        rules = json.loads(text)
    except (ValueError, RecursionError):
        rules = None
    if not isinstance(rules, dict):
        return Limits(), Bounds()
    bounds, kinds, default = rules.get("bounds"), rules.get("customKinds"), Limits()
    kinds = kinds if isinstance(kinds, list) else ()
    limits = Limits(
        max_payload_bytes=_size(rules.get("maxPayloadBytes"), default.max_payload_bytes),
        max_nesting=_size(rules.get("maxNesting"), default.max_nesting),
        message_body_max_chars=_size(rules.get("messageBodyMaxChars"), 0) or None,
        custom_kinds=tuple(kind for kind in kinds if isinstance(kind, str)),
        key_scope=_text(rules.get("keyScope"), default.key_scope),
    )
    return limits, Bounds.from_json(bounds if isinstance(bounds, dict) else {})


def _size(value: object, default: int) -> int:
    return value if type(value) is int and value > 0 else default


def _text(value: object, default: str) -> str:
    return value if isinstance(value, str) else default
