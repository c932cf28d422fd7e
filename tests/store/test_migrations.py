"""A file of an older release is brought to this one's schema when it is opened: once, step by step."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from boxes import contents, deliver, event, fill, kill, put, seqs
from later_schema import LATER, STEPS, upgrade
from small_disk import SmallDisk

from outbox.errors import StoreError, StoreFull, StoreTooNew
from outbox.store import schema
from outbox.store.file import open_outbox
from outbox.store.verify import unsound_rows, verify_counters, verify_pages

OLDER = schema.VERSION


@pytest.fixture
def older(box):
    """A file of this release with something of everything: events, a dead letter, a receipt."""
    fill(box, 6)
    kill(box)
    deliver(box)
    return box


def version(box):
    """What the file says of itself."""
    return box.one("PRAGMA user_version")[0]


def test_an_older_file_is_migrated_when_it_is_opened(state, older, monkeypatch):
    """Every row is there and sound, with what the steps made of it; opened again, nothing happens."""
    before = contents(older)
    upgrade(monkeypatch)
    for _ in range(2):
        with contextlib.closing(open_outbox(state, older.path)) as box:
            assert version(box) == LATER
            assert [row[:-1] for row in contents(box)["events"]] == before["events"]
            assert box.rows("SELECT label, seq FROM labels") == [
                (f"session-message {seq}", seq) for seq in seqs(older)
            ]
            assert box.rows("SELECT detail FROM dead") == [(before["dead"][0][14] + " (migrated)",)]
            assert verify_counters(box) == verify_pages(box) == unsound_rows(box) == []


def test_a_new_file_has_what_a_migrated_one_has(state, older, make, monkeypatch):
    """The schema of both is the same."""
    upgrade(monkeypatch)
    tables = "SELECT name, sql FROM sqlite_schema ORDER BY name"
    new = make("of-the-later-release")
    with contextlib.closing(open_outbox(state, older.path)) as box:
        assert box.rows(tables) == new.rows(tables)
        assert version(box) == version(new) == LATER


def test_whoever_has_it_open_goes_on(state, older, monkeypatch):
    """A process of the older release that writes meanwhile, and one that opens the file anew."""
    upgrade(monkeypatch)
    open_outbox(state, older.path).close()
    (seq,) = put(older, event())
    assert deliver(older) == [3]
    monkeypatch.undo()
    with pytest.raises(StoreTooNew, match=f"format {LATER}; this one knows {OLDER}"):
        open_outbox(state, older.path)
    assert seqs(older)[-1] == seq


def test_those_who_come_together_migrate_it_once(state, older, monkeypatch):
    """A step that was done twice would fail, or say so twice."""
    upgrade(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        for box in pool.map(lambda _: open_outbox(state, older.path), range(8)):
            assert version(box) == LATER
            box.close()
    assert older.rows("SELECT detail FROM dead WHERE detail LIKE '%migrated%migrated%'") == []


def test_a_step_that_fails_leaves_the_file_as_it_was(state, older, monkeypatch):
    """Nothing of it is half done; what the steps before it did stays."""
    upgrade(monkeypatch)
    broken = f"{STEPS[1]} INSERT INTO nowhere VALUES (1);"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS[:-1], broken))
    with pytest.raises(StoreError, match="no such table"):
        open_outbox(state, older.path)
    assert version(older) == LATER - 1
    assert older.rows("SELECT name FROM sqlite_schema WHERE name = 'labels'") == []
    assert verify_counters(older) == []
    monkeypatch.setattr(schema, "MIGRATIONS", STEPS)
    with contextlib.closing(open_outbox(state, older.path)) as box:
        assert version(box) == LATER


def test_on_a_full_disk_it_stays_as_it_was(state, older, monkeypatch):
    """It is told as full, and migrated once there is room."""
    put(older, *(event({"body": "x" * 3_000}) for _ in range(50)))
    path, held = older.path, seqs(older)
    older.close(checkpoint=True)
    upgrade(monkeypatch)
    disk = SmallDisk(state.path)
    try:
        disk.room_bytes = disk.used_bytes() + 40_000
        with pytest.raises(StoreFull, match="Make space"):
            open_outbox(state, path)
        disk.room_bytes += 1 << 30
        with contextlib.closing(open_outbox(state, path)) as box:
            assert (version(box), seqs(box)) == (LATER, held)
    finally:
        disk.unregister()
