"""Whether the relay holds what was accepted: all of it, in order, once, unchanged. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NAMES = {
    "/api/messages": ("session message", "session messages"),
    "/api/insights/observations": ("insight", "insights"),
    "/api/mcp": ("tool call", "tool calls"),
}
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Sent:
    """An accepted event: its receipt's numbers, and what was given."""

    seq: int
    key: str
    kind: str
    payload: Mapping[str, Any]


def faults(
    sent: Sequence[Sent], held: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None
) -> list[str]:
    """What is wrong, one sentence each; an empty list when the relay holds exactly what was sent.

    `held` are the relay's rows in the order of their arrival (`/api/reference/events`), `summary` is what it
    says of the agent (`/api/reference/summary`), None when it knows nothing of it.
    """
    arrived = [row["key"] for row in held]
    by_key = {event.key: event for event in sent}
    times = Counter(arrived)
    expected = [event.key for event in sent if event.key in times]
    first_arrivals = list(dict.fromkeys(key for key in arrived if key in by_key))
    changed = [row["seq"] for row in held if row["key"] in by_key and not _same(by_key[row["key"]], row)]
    found = [
        _fault("missing", [event.seq for event in sent if event.key not in times]),
        _fault("held more than once", [by_key[key].seq for key in expected if times[key] > 1]),
        _fault("held with another content than was given", changed),
        _fault("held, though never sent in this session", [key for key in times if key not in by_key]),
        _out_of_order(expected, first_arrivals, by_key),
        _contradiction(held, summary),
    ]
    return [fault for fault in found if fault]


def by_kind(held: Sequence[Mapping[str, Any]]) -> str:
    """What is held, in words: "43 session messages, 1 tool call, 1 insight"."""
    counts = Counter(row["path"] for row in held)
    return ", ".join(f"{many:,} {_name(path, many)}" for path, many in counts.most_common())


def _name(path: str, many: int) -> str:
    one, several = _NAMES.get(path, (path, path))
    return one if many == 1 else several


def _fault(what: str, which: Sequence[object]) -> str:
    if not which:
        return ""
    named = ", ".join(str(one) for one in which[:_MOST_NAMED])
    more = f" and {len(which) - _MOST_NAMED:,} more" if len(which) > _MOST_NAMED else ""
    return f"{len(which):,} {what}: {named}{more}"


def _out_of_order(expected: Sequence[str], arrived: Sequence[str], by_key: Mapping[str, Sent]) -> str:
    for wanted, got in zip(expected, arrived, strict=True):
        if wanted != got:
            return f"out of order: seq {by_key[got].seq} stands where seq {by_key[wanted].seq} belongs"
    return ""


def _contradiction(held: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return "" if not held else "the relay's summary does not know this agent"
    if (summary["count"], summary["distinctKeys"]) != (len(held), len({row["key"] for row in held})):
        return (
            f"the relay's summary counts {summary['count']:,} events under {summary['distinctKeys']:,} keys, "
            f"and lists {len(held):,}"
        )
    return "" if summary["inOrder"] else "the relay's summary says that they did not come in order"


def _same(event: Sent, row: Mapping[str, Any]) -> bool:
    body = json.loads(row["body"])
    if event.kind == "mcp-tool-call":
        params = body["params"]
        return {"tool": params["name"], "arguments": params["arguments"]} == event.payload
    given = {name: value for name, value in body.items() if name not in {"idempotencyKey", "occurredAt"}}
    return given == event.payload
