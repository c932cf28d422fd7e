"""A disk whose writes and flushes fail: nothing is told accepted that a power cut could take."""

import contextlib
import random
import shutil
from itertools import count
from pathlib import Path

import apsw
import pytest
from boxes import NOW, ack, deliver, event, first, make_box, release, seqs, state_in, take, tool_call, total
from power_disk import Least, Most, Platter, RecordedDisk

from outbox.errors import StoreError
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt, enqueue
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.retiring import retire
from outbox.store.sending import claim, recover, settle
from outbox.store.verify import verify_counters, verify_pages


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A recorded disk."""
    (tmp_path / "disk").mkdir()
    made = RecordedDisk(tmp_path / "disk")
    with made.recording(monkeypatch):
        yield made


def once(act, name, number=1):
    """Makes the `number`-th such call on a file of this name fail."""
    left = count(-number + 1)
    return lambda what, path: what == act and path.endswith(name) and next(left) == 0


def some(after, number):
    """Makes so many writes or flushes fail, after so many that do not."""
    calls = count()
    return lambda what, path: after <= next(calls) < after + number


def keys_after_cut(disk, folder, chance=None, agent="builder"):
    """What waits in the outbox that a power cut now would leave, once it is found whole."""
    platter = Platter(disk.root)
    for entry in disk.log:
        platter.play(entry)
    folder.mkdir()
    platter.lay_out(folder, chance or Least())
    state = StateDirectory(folder / "state")
    box = open_outbox(state, state.outbox_path(agent))
    try:
        assert verify_pages(box) == []
        assert verify_counters(box) == []
        return [key for (key,) in box.rows("SELECT key FROM events ORDER BY seq")]
    finally:
        box.close()


def put_key(box, key, size=0):
    """Enqueue one event; True when it was accepted."""
    try:
        (result,) = enqueue(box, [event({"body": "x" * size}, idempotency_key=key)], now_ms=NOW)
    except StoreError:
        return False
    assert isinstance(result, Receipt)
    return True


def test_what_is_accepted_after_a_failed_flush_survives_a_power_cut(disk, tmp_path):
    """Linux takes what a failed flush did not write for written: the next flush succeeds without it."""
    box = make_box(state_in(f"{disk.root}/state"))
    assert put_key(box, "first")
    taken = take(box)
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)  # not flushed
    disk.fails = once("sync", "-wal")
    assert not put_key(box, "refused", 5_000)
    assert put_key(box, "accepted")
    assert keys_after_cut(disk, tmp_path / "left") == ["accepted"]
    box.close()


def test_the_log_is_renewed_before_anything_is_told_accepted(disk, tmp_path):
    """While the disk goes on failing every producer is refused; what was refused never comes back."""
    box = make_box(state_in(f"{disk.root}/state"))
    assert put_key(box, "first")
    disk.fails = lambda act, path: act == "sync"
    for number in range(3):
        assert not put_key(box, f"refused-{number}", 9_000)
    assert keys_after_cut(disk, tmp_path / "most", Most()) == ["first"]
    disk.fails = lambda act, path: False
    assert put_key(box, "accepted")
    assert keys_after_cut(disk, tmp_path / "left") == ["first", "accepted"]
    box.close()


@pytest.mark.parametrize("ends", [OutboxFile.close, OutboxFile.leave_to_parent], ids=["by itself", "killed"])
@pytest.mark.parametrize("where", ["a commit", "a checkpoint"])
def test_the_next_process_knows_of_a_failed_flush(disk, tmp_path, where, ends):
    """The one that met it ends before the log is renewed: the next to store something does it first, once."""
    state = state_in(f"{disk.root}/state")
    box = make_box(state)
    assert put_key(box, "first")
    taken = take(box)
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)  # not flushed
    disk.fails = lambda act, path: act == "sync"
    if where == "a commit":
        assert not put_key(box, "refused", 5_000)
    else:
        box.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
    ends(box)
    disk.fails = lambda act, path: False
    renewed = []
    for name in ("accepted", "accepted-later"):
        with contextlib.closing(open_outbox(state, box.path)) as later:
            assert put_key(later, name)
            renewed.append(total(later, "log_renewed"))
    assert keys_after_cut(disk, tmp_path / "left") == ["accepted", "accepted-later"]
    assert renewed[0] == renewed[1] > 0


def test_who_only_reads_leaves_the_log_to_others(disk):
    """A person who looks while the disk fails gets an answer, and whoever stores something next renews it."""
    state = state_in(f"{disk.root}/state")
    box = make_box(state)
    assert put_key(box, "first")
    disk.fails = lambda act, path: act == "sync"
    assert not put_key(box, "refused")
    for _ in range(2):
        reader = open_outbox(state, box.path)
        assert seqs(reader) == [1]
        reader.close()
    disk.fails = lambda act, path: False
    writer = open_outbox(state, box.path)
    assert put_key(writer, "accepted")
    assert total(writer, "log_renewed") == 1
    assert not Path(writer.suspect_mark).exists()
    writer.close()
    box.close()


def test_a_file_that_goes_leaves_no_mark_of_a_failed_flush(disk):
    """Nothing is left of an agent that is done for good."""
    state = state_in(f"{disk.root}/state")
    box = make_box(state)
    assert put_key(box, "first")
    deliver(box)
    disk.fails = once("sync", "-wal")
    box.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
    assert Path(box.suspect_mark).exists()
    box.leave_to_parent()
    assert retire(state, box.path, NOW + 30 * 86_400_000)
    assert list(state.agents.iterdir()) == []


def test_a_checkpoint_that_fails_is_noticed(disk, tmp_path):
    """SQLite's own after a commit would keep it to itself, and what follows would stand on nothing."""
    box = make_box(state_in(f"{disk.root}/state"))
    assert put_key(box, "first")
    taken = take(box)
    box.checkpoint_pages, disk.fails = 1, once("sync", "-wal")
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)  # not flushed, but for the checkpoint
    assert [entry.act for entry in disk.log if "sync" in entry.act][-1] == "failed_sync"
    box.checkpoint_pages = 0
    assert put_key(box, "accepted")
    assert keys_after_cut(disk, tmp_path / "left") == ["accepted"]
    box.close()


def test_an_unsafe_call_is_not_sent_when_its_claim_cannot_be_flushed(disk, tmp_path):
    """And after the disk works again it goes out once."""
    box = make_box(state_in(f"{disk.root}/state"))
    enqueue(box, [tool_call(idempotency_key="call")], now_ms=NOW)
    disk.fails = once("sync", "-wal")
    with pytest.raises(StoreError):
        take(box, unsafe=True)
    assert keys_after_cut(disk, tmp_path / "before") == ["call"]
    taken = take(box, unsafe=True)
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    assert seqs(box) == []
    box.close()


def test_any_write_or_flush_may_fail(tmp_path, monkeypatch, rounds, seed):
    """One after the other fails, once or a few times: what was accepted is there, what was refused is not."""
    for number in range(rounds(2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        disk = RecordedDisk(folder)
        with disk.recording(monkeypatch):
            _fail_each(disk, folder, random.Random(f"{seed}/{number}"))
        shutil.rmtree(folder)


def _fail_each(disk, folder, chance):
    box = make_box(state_in(f"{disk.root}/state"))
    box.checkpoint_pages = 12
    accepted, refused = [], []
    for step in range(40):
        disk.fails = some(chance.randint(0, 8), chance.choice((1, 1, 2, 5)))
        for number in range(3):
            key = f"key-{step}-{number}"
            (accepted if put_key(box, key, chance.choice((10, 3_000, 9_000))) else refused).append(key)
            with contextlib.suppress(StoreError):
                recover(box, now_ms=NOW)
                if taken := claim(box, first(2), unsafe=False, now_ms=NOW):
                    settle(box, taken, [release(row) for row in taken.rows], now_ms=NOW)
        if chance.random() < 0.3:  # its process ends, and another one goes on
            chance.choice((OutboxFile.close, OutboxFile.leave_to_parent))(box)
            disk.fails = lambda act, path: False
            box = open_outbox(box.state, box.path)
            box.checkpoint_pages = 12
        disk.fails = lambda act, path: False
        key = f"key-{step}-whole"
        assert put_key(box, key)
        accepted.append(key)
        if step % 5 == 0:
            assert keys_after_cut(disk, folder / str(step)) == accepted
    assert len(refused) > 20
    box.close()
