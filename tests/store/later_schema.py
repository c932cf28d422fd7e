"""The schema of a later release, made up: a table and an index more, columns that are filled from others."""

from outbox.store import schema

STEPS = (
    """
    ALTER TABLE events ADD COLUMN label TEXT;
    UPDATE events SET label = kind || ' ' || seq;
    CREATE INDEX events_by_label ON events (label);
    UPDATE dead SET detail = detail || ' (migrated)';
    """,
    """
    CREATE TABLE labels (label TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;
    INSERT INTO labels SELECT label, seq FROM events WHERE label IS NOT NULL;
    ALTER TABLE receipts ADD COLUMN told INTEGER NOT NULL DEFAULT 0;
    """,
)
LATER = schema.VERSION + len(STEPS)


def upgrade(monkeypatch):
    """From here on this process is the later release."""
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, *STEPS))
    monkeypatch.setattr(schema, "VERSION", LATER)
