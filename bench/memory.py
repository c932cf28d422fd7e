"""The daemon's memory: constant in the backlog, small when idle; and what an idle one does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench import machine
from bench.agents import idle_percent
from bench.figure import Figure, Row, Size, Target, ratio
from bench.rounds import interleaved
from bench.stage import Backlogs, Daemon, Relay, fill, until

_MOST_OF_SHORT, _MOST_IDLE_MB, _MOST_IDLE_PERCENT = 1.3, 55, 1.0
_SHORT = 1_000


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """Draining a long backlog beside a short one, then at rest."""
    long, seconds = size.pick(1_000_000, 20_000), 5.0 if not size.quick else 0.3
    backlogs = Backlogs(scratch)
    states = {_SHORT: _new(scratch), long: backlogs.copy(long, _new(scratch))}
    found = interleaved(
        {f"{events:,} waiting": partial(_draining_mb, state, seconds) for events, state in states.items()},
        size.rounds,
    )
    short, much = found.values()
    yield Figure(
        "Memory while a backlog drains",
        f"The daemon's resident memory at its highest, {seconds:g} s after its first request.",
        [Row(name, values, "MB") for name, values in found.items()],
        [
            Target(
                "memory: a long backlog, of a short one",
                ratio(much, short),
                "times",
                _MOST_OF_SHORT,
                at_least=False,
            )
        ],
        base=f"{_SHORT:,} waiting",
    )
    yield _idle(size, scratch, seconds)


def _new(scratch: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=scratch)) / "state"


def _draining_mb(state: Path, seconds: float) -> float:
    """A round takes from the long backlog much less than it has; what the short one needs is put in again."""
    fill(state, _SHORT)
    with Relay() as relay, Daemon(state, relay.url) as daemon:
        until(lambda: relay.count().requests > 0, "the first request")
        time.sleep(seconds)
        return machine.memory_mb(daemon.pid, peak=True)


def _idle(size: Size, scratch: Path, seconds: float) -> Figure:
    memory, percent = [], []
    for _ in range(size.rounds):
        with Relay() as relay, Daemon(_new(scratch), relay.url) as daemon:
            percent.append(idle_percent(daemon.pid, seconds * 2))
            memory.append(machine.memory_mb(daemon.pid))
    return Figure(
        "An idle daemon",
        "Started, and nothing to do.",
        [Row("memory", memory, "MB"), Row("processor, of one core", percent, "%")],
        [
            Target("idle daemon: memory", memory, "MB", _MOST_IDLE_MB, at_least=False),
            Target("idle daemon: processor", percent, "%", _MOST_IDLE_PERCENT, at_least=False),
        ],
    )
