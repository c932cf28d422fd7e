"""Events: validated, given a key and a time, and turned into their wire text, once, at acceptance.

No I/O, no clock, no randomness in here: the moment and the key are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from zlib import crc32

from outbox.blake2 import blake2b
from outbox.errors import UsageError
from outbox.event_checks import (
    check_agent,
    check_correlation,
    check_dedupe_key,
    check_key,
    check_kind,
    check_payload,
    check_retry,
    check_time,
    check_trace,
    unknown,
)
from outbox.json_text import dump, last_values, plain_value
from outbox.value import NamedTuple
from outbox.wire_text import Stamp, key_scope, make_wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "BUILT_IN_KINDS",
    "Accepted",
    "Draft",
    "Limits",
    "accept",
    "check_agent",
    "draft_event",
    "parse_event",
    "row_checksum",
    "uuid7",
]

BUILT_IN_KINDS: Mapping[str, str] = {
    "session-message": "/api/messages",
    "session-message-batch": "/api/messages/batch",
    "insight": "/api/insights/observations",
    "continuation-archive": "/api/continuation-archives",
    "mcp-tool-call": "/api/mcp",
}

# The fields of an event in JSON, and the names of the same in Python.
_FIELDS: Mapping[str, str] = {
    "kind": "kind",
    "payload": "payload",
    "mode": "mode",
    "dedupeKey": "dedupe_key",
    "occurredAt": "occurred_at_ms",
    "idempotencyKey": "idempotency_key",
    "retry": "retry",
    "accountId": "account_id",
    "runId": "run_id",
    "stepId": "step_id",
    "parentId": "parent_id",
    "conversationId": "conversation_id",
    "metadata": "metadata",
    "traceparent": "traceparent",
    "tracestate": "tracestate",
}
_PULL_FIELDS = frozenset(("lane", "notBefore", "priority"))


class Limits(NamedTuple):
    """What a producer checks before it accepts; stands in the outbox file itself."""

    max_payload_bytes: int = 8 * 1024 * 1024
    max_nesting: int = 500
    message_body_max_chars: int | None = None
    custom_kinds: tuple[str, ...] = ()
    key_scope: str = "none"


class Draft(NamedTuple):
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


class Accepted(NamedTuple):
    """An event in the form in which it is stored and sent; nothing in it changes any more.

    `key` is the producer's; with `scoped` the relay sees it behind the agent's hash (`wire_text.wire_key`).
    `shape` says how to read the wire payload: object, value, batch, tool or archive. With `key_given` the key
    is the producer's own and may have been used before. `replayed_from` is the seq of the dead letter it was.
    """

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
    notes: Mapping[str, int] = MappingProxyType({})
    key_given: bool = True
    replayed_from: int | None = None


def parse_event(line: str | bytes, limits: Limits) -> Draft:
    """One event, read from its JSON text; the payload keeps its own text to the letter.

    A field that is null counts as absent, except the payload; of a field given twice the last one counts.

    Raises:
        UsageError: not UTF-8, not strict JSON (with the column), or not an event that can be taken.
    """
    values = last_values(_decoded(line))
    payload = values.pop("payload", None)
    fields = {}
    for name, value in values.items():
        if value != "null":
            if name not in _FIELDS:
                raise _unknown_field(name)
            fields[_FIELDS[name]] = plain_value(value, name)
    if payload is None:
        raise UsageError("the payload is missing; for one without content give null")
    return _draft(fields.pop("kind", None), payload, limits, **fields)


def draft_event(
    kind: str,
    payload: object,
    *,
    limits: Limits,
    mode: str = "append",
    dedupe_key: str | None = None,
    occurred_at_ms: int | None = None,
    idempotency_key: str | None = None,
    retry: Mapping[str, object] | None = None,
    account_id: str | None = None,
    run_id: str | None = None,
    step_id: str | None = None,
    parent_id: str | None = None,
    conversation_id: str | None = None,
    metadata: Mapping[str, object] | None = None,
    traceparent: str | None = None,
    tracestate: str | None = None,
) -> Draft:
    """The same from Python values; times are epoch milliseconds, `retry` has the names it has in JSON.

    Raises:
        UsageError: a value that is no JSON value (the message says where), or not an event that can be taken.
    """
    return _draft(
        kind,
        dump(payload),
        limits,
        mode=mode,
        dedupe_key=dedupe_key,
        occurred_at_ms=occurred_at_ms,
        idempotency_key=idempotency_key,
        retry=retry,
        account_id=account_id,
        run_id=run_id,
        step_id=step_id,
        parent_id=parent_id,
        conversation_id=conversation_id,
        metadata=metadata,
        traceparent=traceparent,
        tracestate=tracestate,
    )


def accept(draft: Draft, *, limits: Limits, agent: str, now_ms: int, new_key: str) -> Accepted:
    """The event as it is stored and sent: with a key, a time, and its wire text. Pure.

    `new_key` and `now_ms` are used where the producer gave none. The digest covers kind and payload, so that
    the same key with another content is recognised.
    """
    key = draft.idempotency_key or new_key
    occurred_at_ms = now_ms if draft.occurred_at_ms is None else draft.occurred_at_ms
    scoped = limits.key_scope == "agent"
    scope = key_scope(agent) if scoped else ""
    payload = draft.payload_text
    text, shape, tool, notes = make_wire(
        draft.kind, payload, Stamp(occurred_at_ms, scope + key, scope, limits.message_body_max_chars)
    )
    return Accepted(
        draft.kind,
        key,
        text.encode(),
        shape,
        occurred_at_ms,
        blake2b(f"{draft.kind}\0{payload}".encode(), digest_size=16).digest(),
        draft.mode,
        draft.dedupe_key,
        scoped,
        tool,
        draft.retry,
        draft.correlation,
        draft.traceparent,
        draft.tracestate,
        notes,
        draft.idempotency_key is not None,
    )


def row_checksum(  # noqa: PLR0917 - a row is what it is, in the order of its columns
    stream: str, seq: int, kind: str, key: str, occurred_at_ms: int, wire_payload: bytes
) -> int:
    """CRC-32 of a stored event, and of where it stands: a row of another outbox or place does not match."""
    return crc32(wire_payload, crc32(f"{stream}\0{seq}\0{kind}\0{key}\0{occurred_at_ms}\0".encode()))


def uuid7(now_ms: int, random_bytes: bytes) -> str:
    """A UUID of version 7 (RFC 9562, section 5.7) from the time and ten random bytes."""
    chance = int.from_bytes(random_bytes, "big")
    number = (
        (now_ms & 0xFFFF_FFFF_FFFF) << 80
        | 0x7 << 76
        | (chance >> 62 & 0xFFF) << 64
        | 0b10 << 62
        | chance & 0x3FFF_FFFF_FFFF_FFFF
    )
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _draft(
    kind: object,
    payload: str,
    limits: Limits,
    *,
    mode: Any = "append",
    dedupe_key: Any = None,
    occurred_at_ms: Any = None,
    idempotency_key: Any = None,
    retry: Any = None,
    account_id: Any = None,
    run_id: Any = None,
    step_id: Any = None,
    parent_id: Any = None,
    conversation_id: Any = None,
    metadata: Any = None,
    traceparent: Any = None,
    tracestate: Any = None,
) -> Draft:
    if type(kind) is not str or kind not in BUILT_IN_KINDS:
        kind = check_kind(kind, (*BUILT_IN_KINDS, *limits.custom_kinds))
    if mode != "append" or dedupe_key is not None:
        dedupe_key = check_dedupe_key(mode, dedupe_key)
    if occurred_at_ms is not None:
        occurred_at_ms = check_time(occurred_at_ms)
    if idempotency_key is not None:
        idempotency_key = check_key(idempotency_key)
    if traceparent is not None or tracestate is not None:
        check_trace(traceparent, tracestate)
    ids = (account_id, run_id, step_id, parent_id, conversation_id)
    correlation = None
    if metadata is not None or ids != _NO_IDS:
        correlation = check_correlation(dict(zip(_IDS, ids, strict=True)), metadata, limits.max_nesting)
    check_payload(kind, payload, idempotency_key, limits.max_payload_bytes, limits.max_nesting)
    return Draft(
        kind,
        payload,
        mode,
        dedupe_key,
        occurred_at_ms,
        idempotency_key,
        None if retry is None else check_retry(retry),
        correlation,
        traceparent,
        tracestate,
    )


_IDS = ("accountId", "runId", "stepId", "parentId", "conversationId")
_NO_IDS = (None,) * len(_IDS)


def _unknown_field(name: str) -> UsageError:
    if name in _PULL_FIELDS:
        return UsageError(f'"{name}" belongs to pull lanes, which this outbox does not have; leave it out')
    if name == "agent":
        return UsageError(
            '"agent" is no field of an event: all events of one call are one agent\'s (--agent)'
        )
    return unknown("field", name, _FIELDS)


def _decoded(line: str | bytes) -> str:
    try:
        if isinstance(line, bytes):
            return line.decode()
        if not line.isascii():
            line.encode()
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8: byte {error.start + 1}", code="not_json") from None
    except UnicodeEncodeError as error:
        raise UsageError(
            f"not UTF-8: half a surrogate pair (column {error.start + 1})", code="not_json"
        ) from None
    return line
