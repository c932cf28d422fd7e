"""Whether an outbox file is what it should be: pages, rows, counters. For `doctor` and the tests."""

from __future__ import annotations

import apsw

from outbox.errors import StoreDamaged
from outbox.store import statements as sql
from outbox.store.file import OutboxFile
from outbox.store.row import sender_row

_MOST_FAULTS = 5

_CHECKS = {
    "waiting": "SELECT waiting, (SELECT count(*) FROM events WHERE kind <> 'outbox-gap') FROM outbox",
    "waiting_bytes": """
        SELECT waiting_bytes, (SELECT coalesce(sum(octet_length(wire_payload)), 0) FROM events
                               WHERE kind <> 'outbox-gap') FROM outbox""",
    "dead": "SELECT dead, (SELECT count(*) FROM dead) FROM outbox",
    "dead_bytes": """
        SELECT dead_bytes, (SELECT coalesce(sum(octet_length(wire_payload)), 0) FROM dead) FROM outbox""",
    "receipt_bytes": """
        SELECT receipt_bytes, (
            SELECT coalesce(sum(octet_length(key) + 64 + coalesce(octet_length(result), 0)), 0)
            FROM receipts) FROM outbox""",
    # Every event that was accepted waits, is a dead letter, or ended in one of the ways that are counted.
    "accepted": """
        SELECT accepted, waiting + dead + delivered + dropped + (
            SELECT coalesce(sum(value), 0) FROM totals
            WHERE name IN ('coalesced', 'discarded', 'tool_error') OR name GLOB 'dropped_dead:*')
        FROM outbox""",
    "dropped": """
        SELECT dropped, (SELECT coalesce(sum(value), 0) FROM totals WHERE name GLOB 'dropped:*')
        FROM outbox""",
    "tries without an event": """
        SELECT 0, (SELECT count(*) FROM tries WHERE seq NOT IN (SELECT seq FROM events))""",
    "seqs given twice": """
        SELECT 0, (SELECT count(*) FROM events WHERE seq > last_seq OR seq IN (SELECT seq FROM dead))
        FROM outbox""",
    "open gaps that are none": """
        SELECT 0, count(*) FROM outbox WHERE open_gap_seq IS NOT NULL
        AND open_gap_seq NOT IN (SELECT seq FROM events WHERE kind = 'outbox-gap')""",
}


def verify_counters(box: OutboxFile) -> list[str]:
    """One line for each counter that disagrees with the rows ("waiting: 5 counted, 4 found").

    Reads every row once: not for the way of an event.
    """
    with box.snapshot():
        found = [(name, *box.one(check)) for name, check in _CHECKS.items()]
    return [f"{name}: {counted} counted, {rows} found" for name, counted, rows in found if counted != rows]


def verify_pages(box: OutboxFile) -> list[str]:
    """What is wrong with the pages of the file, at most five faults; all of them are read."""
    try:
        said = [text for (text,) in box.rows(f"PRAGMA quick_check({_MOST_FAULTS})")]
    except StoreDamaged as error:
        return [str(error).partition(". ")[0]]
    return [] if said == ["ok"] else [" ".join(text.split()) for text in said]


def unsound_rows(box: OutboxFile) -> list[int]:
    """The seqs of waiting events whose stored row is not what was accepted."""
    with box.snapshot():
        return [
            row.seq for raw in box.each(sql.HEAD_ROWS, -1) if not (row := sender_row(box.stream, raw)).sound
        ]


def sqlite_version() -> str:
    """Which SQLite is at work ("3.51.3")."""
    return apsw.sqlite_lib_version()
