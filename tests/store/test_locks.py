"""Locks between processes: which bytes, who is kept out, and that they end with whoever held them."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from boxes import fill

from outbox.errors import StoreError, StoreHeld
from outbox.store.directory import file_name
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.locks import DAEMON_BYTE, OwnersLock, lifecycle_byte, owners_lock, sender_byte

HOLDING = """
import sys, time
from pathlib import Path
from outbox.store.locks import owners_lock

lock = owners_lock(Path(sys.argv[1]))
print(lock.try_exclusive(int(sys.argv[2])), flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold(state):
    """Lets another process hold a byte; the processes are ended after the test."""
    running = []

    def start(byte):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDING, str(state.path), str(byte)], stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout.readline() == "True\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_each_outbox_has_bytes_of_its_own():
    """Two for each file, none of them the daemon's, all within what a file offset can be."""
    names = [file_name(f"agent-{n}") for n in range(1_000)]
    found = {byte for name in names for byte in (sender_byte(name), lifecycle_byte(name))}
    assert len(found) == 2_000
    assert all(DAEMON_BYTE < byte < 2**63 for byte in found)


def test_a_byte_of_another_process_cannot_be_had_until_it_ends(state, hold):
    """Exclusively or shared; `kill -9` gives it back at once."""
    process = hold(5)
    lock = owners_lock(state.path)
    assert not lock.try_exclusive(5)
    assert not lock.take_shared(5, 0)
    assert lock.held_elsewhere(5)
    assert not lock.holds(5)
    assert lock.try_exclusive(6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not lock.held_elsewhere(5)
    assert lock.try_exclusive(5)
    lock.release(5)
    lock.release(6)


def test_one_process_does_not_lock_itself_twice(state):
    """The kernel would let it: threads share the open file."""
    lock = owners_lock(state.path)
    assert lock.try_exclusive(5)
    assert not owners_lock(state.path).try_exclusive(5)
    assert not lock.take_shared(5, 0)
    lock.release(5)
    assert lock.take_shared(5, 0)
    assert not lock.try_exclusive(5)
    lock.give_shared(5)
    assert lock.try_exclusive(5)
    lock.release(5)


def test_a_shared_byte_is_free_when_the_last_holder_gives_it_back(state):
    """Not when the first one does."""
    lock, other = owners_lock(state.path), OwnersLock(state.path / "owners.lock")
    assert lock.take_shared(5, 0)
    assert lock.take_shared(5, 0)
    lock.give_shared(5)
    assert not other.try_exclusive(5)
    lock.give_shared(5)
    assert other.try_exclusive(5)
    other.close()


def test_giving_back_what_is_not_held_takes_nothing_from_others(state):
    """A second `release` must not end a shared hold of the same byte."""
    lock, other = owners_lock(state.path), OwnersLock(state.path / "owners.lock")
    assert lock.take_shared(5, 0)
    lock.release(5)
    assert not other.try_exclusive(5)
    lock.give_shared(5)
    other.close()


def test_a_shared_byte_is_waited_for(state):
    """For as long as was said, and no longer than it takes."""
    lock, other = owners_lock(state.path), OwnersLock(state.path / "owners.lock")
    assert other.try_exclusive(5)
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(lock.take_shared(5, 30)))
    waiting.start()
    other.release(5)
    waiting.join(10)
    assert taken == [True]
    lock.give_shared(5)
    other.close()


def descriptors():
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_exclusive_lock_lives_without_anybody_keeping_the_object(state, hold):
    """It is held by the process, not by a variable; and a lock file nobody uses is closed."""
    before = descriptors()
    assert owners_lock(state.path).try_exclusive(DAEMON_BYTE)
    assert owners_lock(state.path).holds(DAEMON_BYTE)
    owners_lock(state.path).release(DAEMON_BYTE)
    assert descriptors() == before
    hold(DAEMON_BYTE)


def test_a_lock_file_that_was_removed_is_not_trusted(state):
    """Who opens the state directory anew locks the file that is there now, as every other process does."""
    old = owners_lock(state.path)
    (state.path / "owners.lock").unlink()
    new = owners_lock(state.path)
    assert new is not old
    assert new.try_exclusive(5)
    other = OwnersLock(state.path / "owners.lock")
    assert other.held_elsewhere(5)
    other.close()
    new.release(5)


def test_a_lock_file_that_cannot_be_opened_is_a_clear_error(state):
    """Here a folder has its name."""
    (state.path / "owners.lock").mkdir()
    with pytest.raises(StoreError, match="lock file"):
        owners_lock(state.path)


def test_the_sender_is_one_over_all_openings_of_the_file(state, make):
    """A second opening in the same process is refused too, and sees that there is a sender."""
    box = make()
    fill(box, 1)
    box.become_sender()
    other = open_outbox(state, box.path)
    with pytest.raises(StoreHeld, match="Another process delivers"):
        other.become_sender()
    assert read_status(other).sender
    box.close()
    assert read_status(other).sender  # closing a file is not giving up: the least recently used are closed
    box.resign_sender()
    other.become_sender()
    other.resign_sender()
    other.resign_sender()
    assert not other.has_sender
    other.close()


def test_senders_of_two_outboxes_do_not_meet(make):
    """Each outbox has its own."""
    one, two = make("one"), make("two")
    one.become_sender()
    two.become_sender()
    one.resign_sender()
    assert two.has_sender
    two.resign_sender()
