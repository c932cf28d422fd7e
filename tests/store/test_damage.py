"""Damage shows as a clear error or a damaged row; it never spreads, and nothing damaged is changed."""

import contextlib
import hashlib
import os
import shutil
import tempfile

import apsw
import pytest
from boxes import (
    NOW,
    ack,
    bury,
    contents,
    dead_seqs,
    deliver,
    event,
    fill,
    gaps,
    kill,
    make_box,
    put,
    put_damaged,
    python,
    release,
    seqs,
    state_in,
    take,
    tool_call,
    trouble,
)  # fmt: skip

from outbox.errors import StoreDamaged, StoreError, StoreTooNew, UsageError
from outbox.event import Limits
from outbox.outcome import Reason
from outbox.record_line import read_line, read_record, record_line
from outbox.store import schema
from outbox.store.dead import Choice, chosen, discard_each, replay
from outbox.store.dropping import expire
from outbox.store.enqueue import enqueue
from outbox.store.file import open_outbox
from outbox.store.inspect import dead_letters, read_status
from outbox.store.people import skip
from outbox.store.records import everything, find, listed
from outbox.store.sending import head, recover, settle
from outbox.store.verify import verify_counters


def change(box, sql, *args):
    """Change rows behind the store's back."""
    with box.transaction(durable=True):
        box.run(sql, *args)


def with_history(box):
    """One event that was tried, so that there is a row of tries, and one behind it."""
    put(box, event({"n": 1}, idempotency_key="k-1", run_id="r"), event({"n": 2}))
    taken = take(box)
    settle(
        box, taken, [release(taken.rows[0], attempts=1, why=trouble(), progress='{"stored":[]}')], now_ms=NOW
    )


DAMAGES = {
    "payload cut": "UPDATE events SET wire_payload = substr(wire_payload, 1, 7) WHERE seq = 1",
    "payload no text": "UPDATE events SET wire_payload = CAST(x'ff00fe' AS TEXT) WHERE seq = 1",
    "payload a number": "UPDATE events SET wire_payload = 5 WHERE seq = 1",
    "kind changed": "UPDATE events SET kind = 'insight' WHERE seq = 1",
    "kind no UTF-8": "UPDATE events SET kind = CAST(x'ff41' AS TEXT) WHERE seq = 1",
    "key changed": "UPDATE events SET key = 'k-2' WHERE seq = 1",
    "key no UTF-8": "UPDATE events SET key = CAST(x'ff41' AS TEXT) WHERE seq = 1",
    "key a blob": "UPDATE events SET key = x'fe' WHERE seq = 1",
    "time changed": "UPDATE events SET occurred_at_ms = 7 WHERE seq = 1",
    "time a text": "UPDATE events SET occurred_at_ms = 'then' WHERE seq = 1",
    "acceptance a text": "UPDATE events SET accepted_at_ms = 'then' WHERE seq = 1",
    "digest a number": "UPDATE events SET digest = 5 WHERE seq = 1",
    "checksum changed": "UPDATE events SET checksum = checksum + 1 WHERE seq = 1",
    "shape unknown": "UPDATE events SET shape = 'objec' WHERE seq = 1",
    "shape no UTF-8": "UPDATE events SET shape = CAST(x'ff' AS TEXT) WHERE seq = 1",
    "extra cut": "UPDATE events SET extra = substr(extra, 1, 5) WHERE seq = 1",
    "extra no object": "UPDATE events SET extra = '[1]' WHERE seq = 1",
    "extra nested too deep": "UPDATE events SET extra = replace(hex(zeroblob(9999)), '0', '[') WHERE seq = 1",
    "extra no UTF-8": "UPDATE events SET extra = CAST(x'ff' AS TEXT) WHERE seq = 1",
    "history cut": "UPDATE tries SET history = '[{\"at'",
    "history nested too deep": "UPDATE tries SET history = replace(hex(zeroblob(9999)), '0', '[')",
    "history no list": "UPDATE tries SET history = '{}'",
    "history no UTF-8": "UPDATE tries SET history = CAST(x'ff' AS TEXT)",
    "progress cut": "UPDATE tries SET progress = '{\"sto'",
    "progress no object": "UPDATE tries SET progress = '7'",
    "attempts a text": "UPDATE tries SET attempts = 'many'",
}


@pytest.mark.parametrize("sql", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_row_is_told_from_a_sound_one(box, sql):
    """The head can be read, says that it is damaged, and can be set aside; what is behind it goes on."""
    with_history(box)
    change(box, sql)
    assert not head(box).sound
    assert read_status(box).head.seq == 1
    taken = take(box)
    settle(box, taken, [bury(taken.rows[0], Reason.DAMAGED, sent=False)], now_ms=NOW)
    (letter,) = dead_letters(box)
    assert (letter.seq, letter.reason) == (1, "damaged")
    assert head(box).sound
    assert (seqs(box), dead_seqs(box)) == ([2], [1])
    repair_counters(box)


@pytest.mark.parametrize("sql", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_row_in_flight_survives_its_sender(box, sql):
    """Recovery of a crash meets it too."""
    with_history(box)
    take(box)
    change(box, sql)
    assert recover(box, now_ms=NOW) == []
    assert head(box).seq == 1
    skip(box, 1, NOW)
    assert (seqs(box), dead_seqs(box)) == ([2], [1])
    repair_counters(box)


def repair_counters(box):
    """A cut payload counts with the bytes it had: that is for `doctor`, and all that may be wrong."""
    assert {fault.split(":")[0] for fault in verify_counters(box)} <= {"waiting_bytes", "dead_bytes"}
    change(
        box,
        "UPDATE outbox SET dead_bytes = (SELECT sum(octet_length(wire_payload)) FROM dead), "
        "waiting_bytes = (SELECT sum(octet_length(wire_payload)) FROM events)",
    )


def test_rows_whose_numbers_are_gone_with_the_schema_are_listed(state):
    """A person's command meets the file before a sender does, which sets it aside."""
    box = make_box(state)
    fill(box, 3)
    kill(box)
    box.close(checkpoint=True)
    data = box.path.read_bytes()
    for table in (b"events (\n    seq", b"dead (\n    seq"):
        data = data.replace(table + b" ", table + b",")
    box.path.write_bytes(data)
    with contextlib.closing(open_outbox(state, box.path)) as box:
        assert [letter.seq for letter in dead_letters(box)] == [0]
        assert [record.seq for record in everything(box)] == [0, 0, 0]


@pytest.mark.parametrize("column", ["kind", "key", "wire_payload", "occurred_at_ms", "accepted_at_ms"])
def test_an_event_without_one_of_its_values_is_listed(state, column):
    """As far as it can be read; the listing does not end at it."""
    box = make_box(state)
    fill(box, 2)
    box.close()
    put_damaged(box.path, "events", column, None)
    with contextlib.closing(open_outbox(state, box.path)) as box:
        assert [found.seq for found in listed(box)] == [1, 2]
        assert [record.seq for record in everything(box)] == [1, 2]


COLUMNS = ["kind", "key", "wire_payload", "occurred_at_ms", "accepted_at_ms", "digest"]


def damage_a_value(state, box, table, column):
    """No value at all, or, of a text, one that is no UTF-8; the file opened anew."""
    box.close()
    put_damaged(box.path, table, column, None)
    box = open_outbox(state, box.path)
    if column == "kind":
        change(box, f"UPDATE {table} SET kind = CAST(x'ff' AS TEXT)")
    return box


@pytest.mark.parametrize("column", COLUMNS)
def test_a_damaged_event_makes_room_as_any_other(state, column):
    """It is the oldest, and the outbox is full: no producer is refused for it."""
    box = make_box(state, max_events=2)
    fill(box, 2)
    with contextlib.closing(damage_a_value(state, box, "events", column)) as box:
        assert fill(box, 2) == [3, 4]
        ((_, told),) = gaps(box).items()
        assert (told["firstSeq"], told["lastSeq"], told["count"]) == (1, 2, 2)
        assert [fault for fault in verify_counters(box) if "bytes" not in fault] == []


@pytest.mark.parametrize("column", COLUMNS)
def test_a_damaged_dead_letter_makes_room_as_any_other(state, column):
    """As an event that waits."""
    box = make_box(state, max_events=2)
    fill(box, 2)
    kill(box, 2)
    with contextlib.closing(damage_a_value(state, box, "dead", column)) as box:
        assert fill(box, 2) == [3, 4]
        assert dead_seqs(box) == []


TEXTS = ("kind", "key", "reason", "detail", "code", "answer", "path")
OF_A_LETTER = (*TEXTS, "wire_payload", "digest", "occurred_at_ms", "attempts", "failed_at_ms", "status")


@pytest.mark.parametrize("value", [None, b"\xff", 1 << 60])
@pytest.mark.parametrize("column", OF_A_LETTER)
def test_a_damaged_dead_letter_is_listed_exported_and_thrown_away(state, column, value):
    """As far as it can be read; the one behind it too."""
    box = make_box(state)
    fill(box, 2)
    kill(box, 2)
    box.close()
    put_damaged(box.path, "dead", column, value)
    with contextlib.closing(open_outbox(state, box.path)) as box:
        if type(value) is bytes and column in TEXTS:
            change(box, f"UPDATE dead SET {column} = CAST(x'ff' AS TEXT)")
        assert [letter.seq for letter in dead_letters(box)] == [1, 2]
        assert [letter.seq for letter in chosen(box, Choice())] == [1, 2]
        for letter in dead_letters(box):
            assert {type(text) for text in (letter.kind, letter.key, letter.reason, letter.detail)} == {str}
            assert {type(n) for n in (letter.occurred_at_ms, letter.attempts, letter.failed_at_ms)} == {int}
        with box.snapshot():
            lines = [record_line("builder", record) for record in everything(box)]
        assert [read_record(read_line(line), Limits()).letter is not None for line in lines] == [True, True]
        assert discard_each(box, [1, 2], NOW) == [1, 2]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_damaged_event_can_be_replaced_and_grows_too_old(state, column):
    """Whatever takes a row away, takes a damaged one away."""
    box = make_box(state, max_age_ms=1)
    put(box, event({"n": 1}, mode="coalesce", dedupe_key="d"), event({"n": 2}))
    with contextlib.closing(damage_a_value(state, box, "events", column)) as box:
        assert put(box, event({"n": 3}, mode="coalesce", dedupe_key="d")) == [3]
        assert seqs(box) == [2, 3]
        assert expire(box, NOW + 1, now_ms=NOW + 2) == 2


@pytest.mark.parametrize("column", ["seq", "kind", "digest", "state", "at_ms"])
def test_a_receipt_without_one_of_its_values_is_no_receipt(state, column):
    """It is neither shown nor exported, and what is sound is."""
    box = make_box(state)
    put(box, event({"n": 1}, idempotency_key="k-1"), event({"n": 2}))
    deliver(box)
    box.close()
    put_damaged(box.path, "receipts", column, None)
    with contextlib.closing(open_outbox(state, box.path)) as box:
        assert find(box, "k-1") is None
        assert [record.seq for record in everything(box)] == [2]


def test_far_more_attempts_than_can_be_are_only_a_number(box):
    """The event is tried once more or given up, and nothing overflows."""
    with_history(box)
    change(box, "UPDATE tries SET attempts = 1 << 40")
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], attempts=taken.rows[0].attempts + 1)], now_ms=NOW)
    assert head(box).attempts == (1 << 40) + 1


def test_a_row_of_another_outbox_is_damaged(make):
    """A row that was copied from another file, or to another place in it, is not sent."""
    one, other = make("one"), make("other")
    fill(one, 2)
    fill(other, 1)
    change(one, "UPDATE events SET seq = seq + 10 WHERE seq = 2")
    change(one, "UPDATE outbox SET last_seq = 12")
    row = other.one("SELECT wire_payload, checksum FROM events")
    change(one, "UPDATE events SET wire_payload = ?, checksum = ? WHERE seq = 1", *row)
    taken = take(one, 2)
    assert [row.sound for row in taken.rows] == [False, False]
    recover(one, now_ms=NOW)


def test_a_damaged_dead_letter_is_not_replayed(box):
    """Its text is not what was enqueued."""
    fill(box, 1)
    kill(box, reason=Reason.DAMAGED)
    with pytest.raises(UsageError, match="is damaged"):
        replay(box, 1, NOW)
    assert dead_seqs(box) == [1]


def test_a_skipped_damaged_event_is_not_replayed_either(box):
    """Setting it aside by hand does not mend it."""
    fill(box, 1)
    change(box, "UPDATE events SET checksum = checksum + 1")
    skip(box, 1, NOW)
    with pytest.raises(UsageError, match="is damaged"):
        replay(box, 1, NOW)


def test_an_unsafe_damaged_event_has_an_unknown_outcome_all_the_same(box):
    """It was in flight: what the relay did with it is not known."""
    put(box, tool_call())
    take(box, unsafe=True)
    change(box, "UPDATE events SET checksum = checksum + 1")
    assert recover(box, now_ms=NOW) == [1]
    assert [letter.reason for letter in dead_letters(box)] == ["outcome_unknown"]


def test_unreadable_rules_are_no_rules(box):
    """Producers go on with the defaults; the daemon writes the rules anew."""
    change(box, "UPDATE outbox SET rules = '{\"bou'")
    fill(box, 1)
    assert box.bounds.max_events == 100_000
    change(box, 'UPDATE outbox SET rules = \'{"bounds": {"maxEvents": 2, "later": 1}, "new": 3}\'')
    fill(box, 1)
    assert (box.bounds.max_events, box.limits.max_nesting) == (2, 500)


# Files ------------------------------------------------------------------------------------------------------


def closed_box(state, number=3):
    """The path of an outbox that nobody has open, all of it in its main file."""
    box = make_box(state)
    fill(box, number)
    box.close(checkpoint=True)
    return box.path


def digest(path):
    """What tells whether a file changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def text_file(path):
    """Somebody's note in place of the database."""
    path.write_text("moved to the other disk, see notes\n" * 200, encoding="utf-8")


def flip(path, at, number):
    """Invert some bytes."""
    data = bytearray(path.read_bytes())
    data[at : at + number] = bytes(byte ^ 0xFF for byte in data[at : at + number])
    path.write_bytes(data)


FILES = {
    "empty": lambda path: os.truncate(path, 0),
    "header only": lambda path: os.truncate(path, 100),
    "text": text_file,
    "another database": lambda path: (
        path.unlink(),
        apsw.Connection(str(path)).execute("CREATE TABLE t (a)"),
    ),
    "no version": lambda path: apsw.Connection(str(path)).execute("PRAGMA user_version = 0"),
    "first page": lambda path: flip(path, 100, 400),
}


@pytest.mark.parametrize("damage", FILES.values(), ids=FILES)
def test_a_file_that_is_no_outbox_is_refused_and_left_alone(state, damage):
    """The error is `damaged` and names the file; not a byte of it changes."""
    path = closed_box(state)
    damage(path)
    before = digest(path)
    with pytest.raises(StoreDamaged, match=path.name):
        open_outbox(state, path)
    assert digest(path) == before


def test_pages_that_cannot_be_read_are_an_error_of_this_file(state):
    """Damage behind the first page shows when it is read, as `damaged`."""
    path = closed_box(state, 200)
    box = open_outbox(state, path)
    box.close()
    size = path.stat().st_size
    flip(path, 2 * 4096, size - 2 * 4096)
    with pytest.raises(StoreDamaged):
        read_all(state, path)


def read_all(state, path):
    """Open a file and read every row."""
    box = open_outbox(state, path)
    try:
        contents(box)
    finally:
        box.close()


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_left_alone(state, kind):
    """A folder, a link or a pipe in place of the file is a clear error, and stays."""
    path = closed_box(state)
    moved = path.with_name(path.name + ".moved")
    path.rename(moved)
    {"folder": path.mkdir, "link": lambda: path.symlink_to(moved), "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(StoreError, match="no regular file"):
        open_outbox(state, path)
    assert os.path.lexists(path)


def test_a_file_that_is_not_there_is_not_made_by_opening(state):
    """Opening is not making."""
    path = state.outbox_path("nobody")
    with pytest.raises(StoreError, match="no file"):
        open_outbox(state, path)
    assert not path.exists()


@pytest.mark.parametrize("log_bytes", [0, 2_000_000])
def test_a_newer_version_is_never_written_to(state, log_bytes):
    """Both versions are named; file and log stay as they are, even with a log that waits to be copied."""
    path = closed_box(state)
    writer = apsw.Connection(str(path))
    writer.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    writer.wal_autocheckpoint(0)
    writer.execute("ALTER TABLE events ADD COLUMN lane TEXT NOT NULL DEFAULT 'x'")
    writer.execute("UPDATE events SET wire_payload = zeroblob(?) WHERE seq = 1", (log_bytes,))
    writer.execute("PRAGMA user_version = 999")
    writer.close()
    log = path.with_name(path.name + "-wal")
    before = digest(path), digest(log)
    with pytest.raises(StoreTooNew, match=f"format 999; this one knows {schema.VERSION}"):
        open_outbox(state, path)
    assert (digest(path), digest(log)) == before


def test_the_outbox_of_another_agent_is_not_taken_for_ones_own(state):
    """A file under a wrong name would mix two agents' events."""
    path = closed_box(state)
    wrong = state.outbox_path("somebody else")
    path.rename(wrong)
    with pytest.raises(StoreDamaged, match="holds the outbox of 'builder'"):
        open_outbox(state, wrong)


def test_a_long_log_of_another_agent_is_not_applied_by_looking(state):
    """Who opens the file is refused, and both it and the log beside it stay as they are."""
    path = closed_box(state)
    other = make_box(state, "other")
    other.checkpoint_pages = 0
    put(other, event({"body": "x" * 2_000_000}))
    log = path.with_name(f"{path.name}-wal")
    shutil.copyfile(other.path.with_name(f"{other.path.name}-wal"), log)
    before = digest(path), digest(log)
    with pytest.raises(StoreDamaged):
        open_outbox(state, path)
    assert (digest(path), digest(log)) == before
    other.close()


READ_ONLY = """
import os, sys
from pathlib import Path
from outbox.errors import StoreError
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.people import pause

if os.getuid() == 0:  # permissions do not bind root
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
state = StateDirectory(Path(sys.argv[1]))
box = open_outbox(state, Path(sys.argv[2]))
print(read_status(box).waiting)
try:
    pause(box, 1)
except StoreError as error:
    print(error.code, error)
box.close()
"""


def test_a_file_that_can_only_be_read_is_read():
    """Status works; hand-over fails at once with a clear error, and what waits is kept."""
    with tempfile.TemporaryDirectory() as folder:
        state = state_in(folder)
        path = closed_box(state)
        path.chmod(0o444)
        (state.path / "owners.lock").chmod(0o666)
        for place in (state.path, state.agents):
            place.chmod(0o777)
        waiting, said = python(READ_ONLY, folder, path).splitlines()
    assert waiting == "3"
    assert said.startswith(f"store The file {path.name} can only be read.")


def test_a_failing_insert_is_an_open_refusal_and_delivery_goes_on(box):
    """Never a yes without the row; with the fault mended the same connection takes events again."""
    fill(box, 2)
    change(
        box, "CREATE TRIGGER stop BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END"
    )
    with pytest.raises(StoreError, match="disk I/O error"):
        enqueue(box, [event({"n": 9})], now_ms=NOW)
    taken = take(box, 2)
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    assert seqs(box) == []
    change(box, "DROP TRIGGER stop")
    assert fill(box, 1) == [3]
