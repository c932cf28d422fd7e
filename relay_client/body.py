"""Reading what comes back in constant memory, however large it is or grows when unpacked. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from relay_client.mcp import answer_to
from relay_client.problem import parse_json
from relay_client.sse import EventStream, EventTooLarge

ERROR_LIMIT_BYTES = 64 * 1024
ANSWER_LIMIT_BYTES = 8 * 1024 * 1024

_PIECE_BYTES = 64 * 1024
_GZIP_OR_ZLIB = 47


class DamagedBody(Exception):
    """The packed body cannot be unpacked, or ends too early."""


def limit_bytes(status: int) -> int:
    """How much of an answer is read: 8 MiB of a 2xx, 64 KiB of anything else."""
    return ANSWER_LIMIT_BYTES if 200 <= status < 300 else ERROR_LIMIT_BYTES


def read_capped(chunks: Iterable[bytes], max_bytes: int) -> tuple[bytes, bool]:
    """The start of a body, and whether there was more. Of the rest nothing is read."""
    body = bytearray()
    for chunk in chunks:
        body += chunk[: max_bytes - len(body) + 1]
        if len(body) > max_bytes:
            return bytes(body[:max_bytes]), True
    return bytes(body), False


def read_message(chunks: Iterable[bytes], request_id: str, max_bytes: int) -> tuple[bytes, bool]:
    """The text of the JSON-RPC answer to `request_id` in an event stream, read no further than to its end.

    b"" when the stream ends without it; True beside it when an event was too large to be read.
    """
    stream = EventStream(max_bytes)
    try:
        for chunk in chunks:
            for event in stream.feed(chunk):
                if answer_to(parse_json(event.data), request_id) is not None:
                    return event.data.encode(), False
    except EventTooLarge:
        return b"", True
    return b"", False


def unpacked(chunks: Iterable[bytes], encoding: str) -> Iterable[bytes]:
    """The chunks without their content coding, in pieces of at most 64 KiB.

    We ask for `identity`; some servers pack all the same. A coding that is not known here is left as it is.

    Raises:
        DamagedBody: while iterating.
    """
    if encoding.strip().lower() not in {"gzip", "x-gzip", "deflate"}:
        return chunks
    return _inflated(chunks)


def _inflated(chunks: Iterable[bytes]) -> Iterator[bytes]:
    unpacker, is_empty = zlib.decompressobj(_GZIP_OR_ZLIB), True
    try:
        for chunk in chunks:
            packed, is_empty = chunk, is_empty and not chunk
            while packed and not unpacker.eof:
                yield unpacker.decompress(packed, _PIECE_BYTES)
                packed = unpacker.unconsumed_tail
    except zlib.error as error:
        raise DamagedBody(str(error)) from error
    if not (unpacker.eof or is_empty):  # nothing at all is an empty body, whatever it is said to be
        raise DamagedBody("it ends too early")
