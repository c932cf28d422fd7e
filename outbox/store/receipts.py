"""Receipts: the memory of keys whose events are gone, for a window of time and of bytes."""

from __future__ import annotations

from outbox.bounds import Bounds
from outbox.store import statements as sql
from outbox.store.file import OutboxFile

_ROW_BYTES = 64


def remember(
    box: OutboxFile,
    key: str,
    seq: int,
    kind: str,
    digest: bytes,
    state: str,
    now_ms: int,
    result: str | None = None,
) -> None:
    """Keep what became of a key; inside a transaction."""
    box.run(sql.PUT_RECEIPT, key, seq, kind, digest, str(state), now_ms, result)
    box.run(sql.COUNT_RECEIPTS, _size(key, result))


def remember_many(box: OutboxFile, rows: list[tuple[str, int, str, bytes, str, int, str | None]]) -> None:
    """The same for a settled group, with one count."""
    box.run_many(sql.PUT_RECEIPT, list(rows))
    box.run(sql.COUNT_RECEIPTS, sum(_size(row[0], row[6]) for row in rows))


def forget_old(box: OutboxFile, bounds: Bounds, now_ms: int) -> int:
    """Drop receipts beyond the window (at most 500 at a time); returns how many. Makes its own transaction."""
    kept_bytes = box.one("SELECT receipt_bytes FROM outbox")[0]
    horizon_ms = now_ms - bounds.receipt_window_ms
    gone: list[tuple[str]] = []
    freed = 0
    for key, at_ms, size in box.rows(sql.OLDEST_RECEIPTS):
        if at_ms >= horizon_ms and kept_bytes - freed <= bounds.receipt_max_bytes:
            break
        gone.append((key,))
        freed += size
    if gone:
        with box.transaction(durable=False):
            box.run_many(sql.DELETE_RECEIPT, list(gone))
            box.run(sql.COUNT_RECEIPTS, -freed)
    return len(gone)


def _size(key: str, result: str | None) -> int:
    return len(key) + _ROW_BYTES + (len(result) if result else 0)
