"""A thousand agents with events on one host: memory, descriptors, and whether one waits longer than all."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import machine
from bench.figure import Figure, Row, Size, Target, share
from bench.stage import Daemon, Relay, fill

_EACH, _GROUP = 30, 10
_LATENCY_MS = 20
_DESCRIPTORS = 256
_MOST_MB, _MOST_OF_MEAN = 150, 3.0
_LOOK_AGAIN_S = 0.05


class _Seen(NamedTuple):
    memory_mb: float
    descriptors: float
    longest_of_mean: float
    p99_of_mean: float
    per_s: float
    idle_percent: float


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """All of them at once, from a cold start."""
    agents = size.pick(1_000, 20)
    state = Path(tempfile.mkdtemp(dir=scratch)) / "state"
    found = [_run(size, state, agents) for _ in range(size.rounds)]
    memory, descriptors, longest, p99, rates, idle = (list(values) for values in zip(*found, strict=True))
    yield Figure(
        f"{agents:,} agents",
        f"Each has {_EACH} events waiting, {_GROUP} a request; the relay answers after {_LATENCY_MS} ms; "
        f"the daemon may open {_DESCRIPTORS} descriptors. A wait is the time between an agent's requests "
        "(and before its first).",
        [
            Row("memory at its highest", memory, "MB"),
            Row("descriptors", descriptors, ""),
            Row("longest wait of an agent, of the mean", longest, "times"),
            Row("p99 of the waits, of the mean", p99, "times"),
            Row("drain of all together", rates, "/s"),
            Row("processor, once all is delivered", idle, "%"),
        ],
        [
            Target("agents: memory", memory, "MB", _MOST_MB, at_least=False),
            Target("agents: descriptors", descriptors, "", _DESCRIPTORS, at_least=False),
            Target("agents: longest wait, of the mean", longest, "times", _MOST_OF_MEAN, at_least=False),
        ],
    )


def _run(size: Size, state: Path, agents: int) -> _Seen:
    for number in range(agents):
        fill(state, _EACH, f"agent-{number}")
    settings = {"delivery.batch_max_items": str(_GROUP)}
    most = 0
    with (
        Relay(latency_ms=_LATENCY_MS, notes=True) as relay,
        Daemon(state, relay.url, settings, descriptors=_DESCRIPTORS) as daemon,
    ):
        while (count := relay.count()).events < agents * _EACH:
            most = max(most, machine.descriptors(daemon.pid))
            time.sleep(_LOOK_AGAIN_S)
        waits = _waits([(agent, at_ns) for agent, at_ns, _ in relay.notes()], count.first_ns)
        idle = idle_percent(daemon.pid, 5.0 if not size.quick else 0.2)
        memory = machine.memory_mb(daemon.pid, peak=True)
    mean = statistics.mean(waits)
    return _Seen(memory, most, max(waits) / mean, share(waits, 0.99) / mean, count.per_s, idle)


def _waits(requests: list[tuple[str, int]], first_ns: int) -> list[float]:
    last_ns: dict[str, int] = {}
    waits = []
    for agent, at_ns in requests:
        waits.append(float(at_ns - last_ns.get(agent, first_ns)))
        last_ns[agent] = at_ns
    return waits


def idle_percent(pid: int, seconds: float) -> float:
    """How much of one core a process takes, a moment after it had something to do."""
    time.sleep(min(2.0, seconds * 2))
    begun, before_s = time.monotonic(), machine.processor_s(pid)
    time.sleep(seconds)
    return (machine.processor_s(pid) - before_s) / (time.monotonic() - begun) * 100
