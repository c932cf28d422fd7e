"""What `outbox status --watch` looks like on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from outbox.api.report import Overview
from outbox.cli.status_watch import picture

_COLOURS = (
    (r"^relay .* works$", "green"),
    (r"closed since .*", "red"),
    (r"(waits for .*|held: .*|cannot be read: .*|none runs: .*)$", "yellow"),
    (r"^agent  .*", "bold"),
    (r"^[\d,]+ dead letters?: .*", "red"),
)


class LiveStatus:
    """The status in place of the one before; the last one stays when it ends."""

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

    def show(self, seen: Overview) -> None:
        """Draw the moment."""
        width, height = self._console.size
        text = Text(no_wrap=True, overflow="ellipsis")
        for number, line in enumerate(picture(seen, width, height)):
            text.append("\n" if number else "").append(_painted(line))
        self._live.update(text, refresh=True)


def _painted(line: str) -> Text:
    painted = Text(line)
    for pattern, colour in _COLOURS:
        painted.highlight_regex(pattern, colour)
    return painted
