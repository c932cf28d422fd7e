"""How commands speak: numbers, ages, times and tables for a person, plain lines in a pipe, JSON as data.

Nothing here is heavy to import; live views take rich where they are drawn.
"""

from __future__ import annotations

import json
import os
import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TextIO

from outbox.errors import OutboxError
from outbox.measures import age, bytes_text, count, local_time, number
from outbox.printable import printable as clean

__all__ = [
    "OutputFailed",
    "age",
    "bytes_text",
    "clean",
    "colour_wanted",
    "count",
    "emit_json",
    "fail",
    "local_time",
    "number",
    "paint",
    "say",
    "table",
    "terminal_width",
]


class OutputFailed(OSError):
    """stdout takes no more (a full disk behind `> FILE`); what the command did is done."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"What is told on stdout cannot be written: {error.strerror}. Only the telling failed: what was "
            "accepted or changed before it stays so. To see how things stand: outbox status"
        )


_COLOURS = {"red": "31", "green": "32", "yellow": "33", "blue": "34", "bold": "1", "dim": "2"}


def table(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    *,
    right: Collection[str] = (),
    width: int | None = None,
) -> list[str]:
    """Aligned lines of plain text, headers first, two spaces between the columns.

    Columns whose header is in `right` end at their right edge. Cells are cleaned. Lines longer than `width`
    (cells of a terminal) are cut with an ellipsis; without one they are as long as they are.
    """
    grid = [[clean(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(_cells(row[column]) for row in grid) for column in range(len(headers))]
    lines = []
    for row in grid:
        padded = (
            _pad(cell, wide, right=header in right)
            for cell, wide, header in zip(row, widths, headers, strict=True)
        )
        line = "  ".join(padded).rstrip()
        lines.append(line if width is None else _cut(line, width))
    return lines


def _pad(text: str, wide: int, *, right: bool) -> str:
    space = " " * (wide - _cells(text))
    return space + text if right else text + space


def _cut(line: str, width: int) -> str:
    if _cells(line) <= width:
        return line
    while line and _cells(line) >= width:
        line = line[:-1]
    return line + "…"


def _cells(text: str) -> int:
    """How many cells a terminal takes for it (UAX 11); close enough for joined emoji."""
    if text.isascii():
        return len(text)
    return sum(_cell_width(character) for character in text)


def _cell_width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in {"W", "F"} else 1


def terminal_width(stream: TextIO) -> int | None:
    """The width of the terminal behind a stream, None when there is none: then nothing is cut."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):
        return None


def colour_wanted(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to colour: on a terminal that can, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") not in {None, "", "dumb"}


def paint(text: str, colour: str, *, on: bool) -> str:
    """`text` in red, green, yellow, blue, bold or dim when `on`."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if on else text


def say(*lines: str, to: TextIO | None = None) -> None:
    """Print lines to stdout or `to`; what the stream's encoding does not have is written as an escape."""
    stream = sys.stdout if to is None else to
    encoding = stream.encoding or "utf-8"
    try:
        for line in lines:
            stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is sys.stdout:
            raise OutputFailed(error) from error
        raise


def emit_json(value: Any) -> None:
    """Print one line of JSON, in ASCII: neither half a surrogate pair nor stdout's encoding can stop it."""
    say(json.dumps(value, allow_nan=False))


def fail(error: OutboxError) -> int:
    """Print an error as one line to stderr; returns the exit status that belongs to it."""
    say(clean(str(error)), to=sys.stderr)
    return error.exit_status
