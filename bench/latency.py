"""From handing an event over to its arrival at the relay, the daemon being another process."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from bench import peers
from bench.figure import Figure, Row, Size, Target, share
from bench.rounds import interleaved
from bench.stage import KIND, PAYLOAD, Daemon, Relay, open_outbox

_PER_S = 100
_MOST_P50_MS, _MOST_P99_MS = 4.0, 15.0
_WARM = 20
_OURS, _BARE = "library and daemon", "bare commit, then bare httpx POST"


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """p50 and p99 of each round."""
    events = size.pick(500, 20)
    delays: dict[str, list[list[float]]] = {_OURS: [], _BARE: []}

    def run(name: str, act: Callable[[Path, int], list[float]]) -> float:
        delays[name].append(act(scratch, events))
        return 0.0

    interleaved({_OURS: lambda: run(_OURS, _ours), _BARE: lambda: run(_BARE, _bare)}, size.rounds)
    rows = []
    for name, found in delays.items():
        rows.append(Row(f"{name}, p50", [statistics.median(one) for one in found], "ms"))
        rows.append(Row(f"{name}, p99", [share(one, 0.99) for one in found], "ms"))
    yield Figure(
        f"Accept to relay at {_PER_S} events a second",
        f"From the call of enqueue, its commit included, until the relay has read the event; {events} a "
        "round. The bare one commits and posts in one process, without a queue between.",
        rows,
        [
            Target("latency: accept to relay, p50", rows[0].values, "ms", _MOST_P50_MS, at_least=False),
            Target("latency: accept to relay, p99", rows[1].values, "ms", _MOST_P99_MS, at_least=False),
        ],
    )


def _paced(relay: Relay, events: int, act: Callable[[dict[str, object]], object]) -> list[float]:
    """Give events at their pace; the delay of each in milliseconds, but for those that warm up."""
    begun = time.monotonic()
    for number in range(_WARM + events):
        time.sleep(max(0.0, begun + number / _PER_S - time.monotonic()))
        act({**PAYLOAD, "sentNs": time.monotonic_ns()})
    relay.wait(_WARM + events)
    delays_ns = [delay for _, _, delays in relay.notes() for delay in delays]
    return [delay / 1e6 for delay in delays_ns[_WARM:]]


def _ours(scratch: Path, events: int) -> list[float]:
    state = Path(tempfile.mkdtemp(dir=scratch)) / "state"
    with Relay(notes=True) as relay, Daemon(state, relay.url), open_outbox(state) as outbox:
        return _paced(relay, events, lambda payload: outbox.enqueue(KIND, payload))


def _bare(scratch: Path, events: int) -> list[float]:
    state = Path(tempfile.mkdtemp(dir=scratch)) / "state"
    connection, row, insert = peers.bare_insert(peers.bare_file(state))
    headers = {"Content-Type": "application/json"}
    with Relay(notes=True) as relay, httpx.Client(trust_env=False) as client, peers.closing(connection):

        def act(payload: dict[str, object]) -> None:
            row[0] += 1
            row[2], text = f"bare-{row[0]}", json.dumps(payload)
            row[3] = text
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(insert, row)
            connection.execute("COMMIT")
            client.post(f"{relay.url}/api/messages", content=text, headers=headers)

        return _paced(relay, events, act)
