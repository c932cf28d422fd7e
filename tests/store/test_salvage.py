"""A damaged file is set aside and what can be read is queued again, whatever is hit, and whoever dies."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys

import apsw
import pytest
from boxes import (
    NOW,
    ack,
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
    receipt_of,
    release,
    seqs,
    take,
    tool_call,
    total,
    trouble,
)  # fmt: skip

from outbox import Outbox
from outbox.errors import StoreBusy, StoreClosed, StoreDamaged, StoreHeld, StoreTooNew
from outbox.outcome import Reason
from outbox.store import salvage, statements
from outbox.store.aside import hidden_path, mended_path
from outbox.store.damage import damaged_files, damages, tell_damages
from outbox.store.dead import replay
from outbox.store.enqueue import enqueue
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.inspect import dead_letters, read_status
from outbox.store.locks import lifecycle_byte
from outbox.store.people import pause
from outbox.store.salvage import set_aside
from outbox.store.sending import head, recover, settle
from outbox.store.verify import verify_counters

PAGE = 4096
AGENT = "builder"


def roots(path):
    """Where each table begins."""
    db = apsw.Connection(str(path))
    found = dict(db.execute("SELECT name, rootpage FROM sqlite_schema WHERE type = 'table'").fetchall())
    db.close()
    return found


def wipe(path, *pages):
    """Fill pages (from 1) with zeros."""
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(bytes(PAGE))


def leaf(path, table):
    """A page with rows of the table."""
    with contextlib.closing(apsw.Connection(str(path))) as db:
        sql = "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf'"
        return db.execute(sql, (table,)).fetchone()[0]


def copy_page(path, source, target):
    """Put one page (from 1) over another."""
    with path.open("r+b") as file:
        file.seek((source - 1) * PAGE)
        page = file.read(PAGE)
        file.seek((target - 1) * PAGE)
        file.write(page)


def schema_pages(path):
    """The first page, and those with the texts of the tables."""
    pages = range(1, path.stat().st_size // PAGE + 1)
    return [1, *(page for page in pages if b"CREATE" in path.read_bytes()[(page - 1) * PAGE :][:PAGE])]


def flip(path, page, size=64):
    """Invert the first bytes of a page (from 1)."""
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        old = file.read(size)
        file.seek((page - 1) * PAGE)
        file.write(bytes(byte ^ 0xFF for byte in old))


def long_events(number, **fields):
    """Events of which about ten fill a page."""
    return [event({"n": n, "text": "x" * 300}, **fields) for n in range(number)]


def with_changed_schema(state, made, changed):
    """A file of four events and a dead letter, in which a text of the schema is another."""
    box = make_box(state)
    put(box, *(event({"n": n}) for n in range(5)))
    kill(box)
    path = closed(box)
    data = path.read_bytes()
    assert made in data
    path.write_bytes(data.replace(made, changed))
    return path


def digest(path):
    """What tells whether a file changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def closed(box):
    """All of it in its main file, and nobody has it open."""
    box.close(checkpoint=True)
    return box.path


@pytest.fixture
def mend(state):
    """Sets a file aside and opens the new one; the counters of all of these are true in the end."""
    opened = []

    def act(path, agent=AGENT):
        damage = set_aside(state, path, agent, NOW)
        box = open_outbox(state, path)
        opened.append(box)
        return damage, box

    yield act
    for box in (box for box in opened if not box.closed):
        faults = verify_counters(box)
        box.close()
        assert faults == []


def wires(box):
    """Key, times, wire text and extra of all that waits, in order."""
    return box.rows(
        "SELECT key, occurred_at_ms, accepted_at_ms, wire_payload, dedupe_key, extra FROM events ORDER BY seq"
    )


# What is kept -----------------------------------------------------------------------------------------------


def test_all_that_is_known_of_an_event_is_kept(state, mend):
    """Keys, times, order, texts, tries and progress, dead letters, receipts, totals, a person's pause."""
    box = make_box(state)
    put(box, *long_events(5, idempotency_key=None, run_id="r-1"))
    put(box, event(mode="coalesce", dedupe_key="d", idempotency_key="own-key"))
    deliver(box, 2)
    kill(box)
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], attempts=1, why=trouble(), progress='{"s":[1]}')], now_ms=NOW)
    pause(box, 5)
    before = wires(box), box.rows("SELECT * FROM receipts"), box.rows("SELECT * FROM tries")
    letters, stream, old_totals = list(dead_letters(box)), box.stream, box.rows("SELECT * FROM totals")
    wipe(closed(box), 2)
    damage, new = mend(box.path)
    assert (wires(new), new.rows("SELECT * FROM receipts"), new.rows("SELECT * FROM tries")) == before
    assert list(dead_letters(new)) == letters
    assert (new.rows("SELECT * FROM totals"), new.agent) == (old_totals, AGENT)
    assert new.stream != stream
    assert (damage.queued, damage.lost, damage.dead, damage.counted) == (3, 0, 1, True)
    assert new.one("SELECT paused_at_ms, delivered FROM outbox") == (5, 2)
    assert head(new).sound
    assert fill(new, 1) == [7]


def events_again(box):
    """An older page of the events stands in the place of a newer one: a write that the disk lost."""
    columns = "seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest, extra, checksum"
    rows = box.rows(f"SELECT {columns} FROM events")

    def put_back():
        with box.transaction(durable=True):
            box.run_many(
                f"INSERT OR IGNORE INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )

    return put_back


def test_what_is_over_does_not_begin_again(state, mend):
    """Delivered, or a dead letter: a row that is there again is not sent again, whatever it was."""
    box = make_box(state)
    put(box, tool_call(), tool_call(), event({"n": 3}))
    put_back = events_again(box)
    deliver(box)
    kill(box, reason=Reason.OUTCOME_UNKNOWN)
    put_back()
    flip(closed(box), roots(box.path)["tries"])
    _, new = mend(box.path)
    assert seqs(new) == [3]
    assert dead_seqs(new) == [2]
    assert deliver(new) == [3]
    assert new.rows("SELECT seq, state FROM receipts ORDER BY seq") == [(1, "delivered"), (3, "delivered")]


def test_what_goes_again_is_not_remembered_as_over(state, mend):
    """An older page of the receipts or of the dead letters does not bring back what was before."""
    box = make_box(state)
    put(box, event({"n": 1}), event({"n": 2}))
    kill(box)
    (before,) = box.rows("SELECT key, seq, kind, digest FROM dead")
    assert replay(box, 1, NOW) == 3
    with box.transaction(durable=True):
        box.run(statements.PUT_RECEIPT, *before, "discarded", NOW, None)
        box.run(
            "INSERT INTO dead (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest,"
            " checksum, reason, failed_at_ms) SELECT 1, kind, key, wire_payload, shape, occurred_at_ms,"
            " accepted_at_ms, digest, checksum, 'rejected', 1 FROM events WHERE seq = 3"
        )
    flip(closed(box), roots(box.path)["tries"])
    _, new = mend(box.path)
    assert seqs(new) == [2, 3]
    assert dead_seqs(new) == []
    assert deliver(new, 2) == [2, 3]
    assert receipt_of(new, before[0]) == "delivered"


def test_the_lost_are_told_in_their_place(state, mend):
    """A bad page in the middle: the gap stands where its rows were, and counts them."""
    box = make_box(state)
    put(box, *long_events(60))
    path = closed(box)
    leaf = next(page for page in range(13, 40) if b"own-" in path.read_bytes()[page * PAGE :][:PAGE]) + 3
    flip(path, leaf)
    damage, new = mend(path)
    ((seq, gap),) = gaps(new).items()
    assert damage.lost > 0
    assert (gap["count"], gap["reason"], gap["firstSeq"]) == (damage.lost, "damaged", seq)
    assert gap["lastSeq"] - gap["firstSeq"] + 1 == damage.lost
    assert seqs(new) == [n for n in range(1, 61) if not gap["firstSeq"] < n <= gap["lastSeq"]]
    assert damage.queued + damage.lost == 60
    assert total(new, "dropped:damaged") == damage.lost
    assert f"{damage.queued} of 60 events were readable and are queued again" in damage.sentence()


def test_an_unsafe_call_that_was_in_flight_has_an_unknown_outcome(state, mend):
    """It is not sent again; what is behind it is."""
    box = make_box(state)
    put(box, tool_call(), tool_call())
    take(box, unsafe=True)
    wipe(closed(box), 2)
    damage, new = mend(box.path)
    assert (seqs(new), dead_seqs(new)) == ([2], [1])
    assert [letter.reason for letter in dead_letters(new)] == ["outcome_unknown"]
    assert recover(new, now_ms=NOW) == []
    assert (damage.outcome_unknown, damage.queued) == (1, 1)


def test_with_the_claim_lost_a_tool_call_at_the_head_may_have_been_sent(state, mend):
    """Nobody can say; so it is not sent again by itself."""
    box = make_box(state)
    put(box, tool_call(), tool_call())
    wipe(closed(box), roots(box.path)["outbox"])
    _, new = mend(box.path)
    assert (seqs(new), dead_seqs(new)) == ([2], [1])


def test_a_settlement_of_before_changes_nothing(state, mend):
    """The sender that had claimed events of the old file cannot settle them in the new one."""
    box = make_box(state)
    fill(box, 2)
    taken = take(box, 2)
    wipe(closed(box), 2)
    _, new = mend(box.path)
    with pytest.raises(StoreHeld):
        settle(new, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    assert seqs(new) == [1, 2]


def test_a_row_that_does_not_match_is_a_damaged_dead_letter(state, mend):
    """It is kept, and cannot be replayed as it is."""
    box = make_box(state)
    fill(box, 3)
    with box.transaction(durable=True):
        box.run("UPDATE events SET wire_payload = substr(wire_payload, 1, 9) WHERE seq = 2")
    wipe(closed(box), 2)
    damage, new = mend(box.path)
    assert (seqs(new), damage.damaged_rows) == ([1, 3], 1)
    assert [(letter.seq, letter.reason) for letter in dead_letters(new)] == [(2, "damaged")]


def test_an_open_gap_grows_on(state, mend):
    """What a bound dropped before is not forgotten."""
    box = make_box(state, max_events=2)
    fill(box, 4)
    wipe(closed(box), 2)
    _, new = mend(box.path)
    fill(new, 1)
    assert [gap["count"] for gap in gaps(new).values()] == [3]


# Where to read it from --------------------------------------------------------------------------------------


def test_without_a_schema_the_tables_are_found(state, mend):
    """The first page and those below it are gone: every row is still read."""
    box = make_box(state)
    put(box, *long_events(40))
    deliver(box, 3)
    path = closed(box)
    wipe(path, *schema_pages(path))
    damage, new = mend(path, agent=None)
    assert seqs(new) == list(range(4, 41))
    assert (damage.queued, damage.counted, damage.agent) == (37, True, AGENT)


@pytest.mark.parametrize(
    "column",
    [
        b"agent            TEXT", b"rules ", b"blocked_since_ms ", b"wire_payload ", b"first_try_at_ms ",
        b"failed_at_ms ", b"state  TEXT", b"value INTEGER",
    ],
)  # fmt: skip
def test_a_column_that_has_another_name_on_the_disk_is_damage(state, mend, column):
    """The schema is a text in the file; with a byte of it changed, every page and row is as it was."""
    path = with_changed_schema(state, column, b"q" + column[1:])
    damage, new = mend(path)
    assert damage.fault == "its tables are not those of an outbox"
    assert (seqs(new), dead_seqs(new), damage.counted) == ([2, 3, 4, 5], [1], True)


@pytest.mark.parametrize(
    ("made", "changed"),
    [
        (b"TABLE events (\n    seq            INTEGER", b"TABLE events (\n    seq            INTEGES"),
        (b"TABLE tries (\n    seq             INTEGER", b"TABLE tries (\n    seq,            INTEGER"),
        (b"TABLE dead (\n    seq             INTEGER", b"TABLE dead (\n    seq             INTEGES"),
        (b"CHECK (id = 1)", b"CHECK (id = 9)"),
        (b"WHERE dedupe_key IS NOT NULL", b"WHERE dedupe_key IS NOT 1234"),
        (b"receipts (at_ms)", b"receipts (seq  )"),
    ],
)
def test_no_sender_goes_by_a_schema_that_has_changed(state, mend, made, changed):
    """With a letter of a type, no row has a number any more: it is seen before an event is claimed."""
    path = with_changed_schema(state, made, changed)
    with (
        pytest.raises(StoreDamaged, match=r"tables are not|cannot be read"),
        contextlib.closing(open_outbox(state, path)) as box,
    ):
        box.become_sender()
    damage, new = mend(path)
    assert damage.fault == "its tables are not those of an outbox"
    assert (seqs(new), dead_seqs(new), damage.counted) == ([2, 3, 4, 5], [1], True)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("last_seq", None), ("last_seq", 4), ("last_seq", -1), ("waiting", None), ("waiting", 1.5),
        ("dead", 9), ("claimed_through", 6), ("generation", "x"), ("accepted", b""), ("open_gap_seq", "x"),
        ("paused_at_ms", 0.5), ("blocked_reason", b"x"), ("receipt_bytes", -5),
        ("waiting_bytes", 2**31), ("paused_at_ms", 0), ("open_gap_seq", 0),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_true_are_damage(state, mend, column, value):
    """No event may get the number of another, and no producer may stumble: the rows count."""
    box = make_box(state)
    put(box, *(event({"n": n}) for n in range(5)))
    kill(box)
    put_damaged(closed(box), "outbox", column, value)
    with pytest.raises(StoreDamaged, match="numbers in its own row"):
        open_outbox(state, box.path)
    damage, new = mend(box.path)
    assert damage.fault == "the numbers in its own row cannot be true"
    assert (seqs(new), dead_seqs(new)) == ([2, 3, 4, 5], [1])
    assert fill(new, 1) == [6]


def test_what_a_person_has_added_to_a_file_is_no_damage(state):
    """An index of their own, or statistics."""
    box = make_box(state)
    box.db.execute("CREATE INDEX by_kind ON events (kind); CREATE TABLE notes (a); ANALYZE")
    box.become_sender()
    box.close()
    assert set_aside(state, box.path, AGENT, NOW) is None


def test_who_meets_such_a_column_says_that_the_file_is_damaged(state):
    """Not that it could not be used: it would be left as it is for ever."""
    path = closed(make_box(state))
    path.write_bytes(path.read_bytes().replace(b"failed_at_ms ", b"qailed_at_ms "))
    with (
        contextlib.closing(open_outbox(state, path)) as box,
        pytest.raises(StoreDamaged, match="no such column"),
    ):
        list(dead_letters(box))


def test_without_its_own_row_the_rows_prove_themselves(state, mend):
    """Agent, id and counters are gone: the digests of the events are compared, and seqs go on above."""
    box = make_box(state)
    put(box, *long_events(40))
    deliver(box, 3)
    wipe(closed(box), roots(box.path)["outbox"])
    damage, new = mend(box.path)
    assert seqs(new) == list(range(4, 41))
    assert (damage.queued, damage.lost, damage.counted) == (37, 0, False)
    assert "how many it held is not known" in damage.sentence()
    assert fill(new, 1) == [41]
    assert head(new).sound


@pytest.mark.parametrize("table", ["events", "dead"])
def test_a_row_of_another_table_in_the_place_of_its_own_is_nobodys_name(state, mend, table):
    """A page went to the wrong place: a kind stands where the agent's name is read, and a key beside."""
    box = make_box(state)
    put(box, *long_events(40))
    kill(box)
    path = closed(box)
    copy_page(path, leaf(path, table), roots(path)["outbox"])
    damage, new = mend(path)
    assert (damage.fault, damage.agent) == ("its own row is damaged", AGENT)
    assert seqs(new) == list(range(2, 41))


def test_a_file_that_does_not_tell_whose_it_is_waits_for_its_agent(state):
    """It is left where it is, byte for byte, until somebody comes who knows."""
    box = make_box(state)
    fill(box, 3)
    path = closed(box)
    path.write_bytes(b"")
    with pytest.raises(StoreDamaged, match="does not tell whose it is"):
        set_aside(state, path, None, NOW)
    assert (path.read_bytes(), damaged_files(state)) == (b"", [])
    with Outbox.open(AGENT, state_dir=state.path) as outbox:
        assert outbox.depth == 0
    assert [damage.fault for damage in damages(state)] == ["it is empty"]


def test_the_log_is_read_too(state, mend):
    """What was never copied into the main file is salvaged from the log beside it."""
    box = make_box(state)
    put(box, *long_events(10))
    box.close()
    wipe(box.path, *schema_pages(box.path))
    damage, new = mend(box.path)
    assert (seqs(new), damage.queued) == (list(range(1, 11)), 10)


def test_a_healthy_file_stays(state, make):
    """Looking changes nothing, not even for those who have it open."""
    box = make()
    fill(box, 3)
    before = box.path.stat()
    assert set_aside(state, box.path, AGENT, NOW) is None
    assert (box.path.stat().st_ino, damaged_files(state)) == (before.st_ino, [])
    assert fill(box, 1) == [4]


def test_a_newer_and_a_misplaced_file_stay(state):
    """They are not damaged; the error says what they are."""
    path = closed(make_box(state))
    apsw.Connection(str(path)).execute("PRAGMA user_version = 999")
    with pytest.raises(StoreTooNew, match="format 999"):
        set_aside(state, path, AGENT, NOW)
    other = closed(make_box(state, "other"))
    wrong = other.replace(state.outbox_path("somebody else"))
    with pytest.raises(StoreDamaged, match="holds the outbox of 'other'") as misplaced:
        set_aside(state, wrong, "somebody else", NOW)
    assert f"Rename it to {other.name}" in str(misplaced.value)
    assert "If you know no such agent" in str(misplaced.value)
    assert path.exists()
    assert wrong.exists()


def test_a_misplaced_file_that_is_damaged_too_stays_and_says_whose_it_is(state):
    """By what is left in it, while the file of that agent, there as well, vouches for the name."""
    make_box(state, "other").close()
    box = make_box(state, "somebody else")
    path = closed(box)
    path.write_bytes(state.outbox_path("other").read_bytes())
    wipe(path, 1)
    with pytest.raises(StoreDamaged, match="holds the outbox of 'other'"):
        set_aside(state, path, "somebody else", NOW)
    assert path.exists()


def test_any_pages_may_be_bad(state, mend):
    """Whatever pages are hit: what is queued again and what is told as lost is all that was accepted."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    for round_number in range(12):
        agent = f"agent-{round_number}"
        box = make_box(state, agent)
        put(box, *(event({"n": n, "text": "x" * chance.randrange(600)}, agent=agent) for n in range(80)))
        deliver(box, 5)
        path = closed(box)
        pages = range(4, path.stat().st_size // PAGE + 1)
        for page in chance.sample(pages, 4):
            flip(path, page, chance.choice([8, 64, PAGE]))
        damage, new = mend(path, agent)
        if damage is None:  # only free pages were hit
            assert seqs(new) == list(range(6, 81))
            continue
        told = sum(gap["count"] for gap in gaps(new).values())
        waiting = [seq for seq in seqs(new) if seq not in gaps(new)]
        assert (len(waiting) + len(dead_seqs(new)) + told, told) == (75, damage.lost)
        assert waiting == sorted(waiting)
        assert all(row.sound for row in take(new, 1).rows)


# Who does it, and who dies ----------------------------------------------------------------------------------


def test_a_producer_goes_on_in_the_new_file(state, mend):
    """An open connection never commits into a file that was set aside."""
    box = make_box(state)
    fill(box, 2)
    flip(box.path, 2)
    _, new = mend(box.path)
    with pytest.raises(StoreClosed):
        enqueue(box, [event()], now_ms=NOW)
    box.close()
    assert fill(new, 1) == [3]


def test_the_library_mends_what_it_meets(state, caplog):
    """Opening and enqueueing go on, with one warning that says what happened."""
    path = closed(make_box(state))
    path.write_text("somebody's note", encoding="utf-8")
    with Outbox.open(AGENT, state_dir=state.path) as outbox:
        assert outbox.enqueue("session-message", {"n": 1}).seq == 1
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("outbox", "WARNING")
        assert "is damaged (only its first 15 bytes are left)" in record.message
        outbox.enqueue("session-message", {"n": 2})
        outbox._box.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        wipe(path, *range(2, 14))
        found = [outbox.enqueue("session-message", {"n": n}) for n in range(3, 6)]
        assert [receipt.state for receipt in found] == ["waiting"] * 3
        lost = sum(damage.lost for damage in damages(state))
        assert outbox.depth + lost == 5


_NEWER = {62, 63}  # low bytes of the format's number: they may well be a newer release's


def test_any_byte_of_the_header_may_be_wrong(state):
    """Whoever hands over an event meets the file, sets it aside, and all that waited goes on."""
    box = make_box(state)
    fill(box, 3)
    path = closed(box)
    sound = path.read_bytes()
    for at in set(range(100)) - _NEWER:
        path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x55]) + sound[at + 1 :])
        with Outbox.open(AGENT, state_dir=state.path) as outbox:
            outbox.enqueue("session-message", {"n": at})
            assert outbox.depth == 4, at


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        (18, "its header names a format that cannot be written"),
        (47, "unsupported file format"),
        (60, "it names the format 1426063361, which no release has"),
    ],
)
def test_a_format_that_nobody_writes_is_damage(state, at, fault):
    """It is neither a file that its owner may not write to, nor one of a newer release."""
    path = closed(make_box(state))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x55")
    with Outbox.open(AGENT, state_dir=state.path) as outbox:
        outbox.enqueue("session-message", {"n": 1})
    assert [damage.fault for damage in damages(state)] == [fault]


def test_evidence_is_never_overwritten(state, mend):
    """Twice in the same second: two files, each as it was, with its log."""
    contents = []
    for text in (b"first", b"second"):
        path = closed(make_box(state))
        path.write_bytes(text)
        path.with_name(path.name + "-wal").write_bytes(b"log of " + text)
        contents.append(text)
        mend(path)[1].close()
    assert {kept.read_bytes() for kept in damaged_files(state)} == set(contents)
    for kept in damaged_files(state):
        assert kept.with_name(kept.name + "-wal").read_bytes() == b"log of " + kept.read_bytes()
    reports = state.damaged.glob("*.json*")
    assert {path.stat().st_mode & 0o777 for path in (*damaged_files(state), *reports)} == {0o600}
    assert state.damaged.stat().st_mode & 0o777 == 0o700


def test_each_is_told_once(state, mend):
    """Whoever looks first logs it; nobody does again."""
    path = closed(make_box(state))
    path.write_bytes(b"note")
    mend(path)
    said = []
    assert tell_damages(state, lambda name, fields: said.append((name, fields))) == 1
    assert tell_damages(state, lambda name, fields: said.append((name, fields))) == 0
    ((name, fields),) = said
    assert (name, fields["agent"], fields["file"]) == ("damaged_file", AGENT, path.name)
    assert (fields["level"], fields["salvaged"], fields["lost"]) == ("error", 0, 0)


def test_while_somebody_commits_it_is_not_replaced(state, monkeypatch):
    """The error says so, and nothing is lost: the next one goes on."""
    box = make_box(state)
    put(box, *long_events(10))
    flip(closed(box), 2)
    monkeypatch.setattr("outbox.store.salvage._LONGEST_WAIT_S", 0.05)
    assert box.locks.take_shared(lifecycle_byte(box.path.name), 1)
    try:
        with pytest.raises(StoreBusy, match="just being set aside"):
            set_aside(state, box.path, AGENT, NOW)
    finally:
        box.locks.give_shared(lifecycle_byte(box.path.name))
    assert [path.name for path in state.outbox_files()] == [box.path.name]
    with pytest.raises(StoreDamaged, match="is just being replaced"):
        open_outbox(state, box.path)
    with Outbox.open(AGENT, state_dir=state.path) as outbox:
        assert outbox.depth == 10


@pytest.mark.parametrize("moment", ["seen", "looked at", "opened"])
def test_a_file_that_is_hidden_while_it_is_opened_is_just_being_replaced(state, monkeypatch, moment):
    """Whoever hides it does not wait for those who open it: they are told so, and of no fault of the disk."""
    box = make_box(state)
    put(box, event())
    path = closed(box)

    def hide():
        if not hidden_path(path).exists():
            path.rename(hidden_path(path))

    def lstat(name, *args, real=os.lstat, **options):
        found = real(name, *args, **options)
        if os.fspath(name) == str(path):
            hide()
        return found

    with monkeypatch.context() as patch:
        if moment == "seen":
            patch.setattr(os, "lstat", lstat)
        elif moment == "looked at":
            patch.setattr(apsw, "Connection", _after(hide, apsw.Connection))
        else:
            patch.setattr(OutboxFile, "_check", _after(hide, OutboxFile._check))
        with pytest.raises(StoreDamaged, match="is just being replaced"):
            open_outbox(state, path)
    with Outbox.open(AGENT, state_dir=state.path) as outbox:
        assert outbox.depth == 1


def _after(act, real):
    def call(*args, **options):
        act()
        return real(*args, **options)

    return call


SET_ASIDE = """
import os, signal, sys
from pathlib import Path
from outbox.store.directory import StateDirectory
from outbox.store.salvage import set_aside

left = int(sys.argv[3])
def at(event, args):
    global left
    if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.copyfile", "open"):
        if str(Path(sys.argv[1])) in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(at)
set_aside(StateDirectory(Path(sys.argv[1])), Path(sys.argv[2]), "builder", 1)
"""


def test_killed_anywhere_the_next_one_goes_on(state):
    """Killed with -9 before each act on a file: nothing is lost, and what was damaged is kept."""
    step, ended = 0, False
    while not ended:
        step += 1
        box = make_box(state)
        accepted = put(box, *long_events(10))
        flip(closed(box), 2)
        damaged = digest(box.path)
        done = subprocess.run(
            [sys.executable, "-c", SET_ASIDE, str(state.path), str(box.path), str(step)],
            check=False, timeout=60, capture_output=True, text=True,
        )  # fmt: skip
        ended = done.returncode == 0
        assert ended or done.returncode == -signal.SIGKILL, done.stderr
        if not box.path.exists():
            assert list(state.outbox_files()) == [box.path]
        with Outbox.open(AGENT, state_dir=state.path) as outbox:
            if not damaged_files(state):  # it had not begun; here nothing met the damage yet
                set_aside(state, box.path, AGENT, NOW)
            assert outbox.depth == len(accepted)
            assert not hidden_path(box.path).exists()
            assert outbox.enqueue("session-message", {}).seq == 11
        (kept,) = damaged_files(state)
        assert digest(kept) == damaged
        assert [path.name for path in state.agents.iterdir() if path.name.startswith(".")] == []
        for path in (*state.damaged.iterdir(), *state.agents.iterdir()):
            assert path.is_file(), path
            path.unlink()
    assert step > 8


def test_the_new_file_of_another_is_not_taken_for_a_leftover(state, monkeypatch):
    """Who has seen the damaged file at its place, and is slow, does not remove what was made meanwhile."""
    box = make_box(state)
    put(box, *long_events(10))
    flip(closed(box), 2)

    def killed(*_):
        raise KeyboardInterrupt

    def faster(path, real=salvage.is_regular):
        monkeypatch.setattr(salvage, "is_regular", real)
        found = real(path)
        swap = salvage._swap
        monkeypatch.setattr(salvage, "_swap", killed)
        with pytest.raises(KeyboardInterrupt):
            set_aside(state, path, AGENT, NOW)
        monkeypatch.setattr(salvage, "_swap", swap)
        hidden_path(path).rename(state.damaged / path.name)  # as far as it came before it was killed
        return found

    monkeypatch.setattr(salvage, "is_regular", faster)
    set_aside(state, box.path, AGENT, NOW)
    with contextlib.closing(open_outbox(state, box.path)) as new:
        assert read_status(new).waiting == 10


def test_a_leftover_beside_a_file_is_not_taken_for_its_mended_self(state, mend):
    """What lies there from another time is removed, and the file is looked at as it is."""
    box = make_box(state)
    put(box, *long_events(10))
    path = closed(box)
    mended_path(path).write_bytes(path.read_bytes()[:PAGE])
    _, new = mend(path)
    assert read_status(new).waiting == 10
    assert not mended_path(path).exists()


def test_two_at_once_make_one_new_file(state):
    """Each finds a whole file when it returns; it is set aside once."""
    box = make_box(state)
    put(box, *long_events(10))
    flip(closed(box), 2)
    command = [sys.executable, "-c", SET_ASIDE, str(state.path), str(box.path), "0"]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(damaged_files(state)) == 1
    assert json.loads(python(COUNT, state.path)) == 10


COUNT = """
import sys
from outbox import Outbox
print(Outbox.open("builder", state_dir=sys.argv[1]).depth)
"""


def test_reasons_of_dead_letters_are_kept_only_where_the_row_is_sound(state, mend):
    """A dead letter that does not match any more is a damaged one, with what can be read of it."""
    box = make_box(state)
    fill(box, 2)
    kill(box, 2)
    with box.transaction(durable=True):
        box.run("UPDATE dead SET wire_payload = x'00' WHERE seq = 1")
    wipe(closed(box), 2)
    damage, new = mend(box.path)
    assert [letter.reason for letter in dead_letters(new)] == [Reason.DAMAGED, Reason.REJECTED]
    assert (damage.dead, receipt_of(new, "nothing")) == (2, None)


def test_a_lost_gap_is_told_again(state, mend):
    """Damaged twice before the relay heard of it: the new gap stands for all that is lost."""
    box = make_box(state)
    put(box, *long_events(60))
    told = 0
    for _ in range(2):
        path = closed(box)
        wipe(path, roots(path)["events"])
        damage, box = mend(path)
        assert (damage.queued, [gap["count"] for gap in gaps(box).values()]) == (0, [60 + told])
        put(box, *long_events(10))
        told = 10
    assert total(box, "dropped:damaged") == 70
