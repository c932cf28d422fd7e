"""A bar on stderr while a command works through much, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], object]


@contextmanager
def progress(title: str, total: int | None, *, shown: bool) -> Iterator[Advance]:
    """What is yielded tells how much more is done. With `total` None its end is not known."""
    if not shown or not sys.stderr.isatty():
        yield lambda _more: None
        return
    from rich.console import Console  # noqa: PLC0415 - rich is for terminals
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda more: bar.advance(task, more)
