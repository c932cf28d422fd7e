"""Why an event waits: the one true reason for the head of an outbox, and the sentences that tell it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outbox.api.obstacle import KIND_PATHS, Facts, Scope, find_obstacle
from outbox.api.reasons import Telling, nobody_sends, queue_line
from outbox.store.inspect import OutboxStatus


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the head of an outbox waits: `reason` is stable, `lines` are for a person. Times are epoch ms."""

    reason: str
    lines: list[str]
    next_try_at_ms: int | None = None
    since_ms: int | None = None
    detail: str = ""
    scope: Scope = Scope.NOTHING
    path: str = ""


def explain(
    status: OutboxStatus,
    facts: Facts,
    *,
    daemon_running: bool,
    now_ms: int,
    paths: Mapping[str, str] = KIND_PATHS,
    max_attempts: int = 12,
) -> Explanation:
    """Why the head of this outbox waits.

    `facts` are those of STATE/relay.sqlite, `paths` says where each kind goes, `max_attempts` how often the
    head is tried before it becomes a dead letter. Reasons are looked for in the order of `find_obstacle`.
    """
    sending = daemon_running or status.sender
    found = find_obstacle(status, facts, sending=sending, now_ms=now_ms, paths=paths)
    if found.scope is Scope.SENDER:
        lines = nobody_sends(find_obstacle(status, facts, sending=True, now_ms=now_ms, paths=paths))
    else:
        lines = Telling(status, facts, found, now_ms, max_attempts).lines()
    return Explanation(
        reason=found.reason,
        lines=[queue_line(status, now_ms), *lines],
        next_try_at_ms=found.next_try_at_ms,
        since_ms=found.since_ms,
        detail=found.detail,
        scope=found.scope,
        path=found.path,
    )
