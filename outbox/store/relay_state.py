"""STATE/relay.sqlite: what is known of the relay, kept over restarts and shared with a flush that has no daemon.

Facts are small JSON objects by name; losing the file costs time, never an event.
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


class RelayState:
    """Named facts on disk. A file that cannot be used is put aside, and knowledge starts afresh."""

    def __init__(self, path: Path) -> None:
        """Open or make the file (mode 0600)."""
        self._mutex = threading.Lock()
        try:
            self._db = _open(path)
        except apsw.Error:
            aside = path.with_name(f"{path.name}.unreadable")
            with contextlib.suppress(FileNotFoundError):
                path.replace(aside)
            for side in ("-wal", "-shm"):
                path.with_name(path.name + side).unlink(missing_ok=True)
            self._db = _open(path)

    def read(self) -> dict[str, Any]:
        """Every fact."""
        with self._mutex:
            return {
                name: json.loads(text) for name, text in self._db.execute("SELECT name, value FROM facts")
            }

    def write(self, facts: Mapping[str, Any]) -> None:
        """Keep these facts; None removes one. A full disk or a lock is no reason to stop sending."""
        with self._mutex, contextlib.suppress(apsw.BusyError, apsw.FullError, apsw.IOError), self._db:
            for name, value in facts.items():
                if value is None:
                    self._db.execute("DELETE FROM facts WHERE name = ?", (name,))
                else:
                    self._db.execute(
                        "INSERT INTO facts (name, value) VALUES (?, ?) "
                        "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                        (name, json.dumps(value, separators=(",", ":"))),
                    )

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._db.close()


def _open(path: Path) -> apsw.Connection:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(2_000)
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"
        )
    except apsw.Error:
        connection.close()
        raise
    return connection


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a state directory without making anything; empty when there are none or they are unreadable."""
    if not path.exists():
        return {}
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error:
        return {}
    try:
        connection.set_busy_timeout(2_000)
        return {name: json.loads(text) for name, text in connection.execute("SELECT name, value FROM facts")}
    except apsw.Error:
        return {}
    finally:
        connection.close()
