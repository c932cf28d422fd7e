"""Server-sent events, read piece by piece as the WHATWG HTML standard (section 9.2.6) defines the stream.

Pure, and bounded: bytes in, events out, however the bytes were cut up on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(Exception):
    """One event is larger than the reader was told to hold."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event of the stream."""

    data: str
    type: str = "message"


class EventStream:
    """Reads one stream. An event that the end of the stream cuts off is never given out."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._data = bytearray()
        self._type = b""
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Give out the events that `chunk` completes.

        Raises:
            EventTooLarge: an unfinished event is beyond `max_event_bytes`; the stream cannot be read on.
        """
        for line in self._lines(chunk):
            if line:
                self._take(line)
            elif self._data:
                data = self._data[:-1].decode("utf-8", "replace")
                self._data.clear()
                yield ServerEvent(data, self._taken_type())
            else:
                self._type = b""

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        *whole, rest = _LINE_END.split(chunk)
        for piece in whole:
            self._hold(piece)
            line = self._without_mark(bytes(self._line))
            self._line.clear()
            yield line
        self._hold(rest)

    def _hold(self, piece: bytes) -> None:
        self._line += piece
        if len(self._line) + len(self._data) > self._max_event_bytes:
            raise EventTooLarge

    def _without_mark(self, line: bytes) -> bytes:
        at_start, self._at_start = self._at_start, False
        return line.removeprefix(_BYTE_ORDER_MARK) if at_start else line

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data += value + b"\n"
        elif name == b"event":
            self._type = value

    def _taken_type(self) -> str:
        taken, self._type = self._type, b""
        return taken.decode("utf-8", "replace") or "message"
