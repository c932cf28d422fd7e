"""The values that pass between the wire and whoever sends: what came back, and what it means.

No I/O, and no judgement of events: whether an answer costs an event anything is the caller's decision.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class Sort(enum.StrEnum):
    """What an answer means: one member for each row of the outcome table (docs/relay-contract.md)."""

    ACCEPTED = "accepted"  # 2xx, JSON without a top-level `error`, or empty
    DUPLICATE = "duplicate"  # 409: this key is stored already
    TOOL_ERROR = "tool_error"  # MCP `isError`: the tool ran and said no
    ITEMS = "items"  # a batch answered message by message: see `Reading.items`
    UNCLEAR_BATCH = "unclear_batch"  # wrong number of results, or no readable body: send singly
    REFUSED = "rejected"  # the relay clearly does not want this event
    TOO_LARGE = "too_large"  # 413
    CONFLICT = "conflict"  # 409 for the whole of a batch: split
    IN_PROGRESS = "in_progress"  # 409: the first try is still being worked on
    UNAUTHORIZED = "unauthorized"  # 401
    FORBIDDEN = "forbidden"  # 403
    NO_ENDPOINT = "no_endpoint"  # 404, 405, 501 of a path
    BUSY = "busy"  # 408, 421, 423, 425, 429, 503, or anything with a Retry-After
    GATEWAY = "gateway"  # 502, 504
    FAILED = "failed"  # 500, other 5xx, other 4xx
    NOT_A_RELAY = "not_a_relay"  # 2xx with something that is no relay's answer
    REDIRECTED = "redirected"  # 3xx
    UNREACHABLE = "unreachable"  # nothing was sent: refused, DNS, TLS, no usable token
    LOST = "lost"  # sent, and no whole answer came


class Failure(enum.StrEnum):
    """Why there is no answer."""

    UNREACHABLE = "unreachable"  # not one byte of the request left
    LOST = "lost"  # bytes may have left
    STOPPED = "stopped"  # cut off by us: `abort()` or the caller's deadline; says nothing about the relay


class Answer(NamedTuple):
    """What came back for one request.

    `status` is None when no whole answer came; then `failure` says why. `headers` have lower-case names, a
    repeated one joined by ", ". `body` is cut at the contract's limits (64 KiB of an error, 8 MiB of a 2xx);
    `cut` says so.

    Of MCP only: `request_id` is the JSON-RPC id that was asked with. `is_preparation` says that this answers
    a request before the call, and that the call itself did not run; `era_holds` that the endpoint was asked
    again after this answer and still speaks this era, so that the answer is about the call.
    """

    status: int | None
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""
    cut: bool = False
    failure: Failure | None = None
    detail: str = ""
    elapsed_ms: int = 0
    sent: bool = True
    request_id: str = ""
    is_preparation: bool = False
    era_holds: bool = False


class Reading(NamedTuple):
    """What one answer means.

    `code` is the relay's own error code, "" without one. `detail` is one line without control characters, at
    most 300 characters. `excerpt` is the start of the body as text, at most 2 KiB, for the dead letter.
    `retry_after_ms` is None when the answer asked for no (readable) wait. `not_run` says that a tool call
    certainly had no effect, whatever else is unknown.
    """

    sort: Sort
    status: int | None = None
    code: str = ""
    detail: str = ""
    excerpt: str = ""
    retry_after_ms: int | None = None
    items: tuple[Reading, ...] = ()
    result: str | None = None  # the JSON text of an MCP result, at most 16 KiB
    not_run: bool = False
    generation: int | None = None  # a continuation archive's generation


class Origin(NamedTuple):
    """Where a request comes from; becomes the `Outbox-…` and trace headers."""

    agent: str
    stream: str
    seq: int
    attempt: int
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What `/api/spec` says under `x-outbox`; the defaults are those of the contract."""

    batch_max_items: int = 100
    batch_max_bytes: int = 1_048_576
    idempotency_window_s: int | None = None
    mcp_idempotency: bool = False
