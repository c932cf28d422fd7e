"""One stored event as its sender sees it, read so that damage shows as a damaged row and never as a crash."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from outbox.event import row_checksum
from outbox.outcome import Trouble

_SHAPES = frozenset(("object", "value", "batch", "tool", "archive", "gap"))
_HISTORY_LENGTH = 20
_UNSOUND = False
CRASHED = "crashed"  # the reason of an entry: its sender died


class Row(NamedTuple):
    """One event as its sender sees it. `size_bytes` is what it counts for in the bounds."""

    seq: int
    kind: str
    key: str
    wire_payload: bytes
    shape: str
    occurred_at_ms: int
    accepted_at_ms: int
    digest: bytes
    extra: dict[str, Any]
    sound: bool  # its checksum matches, and all of it can be read
    sends: int
    attempts: int
    crashes: int
    first_try_at_ms: int | None  # None: nothing is remembered of a try
    history: str
    progress: str | None

    @property
    def size_bytes(self) -> int:
        """The length of its wire text."""
        return len(self.wire_payload)


def sender_row(stream: str, raw: tuple[Any, ...]) -> Row:
    """A row of HEAD_ROWS and its like, with its checksum compared.

    Their texts come as bytes, since one that is no UTF-8 any more must not stop the reading.
    """
    try:
        return _read(stream, raw)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _damaged(raw)


def _read(stream: str, raw: tuple[Any, ...]) -> Row:
    (seq, kind, key, wire, shape, occurred_at_ms, accepted_at_ms, digest, extra, checksum,
     sends, attempts, crashes, first_try_at_ms, history, progress) = raw  # fmt: skip
    kind, key, shape = kind.decode(), key.decode(), shape.decode()
    sound = shape in _SHAPES and checksum == row_checksum(stream, seq, kind, key, occurred_at_ms, wire)
    known: dict[str, Any] = {}
    if extra is not None:
        known = json.loads(extra)
        sound = sound and type(known) is dict
    if first_try_at_ms is not None:
        sound = sound and type(sends) is type(attempts) is type(crashes) is type(first_try_at_ms) is int
        history = history.decode()
        sound = sound and type(json.loads(history)) is list
        if progress is not None:
            progress = progress.decode()
            sound = sound and type(json.loads(progress)) is dict
    if not sound or type(accepted_at_ms) is not int or type(digest) is not bytes:
        return _damaged(raw)
    return Row(
        seq, kind, key, wire, shape, occurred_at_ms, accepted_at_ms, digest, known, sound,
        sends, attempts, crashes, first_try_at_ms, history or "[]", progress,
    )  # fmt: skip


def _damaged(raw: tuple[Any, ...]) -> Row:
    """What can still be said of a row that is not what was stored."""
    (seq, kind, key, wire, shape, occurred_at_ms, accepted_at_ms, digest, extra, _,
     sends, attempts, crashes, first_try_at_ms, history, _) = raw  # fmt: skip
    return Row(
        whole(seq), readable(kind), own_key(key, whole(seq)), wire if isinstance(wire, bytes) else b"",
        readable(shape), whole(occurred_at_ms), whole(accepted_at_ms),
        digest if isinstance(digest, bytes) else b"", read_object(extra), _UNSOUND,
        whole(sends), whole(attempts), whole(crashes),
        None if first_try_at_ms is None else whole(first_try_at_ms),
        json.dumps(read_history(history)), None,
    )  # fmt: skip


def readable(value: object) -> str:
    """A stored text, whatever has become of it."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def own_key(key: object, seq: int) -> str:
    """The key, or one that no other event has where it cannot be read."""
    try:
        return key.decode() if isinstance(key, bytes) else f"damaged-{seq}"
    except UnicodeDecodeError:
        return f"damaged-{seq}"


def whole(value: object) -> int:
    """A stored number; 0 in the place of what damage made of one."""
    return value if isinstance(value, int) else 0


def http_status(value: object) -> int | None:
    """A stored status of an answer; None in the place of what is none."""
    return value if type(value) is int and 0 <= value <= 999 else None


def longer_history(history: str, trouble: Trouble | None) -> str:
    """The history with one more trouble; the oldest go beyond twenty."""
    if trouble is None:
        return history
    fields = trouble._asdict()
    fields.pop("excerpt")
    entry = {name: value for name, value in fields.items() if value not in (None, "")}
    entries = [*read_history(history), entry]
    if len(entries) > _HISTORY_LENGTH:
        entries = [entries[0], *entries[1 - _HISTORY_LENGTH :]]  # the first one tells since when
    return json.dumps(entries, separators=(",", ":"))


def first_try_as_head_ms(history: str) -> int | None:
    """When the event first went out as the head and came back; a crash with it in flight does not count."""
    for entry in read_history(history):
        if entry.get("reason") != CRASHED and isinstance(entry.get("at_ms"), int):
            return int(entry["at_ms"])
    return None


def read_history(text: str | bytes | None) -> list[dict[str, Any]]:
    """What went wrong so far, oldest first; a history that cannot be read counts as none."""
    entries = _json(text)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def read_object(text: str | bytes | None) -> dict[str, Any]:
    """A JSON object; a text that is none counts as an empty one."""
    value = _json(text)
    return value if isinstance(value, dict) else {}


def _json(text: str | bytes | None) -> object:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None


def storable(text: str) -> str:
    """A text from outside as UTF-8 can hold it: halves of surrogate pairs become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
