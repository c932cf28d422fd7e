"""A disk without a free byte: nothing is accepted, what waits is delivered, and then there is room."""

import contextlib
import os
from types import SimpleNamespace

import pytest
from boxes import NOW, ack, event, fill, make_box, put, seqs, take, tool_call
from small_disk import SmallDisk

from outbox.errors import StoreFull
from outbox.store import open_files, reserve
from outbox.store.enqueue import enqueue
from outbox.store.inspect import read_status
from outbox.store.open_files import OpenFiles
from outbox.store.people import pause
from outbox.store.place import leave_place, take_place
from outbox.store.reserve import RESERVE_BYTES, give_up_reserve, keep_reserve
from outbox.store.sending import settle
from outbox.store.verify import verify_counters


@pytest.fixture
def disk(state):
    """A disk beneath the state directory, with the reserve and 3 MiB on it."""
    keep_reserve(state)
    made = SmallDisk(state.path)
    made.room_bytes = RESERVE_BYTES + 3 * 1024 * 1024
    yield made
    made.unregister()


@pytest.fixture
def small(state, disk):
    """An outbox on that disk, with a log that is never copied before there is need."""
    box = make_box(state)
    box.db.wal_autocheckpoint(0)
    yield box
    assert verify_counters(box) == []
    box.close()


def fill_up(box, disk):
    """Enqueue until there is no byte left; returns how many wait."""
    with contextlib.suppress(StoreFull):
        while True:
            put(box, event({"body": "x" * 12_000}))
    disk.room_bytes = disk.used_bytes()
    with contextlib.suppress(StoreFull):
        for n in range(50):  # the log may have a few pages left
            pause(box, NOW + n)
    return len(seqs(box))


def drain(box):
    """Deliver everything; returns how often the disk was too full for it."""
    refused = 0
    taken = None
    while read_status(box).waiting:
        try:
            taken = taken or take(box, 100)
            settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
            taken = None
        except StoreFull:
            refused += 1
            assert refused < 5
    return refused


def test_a_full_disk_is_drained_and_takes_events_again(state, disk, small):
    """The reserve is given up for the first delivery that does not fit; afterwards there is room."""
    taken = fill_up(small, disk)
    assert state.reserve_file.exists()  # accepting more is not what it is for
    assert drain(small) == 1
    assert not state.reserve_file.exists()
    small.give_space_back()
    assert disk.used_bytes() - RESERVE_BYTES < 1024 * 1024
    assert put(small, event({"n": 1})) == [taken + 1]


def test_without_a_reserve_nothing_is_lost_either(state, disk, small):
    """What waits stays, and goes out as soon as somebody makes room."""
    give_up_reserve(state)
    number = fill_up(small, disk)
    for _ in range(3):
        with pytest.raises(StoreFull):
            take(small)
    assert seqs(small) == list(range(1, number + 1))
    disk.room_bytes *= 2
    assert drain(small) == 0


def test_unsafe_calls_go_out_on_a_full_disk_too(state, disk, small):
    """Their claim has to be on disk before a byte leaves: it makes way like any other."""
    put(small, tool_call())
    fill_up(small, disk)
    with pytest.raises(StoreFull):
        take(small, unsafe=True)
    taken = take(small, unsafe=True)
    settle(small, taken, [ack(taken.rows[0])], now_ms=NOW)
    assert seqs(small)[0] == 2


def test_a_settlement_that_does_not_fit_can_be_written_later(state, disk, small):
    """It is all or nothing: the same one again counts once."""
    fill(small, 3)
    taken = take(small, 3)
    fill_up(small, disk)
    waiting = read_status(small).waiting
    give_up_reserve(state)
    disk.room_bytes = disk.used_bytes()
    results = [ack(row, result="x" * 20_000) for row in taken.rows]
    with pytest.raises(StoreFull):
        settle(small, taken, results, now_ms=NOW)
    assert read_status(small).waiting == waiting
    disk.room_bytes *= 2
    settle(small, taken, results, now_ms=NOW)
    assert read_status(small).waiting == waiting - 3


def test_the_sender_opens_a_file_with_the_help_of_the_reserve(state, monkeypatch):
    """A daemon that starts on a full disk needs a few pages beside each file."""
    keep_reserve(state)
    box = make_box(state)
    box.close()
    real = open_files.open_outbox

    def needs_room(*args):
        if state.reserve_file.exists():
            raise StoreFull
        return real(*args)

    monkeypatch.setattr(open_files, "open_outbox", needs_room)
    files = OpenFiles(state)
    with files.borrow(box.path) as opened:
        assert opened.agent == "builder"
    files.close()
    monkeypatch.setattr(open_files, "open_outbox", lambda *args: (_ for _ in ()).throw(StoreFull))
    with pytest.raises(StoreFull), files.borrow(box.path):
        pass


# The reserve ------------------------------------------------------------------------------------------------


def free(bytes_free):
    """What `os.statvfs` says of a disk with so many free bytes."""
    return lambda path: SimpleNamespace(f_bavail=bytes_free // 4096, f_frsize=4096)


def test_the_daemon_keeps_a_reserve(state):
    """From its start on, private, and with its blocks really taken; made again at rest when given up."""
    take_place(state, "1", state.path / "s", NOW)
    leave_place(state)
    status = state.reserve_file.stat()
    assert (status.st_size, status.st_mode & 0o777) == (RESERVE_BYTES, 0o600)
    assert status.st_blocks * 512 >= RESERVE_BYTES
    box = make_box(state)
    box.make_way()
    assert not state.reserve_file.exists()
    box.give_space_back()
    assert state.reserve_file.exists()
    box.close()


def test_no_reserve_is_made_of_scarce_space(state, monkeypatch):
    """It must not be what fills the disk."""
    monkeypatch.setattr(os, "statvfs", free(8 * RESERVE_BYTES - 4096))
    keep_reserve(state)
    assert not state.reserve_file.exists()
    assert not give_up_reserve(state)
    monkeypatch.setattr(os, "statvfs", free(8 * RESERVE_BYTES))
    keep_reserve(state)
    assert give_up_reserve(state)


def test_a_reserve_that_cannot_be_made_leaves_nothing(state, monkeypatch):
    """Half of one would be taken for a whole one."""

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reserve.os, "posix_fallocate", fails)
    keep_reserve(state)
    assert [path.name for path in state.path.iterdir() if "reserve" in path.name] == []


def test_accepting_does_not_use_up_the_reserve(state, disk, small):
    """Else producers would take what deliveries need."""
    fill_up(small, disk)
    for _ in range(3):
        with pytest.raises(StoreFull):
            enqueue(small, [event({"body": "x" * 50_000})], now_ms=NOW)
    assert state.reserve_file.exists()
    drain(small)
