"""Whether a row of a damaged file is what was stored: by its checksum, or, with no id left, by its digest."""

from __future__ import annotations

import contextlib
import json
from hashlib import blake2b
from typing import Any

from outbox.event import row_checksum
from outbox.gap import GAP_KIND
from outbox.store.row import Row, readable, sender_row
from outbox.wire_text import original_payload, wire_key

_NO_TRIES = (0, 0, 0, None, None, None)


class Soundness:
    """Proves rows of one outbox, whose agent is known, and whose ids `streams` may be."""

    def __init__(self, streams: tuple[str, ...], agent: str, *, mixed: bool = False) -> None:
        """A checksum covers the file's id: what another file holds does not match.

        A digest does not: where files are `mixed` it proves nothing.
        """
        self._streams = streams
        self._mixed = mixed
        self._agent = agent

    def row(self, raw: tuple[Any, ...]) -> tuple[Row, str | None]:
        """A row of READ_EVENTS, with `sound` as it was proven, and its dedupe key."""
        *columns, dedupe_key = raw
        rows = [sender_row(stream, (*columns, *_NO_TRIES)) for stream in self._streams]
        found = next((row for row in rows if row.sound), None) or self._by_its_digest(columns)
        return found, None if dedupe_key is None else readable(dedupe_key)

    def _by_its_digest(self, columns: list[Any]) -> Row:
        row = sender_row("", (*columns, *_NO_TRIES))
        if self._streams or self._mixed:
            return row
        seq, kind, key, wire, _, at_ms, *_ = columns
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            checksum = row_checksum("", seq, kind.decode(), key.decode(), at_ms, wire)
            found = sender_row("", (*columns[:9], checksum, *_NO_TRIES))
            if found.sound and self._has_its_digest(found):
                return found
        return row

    def _has_its_digest(self, row: Row) -> bool:
        if row.kind == GAP_KIND:
            return type(json.loads(row.wire_payload)) is dict
        key = wire_key(row.key, self._agent, bool(row.extra.get("scoped")))
        payload = original_payload(
            row.kind, row.shape, row.wire_payload, key=key, occurred_at_ms=row.occurred_at_ms
        )
        return blake2b(row.kind.encode() + b"\0" + payload, digest_size=16).digest() == row.digest


def tries_make_sense(*raw: Any) -> bool:
    """Whether sends, attempts, crashes, first try, history and progress are what a sender remembers."""
    sends, attempts, crashes, first_try_at_ms, history, progress = raw
    if any(type(n) is not int or n < 0 for n in (sends, attempts, crashes, first_try_at_ms or 0)):
        return False
    try:
        return type(json.loads(history)) is list and (progress is None or type(json.loads(progress)) is dict)
    except (ValueError, TypeError, RecursionError):
        return False
