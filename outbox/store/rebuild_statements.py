"""The SQL of a rebuilding: what is read of a damaged file row by row, and how the new one is filled."""

from outbox.store.statements import INSERT_EVENT, INSERT_LETTER

_BETWEEN = " NOT INDEXED WHERE seq BETWEEN ? AND ? ORDER BY seq"
_EVENT_COLUMNS = """
seq, CAST(kind AS BLOB), CAST(key AS BLOB), CAST(wire_payload AS BLOB), CAST(shape AS BLOB), occurred_at_ms,
accepted_at_ms, digest, CAST(extra AS BLOB), checksum, CAST(dedupe_key AS BLOB)"""

# Rows between two seqs, by the order of the table alone: an index may be what is damaged.
READ_EVENTS = "SELECT" + _EVENT_COLUMNS + " FROM events" + _BETWEEN
READ_LETTERS = (
    "SELECT"
    + _EVENT_COLUMNS
    + """,
       sends, attempts, first_try_at_ms, CAST(history AS BLOB), CAST(progress AS BLOB),
       CAST(reason AS BLOB), failed_at_ms, status, CAST(code AS BLOB), CAST(detail AS BLOB),
       CAST(answer AS BLOB), CAST(path AS BLOB)
FROM dead"""
    + _BETWEEN
)
READ_TRIES = (
    """
SELECT seq, sends, attempts, crashes, first_try_at_ms, CAST(history AS BLOB), CAST(progress AS BLOB)
FROM tries"""
    + _BETWEEN
)

# Rows of the tables that have no seq, from either end.
READ_RECEIPTS = """
SELECT CAST(key AS BLOB), seq, CAST(kind AS BLOB), digest, CAST(state AS BLOB), at_ms, CAST(result AS BLOB)
FROM receipts ORDER BY key {order}"""
READ_TOTALS = "SELECT CAST(name AS BLOB), value FROM totals ORDER BY name {order}"

# What is there twice, by its key or its seq, is taken once.
PUT_EVENT = INSERT_EVENT.replace("INSERT", "INSERT OR IGNORE")
PUT_LETTER = INSERT_LETTER.replace("INSERT", "INSERT OR IGNORE")
PUT_RECEIPT = """
INSERT OR IGNORE INTO receipts (key, seq, kind, digest, state, at_ms, result) VALUES (?, ?, ?, ?, ?, ?, ?)"""
PUT_TOTAL = "INSERT OR IGNORE INTO totals (name, value) VALUES (?, ?)"
PUT_TRIES = """
INSERT OR IGNORE INTO tries (seq, sends, attempts, crashes, first_try_at_ms, history, progress)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7 WHERE EXISTS (SELECT 1 FROM events WHERE seq = ?1)"""

# What tells that a seq is not lost: it is a dead letter, or a receipt remembers it.
KNOWN_BETWEEN = """
SELECT (SELECT count(*) FROM dead WHERE seq BETWEEN ?1 AND ?2)
     + (SELECT count(*) FROM receipts WHERE seq BETWEEN ?1 AND ?2)"""
DELIVERED_THROUGH = "SELECT coalesce(max(seq), 0) FROM receipts WHERE state = 'delivered'"
LAST_REMEMBERED = "SELECT coalesce(max(seq), 0) FROM receipts"
COUNT_DELIVERED = "SELECT count(*) FROM receipts WHERE state = 'delivered'"
IS_TAKEN = "SELECT 1 FROM events WHERE seq = ?1 UNION ALL SELECT 1 FROM dead WHERE seq = ?1"

# A page that the disk did not write is the one of before: what is over stands among the events again, and
# what goes again is still remembered.
IS_OVER = "SELECT 1 FROM receipts WHERE key = ? AND seq = ? AND digest = ?"
FORGET_LETTERS = "DELETE FROM dead WHERE key IN (SELECT key FROM events)"
FORGET_RECEIPTS = """
DELETE FROM receipts WHERE key IN (SELECT key FROM events WHERE kind <> 'outbox-gap')
                        OR key IN (SELECT key FROM dead)"""

# The counters are made from the rows, so that they are true whatever the old ones said.
COUNT_ROWS = """
UPDATE outbox SET
    last_seq = ?1, generation = ?2, paused_at_ms = ?3, open_gap_seq = ?4, created_at_ms = ?5, delivered = ?6,
    waiting = (SELECT count(*) FROM events WHERE kind <> 'outbox-gap'),
    waiting_bytes = (SELECT coalesce(sum(octet_length(wire_payload)), 0) FROM events
                     WHERE kind <> 'outbox-gap'),
    dead = (SELECT count(*) FROM dead),
    dead_bytes = (SELECT coalesce(sum(octet_length(wire_payload)), 0) FROM dead),
    receipt_bytes = (SELECT coalesce(sum(octet_length(key) + 64 + coalesce(octet_length(result), 0)), 0)
                     FROM receipts),
    dropped = (SELECT coalesce(sum(value), 0) FROM totals WHERE name GLOB 'dropped:*')"""
COUNT_ACCEPTED = """
UPDATE outbox SET accepted = waiting + dead + delivered + dropped + (
    SELECT coalesce(sum(value), 0) FROM totals
    WHERE name IN ('coalesced', 'discarded', 'tool_error') OR name GLOB 'dropped_dead:*')"""
