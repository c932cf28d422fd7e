"""`make bench`, `python -m bench NAME…`: measures, tells on the terminal, and writes bench/RESULTS.md."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from bench import machine, report
from bench.figure import Figure, Size

_NAMES = (
    "enqueue",
    "backlog",
    "producers",
    "drain",
    "network",
    "arriving",
    "latency",
    "processor",
    "agents",
    "memory",
    "hook",
)
_ROUNDS, _QUICK_ROUNDS = 5, 1
_HERE = Path(__file__).parent

Measure = Callable[[Size, Path], Iterator[Figure]]


def main() -> None:
    """Run what was asked for, and write the results of a whole run."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some figures only: {', '.join(_NAMES)}")
    parser.add_argument("--quick", action="store_true", help="as little as shows that everything runs")
    parser.add_argument("--rounds", type=int, help=f"rounds for each figure ({_ROUNDS})")
    parser.add_argument("--out", type=Path, help="folder for RESULTS.md and the plots (a whole run: bench)")
    parser.add_argument("--scratch", type=Path, help="where the files of the bench lie (a temporary folder)")
    asked = parser.parse_args()
    names = asked.names or list(_NAMES)
    if unknown := [name for name in names if name not in _NAMES]:
        parser.error(f"no figure is called {unknown[0]!r}; there are {', '.join(_NAMES)}")
    size = Size(asked.rounds or (_QUICK_ROUNDS if asked.quick else _ROUNDS), asked.quick)
    out: Path | None = asked.out or (None if asked.names or asked.quick else _HERE)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=asked.scratch) as scratch:
        before = [*machine.told(Path(scratch)), f"load before {machine.load()}"]
        print("\n".join(before), flush=True)
        figures = list(_figures(names, size, Path(scratch)))
    after = [*before, f"load after {machine.load()}", f"{size.rounds} rounds"]
    print(report.summary(figures))
    if out is not None:
        plots = [figure.plot for figure in figures if figure.plot is not None]
        for plot in plots:
            (out / plot.name).write_text(plot.text, "utf-8")
        names_of_plots = [plot.name for plot in plots]
        (out / "RESULTS.md").write_text(report.document(figures, after, names_of_plots), "utf-8")


def _figures(names: list[str], size: Size, scratch: Path) -> Iterator[Figure]:
    for name in names:
        measure: Measure = import_module(f"bench.{name}").measure
        for figure in measure(size, scratch):
            print(report.in_terminal(figure), flush=True)
            yield figure


if __name__ == "__main__":
    main()
