"""A damaged outbox file, read from a private copy as far as it can be read. Nothing in it is trusted.

Rows are read in order of seq; where a page is bad the range is halved until only what is bad is left out. A
copy without a schema gets the first page of a new file: tables of an outbox begin at the same pages always.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import apsw

from outbox.errors import StoreTooNew
from outbox.store import old_counters, schema
from outbox.store.directory import file_name
from outbox.store.faults import store_error
from outbox.store.own_row import READ_NUMBERS, numbers_make_sense
from outbox.store.own_tables import has_our_tables

PAGE_BYTES = 4096
_OUTBOX_PAGE = 3  # where the table `outbox` begins; page 2 holds the pointers of auto_vacuum
_LONGEST_AGENT_BYTES = 512
_LONGEST_READ_S = 15.0  # of one table: producers wait meanwhile
_MOST_LOG_PAGES = 100
_MOST_TIMES_CUT = 1_000  # a header that tells of a file so many times as long is not believed
_PREFIX = "*** in database main ***"
_STREAM = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

_BAD = (
    *(apsw.CorruptError, apsw.NotADBError, apsw.FormatError, apsw.SchemaChangeError, UnicodeDecodeError),
    apsw.SQLError,  # our statements are right: what they find no column or no format for is the file
)
_ANY = (apsw.Error, UnicodeDecodeError, MemoryError)
OTHER_AGENT = "it holds the events of another agent"

_IDENTITY = "SELECT agent, stream, rules, created_at_ms FROM outbox"
_TYPES_OF_IDENTITY = [str, str, str, int]
_MISSING = "SELECT waiting - (SELECT count(*) FROM events WHERE kind <> 'outbox-gap') FROM outbox"
_LAST = {
    "events": "SELECT seq FROM events ORDER BY seq DESC LIMIT 1",
    "dead": "SELECT seq FROM dead ORDER BY seq DESC LIMIT 1",
    "tries": "SELECT seq FROM tries ORDER BY seq DESC LIMIT 1",
}

_TABLES = """
SELECT name, rootpage, sql LIKE '%WITHOUT ROWID%' FROM sqlite_schema
WHERE type = 'table' AND name NOT LIKE 'sqlite%'"""
_COLUMNS = "SELECT name, type, pk FROM pragma_table_info(?)"

Row = tuple[Any, ...]
Range = tuple[int, int]


def fault_of(copy: Path, name: str) -> str:
    """What is wrong with the copy of the outbox file `name`, in a few words; "" for nothing.

    Raises StoreTooNew, and StoreError for trouble that is not the file's.
    """
    size_bytes = copy.stat().st_size
    if size_bytes < PAGE_BYTES:
        return f"only its first {size_bytes:,} bytes are left" if size_bytes else "it is empty"
    try:
        with contextlib.closing(_connected(copy)) as db:
            version = db.pragma("user_version")
            if db.pragma("application_id") != schema.APPLICATION_ID or version < 1:
                return "it is no outbox"
            if version > schema.HIGHEST_VERSION:
                return f"it names the format {version}, which no release has"
            if version > schema.VERSION:
                raise StoreTooNew(
                    f"The file {name} was written by a newer release (format {version}; this one knows "
                    f"{schema.VERSION}). It was not touched. Upgrade relay-outbox to read it."
                )
            if db.readonly("main"):
                return "its header names a format that cannot be written"
            if not has_our_tables(db):
                return "its tables are not those of an outbox"
            row = db.execute(_IDENTITY).fetchone()
            if row is None:
                return "its own row is missing"
            if not _tells_an_agent(row):
                return "its own row is damaged"
            if file_name(str(row[0])) != name:
                return OTHER_AGENT
            if not numbers_make_sense(db.execute(READ_NUMBERS).fetchall()[0]):
                return "the numbers in its own row cannot be true"
            # Unlike quick_check this finds an index without its row, which stops every settlement as well.
            verdict = str(db.execute("PRAGMA integrity_check(1)").fetchall()[0][0])
            missing = int(str(db.execute(_MISSING).fetchall()[0][0])) if verdict == "ok" else 0
            if missing > 0:
                return f"{missing:,} events are missing"
            return "" if verdict == "ok" else " ".join(verdict.removeprefix(_PREFIX).split())
    except _BAD as error:
        return str(error)
    except apsw.Error as error:
        raise store_error(error, copy) from error


def _tells_an_agent(row: Row) -> bool:
    """A page of another table in the place of its own is read, too: with a kind for the agent's name."""
    return [type(value) for value in row] == _TYPES_OF_IDENTITY and bool(
        _STREAM.fullmatch(row[1].encode("utf-8", "replace"))
    )


def log_is_of(copy: Path, name: str, others: Collection[str]) -> bool:
    """Whether the log of this copy of `name` belongs to one of the `others`, files of other agents."""
    return bool(_other_named(_log_pages(_log_of(copy)), name, others))


def other_agent_in(copy: Path, name: str, others: Collection[str]) -> str:
    """Whose the main file was, which cannot be read as it should: the agent of one of the `others`, or ""."""
    pages = (*_log_pages(_log_of(copy)), _page(copy, (_OUTBOX_PAGE - 1) * PAGE_BYTES))
    return _other_named(pages, name, others)


def agent_of(copy: Path) -> str:
    """Whose the file is, as it says; of one in which nothing but its own name is wrong."""
    with contextlib.closing(_connected(copy)) as db:
        return str(db.execute(_IDENTITY).fetchall()[0][0])


def _other_named(pages: Iterable[bytes], name: str, others: Collection[str]) -> str:
    """By agent and id in the row of `outbox`; a name that is only garbled is nobody's."""
    agents = {file_name(agent): agent for page in pages for agent, _ in _agents_in(page)}
    return "" if name in agents else next((agents[file] for file in others if file in agents), "")


def _agents_in(page: bytes) -> Iterator[tuple[str, str]]:
    """What may be agent and stream, which stand side by side in the row, whatever has become of the rest."""
    for found in _STREAM.finditer(page):
        end = found.start()
        for start in range(end - 1, max(0, end - _LONGEST_AGENT_BYTES) - 1, -1):
            agent = page[start:end].decode("utf-8", "replace")
            if "\ufffd" not in agent:
                yield agent, found[0].decode()


class Wreck:
    """The readable parts of a damaged file. `grafted` says that its first page is that of a new file."""

    def __init__(self, copy: Path, name: str, template: Path, *, mixed: bool = False) -> None:
        """Open the copy; `template` is a new outbox file; `mixed`: what is another agent's was beside it."""
        self.mixed = mixed
        self.unreadable: dict[str, list[Range]] = {}
        self._name = name
        self._copy = copy
        self._pages = copy.stat().st_size // PAGE_BYTES
        _lengthen(copy, template)
        self.identities = list(self._raw_identities())
        self.grafted = not self._pages or not self._has_schema()
        if self.grafted:
            _graft(copy, template)
        self.db = _readable(copy)
        if (row := self._first(_IDENTITY)) and file_name(str(row[0])) == name:
            self.identities.insert(0, (str(row[0]), str(row[1])))

    def close(self) -> None:
        """Close the copy."""
        self.db.close()

    @property
    def agent(self) -> str | None:
        """Whose events these are, where that can still be read; its hash in the file's name proves it."""
        return self.identities[0][0] if self.identities else None

    @property
    def streams(self) -> tuple[str, ...]:
        """The ids that this file may have had; a row's checksum tells which it was."""
        return tuple(dict.fromkeys(stream for _, stream in self.identities))

    def own_row(self) -> Row | None:
        """The counters and the claim as they stand there, right or wrong."""
        return self._first(old_counters.READ)

    def last_seq(self) -> int:
        """The highest seq of a row that can be read from the end of a table; 0 without any."""
        return max(self._last(table) or 0 for table in _LAST)

    def high_of(self, table: str) -> int:
        """How far to look in a table whose counters are lost: to its end, or beyond what it can hold."""
        last = self._last(table)
        if last is not None:
            return last
        row = self._first(_LAST[table].replace("DESC", "ASC"))
        return (_whole(row[0]) if row else 0) + self.most_rows()

    def _last(self, table: str) -> int | None:
        """None when that cannot be read."""
        try:
            row = self.db.execute(_LAST[table]).fetchone()
        except _ANY:
            return None
        return _whole(row[0]) if row else 0

    def most_rows(self) -> int:
        """More rows than the file can hold."""
        return self._pages * (PAGE_BYTES // 64) + 1

    def by_seq(self, table: str, sql: str, low: int, high: int) -> Iterator[Row]:
        """Rows of `sql` in order, seq first, from `low` to `high`; what is left out goes to `unreadable`."""
        ends, parts = time.monotonic() + _LONGEST_READ_S, [(low, high)]
        left_out = self.unreadable.setdefault(table, [])
        while parts:
            low, high = parts.pop()
            done = low - 1
            with contextlib.suppress(*_ANY):
                for row in self.db.execute(sql, (low, high)):
                    if type(row[0]) is not int or not done < row[0] <= high:
                        break
                    done = row[0]
                    yield row
                else:
                    continue
            low = done + 1
            if low >= high or time.monotonic() > ends:
                _add(left_out, low, high)
            else:
                middle = (low + high) // 2
                parts += [(middle + 1, high), (low, middle)]

    def from_both_ends(self, sql: str) -> Iterator[Row]:
        """Rows of `sql` (its {order} is ASC or DESC) up to the first bad page, from the start and the end."""
        ends, seen = time.monotonic() + _LONGEST_READ_S, 0
        for order in ("ASC", "DESC"):
            try:
                for row in self.db.execute(sql.format(order=order)):
                    if time.monotonic() > ends or seen > self.most_rows():
                        return
                    seen += 1
                    yield row
            except _ANY:
                continue
            return

    def _has_schema(self) -> bool:
        with contextlib.closing(_readable(self._copy)) as db, contextlib.suppress(*_ANY):
            return has_our_tables(db)
        return False

    def _first(self, sql: str) -> Row | None:
        try:
            return self.db.execute(sql).fetchone()
        except _ANY:
            return None

    def _raw_identities(self) -> Iterator[tuple[str, str]]:
        """What the newest images of the row of `outbox` tell of this agent."""
        for page in (*_log_pages(_log_of(self._copy)), _page(self._copy, (_OUTBOX_PAGE - 1) * PAGE_BYTES)):
            for agent, stream in _agents_in(page):
                if file_name(agent) == self._name:
                    yield agent, stream


def _log_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}-wal")


def _connected(copy: Path) -> apsw.Connection:
    db = apsw.Connection(str(copy), flags=apsw.SQLITE_OPEN_READWRITE)
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    return db


def _readable(copy: Path) -> apsw.Connection:
    """A connection that reads on where the header's number of pages is wrong."""
    db = _connected(copy)
    db.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
    return db


def _add(ranges: list[Range], low: int, high: int) -> None:
    if low > high:
        return
    if ranges and ranges[-1][1] == low - 1:
        low = ranges.pop()[0]
    ranges.append((low, high))


def _whole(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _page(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PAGE_BYTES)


def _log_pages(log: Path) -> Iterator[bytes]:
    """The newest images of that page in a log (sqlite.org/fileformat2.html#walformat), newest first."""
    try:
        frames = (log.stat().st_size - 32) // (24 + PAGE_BYTES)
    except FileNotFoundError:
        return
    with log.open("rb") as file:
        found = 0
        for index in reversed(range(frames)):
            file.seek(32 + index * (24 + PAGE_BYTES))
            if int.from_bytes(file.read(24)[:4], "big") == _OUTBOX_PAGE:
                found += 1
                yield file.read(PAGE_BYTES)
            if found >= _MOST_LOG_PAGES:
                return


def _lengthen(copy: Path, template: Path) -> None:
    """Give a cut file the length it had, with empty pages: SQLite reads no table when one begins nowhere."""
    size_bytes = copy.stat().st_size
    told = int.from_bytes(_page(copy, 0)[28:32], "big") * PAGE_BYTES
    least = max(size_bytes, template.stat().st_size)
    os.truncate(copy, told if least < told <= _MOST_TIMES_CUT * least else least)


def _graft(copy: Path, template: Path) -> None:
    """Put a first page that reads the tables of an outbox in its place, also over one that the log has."""
    page = _reading_page(template)
    _write_first_page(copy, page)
    with contextlib.closing(_connected(copy)) as db, contextlib.suppress(*_ANY):
        db.pragma("user_version")  # there is no log before the first read
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    _write_first_page(copy, page)


def _reading_page(template: Path) -> bytes:
    """Names and columns of all tables, and where they begin, on one page: their whole texts need several."""
    with contextlib.closing(_connected(template)) as db:
        tables = [(*found, db.execute(_COLUMNS, found[:1]).fetchall()) for found in db.execute(_TABLES)]
    lens = template.with_name("lens")
    with contextlib.closing(apsw.Connection(str(lens))) as db:
        db.pragma("auto_vacuum", "INCREMENTAL")
        db.config(apsw.SQLITE_DBCONFIG_WRITABLE_SCHEMA, 1)
        for name, root, rowless, columns in tables:
            texts = (f"{column} {kind}{' PRIMARY KEY' if key else ''}" for column, kind, key in columns)
            db.execute(f"CREATE TABLE {name} ({', '.join(texts)}){' WITHOUT ROWID' if rowless else ''}")
            db.execute("UPDATE sqlite_schema SET rootpage = ? WHERE name = ?", (root, name))
        db.pragma("application_id", schema.APPLICATION_ID)
        db.pragma("user_version", schema.VERSION)
    return _page(lens, 0)


def _write_first_page(copy: Path, page: bytes) -> None:
    header = bytearray(page)
    header[18:20] = b"\2\2"  # it has a write-ahead log
    header[28:32] = (copy.stat().st_size // PAGE_BYTES).to_bytes(4, "big")
    header[32:40] = bytes(8)  # no free pages
    header[92:96] = header[24:28]  # the number of pages counts only if these two are the same
    with copy.open("r+b") as file:
        file.write(header)
