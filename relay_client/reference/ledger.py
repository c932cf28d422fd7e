"""The reference relay's SQL: what is kept, and the statements that keep and read it.

Every method runs inside a transaction that the store opened; none commits.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import apsw

SCHEMA = """
-- What was accepted, in the order of its arrival; a key is there once, whatever the agent.
CREATE TABLE events (
  n INTEGER PRIMARY KEY AUTOINCREMENT,
  key TEXT UNIQUE,
  path TEXT NOT NULL,
  agent TEXT NOT NULL,
  stream TEXT,
  seq INTEGER,
  item INTEGER NOT NULL,
  attempt INTEGER,
  occurred_at INTEGER,
  received_at INTEGER NOT NULL,
  body BLOB NOT NULL,
  digest BLOB NOT NULL,
  answer TEXT,
  times_seen INTEGER NOT NULL DEFAULT 1
) STRICT;
CREATE INDEX events_by_agent ON events (agent, n);

-- Which events hold the pieces of a continuation archive.
CREATE TABLE chunks (
  agent_id TEXT NOT NULL,
  segment TEXT NOT NULL,
  generation INTEGER NOT NULL,
  chunk INTEGER NOT NULL,
  total INTEGER NOT NULL,
  event INTEGER NOT NULL REFERENCES events (n),
  PRIMARY KEY (agent_id, segment, generation, chunk)
) STRICT, WITHOUT ROWID;

-- Tokens minted here, and revocations; the tokens themselves are not kept, only their SHA-256.
CREATE TABLE tokens (
  digest BLOB PRIMARY KEY,
  agent_id TEXT,
  instance_id TEXT,
  expires_at INTEGER,
  revoked INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- The last requests, each as one JSON text.
CREATE TABLE requests (n INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL) STRICT;
"""

FIND_KEY = "SELECT n, digest, answer FROM events WHERE key = ?"
COUNT_REPEAT = "UPDATE events SET times_seen = times_seen + 1 WHERE n = ?"
ADD_EVENT = """
INSERT INTO events (key, path, agent, stream, seq, item, attempt, occurred_at, received_at, body, digest)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING n
"""
SET_ANSWER = "UPDATE events SET answer = ? WHERE n = ?"
LAST_GENERATION = "SELECT coalesce(max(generation), 0) FROM chunks WHERE agent_id = ? AND segment = ?"
GENERATION_TOTAL = "SELECT total FROM chunks WHERE agent_id = ? AND segment = ? AND generation = ? LIMIT 1"
FIND_CHUNK = "SELECT 1 FROM chunks WHERE agent_id = ? AND segment = ? AND generation = ? AND chunk = ?"
ADD_CHUNK = (
    "INSERT INTO chunks (agent_id, segment, generation, chunk, total, event) VALUES (?, ?, ?, ?, ?, ?)"
)
FIND_TOKEN = "SELECT expires_at, revoked FROM tokens WHERE digest = ?"  # noqa: S105 - a statement
ADD_TOKEN = "INSERT INTO tokens (digest, agent_id, instance_id, expires_at) VALUES (?, ?, ?, ?)"  # noqa: S105
FORGET_EXPIRED_TOKENS = "DELETE FROM tokens WHERE expires_at < ?"
SET_REVOKED = """
INSERT INTO tokens (digest, revoked) VALUES (?1, ?2) ON CONFLICT (digest) DO UPDATE SET revoked = ?2
"""
ADD_REQUEST = "INSERT INTO requests (record) VALUES (?) RETURNING n"
FORGET_REQUESTS = "DELETE FROM requests WHERE n <= ?"
EVENTS_AFTER = """
SELECT n, agent, stream, seq, item, attempt, path, key, occurred_at, received_at, body, answer, times_seen
FROM events WHERE n > ?1 AND (?2 IS NULL OR agent = ?2) ORDER BY n LIMIT ?3
"""
REQUESTS_AFTER = "SELECT n, record FROM requests WHERE n > ? ORDER BY n LIMIT ?"
ARCHIVES = """
SELECT c.agent_id, c.segment, c.generation, c.total, e.body
FROM chunks AS c JOIN events AS e ON e.n = c.event
WHERE c.agent_id = ? ORDER BY c.segment, c.generation, c.chunk
"""
# Inside one stream neither the seq nor, for one seq, the place in its request may go back.
SUMMARY = """
WITH steps AS (
  SELECT agent, key, times_seen, seq,
         seq < lag(seq) OVER stream_order
         OR (seq = lag(seq) OVER stream_order AND item < lag(item) OVER stream_order) AS went_back
  FROM events WINDOW stream_order AS (PARTITION BY agent, stream, seq IS NULL ORDER BY n)
)
SELECT agent, count(*), count(DISTINCT key), sum(times_seen - 1), min(seq), max(seq), total(went_back) = 0
FROM steps GROUP BY agent ORDER BY agent
"""


class Verdict(enum.StrEnum):
    """What became of something to keep; also the contract's error codes."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    KEY_REUSED = "key_reused"
    UNKNOWN_GENERATION = "unknown_generation"
    CHUNK_CONFLICT = "chunk_conflict"


@dataclass(frozen=True, slots=True)
class Event:
    """One event to keep. `digest` is what a repeat with the same key must agree in."""

    key: str | None
    path: str
    agent: str
    stream: str | None
    seq: int | None
    attempt: int | None
    occurred_at_ms: int | None
    received_at_ms: int
    body: bytes
    digest: bytes
    item: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a continuation archive, beside the event that carries it."""

    agent_id: str
    segment: str
    generation: int | None
    index: int
    total: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of it, the number it stands under (0: it was not kept), and the answer kept with it."""

    verdict: Verdict
    n: int = 0
    answer: str | None = None


class Ledger:
    """The statements, over one connection."""

    def __init__(self, db: apsw.Connection) -> None:
        self.db = db

    def keep(self, event: Event) -> Kept:
        """Keep an event, unless its key is known: then count the repeat."""
        return self._known(event) or Kept(Verdict.STORED, self._add(event))

    def answer(self, n: int, answer: str) -> Kept:
        """Keep the answer beside event `n`, for repeats of its key."""
        self.db.execute(SET_ANSWER, (answer, n))
        return Kept(Verdict.STORED, n, answer)

    def keep_chunk(self, event: Event, chunk: Chunk) -> Kept:
        """Keep one piece of an archive; the first piece of one without a generation gets the next number."""
        known = self._known(event)
        if known is not None:
            return known
        series = (chunk.agent_id, chunk.segment)
        generation = chunk.generation or self.db.execute(LAST_GENERATION, series).get + 1
        total = self.db.execute(GENERATION_TOTAL, (*series, generation)).get
        if total is None and chunk.index > 0:
            return Kept(Verdict.UNKNOWN_GENERATION)
        place = (*series, generation, chunk.index)
        if total not in (None, chunk.total) or self.db.execute(FIND_CHUNK, place).get:
            return Kept(Verdict.CHUNK_CONFLICT)
        n = self._add(event)
        self.db.execute(ADD_CHUNK, (*place, chunk.total, n))
        return self.answer(n, json.dumps({"archive": {"generation": generation}}))

    def _known(self, event: Event) -> Kept | None:
        row = self.db.execute(FIND_KEY, (event.key,)).fetchone()
        if row is None:
            return None
        n, digest, answer = row
        if digest != event.digest:
            return Kept(Verdict.KEY_REUSED, n)
        self.db.execute(COUNT_REPEAT, (n,))
        return Kept(Verdict.DUPLICATE, n, answer)

    def _add(self, event: Event) -> int:
        place = (event.agent, event.stream, event.seq, event.item, event.attempt)
        times = (event.occurred_at_ms, event.received_at_ms)
        row = (event.key, event.path, *place, *times, event.body, event.digest)
        return int(self.db.execute(ADD_EVENT, row).get)

    def token(self, digest: bytes) -> tuple[int | None, bool] | None:
        """Return when a token expires (None: never) and whether it is revoked; None for one not here."""
        row = self.db.execute(FIND_TOKEN, (digest,)).fetchone()
        return None if row is None else (row[0], bool(row[1]))

    def mint(
        self, digest: bytes, agent_id: str, instance_id: str, *, expires_at_ms: int, now_ms: int
    ) -> None:
        """Remember a minted token, and forget those that expired a day ago."""
        self.db.execute(FORGET_EXPIRED_TOKENS, (now_ms - 86_400_000,))
        self.db.execute(ADD_TOKEN, (digest, agent_id, instance_id, expires_at_ms))

    def set_revoked(self, digest: bytes, *, revoked: bool) -> None:
        """Revoke a token, given on the command line or minted, or take that back."""
        self.db.execute(SET_REVOKED, (digest, int(revoked)))

    def log(self, record: str, *, keep_last: int) -> None:
        """Add to the log of requests and cut it, now and then, to its last entries."""
        n = self.db.execute(ADD_REQUEST, (record,)).get
        if n % 1000 == 0:
            self.db.execute(FORGET_REQUESTS, (n - keep_last,))

    def events(self, after: int, agent: str | None, limit: int, max_bytes: int) -> Iterator[dict[str, Any]]:
        """Yield events as received, at most `limit`, and none more once their bodies hold `max_bytes`."""
        size = 0
        for row in self.db.execute(EVENTS_AFTER, (after, agent, limit)):
            names = (
                "n",
                "agent",
                "stream",
                "seq",
                "item",
                "attempt",
                "path",
                "key",
                "occurredAt",
                "receivedAt",
            )
            *place, body, answer, times_seen = row
            text = body.decode("utf-8")
            yield {
                **dict(zip(names, place, strict=True)),
                "body": text,
                "answer": answer,
                "timesSeen": times_seen,
            }
            size += len(body)
            if size >= max_bytes:
                return

    def requests(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Return the log of requests after entry `after`."""
        rows = self.db.execute(REQUESTS_AFTER, (after, limit))
        return [{"n": n, **json.loads(record)} for n, record in rows]

    def summary(self) -> list[dict[str, Any]]:
        """Return what is kept of each agent, and whether it came in order."""
        names = ("agent", "count", "distinctKeys", "duplicates", "firstSeq", "lastSeq", "inOrder")
        rows = [dict(zip(names, row, strict=True)) for row in self.db.execute(SUMMARY)]
        return [{**row, "inOrder": bool(row["inOrder"])} for row in rows]

    def archive_chunks(self, agent_id: str) -> Iterator[tuple[tuple[str, str, int, int], bytes]]:
        """Yield ((agent, segment, generation, total), body) of each kept chunk, in the order of the text."""
        for *archive, body in self.db.execute(ARCHIVES, (agent_id,)):
            yield (archive[0], archive[1], archive[2], archive[3]), body
