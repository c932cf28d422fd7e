"""What the tests of the store share: outboxes on real files, events, and the steps of a sender."""

import contextlib
import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import apsw

from outbox.bounds import Bounds
from outbox.event import Limits, accept, draft_event
from outbox.outcome import Ack, Bury, Reason, Release, Trouble
from outbox.store.create import create_outbox
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt, enqueue
from outbox.store.file import open_outbox
from outbox.store.inspect import totals
from outbox.store.sending import claim, settle

NOW = 1_790_000_000_000
_numbers = count(1)


def roomy(**bounds):
    """Bounds that never look at the disk, so that a full test machine fails no test."""
    return Bounds(**({"min_free_disk_bytes": 0} | bounds))


def state_in(folder):
    """A state directory, made."""
    return StateDirectory(Path(folder)).create()


def make_box(state, agent="builder", *, limits=None, busy_timeout_ms=5_000, **bounds):
    """A new outbox file, open."""
    create_outbox(state, agent, limits or Limits(), roomy(**bounds), NOW)
    return open_outbox(state, state.outbox_file(agent), busy_timeout_ms=busy_timeout_ms)


def event(payload=None, *, kind="session-message", agent="builder", limits=None, at_ms=NOW, **fields):
    """An accepted event; without a key it gets one of our own, as in the library."""
    limits = limits or Limits()
    draft = draft_event(kind, {"n": 0} if payload is None else payload, limits=limits, **fields)
    return accept(draft, limits=limits, agent=agent, now_ms=at_ms, new_key=f"own-{next(_numbers)}")


def tool_call(tool="note_add", **fields):
    """An accepted tool call: unsafe to repeat unless somebody says otherwise."""
    return event({"tool": tool, "arguments": {}}, kind="mcp-tool-call", **fields)


def put(box, *events, now_ms=NOW):
    """Enqueue events that must all be taken; returns their seqs."""
    results = enqueue(box, events, now_ms=now_ms)
    assert all(isinstance(result, Receipt) for result in results), results
    return [result.seq for result in results]


def try_put(box, one, *, now_ms=NOW):
    """Enqueue one event; its receipt or its error."""
    return enqueue(box, [one], now_ms=now_ms)[0]


def fill(box, number, **fields):
    """Enqueue this many events {"n": 0}, {"n": 1}, …; returns their seqs."""
    return put(box, *(event({"n": n}, **fields) for n in range(number)))


def first(number):
    """What `claim` asks: the first `number` rows."""

    def choose(rows):
        chosen = []
        for row in rows:
            chosen.append(row)
            if len(chosen) == number:
                break
        return chosen

    return choose


def take(box, number=1, *, unsafe=False):
    """Claim the first `number` events."""
    taken = claim(box, first(number), unsafe=unsafe, now_ms=NOW)
    assert taken is not None
    return taken


def trouble(reason="failed", **fields):
    """What went wrong."""
    return Trouble(NOW, reason, **fields)


def ack(row, **fields):
    """The relay has it."""
    return Ack(row.seq, **fields)


def release(row, *, sent=True, attempts=None, why=None, progress=None):
    """It waits again."""
    return Release(row.seq, sent, row.attempts if attempts is None else attempts, why, progress)


def bury(row, reason=Reason.REJECTED, **fields):
    """It is a dead letter."""
    return Bury(row.seq, reason, row.attempts, fields.pop("why", trouble("rejected")), **fields)


def deliver(box, number=1):
    """Claim and acknowledge the first `number` events."""
    taken = take(box, number)
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    return [row.seq for row in taken.rows]


def kill(box, number=1, reason=Reason.REJECTED):
    """Claim and bury the first `number` events."""
    taken = take(box, number)
    settle(box, taken, [bury(row, reason) for row in taken.rows], now_ms=NOW)
    return [row.seq for row in taken.rows]


def seqs(box):
    """What waits or is in flight, gaps too, in order."""
    return [seq for (seq,) in box.rows("SELECT seq FROM events ORDER BY seq")]


def dead_seqs(box):
    """The dead letters."""
    return [seq for (seq,) in box.rows("SELECT seq FROM dead ORDER BY seq")]


def gaps(box):
    """The gaps by seq: what an open or a frozen one says."""
    rows = box.rows("SELECT seq, wire_payload FROM events WHERE kind = 'outbox-gap' ORDER BY seq")
    said = {seq: json.loads(text) for seq, text in rows}
    return {seq: raw.get("payload", raw) for seq, raw in said.items()}


def receipt_of(box, key):
    """What is remembered of a key whose event is gone, or None."""
    row = box.maybe("SELECT state FROM receipts WHERE key = ?", key)
    return row and row[0]


def counter(box, name):
    """One counter of the outbox."""
    return box.one(f"SELECT {name} FROM outbox")[0]


def total(box, name):
    """One of the totals by reason."""
    return totals(box).get(name, 0)


def contents(box):
    """Everything in the file, to compare before and after."""
    tables = [
        name for (name,) in box.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    ]
    return {table: box.rows(f"SELECT * FROM {table}") for table in tables if not table.startswith("sqlite_")}


def put_damaged(path, table, column, value):
    """A damaged page can make anything of a value, whatever the schema says of it."""
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
        made = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()[0]
        change_schema = "UPDATE sqlite_schema SET sql = ? WHERE name = ?"
        db.execute(change_schema, (made.replace("NOT NULL", ""), table))
        with contextlib.closing(apsw.Connection(str(path))) as another:
            another.execute(f"UPDATE {table} SET {column} = ?", (value,))
        db.execute(change_schema, (made, table))


def python(code, *args, **options):
    """Run Python code in a process of its own; its standard output, when it ends well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True, text=True, check=False, timeout=60, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
