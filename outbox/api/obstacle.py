"""What is in the way of an outbox's head: the decision, without its words (reasons.py has them). Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outbox.event import BUILT_IN_KINDS
from outbox.gap import GAP_KIND
from outbox.outcome import Blocked
from outbox.store.inspect import Head, OutboxStatus

Facts = Mapping[str, Any]
"""What STATE/relay.sqlite knows of the relay (`store.relay_state.read_facts`)."""

_MESSAGES = BUILT_IN_KINDS["session-message"]
KIND_PATHS: Mapping[str, str] = {**BUILT_IN_KINDS, "session-message-batch": _MESSAGES, GAP_KIND: _MESSAGES}
"""Where each kind goes by default; a batch is held by what holds its messages."""


class Scope(enum.Enum):
    """Who or what is in the way."""

    NOTHING = enum.auto()
    PERSON = enum.auto()  # somebody paused it
    SENDER = enum.auto()  # nobody sends
    RELAY = enum.auto()  # the gate: concerns all agents
    PATH = enum.auto()  # one path of the relay: concerns the kinds that go there
    AGENT = enum.auto()  # this agent's own wait


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What is in the way of a head. Times are epoch milliseconds; `tries` are failures in a row."""

    reason: str
    scope: Scope
    since_ms: int | None = None
    next_try_at_ms: int | None = None
    detail: str = ""
    tries: int = 0
    path: str = ""


def find_obstacle(
    status: OutboxStatus, facts: Facts, *, sending: bool, now_ms: int, paths: Mapping[str, str]
) -> Obstacle:
    """The first of these that is the case.

    paused; empty; no_daemon; the agent's own wait while its time runs; the gate; the path of the head's kind
    (`paths` names it); the agent's own wait when its time is over; in_flight; ready. The next try is told for
    the last of all that hold it.
    """
    head, own = status.head, status.blocked
    if status.paused_at_ms is not None:
        return Obstacle("paused", Scope.PERSON, status.paused_at_ms)
    if head is None:
        return Obstacle("empty", Scope.NOTHING)
    if not sending:
        return Obstacle("no_daemon", Scope.SENDER, head.accepted_at_ms, detail="nobody sends")
    path = paths.get(head.kind) or _last_path(head)
    gate = _closed(facts.get("gate"), Scope.RELAY)
    held = _closed(facts.get(f"path:{path}"), Scope.PATH, path)
    mine = _own(own, path) if own is not None else None
    running = mine if mine and (mine.next_try_at_ms or 0) > now_ms else None
    first = running or gate or held or mine
    if first is None:
        return Obstacle("in_flight" if status.in_flight else "ready", Scope.NOTHING)
    moments = [found.next_try_at_ms for found in (gate, held, mine) if found and found.next_try_at_ms]
    return replace(first, next_try_at_ms=max(moments, default=None))


def _last_path(head: Head) -> str:
    return str(head.history[-1].get("path", "")) if head.history else ""


def closed_gate(facts: Facts) -> Obstacle | None:
    """What is in everybody's way; None while the gate is open, or nothing is known."""
    return _closed(facts.get("gate"), Scope.RELAY)


def _own(own: Blocked, path: str) -> Obstacle:
    return Obstacle(own.reason, Scope.AGENT, own.since_ms, own.next_try_at_ms, own.detail, path=path)


def _closed(fact: Any, scope: Scope, path: str = "") -> Obstacle | None:
    if not fact or not fact.get("reason"):
        return None
    return Obstacle(
        reason=fact["reason"],
        scope=scope,
        since_ms=fact.get("since"),
        next_try_at_ms=fact.get("nextTryAt"),
        detail=fact.get("detail", ""),
        tries=fact.get("failures", 0),
        path=path,
    )
