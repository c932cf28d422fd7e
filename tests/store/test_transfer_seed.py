"""A seed runner's file: found, told from others, read from a copy, its rows checked as events are."""

import contextlib
import json

import apsw
import pytest
from boxes import NOW, dead_seqs, fill, make_box, put, seqs, state_in, take, tool_call
from seeds import FIRST_MS, TABLE, contents_of, make_seed, runner_at_work, seed_row

from outbox.errors import StoreBusy, StoreDamaged, StoreError, StoreHeld, UsageError
from outbox.event import Limits
from outbox.store import at_rest
from outbox.store.at_rest import copy_at_rest, holder
from outbox.store.foreign import opened_copy
from outbox.store.records import everything
from outbox.store.seed import SeedFile, looks_like_seed, require_no_runner, seed_files, seed_record
from outbox.store.sending import recover
from outbox.store.transfer import take_in


def rows_of(path, tmp_path):
    """The rows of a copy of the file."""
    copy = tmp_path / "copy.sqlite"
    copy_at_rest(path, copy)
    with SeedFile(copy) as seed:
        rows = list(seed.rows())
        assert len(rows) == seed.count
    return rows


def records_of(path, tmp_path, limits=None):
    """Its rows as records."""
    return [seed_record(row, "builder", limits or Limits(), NOW) for row in rows_of(path, tmp_path)]


def one_record(tmp_path, **fields):
    """The record of one row with these fields."""
    return records_of(make_seed(tmp_path / "seed.sqlite", [seed_row(1, **fields)]), tmp_path)[0]


# Rows -------------------------------------------------------------------------------------------------------


def test_rows_keep_keys_times_and_order(box, tmp_path):
    """Poisoned ones are dead letters, in their place."""
    rows = [seed_row(n, poisoned=n in {2, 5}, attempts=9 * (n in {2, 5})) for n in range(1, 7)]
    records = records_of(make_seed(tmp_path / "seed.sqlite", rows), tmp_path)
    assert all(not one.duplicate for one in take_in(box, records, now_ms=NOW))
    assert (seqs(box), dead_seqs(box)) == ([1, 3, 4, 6], [2, 5])
    found = box.rows("SELECT seq, key, occurred_at_ms, accepted_at_ms FROM events")
    assert found == [
        (n, f"seed-key-{n}", FIRST_MS + 1_000 * n, FIRST_MS + 1_000 * n + 5) for n in (1, 3, 4, 6)
    ]
    assert (
        box.rows("SELECT reason, attempts, sends, failed_at_ms FROM dead") == [("exhausted", 9, 9, NOW)] * 2
    )
    assert all(one.duplicate for one in take_in(box, records, now_ms=NOW))


def test_numbers_of_a_seed_leave_room_for_more(box, tmp_path):
    """A row may have the last number there is: events that come after it get one all the same."""
    row = seed_row(1, seq=2**63 - 1, attempts=2**63 - 1)
    take_in(box, records_of(make_seed(tmp_path / "seed.sqlite", [row]), tmp_path), now_ms=NOW)
    assert fill(box, 2) == [2, 3]
    take(box)
    assert recover(box, now_ms=NOW) == []


def test_tries_of_a_seed_blame_nobody(tmp_path):
    """It counted outages too: they are sends, and no attempts."""
    record = one_record(tmp_path, attempts=11)
    assert (record.letter, record.tries.sends, record.tries.attempts) == (None, 11, 0)


@pytest.mark.parametrize(("attempts", "reason"), [(0, None), (1, "outcome_unknown")])
def test_a_tool_call_that_was_tried_is_not_repeated(tmp_path, attempts, reason):
    """Nobody knows what came of it; one that was never tried goes as it is."""
    payload = json.dumps({"tool": "note_add", "arguments": {}})
    record = one_record(tmp_path, kind="mcp-tool-call", payload=payload, attempts=attempts)
    assert (record.letter and record.letter.reason) == reason


def test_a_payload_keeps_its_own_text(tmp_path):
    """Numbers, escapes and order; blanks around it are none of it."""
    text = ' {"b": 1e400, "a": "\\ud83d", "n": 9007199254740993}\n'
    wire = one_record(tmp_path, payload=text).event.wire_payload.decode()
    assert wire.startswith('{"b": 1e400, "a": "\\ud83d", "n": 9007199254740993,')


def test_coalesce_rows_can_still_be_replaced(box, tmp_path):
    """Rows that stand in the file are all kept: the seed had replaced what it would."""
    rows = [seed_row(n, mode="coalesce", dedupe_key="d") for n in (1, 2)]
    take_in(box, records_of(make_seed(tmp_path / "seed.sqlite", rows), tmp_path), now_ms=NOW)
    assert box.rows("SELECT dedupe_key FROM events") == [("d",), ("d",)]


@pytest.mark.parametrize(
    ("value", "at_ms"),
    [
        (5, 5),
        (1.78e12, 1_780_000_000_000),
        ("1780000000123", 1_780_000_000_123),
        ("2026-05-28T20:26:40.125Z", 1_780_000_000_125),
        ("2026-05-28T22:26:40+02:00", 1_780_000_000_000),
    ],
)
def test_times_as_runners_write_them(tmp_path, value, at_ms):
    """Milliseconds in any dress, or a date with its zone."""
    table = TABLE.replace("occurred_at INTEGER", "occurred_at")
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(1, occurred_at=value)], table=table)
    assert records_of(path, tmp_path)[0].event.occurred_at_ms == at_ms


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "sesion-message"}, 'did you mean "session-message"'),
        ({"payload": '{"n": NaN}'}, "NaN is no JSON number (column 7)"),
        ({"payload": ""}, "no value"),
        ({"payload": '1,"kind":"insight"'}, "not JSON"),
        ({"payload": '{"n":1}}'}, "not JSON"),
        ({"payload": b"\xff"}, "not UTF-8"),
        ({"idempotency_key": "a key"}, "visible ASCII"),
        ({"occurred_at": "yesterday"}, "occurred_at 'yesterday'"),
        ({"occurred_at": "2026-05-28T20:26:40"}, "occurred_at"),
        ({"occurred_at": 1.5}, "occurred_at"),
        ({"created_at": -4}, "created_at"),
        ({"mode": "coalesce"}, "needs a dedupeKey"),
        ({"mode": "sometimes"}, "append or coalesce"),
        ({"payload": json.dumps("x" * 300)}, "bytes of JSON"),
    ],
)
def test_a_row_that_is_no_event_is_refused(tmp_path, fields, said):
    """It says what is wrong with it."""
    table = TABLE.replace("INTEGER NOT NULL", "")
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(1, **fields)], table=table)
    with pytest.raises(UsageError) as caught:
        records_of(path, tmp_path, Limits(max_payload_bytes=200))
    assert said in str(caught.value)


def test_a_row_without_a_key_gets_the_same_one_each_time(tmp_path):
    """So that it is taken once; another row gets another."""
    rows = [seed_row(n, idempotency_key="", payload='{"n":0}') for n in (1, 2)]
    path = make_seed(tmp_path / "seed.sqlite", rows)
    first, again = records_of(path, tmp_path), records_of(path, tmp_path)
    assert [one.event.key for one in first] == [one.event.key for one in again]
    assert first[0].event.key != first[1].event.key


# Files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_runner_at_work_is_found(tmp_path, mode):
    """By its lock on the log, or among its open files; the error names it. Afterwards there is none."""
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(1)], mode=mode)
    with runner_at_work(path, mode) as pid:
        assert holder(path) == pid
        with pytest.raises(StoreHeld, match=rf"process {pid} \(python"):
            require_no_runner(path)
    assert holder(path) is None
    require_no_runner(path)


def test_the_log_of_a_stopped_runner_is_read_and_left(tmp_path):
    """What it never copied into its file is there; file, log and folder are as before."""
    folder = tmp_path / "runner"
    folder.mkdir()
    path = make_seed(folder / "seed.sqlite", [seed_row(n) for n in range(1, 4)])
    before = contents_of(folder)
    assert len(before["seed.sqlite-wal"][0]) > 0
    assert len(rows_of(path, tmp_path)) == 3
    assert contents_of(folder) == before


def test_a_torn_transaction_of_a_runner_is_not_read(tmp_path):
    """A journal beside the file undoes what was half written, in the copy."""
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(n) for n in range(1, 4)], mode="delete")
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.pragma("cache_size", 1)
        db.pragma("cache_spill", 1)
        db.execute("BEGIN")
        rows = ((seed_row(n)["payload"] + " " * 4_000,) for n in range(50))
        db.executemany(
            "INSERT INTO outbox (kind, mode, occurred_at, idempotency_key, payload, created_at) "
            "VALUES ('insight', 'append', 1, 'k', ?, 1)",
            rows,
        )
        db.cache_flush()
        torn = tmp_path / "torn.sqlite"
        for side in ("", "-journal"):
            torn.with_name(torn.name + side).write_bytes(path.with_name(path.name + side).read_bytes())
        db.execute("ROLLBACK")
    assert torn.stat().st_size > path.stat().st_size
    assert [row.seq for row in rows_of(torn, tmp_path)] == [1, 2, 3]


def test_a_file_that_changes_all_the_time_is_not_copied(tmp_path, monkeypatch):
    """Half of one moment and half of another would be nothing."""
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(1)])
    sizes = iter(range(100))
    monkeypatch.setattr(at_rest, "_signature", lambda _: next(sizes))
    with pytest.raises(StoreBusy, match="being written"):
        copy_at_rest(path, tmp_path / "copy.sqlite")


def test_files_of_seed_runners_are_told_from_others(state, box, tmp_path):
    """Ours, other databases, texts and folders are none; one whose table is still in its log is."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    fill(box, 1)
    for name, path in (("ours.sqlite", box.path), ("log.sqlite", None)):
        if path:
            (folder / name).write_bytes(path.read_bytes())
    with contextlib.closing(apsw.Connection(str(folder / "other.sqlite"))) as db:
        db.execute("CREATE TABLE outbox (seq INTEGER PRIMARY KEY, payload TEXT)")
    (folder / "text.sqlite").write_text("poisoned outbox idempotency_key dedupe_key next_attempt_at", "utf-8")
    (folder / "folder.sqlite").mkdir()
    (folder / "empty.sqlite").touch()
    make_seed(folder / "log.sqlite", [seed_row(1)])
    make_seed(folder / "plain.db", [seed_row(1)], mode="delete")
    (folder / "link.db").symlink_to(folder / "plain.db")
    before = contents_of(folder)
    assert seed_files(folder) == [folder / "log.sqlite", folder / "plain.db"]
    assert contents_of(folder) == before
    assert seed_files(tmp_path / "nowhere") == []
    assert not looks_like_seed(tmp_path / "nowhere" / "x")


def test_another_database_is_refused(tmp_path):
    """With what was looked for; and one that is damaged says so."""
    with contextlib.closing(apsw.Connection(str(tmp_path / "other.sqlite"))) as db:
        db.execute("CREATE TABLE outbox (seq INTEGER PRIMARY KEY, payload TEXT)")
    with pytest.raises(StoreError, match="neither ours nor a seed runner's"):
        SeedFile(tmp_path / "other.sqlite")
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(n) for n in range(1, 200)], mode="delete")
    data = bytearray(path.read_bytes())
    data[5 * 4096 : 6 * 4096] = b"\xff" * 4096
    path.write_bytes(data)
    with SeedFile(path) as seed, pytest.raises(StoreDamaged, match="to its end"):
        list(seed.rows())


# Our own ----------------------------------------------------------------------------------------------------


def test_another_outbox_is_read_and_left(box, tmp_path):
    """Also with its log beside it; nothing of its state directory is changed."""
    fill(box, 3)
    before = contents_of(box.state.path)
    assert f"agents/{box.path.name}-wal" in before
    with opened_copy(box.path, tmp_path / "work") as copy, copy.snapshot():
        assert [record.seq for record in everything(copy)] == [1, 2, 3]
        assert copy.path != box.path
    assert contents_of(box.state.path) == before
    assert list((tmp_path / "work" / "agents").iterdir()) == []


def test_a_file_under_another_name_is_known_by_what_is_in_it(box, tmp_path):
    """A copy that somebody keeps elsewhere, outside of any state directory."""
    fill(box, 2)
    kept = tmp_path / "kept.sqlite"
    copy_at_rest(box.path, kept)
    with opened_copy(kept, tmp_path / "work") as copy:
        assert (copy.agent, seqs(copy)) == ("builder", [1, 2])


def test_an_outbox_whose_sender_lives_is_refused(box, tmp_path):
    """And nobody becomes its sender while it is read."""
    fill(box, 1)
    box.become_sender()
    with pytest.raises(StoreHeld, match="being delivered"), opened_copy(box.path, tmp_path / "work"):
        pass
    box.resign_sender()
    with opened_copy(box.path, tmp_path / "work"), pytest.raises(StoreHeld):
        box.become_sender()
    box.become_sender()
    box.resign_sender()


def test_what_a_dead_sender_left_in_flight(box, make, tmp_path):
    """Safe events wait, an unsafe call is a dead letter: as if its sender had come back."""
    put(box, tool_call())
    take(box, unsafe=True)
    other = make_box(state_in(tmp_path / "there"))
    with opened_copy(box.path, tmp_path / "work") as copy, copy.snapshot():
        take_in(other, list(everything(copy)), now_ms=NOW)
    assert other.one("SELECT reason FROM dead")[0] == "outcome_unknown"
    other.close()
    recover(box, now_ms=NOW)
