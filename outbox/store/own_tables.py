"""Whether the tables of a file are those of an outbox, to the letter: SQLite keeps the schema as texts in it.

With a byte of them changed no page is bad, and yet a column has another name, or a row no number any more.
"""

from __future__ import annotations

import contextlib
import functools

import apsw

from outbox.store import schema

_TEXTS = "SELECT type, name, tbl_name, sql FROM sqlite_schema"

Texts = frozenset[tuple[object, ...]]


def has_our_tables(db: apsw.Connection) -> bool:
    """Whether all tables and indexes of the version that the file names are there as they were made.

    What somebody has added is passed over. Raises apsw.Error when the schema cannot be read.
    """
    version = db.pragma("user_version")
    return 1 <= version <= schema.VERSION and _made(version, schema.MIGRATIONS).issubset(db.execute(_TEXTS))


@functools.cache
def _made(version: int, steps: tuple[str, ...]) -> Texts:
    with contextlib.closing(apsw.Connection(":memory:")) as db:
        for step in (schema.CREATE, *steps[: version - 1]):
            db.execute(step)
        return frozenset(db.execute(_TEXTS))
