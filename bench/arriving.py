"""Events arrive while a long backlog drains: are they accepted as fast, does the backlog still shrink."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.figure import Figure, Row, Size, Target, ratio, share
from bench.stage import KIND, PAYLOAD, Backlogs, Daemon, Relay, open_outbox, until

_PER_S = 100
_MOST_OF_NONE, _LEAST_OF_ALONE = 1.2, 0.9
_FAR_MS = 50
_US = 1e6


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """With a relay far away, as in most places, and with one that takes whatever comes."""
    yield _figure(size, scratch, _FAR_MS, is_target=True)
    if not size.quick:
        yield _figure(size, scratch, 0, is_target=False)


class _Seen(NamedTuple):
    """What each enqueue took (seconds), and how many events a second left before and meanwhile."""

    spent_s: list[float]
    alone_per_s: float
    meanwhile_per_s: float


def _figure(size: Size, scratch: Path, latency_ms: int, *, is_target: bool) -> Figure:
    waiting = size.pick(100_000, 4_000)
    idle, busy = [], []
    for _ in range(size.rounds):
        idle.append(_run(size, scratch, 0, latency_ms))
        busy.append(_run(size, scratch, waiting, latency_ms))
    rows = {
        _name("none", "p50"): [statistics.median(seen.spent_s) * _US for seen in idle],
        _name(f"{waiting:,}", "p50"): [statistics.median(seen.spent_s) * _US for seen in busy],
        _name("none", "p99"): [share(seen.spent_s, 0.99) * _US for seen in idle],
        _name(f"{waiting:,}", "p99"): [share(seen.spent_s, 0.99) * _US for seen in busy],
    }
    accepted = ratio(rows[_name(f"{waiting:,}", "p50")], rows[_name("none", "p50")])
    alone, meanwhile = [seen.alone_per_s for seen in busy], [seen.meanwhile_per_s for seen in busy]
    drained = ratio(meanwhile, alone)
    targets = [
        Target("arriving: accepted, of none waiting, p50", accepted, "times", _MOST_OF_NONE, at_least=False),
        Target("arriving: drain, of the drain alone", drained, "times", _LEAST_OF_ALONE, at_least=True),
    ]
    how = (
        f"answers after {latency_ms} ms" if latency_ms else "answers at once, so that the daemon never rests"
    )
    return Figure(
        f"{_PER_S} events a second arriving on {waiting:,} waiting, relay {latency_ms} ms away",
        f"Another process enqueues through the library while the daemon drains; the relay {how}.",
        [
            *(Row(name, values, "us") for name, values in rows.items()),
            Row("drain alone", alone, "/s"),
            Row("drain while events arrive", meanwhile, "/s"),
        ],
        targets if is_target else (),
    )


def _name(waiting: str, which: str) -> str:
    return f"accepting with {waiting} waiting, {which}"


def _run(size: Size, scratch: Path, waiting: int, latency_ms: int) -> _Seen:
    state = Path(tempfile.mkdtemp(dir=scratch)) / "state"
    if waiting:
        Backlogs(scratch).copy(waiting, state)
    with open_outbox(state) as outbox, Relay(latency_ms=latency_ms) as relay, Daemon(state, relay.url):
        alone_per_s, spent_s = 0.0, []
        if waiting:
            until(lambda: relay.count().requests > 1, "the start of the drain")
            alone_per_s = _rate(relay, lambda: time.sleep(size.pick(1_000, 200) / 1_000))

        def arrive() -> None:
            begun = time.monotonic()
            for number in range(size.pick(200, 20)):
                time.sleep(max(0.0, begun + number / _PER_S - time.monotonic()))
                came = time.perf_counter()
                outbox.enqueue(KIND, PAYLOAD)
                spent_s.append(time.perf_counter() - came)

        return _Seen(spent_s, alone_per_s, _rate(relay, arrive))


def _rate(relay: Relay, meanwhile: Callable[[], None]) -> float:
    before, begun = relay.count().events, time.monotonic()
    meanwhile()
    return (relay.count().events - before) / (time.monotonic() - begun)
