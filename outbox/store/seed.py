"""The file of a seed runner's outbox: told from others, its rows read as records. It is never changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import apsw

from outbox.errors import StoreDamaged, StoreError, StoreHeld, UsageError
from outbox.event import Limits, accept, parse_event
from outbox.event_checks import check_time
from outbox.json_text import quoted
from outbox.outcome import Reason
from outbox.record import Letter, Record, Tries
from outbox.record_line import joined, one_value
from outbox.store.at_rest import holder
from outbox.store.directory import is_regular
from outbox.store.faults import FAULTS, store_error
from outbox.store.schema import APPLICATION_ID

MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 256 * 1024
_APPLICATION_ID_AT = 68  # sqlite.org/fileformat.html, section 1.3
_WORDS = (b"outbox", b"dedupe_key", b"idempotency_key", b"poisoned", b"next_attempt_at")

_COLUMNS = "SELECT name FROM pragma_table_info('outbox')"
_WANTED = frozenset(
    ("seq", "kind", "mode", "dedupe_key", "occurred_at", "idempotency_key", "payload", "attempts")
) | {"next_attempt_at", "poisoned", "created_at"}
_COUNT = "SELECT count(*) FROM outbox"
_ROWS = """
SELECT seq, CAST(kind AS BLOB), CAST(mode AS BLOB), CAST(dedupe_key AS BLOB), occurred_at,
       CAST(idempotency_key AS BLOB), CAST(payload AS BLOB), attempts, poisoned, created_at
FROM outbox ORDER BY seq"""


@dataclass(frozen=True, slots=True)
class SeedRow:
    """One row as it stands in the file."""

    seq: Any
    kind: bytes | None
    mode: bytes | None
    dedupe_key: bytes | None
    occurred_at: Any
    idempotency_key: bytes | None
    payload: bytes | None
    attempts: Any
    poisoned: Any
    created_at: Any


# Finding ----------------------------------------------------------------------------------------------------


def application_id(path: Path) -> int | None:
    """What SQLite file this is, by the number in its header; None for one that is no SQLite file."""
    with path.open("rb") as file:
        head = file.read(_APPLICATION_ID_AT + 4)
    if not head.startswith(MAGIC) or len(head) < _APPLICATION_ID_AT + 4:
        return None
    return int.from_bytes(head[_APPLICATION_ID_AT:])


def seed_files(folder: Path) -> list[Path]:
    """The files in this folder that look like a seed runner's outbox; they are looked at, not opened."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries if looks_like_seed(Path(entry.path))]


def looks_like_seed(path: Path) -> bool:
    """Whether the file's first pages, or its log's, tell of the table that seed runners use."""
    try:
        if not is_regular(path) or application_id(path) in (None, APPLICATION_ID):
            return False
        text = _head(path) + _head(path.with_name(f"{path.name}-wal"))
    except OSError:
        return False
    return all(word in text for word in _WORDS)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return b""


def require_no_runner(path: Path) -> None:
    """Raise StoreHeld, and tell who, when a process has the file open."""
    pid = holder(path)
    if pid is not None:
        who = f"process {pid}{_name(pid)}" if pid else "a process that is not seen from here"
        raise StoreHeld(
            f"The runner of {str(path)!r} is at work: {who} has the file open. Nothing was taken, since it "
            "would be sent twice. Stop that runner, and import again."
        )


def _name(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text('utf-8', 'replace').strip()})"
    except OSError:
        return ""


# Reading ----------------------------------------------------------------------------------------------------


class SeedFile:
    """A copy of a seed runner's file, open; `with` closes it."""

    def __init__(self, copy: Path) -> None:
        """Open the copy; raises StoreError when there is no such table in it, or it cannot be read."""
        self._path = copy
        self._db = apsw.Connection(str(copy), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            self.count = self._count()
        except FAULTS as error:
            self.close()
            raise store_error(error, copy) from error
        except StoreError:
            self.close()
            raise

    def _count(self) -> int | None:
        """How many rows there are; None when not all of them can be read."""
        columns = {name for (name,) in self._db.execute(_COLUMNS)}
        if columns >= _WANTED:
            try:
                return int(self._db.execute(_COUNT).get)
            except apsw.CorruptError:
                return None
        raise StoreError(
            "The file is no outbox that is known here: neither ours nor a seed runner's, whose table outbox "
            "has a row for each event. Nothing was taken, and nothing in it was changed."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self) -> Iterator[SeedRow]:
        """Its rows in order; raises StoreDamaged for what cannot be read."""
        try:
            for row in self._db.execute(_ROWS):
                yield SeedRow(*row)
        except FAULTS as error:
            raise StoreDamaged(
                f"The file cannot be read to its end: {error}. What came before was taken, and nothing in "
                "the file was changed. Repair a copy of it (sqlite3 FILE .recover), and import that."
            ) from error

    def close(self) -> None:
        """Close the copy."""
        self._db.close()


def seed_record(row: SeedRow, agent: str, limits: Limits, now_ms: int) -> Record:
    """The row as a record, checked as an event is at acceptance, with its key and its times. Pure.

    A poisoned row is a dead letter; so is a tool call that was tried, since nobody knows what came of it: a
    seed runner did not tell calls apart that must not be repeated. The seed's attempts count as sends: it
    counted outages too. Raises UsageError for a row that is no event.
    """
    payload = one_value(_text(row.payload, "payload") or "")
    created_at_ms = _moment(row.created_at, "created_at", now_ms)
    mode = _text(row.mode, "mode") or "append"
    fields = {
        "kind": _text(row.kind, "kind"),
        "mode": mode,
        "dedupeKey": _text(row.dedupe_key, "dedupe_key") if mode == "coalesce" else None,
        "idempotencyKey": _text(row.idempotency_key, "idempotency_key") or _own_key(row, agent),
    }
    texts = {name: quoted(value) for name, value in fields.items() if value is not None}
    occurred_at_ms = _moment(row.occurred_at, "occurred_at", created_at_ms)
    draft = parse_event(joined({**texts, "occurredAt": str(occurred_at_ms), "payload": payload}), limits)
    event = accept(draft, limits=Limits(), agent=agent, now_ms=now_ms, new_key="")
    attempts = row.attempts if isinstance(row.attempts, int) and row.attempts > 0 else 0
    letter = _letter(row, draft.kind, attempts, now_ms)
    tries = Tries(sends=attempts, attempts=attempts if letter else 0)
    seq = row.seq if isinstance(row.seq, int) and row.seq > 0 else 0
    return Record(event, seq, created_at_ms, tries, letter)


def _letter(row: SeedRow, kind: str, attempts: int, now_ms: int) -> Letter | None:
    if row.poisoned:
        return Letter(
            str(Reason.EXHAUSTED), now_ms, detail=f"a seed runner gave it up after {attempts} tries"
        )
    if kind == "mcp-tool-call" and attempts:
        detail = f"a seed runner tried this call {attempts} times; whether it had its effect is not known"
        return Letter(str(Reason.OUTCOME_UNKNOWN), now_ms, detail=detail)
    return None


def _own_key(row: SeedRow, agent: str) -> str:
    """A key for a row without one: the same each time, so that it is taken once."""
    parts = (agent, row.seq, row.created_at, row.kind, row.payload)
    return "seed-" + blake2b(repr(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()


def _text(value: bytes | None, name: str) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: byte {error.start + 1}") from None


def _moment(value: object, name: str, default_ms: int) -> int:
    """A time in epoch milliseconds: a whole number of them, or a date and time with its zone (ISO 8601)."""
    if value is None:
        return default_ms
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and (moment := _iso(value)) is not None:
        value = moment
    try:
        return check_time(value)
    except UsageError:
        raise UsageError(f"{name} {value!r} is no time in whole epoch milliseconds") from None


def _iso(text: str) -> int | None:
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if moment.tzinfo is None else round(moment.timestamp() * 1000)
