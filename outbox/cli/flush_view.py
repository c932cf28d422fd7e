"""What a flush looks like on a terminal while it runs: a bar for each agent, read from the files."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outbox.api.report import status_of
from outbox.cli.flush import progress_line
from outbox.errors import StoreError
from outbox.printable import printable
from outbox.store.directory import StateDirectory
from outbox.store.inspect import OutboxStatus

_MOST_BARS = 20
_LOOKS_A_SECOND = 5


class FlushView:
    """Live bars while the block runs, gone at its end. Draws in a thread of its own."""

    def __init__(self, state: StateDirectory, agent: str | None) -> None:
        """Show what waits now, the largest first; `agent` alone, where one is named."""
        self._state = state
        paths = list(state.outbox_files()) if agent is None else [state.outbox_path(agent)]
        seen = [(path, status) for path in paths if (status := self._look(path)) and status.waiting]
        seen.sort(key=lambda one: -one[1].waiting)
        self._before = seen[:_MOST_BARS]
        self._live = Live(
            get_renderable=self._draw, console=Console(), refresh_per_second=_LOOKS_A_SECOND, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _draw(self) -> Text:
        wide = max((len(status.agent) for _, status in self._before), default=0)
        lines = [self._line(path, status, wide) for path, status in self._before]
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def _line(self, path: Path, before: OutboxStatus, wide: int) -> str:
        now = self._look(path) or before
        done = now.delivered - before.delivered
        return printable(progress_line(before.agent, done, done + now.waiting, "", wide=wide, bars=True))

    def _look(self, path: Path) -> OutboxStatus | None:
        try:
            return status_of(self._state, path)
        except StoreError:
            return None
