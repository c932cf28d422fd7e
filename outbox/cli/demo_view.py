"""How `outbox demo` looks: a live table on a terminal, a few plain lines in a pipe."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outbox.cli.output import clean, number, say
from outbox.demo.play import Scene

_LINE_EVERY_EVENTS = 10
_MOST_ROWS = 14
_LINES_AROUND = 14  # what stands above and below the rows on a terminal
_BAR_CELLS = 30


class Lines:
    """A line for what happens, and one now and then on how it stands."""

    def __init__(self, to: TextIO) -> None:
        """Nothing is printed yet."""
        self._to = to
        self._next_at = _LINE_EVERY_EVENTS
        self._backlog = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self, *lines: str) -> None:
        """Print what happened."""
        say(*lines, to=self._to)

    def show(self, scene: Scene) -> None:
        """Print how it stands, every ten events and when a backlog has gone out."""
        on_its_way = scene.waiting == 1 and not scene.why  # it just came; where it is in a moment tells more
        drained = self._backlog and not scene.waiting
        if on_its_way or not (drained or len(scene.events) >= self._next_at):
            return
        self._next_at = (len(scene.events) // _LINE_EVERY_EVENTS + 1) * _LINE_EVERY_EVENTS
        self._backlog = scene.waiting > 0
        figures = (
            f"{number(len(scene.events))} accepted, {number(scene.delivered)} delivered, "
            f"{number(scene.waiting)} waiting"
        )
        why = f" ({clean(scene.why)})" if scene.waiting and scene.why else ""
        say(f"  {figures}{why}", to=self._to)


class LiveTable:
    """The last events and where each is, drawn anew several times a second; what happens stands above."""

    def __init__(self, console: Console) -> None:
        """Nothing is drawn before the `with` block."""
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def tell(self, *lines: str) -> None:
        """Print what happened above the table."""
        for line in lines:
            self._console.print(Text(line))

    def show(self, scene: Scene) -> None:
        """Draw the moment."""
        rows = max(3, min(_MOST_ROWS, self._console.height - _LINES_AROUND))
        self._live.update(picture(scene, rows), refresh=True)


def picture(scene: Scene, most_rows: int) -> RenderableType:
    """One moment as rich draws it."""
    return Group("", _figures(scene), "", _events(scene, most_rows))


def _figures(scene: Scene) -> Table:
    answers = ("runs", "green") if scene.relay_runs else ("killed", "red")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("relay", Text.assemble(scene.relay_url, "  ", answers))
    grid.add_row("delivered", _bar(scene.delivered, len(scene.events)))
    grid.add_row("waiting", Text.assemble(number(scene.waiting), "  ", (clean(scene.why), "yellow")))
    return grid


def _bar(done: int, total: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        f"{number(done)}/{number(total)}", ProgressBar(total=max(total, 1), completed=done, width=_BAR_CELLS)
    )
    return grid


def _events(scene: Scene, most_rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    table.add_column("seq", justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True, width=22)
    table.add_column("says", no_wrap=True, ratio=1)
    table.add_column("where it is", no_wrap=True, min_width=14)
    for seq, event in scene.events[-most_rows:]:
        delivered = seq <= scene.delivered_through
        where = Text("at the relay", "green") if delivered else Text("on disk, waits", "yellow")
        text = Text(clean(event.text) or "(nothing)", overflow="ellipsis")
        table.add_row(str(seq), Text(clean(event.speaker), overflow="ellipsis"), text, where)
    return table
