"""STATE/relay.sqlite: what is known of the relay, kept over restarts and shared with every flush.

Facts are small JSON objects (one is a text) by name; losing the file costs time, never an event.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apsw

from outbox.store.directory import StateDirectory, put_aside
from outbox.store.fact_fields import sound_fact

_BUSY_TIMEOUT_MS = 2_000
_UNREADABLE = (apsw.NotADBError, apsw.CorruptError, apsw.FormatError, apsw.SQLError)
_CREATE = "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
_IS_OURS = "SELECT 1 FROM sqlite_schema WHERE name = 'facts' AND sql = ?"
_READ = "SELECT CAST(name AS BLOB), CAST(value AS BLOB) FROM facts"
_PUT = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_DELETE = "DELETE FROM facts WHERE name = ?"


class RelayState:
    """Named facts on disk.

    A file that cannot be read is put aside in STATE/damaged, and knowledge starts afresh. Where no file can
    be used (a full disk, a lock, no leave to write) facts live as long as the process: nobody waits for it.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file (mode 0600)."""
        self._mutex = threading.Lock()
        try:
            self._db = _open(path)
        except _UNREADABLE:
            self._db = _opened_anew(path)
        except (apsw.Error, OSError):
            self._db = _in_memory()

    def read(self) -> dict[str, Any]:
        """Every fact; one that cannot be read is left out, and all are where the file cannot be read."""
        with self._mutex, contextlib.suppress(apsw.Error):
            return _facts(self._db)
        return {}

    def write(self, facts: Mapping[str, Any]) -> None:
        """Keep these facts; None removes one. Trouble with the file is no reason to stop sending."""
        with self._mutex, contextlib.suppress(apsw.Error), self._db:
            for name, value in facts.items():
                if value is None:
                    self._db.execute(_DELETE, (name,))
                else:
                    self._db.execute(_PUT, (name, json.dumps(value, separators=(",", ":"))))

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._db.close()


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a state directory; empty when there are none. Nothing is made, and nothing left behind."""
    if not path.exists():
        return {}
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error:
        return {}
    try:
        connection.set_busy_timeout(_BUSY_TIMEOUT_MS)
        return _facts(connection)
    except apsw.Error:
        return {}
    finally:
        connection.close()


def _open(path: Path) -> apsw.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    return _prepared(apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE))


def _opened_anew(path: Path) -> apsw.Connection:
    sides = (path.with_name(path.name + ending) for ending in ("-wal", "-shm", ""))
    try:
        put_aside(StateDirectory(path.parent), (side for side in sides if os.path.lexists(side)))
        return _open(path)
    except (apsw.Error, OSError):
        return _in_memory()


def _in_memory() -> apsw.Connection:
    return _prepared(apsw.Connection(":memory:"))


def _prepared(connection: apsw.Connection) -> apsw.Connection:
    """Ready for use, and readable from its first page to its last."""
    try:
        connection.set_busy_timeout(_BUSY_TIMEOUT_MS)
        connection.pragma("journal_mode", "WAL")
        connection.pragma("synchronous", "NORMAL")
        connection.execute(_CREATE)
        _require_sound(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_sound(connection: apsw.Connection) -> None:
    """Raises apsw.Error when a byte of it has changed where that counts: later, writing would fail unseen."""
    is_ours = connection.execute(_IS_OURS, (_CREATE.replace("IF NOT EXISTS ", ""),)).fetchone()
    verdict = connection.execute("PRAGMA integrity_check(1)").fetchall()
    if not is_ours or connection.readonly("main") or verdict != [("ok",)]:
        raise apsw.CorruptError


def _facts(connection: apsw.Connection) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for raw_name, text in connection.execute(_READ):
        if raw_name is None or text is None:  # of a damaged page
            continue
        with contextlib.suppress(ValueError, RecursionError):
            name = raw_name.decode()
            fact = sound_fact(name, json.loads(text))
            if fact is not None:
                facts[name] = fact
    return facts
