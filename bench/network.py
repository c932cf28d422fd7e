"""The drain rate by the relay's latency and the size of a group: what a plot shows best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.drain import drained_per_s, seed_drained_per_s
from bench.figure import Figure, Plot, Row, Size
from bench.peers import SEED
from bench.plot import Axis, chart, decades
from bench.rounds import Found, interleaved

_LATENCIES_MS, _QUICK_MS = (0.0, 1.0, 5.0, 20.0, 50.0, 100.0), (0.0, 5.0)
_GROUPS, _QUICK_GROUPS = (1, 10, 100), (100,)
_MOST_ROUNDS = 3
_INSTANT_MS = 0.5  # what a request takes besides
_LONG_S, _QUICK_S = 1.0, 0.1
_MOST_EVENTS_PER_S = 20_000


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """Every latency with every size of a group, and the seed."""
    latencies = _QUICK_MS if size.quick else _LATENCIES_MS
    groups = _QUICK_GROUPS if size.quick else _GROUPS
    contestants: dict[str, Callable[[], float]] = {}
    for latency_ms in latencies:
        for group in groups:
            contestants[_name(_group(group), latency_ms)] = partial(_ours, size, scratch, group, latency_ms)
        contestants[_name(SEED, latency_ms)] = partial(_seed, size, scratch, latency_ms)
    found = interleaved(contestants, min(size.rounds, _MOST_ROUNDS))
    yield Figure(
        "Drain rate by the relay's latency",
        "Events a second of one agent's backlog; the size of a group is delivery.batch_max_items.",
        [Row(name, rates, "/s") for name, rates in found.items()],
        plot=Plot("drain-against-latency.svg", _chart(latencies, [*map(_group, groups), SEED], found)),
    )


def _group(items: int) -> str:
    return f"{items} a request"


def _name(who: str, latency_ms: float) -> str:
    return f"{who}, {latency_ms:g} ms"


def _events(size: Size, group: int, latency_ms: float) -> int:
    """As many as take about a second, whole groups of them."""
    most_per_s = min(_MOST_EVENTS_PER_S, group * 1_000 / (latency_ms + _INSTANT_MS))
    return max(3, int(most_per_s * (_QUICK_S if size.quick else _LONG_S) / group)) * group


def _ours(size: Size, scratch: Path, group: int, latency_ms: float) -> float:
    settings = {"delivery.batch_max_items": str(group)}
    events = _events(size, group, latency_ms)
    return drained_per_s(scratch, events, latency_ms=latency_ms, settings=settings)


def _seed(size: Size, scratch: Path, latency_ms: float) -> float:
    return seed_drained_per_s(scratch, _events(size, 1, latency_ms), latency_ms=latency_ms)


def _chart(latencies: tuple[float, ...], names: list[str], found: Found) -> str:
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    marks = {0.3: "0", **{latency_ms: f"{latency_ms:g}" for latency_ms in latencies if latency_ms}}
    return chart(
        "Draining one agent's backlog",
        Axis("relay answers after (ms)", marks, zero=0.3),
        Axis("events a second (median)", decades(min(medians.values()), max(medians.values()))),
        {name: [(ms, medians[_name(name, ms)]) for ms in latencies] for name in names},
    )
