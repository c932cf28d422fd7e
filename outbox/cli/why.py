"""`outbox why AGENT`: the one reason why its events wait."""

from __future__ import annotations

import argparse

from outbox.api.explain import Explanation, explain
from outbox.api.report import opened
from outbox.cli.output import clean, emit_json, say
from outbox.cli.where import existing, now_ms, settings_to_look, state_of
from outbox.policy import Schedule, schedule_of
from outbox.store.file import OutboxFile
from outbox.store.inspect import OutboxStatus, read_status
from outbox.store.place import running_daemon
from outbox.store.relay_state import read_facts
from outbox.store.sending import head

EXAMPLE = "outbox why reviewer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The agent."""
    parser.add_argument(
        "agent", metavar="AGENT", help="whose events (after -- when the name starts with a dash)"
    )


def run(args: argparse.Namespace) -> int:
    """Explain."""
    settings = settings_to_look(args)
    state = state_of(settings)
    with opened(state, existing(state, args.agent)) as box:
        status = read_status(box)
        most = _attempts_of_head(box, settings.delivery.max_attempts)
    why = explain(
        status,
        read_facts(state.relay_state),
        daemon_running=running_daemon(state) is not None,
        now_ms=now_ms(),
        paths=settings.kind_paths(),
        max_attempts=most,
    )
    if args.json:
        emit_json(_as_data(status, why))
    else:
        say(*(clean(line) for line in why.lines))
    return 0


def _attempts_of_head(box: OutboxFile, usual: int) -> int:
    """How often the head is tried: an event may bring a `retry` of its own."""
    row = head(box)
    return schedule_of(Schedule(max_attempts=usual), row.extra.get("retry") if row else None).max_attempts


def _as_data(status: OutboxStatus, why: Explanation) -> dict[str, object]:
    first = status.head
    return {
        "agent": status.agent,
        "reason": why.reason,
        "since": why.since_ms,
        "nextTryAt": why.next_try_at_ms,
        "detail": why.detail,
        "waiting": status.waiting,
        "head": first and {"seq": first.seq, "kind": first.kind, "attempts": first.attempts},
        "lines": why.lines,
    }
