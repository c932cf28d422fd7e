"""Every SQL statement that reads or changes a running outbox, each with a name and a sentence."""

# The one row ------------------------------------------------------------------------------------------------

INSERT_OUTBOX = "INSERT INTO outbox (id, agent, stream, created_at_ms, rules) VALUES (1, ?, ?, ?, ?)"

# Whose file this is, and what its producers follow.
READ_IDENTITY = "SELECT agent, stream, rules FROM outbox"
READ_RULES = "SELECT rules FROM outbox"
SET_RULES = "UPDATE outbox SET rules = ?"

# What `status` shows of it.
READ_OUTBOX = """
SELECT agent, stream, waiting, waiting_bytes, dead, dead_bytes, accepted, delivered, dropped, claimed_through,
       paused_at_ms, blocked_reason, blocked_since_ms, blocked_next_ms, blocked_detail
FROM outbox"""
READ_WAITING = "SELECT waiting FROM outbox"

# What an enqueue must know, in one read.
READ_FOR_ENQUEUE = """
SELECT rules, last_seq, waiting, waiting_bytes, dead, dead_bytes, claimed_through, open_gap_seq FROM outbox"""

COUNT_ACCEPTED = """
UPDATE outbox SET last_seq = ?, waiting = waiting + ?, waiting_bytes = waiting_bytes + ?,
                  accepted = accepted + ?"""
COUNT_SETTLED = """
UPDATE outbox SET waiting = waiting - ?, waiting_bytes = waiting_bytes - ?, delivered = delivered + ?"""
COUNT_BURIED = "UPDATE outbox SET dead = dead + ?, dead_bytes = dead_bytes + ?"
COUNT_DROPPED = "UPDATE outbox SET dropped = dropped + ?"
COUNT_RECEIPTS = "UPDATE outbox SET receipt_bytes = receipt_bytes + ?"
READ_RECEIPT_BYTES = "SELECT receipt_bytes FROM outbox"
READ_DEAD_COUNT = "SELECT dead FROM outbox"

# A dead letter goes to the tail, as large as it was or, edited, of another size.
COUNT_REPLAYED = """
UPDATE outbox SET last_seq = last_seq + 1, waiting = waiting + 1, waiting_bytes = waiting_bytes + ?,
                  dead = dead - 1, dead_bytes = dead_bytes - ?
RETURNING last_seq"""

OPEN_CLAIM = "UPDATE outbox SET generation = generation + 1, claimed_through = ?, claim_unsafe = ?"
CLOSE_CLAIM = "UPDATE outbox SET claimed_through = 0, claim_unsafe = 0"
TAKE_OVER = "UPDATE outbox SET generation = generation + 1, claimed_through = 0, claim_unsafe = 0"
READ_CLAIM = "SELECT generation, claimed_through, claim_unsafe, open_gap_seq FROM outbox"

SET_BLOCKED = """
UPDATE outbox SET blocked_reason = ?, blocked_since_ms = ?, blocked_next_ms = ?, blocked_detail = ?"""
READ_PAUSED = "SELECT paused_at_ms FROM outbox"
IS_BLOCKED = "SELECT 1 FROM outbox WHERE blocked_reason IS NOT NULL"
SET_PAUSED = "UPDATE outbox SET paused_at_ms = ?"

# What an export must know of the outbox itself.
READ_FOR_EXPORT = """
SELECT stream, paused_at_ms, claimed_through, claim_unsafe, open_gap_seq, waiting + dead FROM outbox"""
READ_FILL = "SELECT waiting, waiting_bytes, dead, dead_bytes FROM outbox"

SET_OPEN_GAP = "UPDATE outbox SET open_gap_seq = ?"

# Events -----------------------------------------------------------------------------------------------------

INSERT_EVENT = """
INSERT INTO events (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, dedupe_key,
                    extra, checksum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
DELETE_EVENT = "DELETE FROM events WHERE seq = ?"

# What a row that goes is remembered by; the texts as bytes, as in the head of the queue.
_GOING = """
SELECT seq, CAST(kind AS BLOB), CAST(key AS BLOB), digest, coalesce(octet_length(wire_payload), 0)"""

# The coalesce events of one dedupe key that are not in flight.
FIND_COALESCED = _GOING + " FROM events WHERE dedupe_key = ? AND seq > ?"

# The oldest event that a bound may drop: waiting, not in flight, no gap.
OLDEST_WAITING = (
    _GOING
    + """, occurred_at_ms, accepted_at_ms FROM events
WHERE seq > ? AND kind IS NOT 'outbox-gap' ORDER BY seq LIMIT 1"""
)

# How many events are in flight, and their bytes.
IN_FLIGHT_FILL = """
SELECT count(*), coalesce(sum(octet_length(wire_payload)), 0) FROM events
WHERE seq <= ? AND kind <> 'outbox-gap'"""

# What the relay is told about lost events: a row that changes as long as it grows.
READ_GAP = """
SELECT key, occurred_at_ms, CAST(wire_payload AS BLOB), checksum FROM events
WHERE seq = ? AND kind = 'outbox-gap'"""
CHANGE_GAP = "UPDATE events SET seq = ?, wire_payload = ?, checksum = ? WHERE seq = ?"

# The head of the queue, in order, with what the sender remembers of each row. Texts come as bytes: one that
# is no UTF-8 any more must not stop the reading.
_SENDER_COLUMNS = """
       e.seq, CAST(e.kind AS BLOB), CAST(e.key AS BLOB), CAST(e.wire_payload AS BLOB), CAST(e.shape AS BLOB),
       e.occurred_at_ms, e.accepted_at_ms, e.digest, CAST(e.extra AS BLOB), e.checksum,
       coalesce(t.sends, 0), coalesce(t.attempts, 0), coalesce(t.crashes, 0), t.first_try_at_ms,
       CAST(t.history AS BLOB), CAST(t.progress AS BLOB)"""
_WITH_TRIES = " FROM events e LEFT JOIN tries t ON t.seq = e.seq"
_SENDER_ROW = f"SELECT {_SENDER_COLUMNS} {_WITH_TRIES}"
HEAD_ROWS = _SENDER_ROW + " ORDER BY e.seq LIMIT ?"

# What a dead sender left in flight, row by row.
CLAIMED_SEQS = "SELECT seq FROM events WHERE seq <= ? ORDER BY seq"

# One waiting event by its seq.
WAITING_ROW = _SENDER_ROW + " WHERE e.seq = ?"

HEAD_EVENT = """
SELECT e.seq, CAST(e.kind AS BLOB), CAST(e.key AS BLOB), e.accepted_at_ms, coalesce(t.sends, 0),
       coalesce(t.attempts, 0), t.first_try_at_ms, CAST(t.history AS BLOB)
FROM events e LEFT JOIN tries t ON t.seq = e.seq ORDER BY e.seq LIMIT 1"""
HEAD_SEQ = "SELECT min(seq) FROM events"

# What `list` shows: a page of what waits or is in flight, of one kind or of all.
LIST_EVENTS = f"""
SELECT e.seq, CAST(e.kind AS BLOB), CAST(e.key AS BLOB), e.occurred_at_ms, e.accepted_at_ms,
       coalesce(octet_length(e.wire_payload), 0), coalesce(t.sends, 0), coalesce(t.attempts, 0)
{_WITH_TRIES} WHERE e.seq > ? AND e.seq <= ? AND (?3 IS NULL OR e.kind = ?3) ORDER BY e.seq LIMIT ?"""

# All that is known of what waits: of all of it, or of one event.
_WHOLE_EVENT = f"SELECT CAST(e.dedupe_key AS BLOB), {_SENDER_COLUMNS} {_WITH_TRIES}"
WHOLE_EVENTS = _WHOLE_EVENT + " ORDER BY e.seq"
WHOLE_EVENT = _WHOLE_EVENT + " WHERE e.seq = ?"
WHOLE_EVENT_OF_KEY = _WHOLE_EVENT + " WHERE e.key = ?"

# A row the sender could not get rid of: what is remembered of it.
PUT_TRIES = """
INSERT INTO tries (seq, sends, attempts, crashes, first_try_at_ms, history, progress)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (seq) DO UPDATE SET sends = excluded.sends, attempts = excluded.attempts,
       crashes = excluded.crashes, first_try_at_ms = excluded.first_try_at_ms, history = excluded.history,
       progress = excluded.progress"""
DELETE_TRIES = "DELETE FROM tries WHERE seq = ?"

# Dead letters -----------------------------------------------------------------------------------------------

# The wire text goes over as it is; of the rest what could be read.
BURY_EVENT = """
INSERT INTO dead (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, dedupe_key,
                  extra, checksum, reason, status, code, detail, answer, path, sends, attempts,
                  first_try_at_ms, history, progress, failed_at_ms)
SELECT seq, ?, ?, coalesce(CAST(wire_payload AS BLOB), x''), ?, ?, ?, ?, dedupe_key, ?,
       checksum, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
FROM events WHERE seq = ?"""
DELETE_DEAD = "DELETE FROM dead WHERE seq = ?"
OLDEST_DEAD = _GOING + " FROM dead ORDER BY seq LIMIT ?"

# All that is known of dead letters: of all of them, or of one; the first columns are those of an event.
_WHOLE_LETTER = """
SELECT CAST(dedupe_key AS BLOB), seq, CAST(kind AS BLOB), CAST(key AS BLOB), CAST(wire_payload AS BLOB),
       CAST(shape AS BLOB), occurred_at_ms, accepted_at_ms, digest, CAST(extra AS BLOB), checksum, sends,
       attempts, 0, coalesce(first_try_at_ms, -1), CAST(history AS BLOB), CAST(progress AS BLOB),
       CAST(reason AS BLOB), failed_at_ms, status, CAST(code AS BLOB), CAST(detail AS BLOB),
       CAST(answer AS BLOB), CAST(path AS BLOB)
FROM dead"""
WHOLE_LETTERS = _WHOLE_LETTER + " ORDER BY seq"
WHOLE_LETTER = _WHOLE_LETTER + " WHERE seq = ?"
WHOLE_LETTER_OF_KEY = _WHOLE_LETTER + " WHERE key = ? ORDER BY seq DESC LIMIT 1"

# One that comes from another outbox.
INSERT_LETTER = """
INSERT INTO dead (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, dedupe_key,
                  extra, checksum, sends, attempts, first_try_at_ms, history, progress,
                  reason, failed_at_ms, status, code, detail, answer, path)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""

# Those that a person chose, oldest first; a choice that is null does not count, the lists are JSON arrays.
_LISTED_LETTER = """
SELECT seq, CAST(kind AS BLOB), CAST(key AS BLOB), occurred_at_ms, CAST(reason AS BLOB), status,
       CAST(detail AS BLOB), attempts, failed_at_ms
FROM dead"""
_CHOSEN = """
WHERE (?1 IS NULL OR seq IN (SELECT value FROM json_each(?1)))
  AND (?2 IS NULL OR reason IN (SELECT value FROM json_each(?2)))
  AND (?3 IS NULL OR kind IN (SELECT value FROM json_each(?3)))
  AND (?4 IS NULL OR failed_at_ms < ?4) AND (?5 IS NULL OR failed_at_ms > ?5)"""
CHOOSE_DEAD = _LISTED_LETTER + _CHOSEN + " ORDER BY seq"
LIST_DEAD = _LISTED_LETTER + " ORDER BY seq"

# Keys and totals --------------------------------------------------------------------------------------------

# A key is remembered in one of three places.
FIND_WAITING_KEY = "SELECT seq, kind, digest FROM events WHERE key = ?"
FIND_DEAD_KEY = "SELECT seq, kind, digest FROM dead WHERE key = ? ORDER BY seq DESC LIMIT 1"
FIND_RECEIPT = "SELECT seq, kind, digest, state FROM receipts WHERE key = ?"

PUT_RECEIPT = """
INSERT INTO receipts (key, seq, kind, digest, state, at_ms, result) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET seq = excluded.seq, kind = excluded.kind, digest = excluded.digest,
       state = excluded.state, at_ms = excluded.at_ms, result = excluded.result"""
OLDEST_RECEIPTS = """
SELECT key, at_ms, octet_length(key) + 64 + coalesce(octet_length(result), 0) FROM receipts
ORDER BY at_ms LIMIT ?"""
DELETE_RECEIPT = "DELETE FROM receipts WHERE key = ?"
UNCOUNT_RECEIPT = """
UPDATE outbox SET receipt_bytes = receipt_bytes - coalesce((
    SELECT octet_length(key) + 64 + coalesce(octet_length(result), 0) FROM receipts WHERE key = ?), 0)"""

# Receipts as they stand, for moving them; and the one of a seq, for showing it (reads every row).
READ_RECEIPTS = "SELECT key, seq, kind, digest, state, at_ms, result FROM receipts"
READ_RECEIPT = "SELECT key, seq, kind, digest, state, at_ms, result FROM receipts WHERE key = ?"
READ_RECEIPT_OF_SEQ = "SELECT key, seq, kind, digest, state, at_ms, result FROM receipts WHERE seq = ?"

ADD_TOTAL = """
INSERT INTO totals (name, value) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"""
READ_TOTALS = "SELECT name, value FROM totals"
