"""Retirement: the file of an agent is removed when nothing in it is of use. When is decided above."""

from __future__ import annotations

from pathlib import Path

import apsw

from outbox.errors import StoreHeld
from outbox.store.directory import StateDirectory, sync_folder
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.locks import lifecycle_byte

# Nothing waits, no gap either; no dead letter; no key that is still remembered; nobody's pause to be kept.
_IS_FINISHED = """
SELECT paused_at_ms IS NULL AND NOT EXISTS (SELECT 1 FROM events) AND NOT EXISTS (SELECT 1 FROM dead)
       AND NOT EXISTS (SELECT 1 FROM receipts WHERE at_ms >= ?)
FROM outbox"""


def is_finished(box: OutboxFile, now_ms: int) -> bool:
    """Whether nothing in this outbox is of use any more."""
    return bool(box.one(_IS_FINISHED, now_ms - box.bounds.receipt_window_ms)[0])


def retire(state: StateDirectory, path: Path, now_ms: int) -> bool:
    """Remove the file of a finished outbox; False, and nothing is changed, when it is in use or of use.

    Whoever has it open learns at its next commit that the file is gone, and makes a new one: while it is
    looked at for the last time and removed, nobody commits. Raises StoreError when it cannot be opened.
    """
    box = open_outbox(state, path)
    try:
        box.become_sender()
        try:
            return _removed(state, box, now_ms)
        finally:
            box.resign_sender()
    except StoreHeld:
        return False
    finally:
        box.close()


def _removed(state: StateDirectory, box: OutboxFile, now_ms: int) -> bool:
    byte = lifecycle_byte(box.path.name)
    if not box.locks.try_exclusive(byte):
        return False
    try:
        if box.was_replaced or not is_finished(box, now_ms):
            return False
        box.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        log, index = (box.path.with_name(box.path.name + side) for side in ("-wal", "-shm"))
        if log.exists() and log.stat().st_size:
            return False  # somebody reads an older state of it
        for name in (box.path, log, index):  # the file first: whoever has it open must see that it is gone
            name.unlink(missing_ok=True)
        Path(box.suspect_mark).unlink(missing_ok=True)
        sync_folder(state.agents)
        return True
    finally:
        box.locks.release(byte)
