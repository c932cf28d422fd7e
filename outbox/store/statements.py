"""Every SQL statement that reads or changes a running outbox, each with a name and a sentence."""

# The one row that tells whose file this is and what its counters say.
READ_OUTBOX = """
SELECT agent, stream, created_at_ms, rules, last_seq, waiting, waiting_bytes, dead, dead_bytes, receipt_bytes,
       accepted, delivered, dropped, open_gap_seq, generation, claimed_through, claim_unsafe, paused_at_ms,
       blocked_reason, blocked_since_ms, blocked_next_ms, blocked_detail
FROM outbox"""

# What an enqueue must know, in one read.
READ_FOR_ENQUEUE = """
SELECT rules, last_seq, waiting, waiting_bytes, dead, dead_bytes, claimed_through, open_gap_seq FROM outbox"""

INSERT_EVENT = """
INSERT INTO events (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, dedupe_key,
                    extra, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

COUNT_ACCEPTED = """
UPDATE outbox SET last_seq = ?, waiting = waiting + ?, waiting_bytes = waiting_bytes + ?,
                  accepted = accepted + ?"""

# A key is remembered in one of three places; the newest knowledge is asked first.
FIND_WAITING_KEY = "SELECT seq, kind, digest FROM events WHERE key = ?"
FIND_DEAD_KEY = "SELECT seq, kind, digest FROM dead WHERE key = ? ORDER BY seq DESC LIMIT 1"
FIND_RECEIPT = "SELECT seq, kind, digest, state FROM receipts WHERE key = ?"

# The coalesce events of one dedupe key that are not in flight.
FIND_COALESCED = """
SELECT seq, kind, key, digest, length(wire_payload) FROM events WHERE dedupe_key = ? AND seq > ?"""

# The oldest rows that a bound may drop: waiting, not in flight, no gap.
OLDEST_WAITING = """
SELECT seq, kind, key, digest, length(wire_payload), occurred_at_ms, accepted_at_ms FROM events
WHERE seq > ? AND kind <> 'outbox-gap' ORDER BY seq"""

OLDEST_DEAD = "SELECT seq, kind, key, digest, length(wire_payload) FROM dead ORDER BY seq"

DELETE_EVENT = "DELETE FROM events WHERE seq = ?"
DELETE_TRIES = "DELETE FROM tries WHERE seq = ?"
DELETE_DEAD = "DELETE FROM dead WHERE seq = ?"

PUT_RECEIPT = """
INSERT INTO receipts (key, seq, kind, digest, state, at_ms, result) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET seq = excluded.seq, kind = excluded.kind, digest = excluded.digest,
       state = excluded.state, at_ms = excluded.at_ms, result = excluded.result"""

OLDEST_RECEIPTS = "SELECT key, at_ms, length(key) + 64 + coalesce(length(result), 0) FROM receipts ORDER BY at_ms LIMIT 500"
DELETE_RECEIPT = "DELETE FROM receipts WHERE key = ?"

ADD_TOTAL = """
INSERT INTO totals (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"""
READ_TOTALS = "SELECT name, value FROM totals"

READ_GAP = "SELECT wire_payload FROM events WHERE seq = ?"
CHANGE_GAP = "UPDATE events SET wire_payload = ?, checksum = ? WHERE seq = ?"

# The head of the queue, in order, with what the sender remembers of each row.
_SENDER_ROW = """
SELECT e.seq, e.kind, e.key, e.wire_payload, e.shape, e.occurred_at_ms, e.accepted_at_ms, e.digest, e.extra,
       e.checksum, coalesce(t.sends, 0), coalesce(t.attempts, 0), coalesce(t.crashes, 0), t.first_try_at_ms,
       t.history, t.progress
FROM events e LEFT JOIN tries t ON t.seq = e.seq"""
HEAD_ROWS = _SENDER_ROW + " ORDER BY e.seq LIMIT ?"

# What a dead sender left in flight.
CLAIMED_ROWS = _SENDER_ROW + " WHERE e.seq <= ? ORDER BY e.seq"

# One waiting event by its seq.
WAITING_ROW = _SENDER_ROW + " WHERE e.seq = ?"

OPEN_CLAIM = "UPDATE outbox SET generation = generation + 1, claimed_through = ?, claim_unsafe = ?"
CLOSE_CLAIM = "UPDATE outbox SET claimed_through = 0, claim_unsafe = 0"
READ_CLAIM = "SELECT generation, claimed_through, claim_unsafe, open_gap_seq FROM outbox"

# A row the sender could not get rid of: what is remembered of it.
PUT_TRIES = """
INSERT INTO tries (seq, sends, attempts, crashes, first_try_at_ms, history, progress)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (seq) DO UPDATE SET sends = excluded.sends, attempts = excluded.attempts,
       crashes = excluded.crashes, first_try_at_ms = excluded.first_try_at_ms, history = excluded.history,
       progress = excluded.progress"""
SAVE_PROGRESS = """
INSERT INTO tries (seq, first_try_at_ms, progress) VALUES (?, ?, ?)
ON CONFLICT (seq) DO UPDATE SET progress = excluded.progress"""

BURY_EVENT = """
INSERT INTO dead (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, dedupe_key, extra,
                  checksum, reason, status, code, detail, answer, path, sends, attempts, first_try_at_ms,
                  history, progress, failed_at_ms)
SELECT seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, dedupe_key, extra,
       checksum, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
FROM events WHERE seq = ?"""

COUNT_SETTLED = """
UPDATE outbox SET waiting = waiting - ?, waiting_bytes = waiting_bytes - ?, delivered = delivered + ?"""
COUNT_BURIED = "UPDATE outbox SET dead = dead + ?, dead_bytes = dead_bytes + ?"
COUNT_DROPPED = "UPDATE outbox SET dropped = dropped + ?"
COUNT_RECEIPTS = "UPDATE outbox SET receipt_bytes = max(0, receipt_bytes + ?)"

SET_BLOCKED = """
UPDATE outbox SET blocked_reason = ?, blocked_since_ms = ?, blocked_next_ms = ?, blocked_detail = ?"""
SET_PAUSED = "UPDATE outbox SET paused_at_ms = ?"
SET_RULES = "UPDATE outbox SET rules = ?"
SET_OPEN_GAP = "UPDATE outbox SET open_gap_seq = ?"

# What `status` shows beside the counters.
IN_FLIGHT_COUNT = "SELECT count(*) FROM events WHERE seq <= ? AND kind <> 'outbox-gap'"
HEAD_EVENT = "SELECT seq, kind, key, accepted_at_ms FROM events ORDER BY seq LIMIT 1"
HEAD_TRIES = "SELECT sends, attempts, first_try_at_ms, history FROM tries WHERE seq = ?"

FIND_EVENT = "SELECT seq, kind, key, length(wire_payload) FROM events WHERE seq = ?"
LIST_DEAD = """
SELECT seq, kind, key, occurred_at_ms, reason, status, detail, attempts, failed_at_ms FROM dead ORDER BY seq"""
