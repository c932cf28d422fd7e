"""The schema of an outbox file, its versions, and the steps between them.

SQL that reads or changes rows of a running outbox stands in statements.py; what makes or migrates them, here.
A release that changes the schema adds one entry to MIGRATIONS and leaves the older ones alone.
"""

from __future__ import annotations

APPLICATION_ID = 0x52_4F_42_58  # "ROBX": tells an outbox from any other SQLite file

CREATE = """
-- One row: whose outbox this is, its rules, its counters, and what its sender is doing.
CREATE TABLE outbox (
    id               INTEGER PRIMARY KEY CHECK (id = 1),
    agent            TEXT    NOT NULL,
    stream           TEXT    NOT NULL,            -- UUID of this file; part of every row's checksum
    created_at_ms    INTEGER NOT NULL,
    rules            TEXT    NOT NULL,            -- JSON: what a producer checks (limits, bounds)
    last_seq         INTEGER NOT NULL DEFAULT 0,
    waiting          INTEGER NOT NULL DEFAULT 0,  -- rows of events, in flight ones too, gaps not
    waiting_bytes    INTEGER NOT NULL DEFAULT 0,
    dead             INTEGER NOT NULL DEFAULT 0,
    dead_bytes       INTEGER NOT NULL DEFAULT 0,
    receipt_bytes    INTEGER NOT NULL DEFAULT 0,
    accepted         INTEGER NOT NULL DEFAULT 0,
    delivered        INTEGER NOT NULL DEFAULT 0,
    dropped          INTEGER NOT NULL DEFAULT 0,
    open_gap_seq     INTEGER,                     -- the gap that still grows
    generation       INTEGER NOT NULL DEFAULT 0,  -- of the newest claim
    claimed_through  INTEGER NOT NULL DEFAULT 0,  -- events up to this seq are in flight; 0: none
    claim_unsafe     INTEGER NOT NULL DEFAULT 0,  -- the claim must not be repeated if its outcome is unknown
    paused_at_ms     INTEGER,
    blocked_reason   TEXT,
    blocked_since_ms INTEGER,
    blocked_next_ms  INTEGER,
    blocked_detail   TEXT
);

-- What waits or is in flight, in order of seq. Rows never change; only a gap that still grows does.
CREATE TABLE events (
    seq            INTEGER PRIMARY KEY,
    kind           TEXT    NOT NULL,
    key            TEXT    NOT NULL,
    wire_payload   BLOB    NOT NULL,
    shape          TEXT    NOT NULL,
    occurred_at_ms INTEGER NOT NULL,
    accepted_at_ms INTEGER NOT NULL,
    digest         BLOB    NOT NULL,
    dedupe_key     TEXT,
    extra          TEXT,                          -- JSON: retry, correlation, trace, tool, scope, replay
    checksum       INTEGER NOT NULL,
    pull_lane      TEXT,
    not_before_ms  INTEGER,
    priority       INTEGER
);
CREATE UNIQUE INDEX events_by_key ON events (key);
CREATE INDEX events_by_dedupe_key ON events (dedupe_key) WHERE dedupe_key IS NOT NULL;

-- What the sender remembers of an event that did not go through at once.
CREATE TABLE tries (
    seq             INTEGER PRIMARY KEY,
    sends           INTEGER NOT NULL DEFAULT 0,
    attempts        INTEGER NOT NULL DEFAULT 0,
    crashes         INTEGER NOT NULL DEFAULT 0,
    first_try_at_ms INTEGER NOT NULL,
    history         TEXT    NOT NULL DEFAULT '[]',
    progress        TEXT
);

CREATE TABLE dead (
    seq             INTEGER PRIMARY KEY,
    kind            TEXT    NOT NULL,
    key             TEXT    NOT NULL,
    wire_payload    BLOB    NOT NULL,
    shape           TEXT    NOT NULL,
    occurred_at_ms  INTEGER NOT NULL,
    accepted_at_ms  INTEGER NOT NULL,
    digest          BLOB    NOT NULL,
    dedupe_key      TEXT,
    extra           TEXT,
    checksum        INTEGER NOT NULL,
    reason          TEXT    NOT NULL,
    status          INTEGER,
    code            TEXT    NOT NULL DEFAULT '',
    detail          TEXT    NOT NULL DEFAULT '',
    answer          TEXT    NOT NULL DEFAULT '',
    path            TEXT    NOT NULL DEFAULT '',
    sends           INTEGER NOT NULL DEFAULT 0,
    attempts        INTEGER NOT NULL DEFAULT 0,
    first_try_at_ms INTEGER,
    history         TEXT    NOT NULL DEFAULT '[]',
    progress        TEXT,
    failed_at_ms    INTEGER NOT NULL
);
CREATE INDEX dead_by_key ON dead (key);

-- Memory of keys whose event is gone.
CREATE TABLE receipts (
    key    TEXT PRIMARY KEY,
    seq    INTEGER NOT NULL,
    kind   TEXT    NOT NULL,
    digest BLOB    NOT NULL,
    state  TEXT    NOT NULL,
    at_ms  INTEGER NOT NULL,
    result TEXT
) WITHOUT ROWID;
CREATE INDEX receipts_by_time ON receipts (at_ms);

-- Totals by reason, for metrics: name is like 'dead:rejected' or 'dropped:max_events'.
CREATE TABLE totals (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
"""

# Step N brings a file from version N to N + 1; version 1 is CREATE as it was first released. A file that is
# made goes through all of them, one that is opened through those it lacks. Processes of the older release may
# have it open meanwhile: what they go on writing must stay right.
MIGRATIONS: tuple[str, ...] = ()

VERSION = 1 + len(MIGRATIONS)
HIGHEST_VERSION = 9_999  # a file that names a higher one is damaged, not of a newer release
