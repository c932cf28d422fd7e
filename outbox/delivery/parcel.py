"""What goes out for a claim: one request, made by joining stored texts. Pure.

Which path a kind goes to, which events must not be repeated, and how a request of several parts goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox.store.row import Row
from outbox.wire_text import wire_key
from relay_client import Origin


class Form(enum.Enum):
    """How the answer is to be read."""

    SINGLE = enum.auto()
    GROUP = enum.auto()
    ARCHIVE = enum.auto()
    TOOL = enum.auto()


class Parcel(NamedTuple):
    """One request. `events` is the number of messages in it; `key` is set when it is one event's."""

    form: Form
    path: str
    body: bytes
    key: str | None
    origin: Origin
    events: int = 1
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Routes:
    """Where each kind goes, and which tool calls may be repeated."""

    messages: str = "/api/messages"
    batch: str = "/api/messages/batch"
    mcp: str = "/api/mcp"
    kinds: Mapping[str, str] = field(default_factory=dict)  # the path of each kind that is known
    mcp_idempotent: bool = False
    safe_to_repeat: frozenset[str] = frozenset()

    def path_of(self, row: Row) -> str | None:
        """The path of an event's own kind; None for a kind that this release does not know."""
        return self.kinds.get(row.kind)

    def is_unsafe(self, row: Row) -> bool:
        """Whether the event must not be repeated when its outcome is unknown."""
        return row.shape == "tool" and not (
            self.mcp_idempotent or str(row.extra.get("tool", "")) in self.safe_to_repeat
        )


def origin_of(agent: str, stream: str, row: Row, *, several: list[Row] | None = None) -> Origin:
    """Where a request comes from. The trace goes along when all its events share it."""
    traces = {trace_id(other.extra.get("traceparent")) for other in several or [row]}
    same = len(traces) == 1
    return Origin(
        agent=agent,
        stream=stream,
        seq=row.seq,
        attempt=row.sends + 1,
        traceparent=row.extra.get("traceparent") if same else None,
        tracestate=row.extra.get("tracestate") if same else None,
    )


def trace_id(traceparent: object) -> str | None:
    """The trace id of a W3C traceparent."""
    return traceparent.split("-")[1] if isinstance(traceparent, str) and traceparent.count("-") >= 3 else None


def key_of(agent: str, row: Row) -> str:
    """The event's key as the relay sees it."""
    return wire_key(row.key, agent, bool(row.extra.get("scoped")))


def single(routes: Routes, agent: str, stream: str, rows: list[Row]) -> Parcel:
    """One event that is a request as it stands."""
    row = rows[0]
    path = routes.path_of(row)
    assert path is not None  # noqa: S101 - unknown kinds never come this far
    form = Form.TOOL if row.shape == "tool" else Form.SINGLE
    return Parcel(
        form, path, row.wire_payload, key_of(agent, row), origin_of(agent, stream, row),
        tool=str(row.extra.get("tool", "")),
    )  # fmt: skip


def group(routes: Routes, agent: str, stream: str, rows: list[Row]) -> Parcel:
    """Neighbouring session messages in one request."""
    body = b'{"messages":[' + b",".join(row.wire_payload for row in rows) + b"]}"
    origin = origin_of(agent, stream, rows[0], several=rows)
    return Parcel(Form.GROUP, routes.batch, body, None, origin, events=len(rows))
