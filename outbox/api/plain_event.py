"""The plain request that hands over one event: recognised in the bytes as they came. Pure.

Only what has one meaning is plain. Whatever is the least bit unusual is left to the HTTP parser, which
decides as if nobody had looked: so there is one place where HTTP is strict.
"""

from __future__ import annotations

import re

from outbox.value import NamedTuple

START = b"POST /v1/agents/"

_MOST_HEAD_BYTES = 8 * 1024
_MOST_BODY_BYTES = 64 * 1024
# RFC 9112, 3 and 5, without what is obsolete: no query, visible ASCII, CRLF at each end, no folded line
_HEAD = re.compile(
    rb"POST /v1/agents/([!-\"$-.0->@-~]+)/events HTTP/1\.1\r\n"
    rb"((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~]*\r\n)+)\r\n"
)
_FIELD = re.compile(rb"([^:]+):[\t ]*([^\r]*)\r\n")
_is_length = re.compile(rb"[0-9]{1,5}").fullmatch
_TELLING = frozenset((b"host", b"content-length", b"content-type", b"connection"))
_UNUSUAL = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
_JSON_TYPES = frozenset((b"", b"application/json"))


class PlainEvent(NamedTuple):
    """The agent as the path has it, and the body, of which so many bytes have not come yet.

    The fields of the head are as ASGI has them: in order, names in lower case, no blanks around values.
    """

    agent: bytes
    body: bytes
    missing_bytes: int
    fields: list[tuple[bytes, bytes]]


def plain_event(data: bytes) -> PlainEvent | None:
    """The one request that these bytes are, or begin with a whole head; None when it is not a plain one.

    Two Content-Length, or one beside a Transfer-Encoding, are never plain (RFC 9112, 6.3).
    """
    head = _HEAD.match(data, 0, _MOST_HEAD_BYTES)
    if head is None:
        return None
    fields = [(name.lower(), value.rstrip()) for name, value in _FIELD.findall(head[2])]
    telling: dict[bytes, bytes] = {}
    for name, value in fields:
        if name in _TELLING:
            if name in telling:
                return None
            telling[name] = value
        elif name in _UNUSUAL:
            return None
    length = telling.get(b"content-length", b"")
    if b"host" not in telling or not _is_length(length):
        return None
    if telling.get(b"connection", b"keep-alive").lower() != b"keep-alive":
        return None
    if telling.get(b"content-type", b"").partition(b";")[0].rstrip().lower() not in _JSON_TYPES:
        return None
    body = data[head.end() :]
    missing_bytes = int(length) - len(body)
    if missing_bytes < 0 or int(length) > _MOST_BODY_BYTES:
        return None
    if not missing_bytes and body.lstrip()[:1] != b"{":
        return None
    return PlainEvent(head[1], body, missing_bytes, fields)
