"""The reference relay's file: opened, and written in group commits.

What arrives in one turn of the event loop goes into one transaction; nobody is answered before it is on disk.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import apsw

from relay_client.reference.ledger import SCHEMA, Ledger

_APPLICATION_ID = 0x52_4C_59_31  # "RLY1"
_SCHEMA_VERSION = 1
_BUSY_TIMEOUT_MS = 5_000
_NOTES_WAIT_S = 0.02

_T = TypeVar("_T")


class StoreUnusable(Exception):
    """The file cannot be used as the relay's; it was left as it was."""


@dataclass(slots=True)
class _Waiting:
    work: Callable[[Ledger], Any]
    done: asyncio.Future[Any] | None  # None: nobody waits for it


class Store:
    """One SQLite file in WAL mode.

    Two connections to it: what somebody waits for is committed with `synchronous=FULL`; notes (the log of
    requests) go along with the next such commit or, when none comes, soon after by one with NORMAL.
    """

    def __init__(self, path: str) -> None:
        """Open the file, or make it (mode 0600).

        Raises:
            StoreUnusable: no SQLite file, another program's, a newer release's, or not writable.
        """
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._durable = _open(path, "FULL")
            self._quick = _open(path, "NORMAL")
        except (OSError, apsw.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise StoreUnusable(
                f"The relay's file {path} cannot be used: {reason}. Nothing was started. "
                "Name another with --db."
            ) from error
        self._waiting: list[_Waiting] = []
        self._waited_for = False

    @property
    def ledger(self) -> Ledger:
        """For reading; sees what was committed."""
        return self._quick

    def submit(self, work: Callable[[Ledger], _T]) -> asyncio.Future[_T]:
        """Run `work` in the next transaction; the future is done when that is on disk.

        A transaction that fails fails everything in it (`apsw.Error`), and nothing of it was kept.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_T] = loop.create_future()
        if not self._waited_for:
            self._waited_for = True
            loop.call_soon(self.commit)
        self._waiting.append(_Waiting(work, done))
        return done

    def note(self, work: Callable[[Ledger], Any]) -> None:
        """Run `work` in some transaction soon; kill -9 within this time, or a full disk, loses it."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(_NOTES_WAIT_S, self.commit)
        self._waiting.append(_Waiting(work, None))

    def commit(self) -> None:
        """Write everything that waits, in its order, in one transaction."""
        group, self._waiting = self._waiting, []
        ledger = self._durable if self._waited_for else self._quick
        self._waited_for = False
        if not group:
            return
        try:
            results = _in_transaction(ledger, [waiting.work for waiting in group])
        except Exception as error:  # noqa: BLE001 - whatever it is, each of the waiting has to learn of it
            for waiting in group:
                if waiting.done is not None and not waiting.done.done():
                    waiting.done.set_exception(error)
            return
        for waiting, result in zip(group, results, strict=True):
            if waiting.done is not None and not waiting.done.done():
                waiting.done.set_result(result)

    def close(self) -> None:
        """Write what waits and close the file."""
        self.commit()
        self._quick.db.close()
        self._durable.db.close()


def _in_transaction(ledger: Ledger, works: list[Callable[[Ledger], Any]]) -> list[Any]:
    ledger.db.execute("BEGIN IMMEDIATE")
    try:
        results = [work(ledger) for work in works]
        ledger.db.execute("COMMIT")
    except BaseException:
        if ledger.db.in_transaction:
            ledger.db.execute("ROLLBACK")
        raise
    return results


def _open(path: str, synchronous: str) -> Ledger:
    db = apsw.Connection(str(Path(path).absolute()))
    try:
        db.set_busy_timeout(_BUSY_TIMEOUT_MS)
        _claim(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {synchronous}")
        db.execute("PRAGMA journal_size_limit = 67108864")
    except BaseException:
        db.close()
        raise
    return Ledger(db)


def _claim(db: apsw.Connection, path: str) -> None:
    """Make the schema in an empty file; refuse one that is not ours without writing to it."""
    application, version = db.pragma("application_id"), db.pragma("user_version")
    if application == 0 and version == 0 and db.execute("SELECT count(*) FROM sqlite_schema").get == 0:
        with db:
            db.execute(SCHEMA)
            db.pragma("application_id", _APPLICATION_ID)
            db.pragma("user_version", _SCHEMA_VERSION)
    elif application != _APPLICATION_ID:
        raise StoreUnusable(
            f"{path} belongs to another program; it was not touched. Name another file with --db."
        )
    elif version > _SCHEMA_VERSION:
        raise StoreUnusable(
            f"{path} was written by a newer release (schema {version}, this one knows {_SCHEMA_VERSION}); "
            "it was not touched. Start the newer release, or name another file with --db."
        )
