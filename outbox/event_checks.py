"""What an event may be: one check for each part of it.

A check returns the value in its stored form or raises UsageError; nothing is repaired silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from outbox.errors import UsageError
from outbox.json_text import deeper_than, dump, elements, last_values, may_name, plain_value, text_value
from outbox.printable import quoted
from outbox.wire_text import ARCHIVE_BYTES, KEY, QUOTED_NAMES, TIME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TIME_MS = 2**63 - 1
MAX_NAME_BYTES = 512
MAX_KEY_CHARS = 200
MAX_ARCHIVE_BYTES = 8 * ARCHIVE_BYTES
MAX_CORRELATION_BYTES = 64 * 1024
MAX_BATCH_MESSAGES = 10_000
MAX_ATTEMPTS = 1_000
MAX_SHOWN_CHARS = 80
MAX_DELAY_MS = 7 * 24 * 60 * 60 * 1000

# Patterns are texts here: compiled when first used, since most events need none of them.
_KEY = r"[\x21-\x7e]{1,200}"
_INTEGER = r"-?[0-9]{1,19}"
# W3C Trace Context, version 00: neither id may be all zeros.
_TRACEPARENT = r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACESTATE = r"[\x20-\x7e]{1,512}"


def check_kind(kind: object, known: Collection[str]) -> str:
    """A kind of the contract or of the configuration; raises UsageError with the nearest otherwise."""
    from outbox.gap import GAP_KIND  # noqa: PLC0415 - for kinds of the configuration; the usual ones pass before

    if isinstance(kind, str) and kind in known and kind != GAP_KIND:
        return _exact(kind)
    if kind is None:
        raise UsageError("the kind is missing")
    if not isinstance(kind, str) or not kind:
        raise UsageError(f"the kind is a text, not {_shown(kind)}")
    if kind == GAP_KIND:
        raise UsageError(f'kind "{GAP_KIND}" is made by the outbox itself')
    raise unknown("kind", kind, known, code="unknown_kind")


def check_agent(agent: object) -> str:
    """The agent's id, exactly as given: 1 to 512 bytes of UTF-8 without NUL. Raises UsageError otherwise."""
    return _short_text(agent, "agent id")


def check_dedupe_key(mode: object, dedupe_key: object) -> str | None:
    """The dedupe key, which coalesce needs and append must not have. Raises UsageError otherwise."""
    if mode == "append":
        if dedupe_key is not None:
            raise UsageError('a dedupeKey belongs to mode "coalesce"')
        return None
    if mode != "coalesce":
        raise UsageError(f"mode {_shown(mode)} is not known; it is append or coalesce")
    if dedupe_key is None:
        raise UsageError('mode "coalesce" needs a dedupeKey')
    return _short_text(dedupe_key, "dedupeKey")


def check_key(key: object) -> str:
    """An idempotency key: 1 to 200 visible ASCII characters, since it becomes a header; or UsageError."""
    if isinstance(key, str) and re.fullmatch(_KEY, key):
        return _exact(key)
    if key == "":
        raise UsageError("idempotencyKey is empty; leave it out and one is made")
    raise UsageError(f"idempotencyKey {_shown(key)} is not 1 to {MAX_KEY_CHARS} visible ASCII characters")


def check_time(at_ms: object) -> int:
    """An event's time: an integer of epoch milliseconds, 0 to 2^63-1. Raises UsageError otherwise."""
    if isinstance(at_ms, int) and not isinstance(at_ms, bool) and 0 <= at_ms <= MAX_TIME_MS:
        return int(at_ms)
    raise UsageError(f"occurredAt {_shown(at_ms)} is no whole number of epoch milliseconds, 0 to 2^63-1")


def check_trace(traceparent: object, tracestate: object) -> None:
    """W3C Trace Context: `traceparent` of version 00, and a `tracestate` only beside it; or UsageError."""
    if traceparent is None:
        raise UsageError("a tracestate needs a traceparent")
    if not isinstance(traceparent, str) or not re.fullmatch(_TRACEPARENT, traceparent):
        raise UsageError(
            f"traceparent {_shown(traceparent)} is not 00-TRACEID-PARENTID-FLAGS (W3C Trace Context)"
        )
    if tracestate is not None and not (isinstance(tracestate, str) and re.fullmatch(_TRACESTATE, tracestate)):
        raise UsageError(f"tracestate {_shown(tracestate)} is not 1 to 512 printable ASCII characters")


def check_retry(retry: object) -> str | None:
    """A retry rule as compact JSON, None for an empty one. Raises UsageError for what is no rule.

    `jitter` is the part of a wait that chance may take away, 0 to 1; true is 0.5, false is 0.
    """
    if not isinstance(retry, Mapping):
        raise UsageError(f"retry is an object, not {_shown(retry)}")
    rule = {name: _retry_part(name, value) for name, value in retry.items() if value is not None}
    if "initialDelayMs" in rule and rule.get("maxDelayMs", MAX_DELAY_MS) < rule["initialDelayMs"]:
        raise UsageError("retry: maxDelayMs is less than initialDelayMs")
    return dump(rule) if rule else None


def check_correlation(ids: Mapping[str, object], metadata: object, max_nesting: int) -> str | None:
    """What an event belongs to, as one compact JSON object; None when that is nothing.

    Raises:
        UsageError: an id is no text, metadata is no object of JSON values, or all of it is more than 64 KiB.
    """
    given: dict[str, object] = {name: value for name, value in ids.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} is a text, not {_shown(value)}")
    if metadata is not None:
        if not isinstance(metadata, Mapping):
            raise UsageError(f"metadata is an object, not {_shown(metadata)}")
        given["metadata"] = dict(metadata)
    text = dump(given, "correlation")
    if deeper_than(text, max_nesting + 1):
        raise UsageError(f"metadata is nested more than {max_nesting} levels deep", code="too_deep")
    _check_size(text, MAX_CORRELATION_BYTES, "metadata with the ids of the event")
    return text if given else None


def check_payload(kind: str, payload: str, key: str | None, max_bytes: int, max_nesting: int) -> None:
    """Size, depth, and what this kind asks of its payload; raises UsageError."""
    limit = MAX_ARCHIVE_BYTES if kind == "continuation-archive" else max_bytes
    if len(payload) * 4 > limit:
        _check_size(payload, limit, "the payload")
    # The payload's own brackets are not counted: 500 levels inside it are what the limit allows.
    if deeper_than(payload, max_nesting + 1):
        raise UsageError(f"the payload is nested more than {max_nesting} levels deep", code="too_deep")
    if kind == "session-message-batch":
        _check_batch(payload, key)
    elif kind == "mcp-tool-call":
        _check_tool_call(payload)
    elif kind == "continuation-archive":
        _check_archive(payload, max_bytes)


def unknown(what: str, name: str, known: Collection[str], code: str = "unknown_field") -> UsageError:
    """The refusal of a name that is not known, with the nearest that is."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a refusal needs it, every hook pays for it

    near = get_close_matches(name, known, 1)
    hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(sorted(known))}"
    return UsageError(f"{what} {_quoted(name)} is not known; {hint}", code=code)


def _check_size(text: str, limit: int, what: str) -> None:
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise UsageError(
            f"{what} is {size:,} bytes of JSON, more than the {limit:,} allowed", code="too_large"
        )


def _check_batch(payload: str, key: str | None) -> None:
    array = payload
    if payload.startswith("{"):
        array = last_values(payload).get("messages", "null")
    if not array.startswith("["):
        raise UsageError('a batch is {"messages": [...]} or an array of messages')
    messages = elements(array)
    if not 1 <= len(messages) <= MAX_BATCH_MESSAGES:
        raise UsageError(f"a batch holds 1 to {MAX_BATCH_MESSAGES:,} messages, not {len(messages):,}")
    if not may_name(array, *QUOTED_NAMES):
        return
    owners: dict[str, int] = {}
    for index, message in enumerate(messages):
        own = _message_key(message, index) or (key and f"{key}:{index}")
        if own and owners.setdefault(own, index) != index:
            raise UsageError(f"messages {owners[own]} and {index} of the batch have the same idempotencyKey")


def _message_key(message: str, index: int) -> str | None:
    own = last_values(message) if message.startswith("{") else {}
    try:
        if (at := own.get(TIME, "null")) != "null":
            check_time(plain_value(at, TIME))
        key = own.get(KEY, "null")
        return None if key == "null" else check_key(plain_value(key, KEY))
    except UsageError as error:
        raise UsageError(f"message {index} of the batch: {error}") from None


def _check_tool_call(payload: str) -> None:
    if not payload.startswith("{"):
        raise UsageError('a tool call is {"tool": NAME, "arguments": {...}}')
    call = last_values(payload)
    if other := call.keys() - {"tool", "arguments"}:
        raise unknown("field", min(other), ("tool", "arguments"))
    tool = text_value(call.get("tool", "null"))
    if not tool:
        raise UsageError('a tool call needs "tool", the name of the tool, as a text')
    _short_text(tool, "tool")
    if call.get("arguments", "null")[0] not in "{n":
        raise UsageError('"arguments" of a tool call is an object')


def _check_archive(payload: str, max_bytes: int) -> None:
    archive = last_values(payload) if payload.startswith("{") else {}
    text = archive.get("text", "null")
    if not text.startswith('"') or archive.get("segment", "null") == "null":
        raise UsageError('a continuation archive needs "agentId", "segment" and "text", a text')
    if not text_value(archive.get("agentId", "null")):
        raise UsageError('"agentId" of a continuation archive is a text')
    generation = archive.get("generation", "null")
    if generation != "null" and not re.fullmatch(_INTEGER, generation):
        raise UsageError(f'"generation" of a continuation archive is an integer, not {generation[:40]}')
    for name, value in archive.items():
        if name != "text":
            _check_size(value, max_bytes, _quoted(name))


def _retry_part(name: object, value: object) -> Any:
    check = _RETRY.get(name) if isinstance(name, str) else None
    if check is None:
        raise unknown("retry field", str(name), _RETRY)
    part = check(value)
    if part is None:
        raise UsageError(f"retry: {name} cannot be {_shown(value)}")
    return part


def _whole(first: int, last: int) -> Callable[[object], int | None]:
    def check(value: object) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and first <= value <= last:
            return value
        return None

    return check


def _backoff(value: object) -> str | None:
    return value if isinstance(value, str) and value in ("fixed", "exponential") else None


def _jitter(value: object) -> float | None:
    if isinstance(value, bool):
        return 0.5 if value else 0
    return value if isinstance(value, int | float) and 0 <= value <= 1 else None


_RETRY: Mapping[str, Callable[[object], Any]] = {
    "maxAttempts": _whole(1, MAX_ATTEMPTS),
    "backoff": _backoff,
    "initialDelayMs": _whole(0, MAX_DELAY_MS),
    "maxDelayMs": _whole(0, MAX_DELAY_MS),
    "jitter": _jitter,
}


def _short_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"the {name} is a text, not {_shown(value)}")
    if not value:
        raise UsageError(f"the {name} is empty")
    if "\0" in value:
        raise UsageError(f"the {name} {_quoted(value)} has a NUL in it")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise UsageError(f"the {name} {_quoted(value)} has half a surrogate pair in it") from None
    if size > MAX_NAME_BYTES:
        raise UsageError(f"the {name} {_quoted(value)} is {size:,} bytes, more than {MAX_NAME_BYTES}")
    return _exact(value)


def _exact(text: str) -> str:
    """A member of a `class Kind(str, Enum)` prints as its name: the text alone is what is meant."""
    return str.__str__(text)


def _quoted(text: str) -> str:
    return quoted(text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value) if abs(value) < 2**128 else "a number beyond 128 bits"
    return f"a {type(value).__name__}"
