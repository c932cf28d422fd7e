"""The header fields that every delivery carries (docs/relay-contract.md). Pure: span ids are arguments."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from relay_client.reading import Origin

_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
_AGENT_SAFE = _VISIBLE.replace("%", "")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SPAN_ID_BYTES = 8


def encode_agent(agent: str) -> str:
    """An agent's id as `Outbox-Agent` has it: UTF-8, percent-encoded outside visible ASCII and for "%"."""
    return quote(agent, safe=_AGENT_SAFE)


def decode_agent(value: str) -> str:
    """The agent's id in an `Outbox-Agent` field.

    Raises:
        ValueError: what was encoded is no UTF-8.
    """
    return unquote(value, errors="strict")


def encode_key(key: str, form: str) -> str | None:
    """The value of `Idempotency-Key`: for "quoted" a structured-field string (RFC 9651, 3.3.3).

    None for "off", and for a key that no header can carry; the body has it in any case.
    """
    if form == "off" or not _PRINTABLE.fullmatch(key):
        return None
    if form == "bare":
        return key
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def next_traceparent(traceparent: str, span_id: bytes) -> str | None:
    """The same trace with `span_id` as its newest span (W3C Trace Context); None when it cannot be read."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, parent_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    if version != "00":
        flags = f"{int(flags, 16) & 1:02x}"  # of a later version, only what version 00 knows may go on
    return f"00-{trace_id}-{span_id[:_SPAN_ID_BYTES].hex()}-{flags}"


def origin_fields(origin: Origin, span_id: bytes) -> list[tuple[str, str]]:
    """The `Outbox-…` and trace fields of one attempt."""
    fields = [
        ("Outbox-Agent", encode_agent(origin.agent)),
        ("Outbox-Stream", origin.stream),
        ("Outbox-Seq", str(origin.seq)),
        ("Outbox-Attempt", str(origin.attempt)),
    ]
    traceparent = next_traceparent(origin.traceparent, span_id) if origin.traceparent else None
    if traceparent:
        fields.append(("traceparent", traceparent))
        if origin.tracestate and _PRINTABLE.fullmatch(origin.tracestate):
            fields.append(("tracestate", origin.tracestate))
    return fields
