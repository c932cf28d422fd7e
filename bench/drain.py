"""One agent's backlog on its way out: grouped, singly, over a network, beside bare httpx and the seed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from bench import peers
from bench.figure import Figure, Row, Size, Target
from bench.rounds import interleaved
from bench.stage import PAYLOAD, Daemon, Relay, fill

_LEAST_GROUPED_PER_S, _LEAST_SINGLY_PER_S, _LEAST_FAR_PER_S = 20_000, 4_500, 1_500
_FAR_MS = 50
_GROUP = 100
_OURS, _HTTPX = "daemon", "bare httpx"


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """The three ways of a drain."""
    yield _grouped(size, scratch)
    yield _singly(size, scratch)
    yield _far(size, scratch)


def drained_per_s(
    scratch: Path,
    events: int,
    *,
    latency_ms: float = 0,
    batches: bool = True,
    settings: Mapping[str, str] | None = None,
) -> float:
    """Events a second that a daemon gets out of a new outbox, between its first and its last request."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    fill(folder / "state", events)
    with (
        Relay(latency_ms=latency_ms, batches=batches) as relay,
        Daemon(folder / "state", relay.url, settings),
    ):
        return relay.wait(events).per_s


def seed_drained_per_s(scratch: Path, events: int, *, latency_ms: float = 0) -> float:
    """The same for the seed's stand-in."""
    made = peers.Seed(Path(tempfile.mkdtemp(dir=scratch)) / "seed.sqlite")
    with peers.closing(made.connection), Relay(latency_ms=latency_ms) as relay:
        made.fill(events)
        made.drain(relay.url, events)
        return relay.count().per_s


def _posted_per_s(requests: int, together: int, *, latency_ms: float = 0) -> float:
    """The same for httpx alone, without a queue: one request after the other, made beforehand."""
    message = {**PAYLOAD, "occurredAt": 1, "idempotencyKey": "0198c0de-0000-7000-8000-000000000000"}
    value = message if together == 1 else {"messages": [message] * together}
    body, path = json.dumps(value).encode(), "/api/messages" + ("" if together == 1 else "/batch")
    with Relay(latency_ms=latency_ms) as relay, httpx.Client(trust_env=False) as client:
        for _ in range(requests):
            client.post(relay.url + path, content=body, headers={"Content-Type": "application/json"})
        return relay.count().per_s


def _grouped(size: Size, scratch: Path) -> Figure:
    events = size.pick(40_000, 1_000)
    found = interleaved(
        {
            _HTTPX: lambda: _posted_per_s(events // _GROUP, _GROUP),
            _OURS: lambda: drained_per_s(scratch, events),
        },
        size.rounds,
    )
    return Figure(
        "Drain, grouped, instant relay",
        f"{events:,} events of one agent, {_GROUP} a request; the relay answers at once, with a result for "
        "each. Bare httpx sends the same bodies and keeps no queue.",
        [Row(name, rates, "/s") for name, rates in found.items()],
        [Target("drain: grouped, instant relay", found[_OURS], "/s", _LEAST_GROUPED_PER_S, at_least=True)],
        base=_HTTPX,
    )


def _singly(size: Size, scratch: Path) -> Figure:
    events = size.pick(8_000, 200)
    found = interleaved(
        {
            _HTTPX: lambda: _posted_per_s(events // 4, 1),
            _OURS: lambda: drained_per_s(scratch, events, batches=False),
            peers.SEED: lambda: seed_drained_per_s(scratch, events // 4),
        },
        size.rounds,
    )
    return Figure(
        "Drain, singly, instant relay",
        f"{events:,} events of one agent to a relay without batches, one a request. The seed deletes each "
        "row with a flush of its own, and speaks through http.client.",
        [Row(name, rates, "/s") for name, rates in found.items()],
        [Target("drain: singly, instant relay", found[_OURS], "/s", _LEAST_SINGLY_PER_S, at_least=True)],
        base=_HTTPX,
    )


def _far(size: Size, scratch: Path) -> Figure:
    events, single = size.pick(5_000, 300), size.pick(40, 5)
    found = interleaved(
        {
            peers.SEED: lambda: seed_drained_per_s(scratch, single, latency_ms=_FAR_MS),
            _HTTPX: lambda: _posted_per_s(single, 1, latency_ms=_FAR_MS),
            _OURS: lambda: drained_per_s(scratch, events, latency_ms=_FAR_MS),
        },
        size.rounds,
    )
    return Figure(
        f"Drain, relay {_FAR_MS} ms away",
        f"{events:,} events of one agent; each request is answered after {_FAR_MS} ms. One event a request "
        "is what the seed does.",
        [Row(name, rates, "/s") for name, rates in found.items()],
        [Target(f"drain: relay {_FAR_MS} ms away", found[_OURS], "/s", _LEAST_FAR_PER_S, at_least=True)],
        base=peers.SEED,
    )
