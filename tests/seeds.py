"""A seed runner's outbox file, as such a runner writes it, and one that is still at work."""

import contextlib
import json
import subprocess
import sys

import apsw

TABLE = """
CREATE TABLE outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, mode TEXT NOT NULL, dedupe_key TEXT,
    occurred_at INTEGER NOT NULL, idempotency_key TEXT NOT NULL, payload TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, next_attempt_at INTEGER NOT NULL DEFAULT 0,
    poisoned INTEGER NOT NULL DEFAULT 0, created_at INTEGER NOT NULL)"""
NAMES = (
    *("seq", "kind", "mode", "dedupe_key", "occurred_at", "idempotency_key", "payload", "attempts"),
    *("next_attempt_at", "poisoned", "created_at"),
)
FIRST_MS = 1_780_000_000_000

_RUNNER = """
import sys, apsw
db = apsw.Connection(sys.argv[1])
if sys.argv[2] == "wal":
    db.pragma("journal_mode", "wal")
db.execute("UPDATE outbox SET attempts = attempts")
print("at work", flush=True)
sys.stdin.read()
"""


def seed_row(n, **fields):
    """One row: a session message {"n": n}, a second after the last."""
    row = {
        "seq": n,
        "kind": "session-message",
        "mode": "append",
        "dedupe_key": None,
        "occurred_at": FIRST_MS + 1_000 * n,
        "idempotency_key": f"seed-key-{n}",
        "payload": json.dumps({"n": n, "body": f"message {n}"}),
        "attempts": 0,
        "next_attempt_at": 0,
        "poisoned": 0,
        "created_at": FIRST_MS + 1_000 * n + 5,
    }
    return row | fields


def make_seed(path, rows, *, table=TABLE, mode="wal"):
    """A file with these rows; its runner has stopped, and left its log behind if it had one."""
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.pragma("journal_mode", mode)
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        db.execute(table)
        with db:
            marks = ", ".join(f":{name}" for name in NAMES)
            db.executemany(f"INSERT INTO outbox ({', '.join(NAMES)}) VALUES ({marks})", rows)
    return path


def contents_of(folder):
    """Every file below a folder: its bytes, its mode and when it was written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextlib.contextmanager
def runner_at_work(path, mode="wal"):
    """A process that has the file open and does nothing at the moment; its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", _RUNNER, str(path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "at work\n"
        try:
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(20)
