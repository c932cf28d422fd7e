"""Receipts: the memory of keys whose events are gone, for a window of time and of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.bounds import Bounds
from outbox.store import statements as sql
from outbox.store.file import OutboxFile

Memory = tuple[str, int, str, bytes, str, int, str | None]
"""What is remembered of one key: key, seq, kind, digest, state, at_ms, result."""

_ROW_BYTES = (
    64  # what a row takes beside its key and its result, roughly; the same in statements.OLDEST_RECEIPTS
)
_FORGOTTEN_AT_ONCE = 500


def remember(box: OutboxFile, rows: Sequence[Memory]) -> None:
    """Keep what became of these keys; inside a transaction.

    Beyond the window's bytes, twice as many old ones go as new ones come.
    """
    if not rows:
        return
    box.run_many(sql.PUT_RECEIPT, list(rows))
    box.run(sql.COUNT_RECEIPTS, sum(_size_bytes(row[0], row[6]) for row in rows))
    kept_bytes: int = box.one(sql.READ_RECEIPT_BYTES)[0]
    if kept_bytes > box.bounds.receipt_max_bytes:
        _forget(box, box.bounds.receipt_max_bytes, kept_bytes, horizon_ms=None, most=2 * len(rows))


def forget_old(box: OutboxFile, bounds: Bounds, now_ms: int, *, by_age: bool = True) -> int:
    """Drop receipts beyond the window (at most 500 at a time), in a transaction of its own; how many went.

    Without `by_age`, since the clock cannot be believed, only the window's bytes count.
    """
    horizon_ms = now_ms - bounds.receipt_window_ms if by_age else None
    oldest = box.maybe(sql.OLDEST_RECEIPTS, 1)
    kept_bytes = box.one(sql.READ_RECEIPT_BYTES)[0]
    is_old = oldest is not None and horizon_ms is not None and oldest[1] < horizon_ms
    if oldest is None or not (is_old or kept_bytes > bounds.receipt_max_bytes):
        return 0
    with box.transaction(durable=False):
        kept_bytes = box.one(sql.READ_RECEIPT_BYTES)[0]
        return _forget(
            box, bounds.receipt_max_bytes, kept_bytes, horizon_ms=horizon_ms, most=_FORGOTTEN_AT_ONCE
        )


def _forget(box: OutboxFile, most_bytes: int, kept_bytes: int, *, horizon_ms: int | None, most: int) -> int:
    """Drop the oldest, while they are older than the horizon or more bytes than allowed are kept."""
    gone: list[tuple[str]] = []
    freed = 0
    for key, at_ms, size in box.rows(sql.OLDEST_RECEIPTS, most):
        if (horizon_ms is None or at_ms >= horizon_ms) and kept_bytes - freed <= most_bytes:
            break
        gone.append((key,))
        freed += size
    box.run_many(sql.DELETE_RECEIPT, gone)
    box.run(sql.COUNT_RECEIPTS, -freed)
    return len(gone)


def _size_bytes(key: str, result: str | None) -> int:
    return len(key) + _ROW_BYTES + (len(result.encode()) if result else 0)
