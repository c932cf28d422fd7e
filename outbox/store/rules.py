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

    Another release may have written them: unknown names are passed over, missing ones have their default. A
    text that cannot be read at all counts as no rules; the daemon writes them anew when it starts.
    """
    try:
        rules = json.loads(text)
        default = Limits()
        limits = Limits(
            max_payload_bytes=rules.get("maxPayloadBytes", default.max_payload_bytes),
            max_nesting=rules.get("maxNesting", default.max_nesting),
            message_body_max_chars=rules.get("messageBodyMaxChars"),
            custom_kinds=tuple(rules.get("customKinds", ())),
            key_scope=rules.get("keyScope", default.key_scope),
        )
        return limits, Bounds.from_json(rules.get("bounds", {}))
    except (ValueError, TypeError, AttributeError):
        return Limits(), Bounds()
