"""The metrics, in Prometheus' text format: read from the files at each scrape, so they survive a restart.

What only the process knows (requests to the relay, refusals) comes from its meter, and starts at zero.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outbox.api.explain import explain
from outbox.api.meter import BUCKETS_S, Metered
from outbox.api.obstacle import Facts, Scope, closed_gate
from outbox.api.report import FOR_ALL, opened, outbox_files
from outbox.api.served import Served
from outbox.errors import StoreError
from outbox.store.damage import damaged_files
from outbox.store.inspect import OutboxStatus, read_status, totals
from outbox.store.relay_state import read_facts

GATE_STATES = ("open", "closed", "unknown")
_BUSY_TIMEOUT_MS = 1_000


@dataclass(slots=True)
class Sums:
    """What is added up over all outboxes. Ages and waits are the longest of any agent, in seconds."""

    events: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    oldest_s: float = 0.0
    blocked_s: dict[str, float] = field(default_factory=dict)
    wal_bytes: int = 0
    unreadable: int = 0


class Exposition:
    """The text of one scrape; the counters of a file that was removed go on counting while we live."""

    def __init__(self, daemon: Served) -> None:
        """Nothing is read yet."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StoreCollector(daemon))
        self._mutex = threading.Lock()

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        with self._mutex:
            return generate_latest(self._registry)


class StoreCollector(Collector):
    """Reads the files of a state directory, and the meter of its daemon."""

    def __init__(self, daemon: Served) -> None:
        """Nothing is read yet."""
        self._daemon = daemon
        self._seen: dict[Path, tuple[str, dict[str, int]]] = {}
        self._gone: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """All families, those of design section 9."""
        now_ms = time.time_ns() // 1_000_000
        facts = read_facts(self._daemon.state.relay_state)
        sums = self._sums(facts, now_ms)
        yield from _gauges(sums)
        yield from self._counters()
        yield from _of_process(self._daemon.meter.read())
        yield _state(
            "outbox_gate_state", "Which state the gate to the relay is in.", _gate(facts), GATE_STATES
        )
        auth = str((facts.get(FOR_ALL) or {}).get("state") or "unknown")
        yield _state("outbox_auth_state", "How the relay's token stands.", auth, ("unknown",))
        yield from self._host(sums)

    def _sums(self, facts: Facts, now_ms: int) -> Sums:
        sums, state = Sums(), self._daemon.state
        now_there: set[Path] = set()
        for path in outbox_files(state):
            now_there.add(path)
            sums.wal_bytes += _size(path.with_name(f"{path.name}-wal"))
            try:
                with opened(state, path, busy_timeout_ms=_BUSY_TIMEOUT_MS) as box:
                    status, counted = read_status(box), totals(box)
            except StoreError:
                sums.unreadable += 1
                continue
            why = explain(status, facts, daemon_running=True, now_ms=now_ms, paths=self._daemon.kind_paths)
            blocked = None if why.scope is Scope.NOTHING else why.reason
            _add(sums, status, blocked, why.since_ms, now_ms)
            self._note(path, status, counted)
        for path in set(self._seen) - now_there:
            self._gone.update(self._seen.pop(path)[1])
        return sums

    def _note(self, path: Path, status: OutboxStatus, counted: Mapping[str, int]) -> None:
        stream, before = self._seen.get(path, (status.stream, {}))
        if stream != status.stream:
            self._gone.update(before)
        self._seen[path] = (status.stream, {**counted, "accepted": status.accepted})

    def _counters(self) -> Iterator[Metric]:
        all_of = Counter(self._gone)
        for _, counted in self._seen.values():
            all_of.update(counted)
        yield _counter("outbox_accepted", "Events that were accepted.", all_of["accepted"])
        yield _counter("outbox_replayed", "Dead letters that were sent again.", all_of["replayed"])
        yield _labelled(
            "outbox_dropped", "Events that a bound dropped.", "reason", _below(all_of, "dropped:")
        )
        refused = Counter(_below(all_of, "refused:")) + Counter(self._daemon.meter.read().refused)
        yield _labelled("outbox_refused", "Events that were not accepted.", "reason", refused)
        yield _labelled("outbox_dead", "Events that became dead letters.", "reason", _below(all_of, "dead:"))

    def _host(self, sums: Sums) -> Iterator[Metric]:
        state = self._daemon.state
        disk = os.statvfs(state.agents)
        yield _gauge("outbox_wal_bytes", "Size of all write-ahead logs.", sums.wal_bytes)
        yield _gauge(
            "outbox_disk_free_bytes", "Free disk below the state directory.", disk.f_bavail * disk.f_frsize
        )
        yield _gauge(
            "outbox_damaged_files",
            "Outbox files that were set aside as damaged, or cannot be read.",
            len(damaged_files(state)) + sums.unreadable,
        )


def _add(sums: Sums, status: OutboxStatus, blocked: str | None, since_ms: int | None, now_ms: int) -> None:
    waiting = status.waiting - status.in_flight
    sums.events.update({"waiting": waiting, "in_flight": status.in_flight, "dead": status.dead})
    sums.bytes.update({"waiting": status.waiting_bytes, "dead": status.dead_bytes})
    head = status.head
    if head is None:
        return
    age_s = max(0, now_ms - head.accepted_at_ms) / 1_000
    sums.oldest_s = max(sums.oldest_s, age_s)
    if blocked is not None:
        wait_s = max(0, now_ms - (head.accepted_at_ms if since_ms is None else since_ms)) / 1_000
        sums.blocked_s[blocked] = max(sums.blocked_s.get(blocked, 0.0), wait_s)


def _gauges(sums: Sums) -> Iterator[Metric]:
    events = GaugeMetricFamily("outbox_events", "Events on disk.", labels=["state"])
    sizes = GaugeMetricFamily(
        "outbox_bytes", "Payload bytes on disk; waiting includes in flight.", labels=["state"]
    )
    for state in ("waiting", "in_flight", "dead"):
        events.add_metric([state], sums.events[state])
    for state in ("waiting", "dead"):
        sizes.add_metric([state], sums.bytes[state])
    yield events
    yield sizes
    yield _gauge("outbox_oldest_age_seconds", "Age of the oldest event that waits.", sums.oldest_s)
    blocked = GaugeMetricFamily(
        "outbox_head_blocked_seconds", "How long the head of an outbox is held back.", labels=["reason"]
    )
    for reason, wait_s in sorted(sums.blocked_s.items()):
        blocked.add_metric([reason], wait_s)
    yield blocked


def _of_process(seen: Metered) -> Iterator[Metric]:
    yield _labelled(
        "outbox_delivery_attempts", "Requests to the relay by this process.", "outcome", seen.attempts
    )
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    yield HistogramMetricFamily(
        "outbox_delivery_seconds",
        "How long requests to the relay took.",
        buckets=list(zip(bounds, seen.buckets, strict=True)),
        sum_value=seen.sum_s,
    )


def _gate(facts: Facts) -> str:
    if closed_gate(facts) is not None:
        return "closed"
    return "open" if any(name.startswith("path:") for name in facts) else "unknown"


def _state(name: str, about: str, now: str, known: Iterable[str]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=["state"])
    for state in sorted({*known, now}):
        family.add_metric([state], float(state == now))
    return family


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def _labelled(name: str, about: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for text, value in sorted(values.items()):
        family.add_metric([text], value)
    return family


def _below(totals_of: Mapping[str, int], start: str) -> dict[str, int]:
    return {name.removeprefix(start): value for name, value in totals_of.items() if name.startswith(start)}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
