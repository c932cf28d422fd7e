"""What a bench found, told on a terminal and in bench/RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bench.figure import Figure, Row, Target, middle, spread

Table = Sequence[Sequence[str]]

_PREFACE = (
    "Written by the command. Compare inside a table: its contestants took turns in the same rounds. Values "
    "are medians over the rounds; the spread is the smallest and the largest. What each means stands in "
    "[docs/performance.md](../docs/performance.md)."
)
_TARGETS = ("target", "asked", "seen", "spread", "met")


def in_terminal(figure: Figure) -> str:
    """One figure, its columns aligned."""
    lines = ["", figure.title, f"  {figure.how}", *_aligned(_rows(figure))]
    if figure.targets:
        lines += _aligned([_target(target) for target in figure.targets])
    return "\n".join([*lines, *(f"  {note}" for note in figure.notes)])


def summary(figures: Iterable[Figure]) -> str:
    """All targets, one a line."""
    targets = [target for figure in figures for target in figure.targets]
    return "\n".join(
        [
            "",
            f"{sum(t.is_met for t in targets)} of {len(targets)} targets met",
            *_aligned([_target(target) for target in targets]),
        ]
    )


def document(figures: Sequence[Figure], machine: Iterable[str], plots: Iterable[str]) -> str:
    """The text of RESULTS.md; `plots` are names of files beside it."""
    targets = [target for figure in figures for target in figure.targets]
    parts = [
        "# What `make bench` found",
        _PREFACE,
        "\n".join(f"- {line}" for line in machine),
        "## Targets",
        _markdown(_TARGETS, [_target(target) for target in targets]),
    ]
    parts += [f"![{name.removesuffix('.svg').replace('-', ' ')}]({name})" for name in plots]
    for figure in figures:
        columns = ("what", "median", "spread", f"of {figure.base}" if figure.base else "")
        parts += [f"## {figure.title}", figure.how, _markdown(columns, _rows(figure)), *figure.notes]
    return "\n\n".join(parts) + "\n"


def _rows(figure: Figure) -> Table:
    return [
        (row.name, middle(row.values, row.unit), spread(row.values, row.unit), _of_base(figure, row))
        for row in figure.rows
    ]


def _of_base(figure: Figure, row: Row) -> str:
    ratios = figure.ratios(row)
    return f"{middle(ratios, 'times')} ({spread(ratios, 'times')})" if ratios else ""


def _target(target: Target) -> Sequence[str]:
    seen, around = middle(target.values, target.unit), spread(target.values, target.unit)
    return target.name, target.asked, seen, around, "yes" if target.is_met else "NO"


def _aligned(table: Table) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))] if table else []
    for row in table:
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {first}  {'  '.join(others)}".rstrip()


def _markdown(columns: Sequence[str], table: Table) -> str:
    wide = [place for place, name in enumerate(columns) if name]
    rows = [columns, ["---"] * len(columns), *table]
    return "\n".join("| " + " | ".join(row[place] for place in wide) + " |" for row in rows)
