"""A durable enqueue by one producer: beside bare apsw, other queues and the seed; and where its time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from bench import peers
from bench.figure import Figure, Row, Size, Target, ratio
from bench.peers import BARE, LIBRARY, SEED
from bench.rounds import alternated
from bench.stage import AGENT, KIND, PAYLOAD, open_outbox
from outbox.event import Limits, accept, draft_event, uuid7

_ACTS = 10
_LEAST_OF_BARE = 0.9


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """Rates beside each other, then the parts of one enqueue."""
    yield _against_peers(size, scratch)
    yield _parts(size, scratch)


def _against_peers(size: Size, scratch: Path) -> Figure:
    opened: dict[str, peers.Opened] = {
        BARE: peers.bare_apsw,
        LIBRARY: peers.library,
        SEED: peers.seed,
        **peers.installed(),
    }
    rates: dict[str, list[float]] = {name: [] for name in opened}
    blocks = size.pick(50, 3)
    for number in range(size.rounds):
        with ExitStack() as stack:
            folder = scratch / f"enqueue-{number}"
            folder.mkdir()
            acts = {
                name: stack.enter_context(make(folder / f"{place}"))
                for place, (name, make) in enumerate(opened.items())
            }
            for name, spent_s in alternated(acts, blocks=blocks, acts=_ACTS, first=number).items():
                rates[name].append(1 / spent_s)
    of_bare = Target(
        "enqueue: library, of bare apsw",
        ratio(rates[LIBRARY], rates[BARE]),
        "times",
        _LEAST_OF_BARE,
        at_least=True,
    )
    notes = [f"Not installed, so left out: {name}." for name in peers.missing()]
    return Figure(
        "Durable enqueue, one producer",
        f"Every contestant commits each event with synchronous=FULL; blocks of {_ACTS}, in turn, {blocks} a "
        "round. Bare apsw inserts the same rows into the same schema, and does nothing else.",
        [Row(name, found, "/s") for name, found in rates.items()],
        [of_bare],
        base=BARE,
        notes=notes,
    )


# Where its time goes ----------------------------------------------------------------------------------------


def _parts(size: Size, scratch: Path) -> Figure:
    """Each part alone, so that they need not add up to the whole to the last microsecond."""
    parts: dict[str, list[float]] = {}
    for number in range(size.rounds):
        with ExitStack() as stack:
            acts = _acts_of_parts(stack, scratch / f"parts-{number}")
            found = alternated(acts, blocks=size.pick(50, 3), acts=_ACTS, first=number)
        found["the flush: bare apsw, FULL less OFF"] = found[BARE] - found["bare apsw, synchronous=OFF"]
        for name, spent_s in found.items():
            parts.setdefault(name, []).append(spent_s * 1e6)
    return Figure(
        "Where the time of an enqueue goes",
        "Microseconds for one event. The library's enqueue is the checks and the wire text, then a "
        "transaction that reads the counters, inserts the row and writes the counters, then the flush.",
        [Row(name, values, "us") for name, values in parts.items()],
        base=LIBRARY,
    )


def _acts_of_parts(stack: ExitStack, folder: Path) -> dict[str, Callable[[], object]]:
    folder.mkdir()
    limits = Limits()

    def values() -> None:
        now_ms = time.time_ns() // 1_000_000
        draft = draft_event(KIND, PAYLOAD, limits=limits)
        accept(draft, limits=limits, agent=AGENT, now_ms=now_ms, new_key=uuid7(now_ms, os.urandom(10)))

    bound = stack.enter_context(open_outbox(folder / "library"))
    plain = stack.enter_context(peers.bare_apsw(folder / "bare"))
    without_flush = stack.enter_context(peers.bare_apsw(folder / "off", "OFF"))
    return {
        LIBRARY: lambda: bound.enqueue(KIND, PAYLOAD),
        "checks, key and wire text": values,
        BARE: plain,
        "bare apsw, synchronous=OFF": without_flush,
    }
