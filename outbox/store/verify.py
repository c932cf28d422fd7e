"""Whether the counters of an outbox agree with its rows; for `doctor`, and after every step of the tests."""

from __future__ import annotations

from outbox.store.file import OutboxFile

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
        found = [(name, *box.one(sql)) for name, sql in _CHECKS.items()]
    return [f"{name}: {counted} counted, {rows} found" for name, counted, rows in found if counted != rows]
