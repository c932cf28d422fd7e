"""What the daemon costs on a processor for each event, which hardly depends on the disk or on the load."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import machine
from bench.figure import Figure, Row, Size
from bench.producers import PRODUCERS, clients_per_s, lines_per_s, paused
from bench.rounds import interleaved
from bench.stage import Daemon, Relay, fill, until

_GROUP = 100


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """One core divided by such a cost is the most there can be a second."""
    state = Path(tempfile.mkdtemp(dir=scratch)) / "state"
    each, lines = size.pick(100, 5), size.pick(20_000, 1_000)
    with Relay() as relay, Daemon(state, relay.url) as daemon:
        paused(daemon, state)
        place = [f"--socket={daemon.socket}"]

        def cost(events: int, act: Callable[[], object]) -> float:
            before_s = machine.processor_s(daemon.pid)
            act()
            return (machine.processor_s(daemon.pid) - before_s) / events * 1e6

        contestants: dict[str, Callable[[], float]] = {}
        if not size.quick:
            contestants["draining singly"] = lambda: _drain_us(scratch, 4_000, batches=False)
        found = interleaved(
            {
                **contestants,
                "draining grouped": lambda: _drain_us(scratch, size.pick(30_000, 1_000), batches=True),
                "accepting one a request": lambda: cost(
                    PRODUCERS * each, lambda: clients_per_s(place, PRODUCERS, each)
                ),
                "accepting NDJSON": lambda: cost(lines, lambda: lines_per_s(daemon.socket, lines)),
            },
            size.rounds,
        )
    yield Figure(
        "The daemon's processor time for an event",
        "Microseconds that all threads of the daemon are on a processor, by what it does with the event.",
        [Row(name, values, "us") for name, values in found.items()],
    )


def _drain_us(scratch: Path, events: int, *, batches: bool) -> float:
    """From the first request nearly to the last, so that its start and its rest do not count."""
    state = fill(Path(tempfile.mkdtemp(dir=scratch)) / "state", events)
    with Relay(batches=batches) as relay, Daemon(state, relay.url) as daemon:
        until(lambda: relay.count().events > 0, "the first request")
        before, before_s = relay.count().events, machine.processor_s(daemon.pid)
        until(lambda: relay.count().events >= events - _GROUP, "the end of the drain")
        after, after_s = relay.count().events, machine.processor_s(daemon.pid)
    return (after_s - before_s) / max(1, after - before) * 1e6
