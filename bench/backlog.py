"""What an enqueue costs while much waits: flat, beside bare apsw and the seed, which counts its rows."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench import peers
from bench.figure import Figure, Plot, Row, Size, Target, ratio
from bench.peers import BARE, LIBRARY, SEED
from bench.plot import Axis, chart, decades
from bench.rounds import alternated
from bench.stage import Backlogs

_WHOLE, _QUICK = (0, 1_000, 10_000, 100_000, 1_000_000), (0, 20_000)
_MOST_OF_NONE = 1.2
_ACTS = 10

Costs = dict[tuple[str, int], list[float]]


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """Microseconds for one enqueue, by what waits."""
    sizes = _QUICK if size.quick else _WHOLE
    folder = Path(tempfile.mkdtemp(dir=scratch))
    backlogs = Backlogs(scratch)
    for waiting in sizes[1:]:
        backlogs.copy(waiting, folder / f"library-{waiting}")
        backlogs.copy(waiting, folder / f"bare-{waiting}")
        (folder / f"seed-{waiting}").mkdir()
        made = peers.Seed(folder / f"seed-{waiting}" / "seed.sqlite")
        with peers.closing(made.connection):
            made.fill(waiting)
    ours = _costs(size, folder, sizes, {LIBRARY: peers.library, BARE: peers.bare_apsw}, size.pick(30, 3))
    seeds = _costs(size, folder, sizes, {SEED: peers.seed}, 1)
    yield _figure(sizes, ours | seeds)


def _costs(
    size: Size, folder: Path, sizes: tuple[int, ...], opened: dict[str, peers.Opened], blocks: int
) -> Costs:
    """All of them in turn, in each round; the outbox with nothing waiting is a new one each time."""
    found: Costs = {(name, waiting): [] for name in opened for waiting in sizes}
    for number in range(size.rounds):
        with ExitStack() as stack:
            acts = {}
            for name, waiting in found:
                kept = folder / f"{name.split()[-1 if name == LIBRARY else 0]}-{waiting}"
                place = kept if waiting else Path(tempfile.mkdtemp(dir=folder)) / "state"
                acts[f"{name} {waiting}"] = stack.enter_context(opened[name](place))
            spent_s = alternated(acts, blocks=blocks, acts=_ACTS, first=number)
        for name, waiting in found:
            found[name, waiting].append(spent_s[f"{name} {waiting}"] * 1e6)
    return found


def _figure(sizes: tuple[int, ...], costs: Costs) -> Figure:
    least, most = costs[LIBRARY, sizes[0]], costs[LIBRARY, sizes[-1]]
    flat = Target(
        "enqueue: the longest backlog, of none",
        ratio(most, least),
        "times",
        _MOST_OF_NONE,
        at_least=False,
    )
    return Figure(
        "Enqueue against backlog",
        "Microseconds for one durable enqueue while so many events wait, in turn. The seed counts its "
        "rows at each.",
        [Row(f"{name}, {waiting:,} waiting", values, "us") for (name, waiting), values in costs.items()],
        [flat],
        plot=Plot("enqueue-against-backlog.svg", _chart(sizes, costs)),
    )


def _chart(sizes: tuple[int, ...], costs: Costs) -> str:
    medians = {at: statistics.median(values) for at, values in costs.items()}
    names = dict.fromkeys(name for name, _ in costs)
    marks = {100.0: "0", **{float(waiting): f"{waiting:,}" for waiting in sizes[1:]}}
    return chart(
        "A durable enqueue, by what waits",
        Axis("events waiting", marks, zero=100),
        Axis("microseconds (median)", decades(min(medians.values()), max(medians.values()))),
        {name: [(waiting, medians[name, waiting]) for waiting in sizes] for name in names},
    )
