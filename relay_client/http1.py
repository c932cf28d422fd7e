"""HTTP/1.1 as a client speaks it (RFC 9112): the bytes of a request, and what the bytes of a response mean.

Pure: no socket and no clock. Strict in what decides where a response ends, since that is what a wrong or
malicious peer would play with; lenient in what does not matter (bare line feeds, folded lines).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD_BYTES = 64 * 1024
_MAX_CHUNK_LINE_BYTES = 4 * 1024

_START = b"HTTP/1."
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: [^\x00-\x08\x0a-\x1f]*)?")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BREAK = re.compile(rb"[\x00\r\n]")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_FOLD = re.compile(rb"\r?\n[ \t]+")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")
_DIGITS = re.compile(rb"[0-9]{1,18}")

Fields = list[tuple[bytes, bytes]]


class NotHttp(Exception):
    """What came is no HTTP/1.1 response, or ended before its end."""


@dataclass(frozen=True, slots=True)
class Head:
    """The start of a final response, its names in lower case.

    `keeps`: the connection may serve another request afterwards.
    """

    status: int
    fields: Fields
    keeps: bool


def request_head(method: bytes, target: bytes, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The bytes before a request's body.

    Raises:
        ValueError: the target, a name or a value would break out of its line.
    """
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    for name, value in fields:
        if not _is_token(name):
            raise ValueError(f"the header field {name!r} cannot be sent")
        lines.append(name + b": " + value)
    head = b"\r\n".join(lines)
    if {head.count(b"\n"), head.count(b"\r")} != {len(lines) - 1} or head.count(b"\0"):
        guilty = [line.partition(b":")[0] for line in lines if _BREAK.search(line)]
        raise ValueError(f"the header field {guilty[0]!r} cannot be sent")
    return head + b"\r\n\r\n"


@functools.lru_cache(64)
def _is_token(name: bytes) -> bool:
    return _TOKEN.fullmatch(name) is not None


class HeadReader:
    """Finds the head of the final response; interim ones (1xx) are passed over."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._looked_at = 0
        self.rest = b""  # what came behind the head: the start of the body

    def feed(self, data: bytes) -> Head | None:
        """Take in what came; give the head once it is whole.

        Raises:
            NotHttp: it will never be one, or `data` is empty: the peer has ended.
        """
        if not data:
            raise NotHttp("the connection ended before an answer")
        self._buffer += data
        while self._buffer[: len(_START)] == _START[: len(self._buffer)]:
            end = _HEAD_END.search(self._buffer, self._looked_at)
            if end is None:
                self._looked_at = max(0, len(self._buffer) - 3)
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise NotHttp("the header is too large")
                return None
            head = _parse_head(bytes(self._buffer[: end.start()]))
            del self._buffer[: end.end()]
            self._looked_at = 0
            if head.status >= 200:
                self.rest = bytes(self._buffer)
                return head
        raise NotHttp("the answer does not begin as HTTP/1.1 does")


class BodyReader(Protocol):
    """Takes the bytes behind a head and gives those of the body."""

    done: bool
    surplus: bool  # there was more than the body: the connection is of no further use

    def feed(self, data: bytes) -> bytes:
        """The part of the body in `data`; raises NotHttp when it cannot be one, or ends (b"") too early."""


def body_reader(head: Head) -> BodyReader:
    """How the end of this response's body is found (RFC 9112, section 6.3).

    Raises:
        NotHttp: it cannot be told.
    """
    if head.status in {204, 304}:
        return _Length(0)
    codings = _tokens(head.fields, b"transfer-encoding")
    if codings:
        if codings != [b"chunked"]:
            raise NotHttp("the answer has a transfer coding that is not known")
        return _Chunked()
    lengths = set(_tokens(head.fields, b"content-length"))
    if not lengths:
        return _UntilEnd()
    if len(lengths) > 1 or not _DIGITS.fullmatch(length := lengths.pop()):
        raise NotHttp("the answer has no readable length")
    return _Length(int(length))


class _Length:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = not length
        self.surplus = False

    def feed(self, data: bytes) -> bytes:
        if not data and self._left:
            raise NotHttp("the connection ended within the answer")
        self.surplus = len(data) > self._left
        part = data[: self._left]
        self._left -= len(part)
        self.done = not self._left
        return part


class _UntilEnd:
    """A body that ends with the connection, which is of no further use then."""

    surplus = True

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes) -> bytes:
        self.done = not data
        return data


class _Chunked:
    """A body in chunks (RFC 9112, section 7.1); extensions and trailers are read and dropped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0  # of the chunk under way
        self._in_trailer = False
        self._after_chunk = False
        self._trailer_bytes = 0
        self.done = False
        self.surplus = False

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise NotHttp("the connection ended within the answer")
        self._buffer += data
        body = bytearray()
        while not self.done and self._buffer:
            if self._left:
                body += self._take(min(self._left, len(self._buffer)))
            elif (line := self._line()) is None:
                break
            else:
                self._read_line(line)
        self.surplus = self.done and bool(self._buffer)
        return bytes(body)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._left -= count
        self._after_chunk = not self._left
        return taken

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > _MAX_CHUNK_LINE_BYTES:
                raise NotHttp("the answer has a chunk without a size")
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        return line

    def _read_line(self, line: bytes) -> None:
        if self._in_trailer:
            self._trailer_bytes += len(line) + 1
            if self._trailer_bytes > MAX_HEAD_BYTES:
                raise NotHttp("the answer's trailer is too large")
            self.done = not line
        elif self._after_chunk:
            if line:
                raise NotHttp("the answer has a chunk that is longer than its size")
            self._after_chunk = False
        else:
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise NotHttp("the answer has a chunk without a size")
            self._left = int(size[1], 16)
            self._in_trailer = not self._left


def _parse_head(block: bytes) -> Head:
    if block.count(b"\0") or block.count(b"\r") != block.count(b"\r\n"):
        raise NotHttp("the answer has a broken header")
    lines = _LINE_END.split(_FOLD.sub(b" ", block))
    start = _STATUS_LINE.fullmatch(lines[0])
    if start is None:
        raise NotHttp("the answer has no status")
    status = int(start[2])
    if status == 101:
        raise NotHttp("the answer switches to a protocol nobody asked for")
    fields = [_parse_field(line) for line in lines[1:]]
    keeps = start[1] != b"0" and b"close" not in _tokens(fields, b"connection")
    # Two answers to where the body ends: one of them was meant to be missed (RFC 9112, section 6.1).
    names = {name for name, _ in fields}
    return Head(status, fields, keeps and not {b"transfer-encoding", b"content-length"} <= names)


def _parse_field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not (colon and _TOKEN.fullmatch(name)):
        raise NotHttp("the answer has a broken header field")
    return name.lower(), value.strip(b" \t")


def _tokens(fields: Fields, name: bytes) -> list[bytes]:
    """The members of a list-valued field, in lower case."""
    values = [value for own, value in fields if own == name]
    return [token.strip(b" \t").lower() for value in values for token in value.split(b",")]
