"""What an enqueue is compared with: bare apsw, other SQLite queues set to survive a power cut, the seed.

A peer is opened on a folder of its own, and gives an act that stores one event durably when it returns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.client import HTTPConnection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import apsw

from bench.stage import KIND, PAYLOAD, file_of, fill, open_outbox

Act = Callable[[], object]
Opened = Callable[[Path], AbstractContextManager[Act]]

BARE = "bare apsw"
LIBRARY = "library"
SEED = "seed stand-in"

_TEXT = json.dumps(PAYLOAD)


@contextmanager
def library(state: Path) -> Iterator[Act]:
    """Relay Outbox itself."""
    with open_outbox(state) as outbox:
        yield lambda: outbox.enqueue(KIND, PAYLOAD)


@contextmanager
def bare_apsw(state: Path, synchronous: str = "FULL") -> Iterator[Act]:
    """The same rows into the same schema with the same settings, a durable commit each, and nothing else."""
    connection, row, insert = bare_insert(bare_file(state))
    connection.pragma("synchronous", synchronous)
    run = connection.cursor().execute

    def act() -> None:
        row[0] += 1
        row[2] = f"bare-{row[0]:031}"
        run("BEGIN IMMEDIATE")
        run(insert, row)
        run("COMMIT")

    with closing(connection):
        yield act


def bare_file(state: Path) -> Path:
    """The outbox file there, made by the library when it is not: with one row, to be copied."""
    if not file_of(state).exists():
        fill(state, 1)
    return file_of(state)


def bare_insert(file: Path) -> tuple[apsw.Connection, list[Any], str]:
    """A connection to an outbox file, its last row (seq, kind, key, …), and the statement that inserts it."""
    connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READWRITE)
    connection.set_busy_handler(_wait_turn)
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    connection.pragma("synchronous", "FULL")
    last = connection.execute("SELECT * FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    assert last is not None
    names = [name for _, name, *_ in connection.execute("PRAGMA table_info(events)")]
    assert names[0] == "seq"
    assert names[2] == "key"
    return connection, list(last), f"INSERT INTO events VALUES ({', '.join('?' * len(names))})"


def _wait_turn(_tries: int) -> bool:
    """SQLite's own pauses grow to 100 ms, which would make a commit each look worse than it has to be."""
    time.sleep(0.001)
    return True


@contextmanager
def closing(connection: apsw.Connection) -> Iterator[None]:
    """Close a connection with the block."""
    try:
        yield
    finally:
        connection.close()


# The seed ---------------------------------------------------------------------------------------------------


class Seed:
    """What the seed runner does, in Python: a count and a flush per enqueue; a POST and a flush per event.

    Its HTTP is http.client, which costs a third of what httpx does: the stand-in is not made slow by ours.
    """

    def __init__(self, file: Path) -> None:
        """Open or make its one table."""
        self.connection = apsw.Connection(str(file))
        self.connection.pragma("journal_mode", "WAL")
        self.connection.pragma("synchronous", "FULL")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL,"
            " payload TEXT NOT NULL, created_at INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0)"
        )

    def fill(self, events: int) -> None:
        """Let so many events wait, with one commit."""
        with self.connection:
            rows = ((KIND, _TEXT) for _ in range(events))
            self.connection.executemany(
                "INSERT INTO outbox (kind, payload, created_at) VALUES (?, ?, 0)", rows
            )

    def enqueue(self) -> None:
        """One event, after a look at how many there are."""
        self.connection.execute("SELECT count(*) FROM outbox").fetchone()
        self.connection.execute(
            "INSERT INTO outbox (kind, payload, created_at) VALUES (?, ?, 0)", (KIND, _TEXT)
        )

    def drain(self, url: str, events: int) -> None:
        """Send so many, oldest first: each POST is answered before its row is deleted."""
        host = url.removeprefix("http://")
        relay = HTTPConnection(host, timeout=60)
        try:
            for _ in range(events):
                head = self.connection.execute(
                    "SELECT id, payload FROM outbox ORDER BY id LIMIT 1"
                ).fetchone()
                assert head is not None
                relay.request("POST", "/api/messages", head[1], {"Content-Type": "application/json"})
                relay.getresponse().read()
                self.connection.execute("DELETE FROM outbox WHERE id = ?", (head[0],))
        finally:
            relay.close()


@contextmanager
def seed(folder: Path) -> Iterator[Act]:
    """The seed's enqueue."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Seed(folder / "seed.sqlite")
    with closing(made.connection):
        yield made.enqueue


# Other queues -----------------------------------------------------------------------------------------------


@contextmanager
def litequeue(folder: Path) -> Iterator[Act]:
    """litequeue, whose own setting (NORMAL) does not survive a power cut: set to FULL."""
    folder.mkdir()
    queue = import_module("litequeue").LiteQueue(str(folder / "queue.sqlite"))
    queue.conn.execute("PRAGMA synchronous=FULL")
    try:
        yield lambda: queue.put(_TEXT)
    finally:
        queue.close()


@contextmanager
def persist_queue(folder: Path) -> Iterator[Act]:
    """persist-queue's SQLite queue, a commit per put."""
    queue = import_module("persistqueue").SQLiteQueue(str(folder), auto_commit=True)
    try:
        yield lambda: queue.put(_TEXT)
    finally:
        queue.close()


@contextmanager
def huey(folder: Path) -> Iterator[Act]:
    """The SQLite storage of huey with fsync on (synchronous=FULL)."""
    folder.mkdir()
    storage = import_module("huey.storage").SqliteStorage(
        "bench", filename=str(folder / "huey.sqlite"), fsync=True
    )
    data = _TEXT.encode()
    try:
        yield lambda: storage.enqueue(data)
    finally:
        with suppress(AttributeError):
            storage.close()


_OPTIONAL: dict[str, tuple[str, Opened]] = {
    "litequeue, FULL": ("litequeue", litequeue),
    "persist-queue": ("persistqueue", persist_queue),
    "huey, fsync": ("huey", huey),
}


def installed() -> dict[str, Opened]:
    """The other queues that are there: `make bench` installs them."""
    return {name: opened for name, (module, opened) in _OPTIONAL.items() if find_spec(module) is not None}


def missing() -> list[str]:
    """The names of those that are not."""
    return [name for name, (module, _) in _OPTIONAL.items() if find_spec(module) is None]
