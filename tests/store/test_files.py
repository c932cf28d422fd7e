"""The file itself: modes, creation, locks of SQLite, replacement, forks, threads, interrupts, space."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest
from boxes import (
    NOW,
    ack,
    counter,
    deliver,
    event,
    fill,
    put,
    python,
    roomy,
    seqs,
    take,
    try_put,
)  # fmt: skip

from outbox.errors import StoreBusy, StoreClosed, StoreError, StoreFull
from outbox.event import Limits
from outbox.store.create import create_outbox
from outbox.store.enqueue import enqueue
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.locks import OwnersLock, lifecycle_byte, owners_lock
from outbox.store.sending import settle

MODES = """
import os, stat, sys
from pathlib import Path

os.umask(int(sys.argv[2], 8))
from outbox import Outbox
from outbox.store.relay_state import RelayState
from outbox.store.directory import StateDirectory
from outbox.store.place import leave_place, take_place
from outbox.store.wake import bind_wake_socket

root = Path(sys.argv[1])
state = root / "missing" / "state"
outbox = Outbox.open("builder", state_dir=state)
outbox.enqueue("insight", {})
facts = RelayState(state / "relay.sqlite")
facts.write({"gate": 1})
place = StateDirectory(state)
take_place(place, "1", state / "s", 1)
wake = bind_wake_socket(state / "wake.sock")
for path in sorted(root.rglob("*")):
    print(f"{stat.S_IMODE(path.lstat().st_mode):o}", path.relative_to(root))
wake.close()
leave_place(place)
facts.close()
outbox.close()
"""


@pytest.mark.parametrize("umask", ["000", "022", "077"])
def test_everything_is_private_whatever_the_umask(tmp_path, umask):
    """P12: folders 0700, files and sockets 0600, side files and folders above the state directory too."""
    lines = python(MODES, tmp_path, umask).splitlines()
    found = {name: mode for mode, name in (line.split(" ", 1) for line in lines)}
    folders = {"missing", "missing/state", "missing/state/agents"}
    assert {name: mode for name, mode in found.items() if name in folders} == dict.fromkeys(folders, "700")
    files = {name: mode for name, mode in found.items() if name not in folders}
    assert {Path(name).name.partition(".")[2] or name for name in files} >= {
        "lock", "sqlite", "sqlite-wal", "sqlite-shm", "json", "sock", "missing/state/reserve",
    }  # fmt: skip
    assert set(files.values()) == {"600"}


def test_an_outbox_is_made_once(state):
    """Whoever comes second finds the first one's, with its rules, and leaves nothing of its own behind."""
    path = state.outbox_path("builder")
    create_outbox(state, "builder", Limits(), roomy(max_events=7), NOW)
    first = path.read_bytes()
    create_outbox(state, "builder", Limits(), roomy(max_events=8), NOW)
    assert path.read_bytes() == first
    assert [entry.name for entry in state.agents.iterdir()] == [path.name]


RACING = """
import sys
from outbox import Outbox

sys.stdin.readline()
with Outbox.open("builder", state_dir=sys.argv[1]) as outbox:
    for n in range(10):
        outbox.enqueue("insight", {"p": sys.argv[2], "n": n})
    print(outbox.status().stream)
"""


def test_processes_that_make_it_together_share_one(state):
    """All events of all of them are in the one file that there is; nobody meets "locked"."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACING, str(state.path), str(n)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for n in range(4)
    ]  # fmt: skip
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    streams = {racer.communicate(timeout=60)[0] for racer in racers}
    assert len(streams) == 1
    (path,) = state.outbox_files()
    box = open_outbox(state, path)
    rows = [text for (text,) in box.rows("SELECT wire_payload FROM events ORDER BY seq")]
    assert len(rows) == 40
    for n in range(4):
        mine = [text for text in rows if f'"p":"{n}"'.encode() in text]
        assert [f'"n":{k},'.encode() in text for k, text in enumerate(mine)] == [True] * 10
    box.close()


def test_a_creator_without_room_makes_nothing(state, monkeypatch):
    """A full disk while the file is being made: a clear refusal, and no draft left."""
    monkeypatch.setattr(
        "outbox.store.schema.CREATE", "CREATE TABLE t (a); INSERT INTO t VALUES (zeroblob(99999999))"
    )
    real = apsw.Connection

    def small(*args, **options):
        connection = real(*args, **options)
        connection.execute("PRAGMA max_page_count=20").fetchall()
        return connection

    monkeypatch.setattr("outbox.store.create.apsw.Connection", small)
    with pytest.raises(StoreFull):
        create_outbox(state, "builder", Limits(), roomy(), NOW)
    assert list(state.agents.iterdir()) == []


def test_a_state_directory_that_cannot_be_written_is_a_clear_error(state):
    """Here something else stands in the place of the folder of outboxes."""
    state.agents.rmdir()
    state.agents.touch()
    with pytest.raises(StoreError, match="cannot be made: File exists"):
        create_outbox(state, "builder", Limits(), roomy(), NOW)


def test_the_write_ahead_log_is_in_force(box):
    """With what the design asks of each connection."""
    assert box.one("PRAGMA journal_mode") == ("wal",)
    assert box.one("PRAGMA auto_vacuum") == (2,)
    assert box.one("PRAGMA journal_size_limit") == (8 * 1024 * 1024,)


def test_a_copy_without_its_log_mode_gets_it_back(box):
    """A file that `VACUUM INTO` or a backup made has a rollback journal; opening gives it a log."""
    fill(box, 2)
    copy = box.path.with_name("copy")
    box.rows(f"VACUUM INTO '{copy}'")
    box.close()
    shutil.move(copy, box.path)
    for side in ("-wal", "-shm"):
        box.path.with_name(box.path.name + side).unlink(missing_ok=True)
    again = open_outbox(box.state, box.path)
    assert again.one("PRAGMA journal_mode") == ("wal",)
    assert put(again, event({"n": 3})) == [3]
    again.close()


# Locks of SQLite --------------------------------------------------------------------------------------------


BUSY_NEIGHBOUR = """
import sys, time, apsw
db = apsw.Connection(sys.argv[1])
db.set_busy_timeout(10_000)
print("ready", flush=True)
while True:
    db.execute("BEGIN IMMEDIATE")
    time.sleep(0.02)
    db.execute("COMMIT")
    time.sleep(0.0003)
"""


def test_a_producer_gets_its_turn_beside_one_that_never_rests(box):
    """The short moments between the commits of a neighbour are enough: nobody waits until it is refused."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", BUSY_NEIGHBOUR, str(box.path)], stdout=subprocess.PIPE, text=True
    )
    probe = apsw.Connection(str(box.path))
    try:
        assert neighbour.stdout.readline() == "ready\n"
        for _ in range(6):
            while not is_locked(probe):
                assert neighbour.poll() is None
            fill(box, 1)
    finally:
        probe.close()
        neighbour.kill()
        neighbour.communicate()
    assert read_status(box).waiting == 6


def is_locked(probe):
    """Whether another connection is in the middle of a commit now."""
    try:
        probe.execute("BEGIN IMMEDIATE")
    except apsw.BusyError:
        return True
    probe.execute("ROLLBACK")
    return False


def test_the_pauses_before_the_next_try_for_a_lock_stay_short(box, monkeypatch):
    """However often was tried: who waits longest asks no less often than who has just come."""
    pauses_s = []
    monkeypatch.setattr("outbox.store.connection.time.sleep", pauses_s.append)
    assert all(box._wait_turn(tries) for tries in range(1_000))
    assert 0 < min(pauses_s) <= max(pauses_s) < 0.01


def test_a_file_that_another_producer_made_first_is_taken_as_it_is(box, monkeypatch):
    """Its log is no leftover of an older file, and nobody waits until the others let it go."""
    fill(box, 1)
    assert box.path.with_name(box.path.name + "-wal").exists()
    locks = owners_lock(box.state.path)
    assert locks.take_shared(lifecycle_byte(box.path.name), 0)
    looked = iter([False])
    exists = os.path.lexists
    first_look_misses = lambda path: next(looked, None) is None and exists(path)  # noqa: E731
    monkeypatch.setattr("outbox.store.create.os.path.lexists", first_look_misses)
    create_outbox(box.state, "builder", Limits(), roomy(), NOW)
    locks.give_shared(lifecycle_byte(box.path.name))
    assert read_status(box).waiting == 1


def test_a_lock_held_too_long_is_busy_and_nothing_is_stored(make):
    """Never a yes without the row; afterwards it works without anything being opened anew."""
    box = make(busy_timeout_ms=50)
    other = apsw.Connection(str(box.path))
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreBusy, match="locked by another program"):
        enqueue(box, [event({"n": 1})], now_ms=NOW)
    assert read_status(box).waiting == 0
    other.execute("ROLLBACK")
    other.close()
    assert fill(box, 1) == [1]


def test_a_lock_held_for_a_moment_is_waited_for(make):
    """The wait is part of the call, up to its documented limit of 5 s."""
    box = make()
    other = apsw.Connection(str(box.path))
    other.execute("BEGIN EXCLUSIVE")
    results = []
    waiting = threading.Thread(target=lambda: results.append(try_put(box, event({"n": 1}))))
    waiting.start()
    assert not results
    other.execute("ROLLBACK")
    waiting.join(10)
    other.close()
    assert [result.seq for result in results] == [1]


def test_a_forgotten_reader_stops_nothing(box):
    """Somebody's open shell reads an old state; events are accepted and delivered meanwhile."""
    fill(box, 2)
    reader = apsw.Connection(str(box.path))
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM events").fetchall()
    fill(box, 2)
    deliver(box, 4)
    assert reader.execute("SELECT count(*) FROM events").fetchall() == [(2,)]
    box.give_space_back()
    reader.close()


# Whose turn -------------------------------------------------------------------------------------------------


def test_threads_share_one_open_file(box):
    """Every event of every thread is there once, each thread's in its own order."""

    def produce(name):
        for n in range(50):
            put(box, event({"t": name, "n": n}, idempotency_key=f"{name}-{n}"))

    threads = [threading.Thread(target=produce, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [key for (key,) in box.rows("SELECT key FROM events ORDER BY seq")]
    assert len(keys) == 200
    assert [[key for key in keys if key[0] == name] for name in "abcd"] == [
        [f"{name}-{n}" for n in range(50)] for name in "abcd"
    ]


def test_a_commit_from_a_signal_handler_does_not_break_into_another(box):
    """It is refused as busy; the one it came into goes on and is stored whole."""
    refused = []

    def handler(number, frame):
        try:
            fill(box, 1)
        except StoreBusy as error:
            refused.append(str(error))

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with box.transaction(durable=True):
            box.run("UPDATE outbox SET paused_at_ms = 7")
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert "signal handler" in refused[0]
    assert counter(box, "paused_at_ms") == 7
    assert fill(box, 1) == [1]


@pytest.mark.parametrize("where", ["begin", "body", "commit"])
def test_an_interrupt_leaves_no_transaction_open(box, monkeypatch, where):
    """Ctrl-C at any moment: the lock is free, the mutex too, and all of it or nothing is stored."""
    real = box.execute

    def interrupted(sql, args=()):
        result = real(sql, args)
        if (where, sql.split()[0]) in {("begin", "BEGIN"), ("body", "INSERT"), ("commit", "COMMIT")}:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(box, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(box, 1)
    assert not box.db.in_transaction
    stored = where == "commit"
    assert seqs(box) == ([1] if stored else [])
    other = open_outbox(box.state, box.path, busy_timeout_ms=0)
    fill(other, 1)
    other.close()
    worker = threading.Thread(target=fill, args=(box, 1))
    worker.start()
    worker.join(10)
    assert len(seqs(box)) == 2 + stored


def test_an_interrupt_of_a_checkpoint_leaves_the_patience_for_locks(box, monkeypatch):
    """A checkpoint waits for nobody; the commits after it do, whatever ended it."""
    real, asked = box.db, []

    class Interrupted:
        def set_busy_handler(self, handler):
            asked.append(handler)
            real.set_busy_handler(handler)

        def wal_checkpoint(self, mode):
            real.wal_checkpoint(mode=mode)
            raise KeyboardInterrupt

    monkeypatch.setattr(box, "db", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        box.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
    monkeypatch.setattr(box, "db", real)
    assert asked == [None, box._wait_turn]


def test_a_closed_outbox_says_so(box):
    """For reading, writing and becoming the sender; closing twice is nothing."""
    box.close()
    box.close()
    for use in (lambda: fill(box, 1), lambda: read_status(box), box.become_sender, lambda: box.has_sender):
        with pytest.raises(StoreClosed, match="closed"):
            use()


# Replaced files ---------------------------------------------------------------------------------------------


def test_nothing_is_written_to_a_file_that_was_replaced(state, make):
    """The producer notices inside the transaction that its path names another file, and stores nothing."""
    box = make()
    fill(box, 1)
    box.path.rename(box.path.with_name("moved"))
    create_outbox(state, "builder", Limits(), roomy(), NOW)
    with pytest.raises(StoreClosed, match="was replaced"):
        fill(box, 1)
    assert box.was_replaced
    assert counter(box, "waiting") == 1
    box.close()


def test_a_log_without_its_file_is_not_taken_for_a_new_ones(state, box):
    """SQLite would apply it: the old events would stand in the new file. It is put aside, not thrown away."""
    fill(box, 3)
    box.path.rename(box.path.with_name("moved"))
    create_outbox(state, "builder", Limits(), roomy(), NOW)
    path = state.outbox_path("builder")
    again = open_outbox(state, path)
    assert fill(again, 1) == [1]
    again.close()
    assert sorted(file.name for file in state.damaged.iterdir()) == [
        f"{path.name}-shm.1", f"{path.name}-wal.1",
    ]  # fmt: skip


def test_whoever_replaces_the_file_shuts_producers_out_for_that_time(state, make):
    """The lifecycle byte held exclusively by another process makes them wait, and then gives up as busy."""
    box = make(busy_timeout_ms=50)
    other = OwnersLock(state.path / "owners.lock")
    byte = lifecycle_byte(box.path.name)
    assert other.try_exclusive(byte)
    with pytest.raises(StoreBusy, match="being replaced"):
        fill(box, 1)
    with pytest.raises(StoreBusy, match="being replaced"):
        open_outbox(state, box.path, busy_timeout_ms=50)
    other.release(byte)
    assert fill(box, 1) == [1]
    other.close()


def test_a_commit_keeps_the_file_from_being_replaced(state, box):
    """While it runs, the lifecycle byte cannot be had exclusively."""
    other = OwnersLock(state.path / "owners.lock")
    byte = lifecycle_byte(box.path.name)
    with box.transaction(durable=True):
        assert not other.try_exclusive(byte)
    assert other.try_exclusive(byte)
    other.release(byte)
    other.close()


# Forks ------------------------------------------------------------------------------------------------------

FORKED = """
import os, subprocess, sys
from outbox import Outbox
from outbox.errors import StoreClosed, StoreHeld

CHECKPOINT = '''
import sys
from pathlib import Path
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
open_outbox(StateDirectory(Path(sys.argv[1])), Path(sys.argv[2])).close(checkpoint=True)
'''

def refused(act, error):
    try:
        act()
    except error:
        return True
    return False

outbox = Outbox.open("builder", state_dir=sys.argv[1])
outbox.enqueue("insight", {"n": 0})
box = outbox._box
box.become_sender()
to_child, from_child = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    checks = [
        refused(lambda: box.rows("SELECT 1"), StoreClosed),
        box.resign_sender() is None,
        outbox.status().sender,
        refused(outbox._box.become_sender, StoreHeld),
    ]
    outbox.enqueue("insight", {"n": 1})
    os.write(from_child[1], b"1" if all(checks) else b"0")
    os.read(to_child[0], 1)
    outbox.enqueue("insight", {"n": 2})
    os._exit(0)
assert os.read(from_child[0], 1) == b"1"
assert box.has_sender
outbox.enqueue("insight", {"n": 3})
outbox.close()
subprocess.run([sys.executable, "-c", CHECKPOINT, sys.argv[1], str(box.path)], check=True)
os.write(to_child[1], b"go")
assert os.waitpid(child, 0)[1] == 0
with Outbox.open("builder", state_dir=sys.argv[1]) as outbox:
    print(outbox.depth)
"""


def test_a_forked_child_goes_on_with_connections_of_its_own(state):
    """It uses, closes and unlocks nothing of its parent's; its locks are real: nobody takes its log away."""
    assert python(FORKED, state.path) == "4\n"


BUSY_FORKS = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from outbox import Outbox
from outbox.store.verify import verify_counters

outbox = Outbox.open("builder", state_dir=sys.argv[1])
stop = threading.Event()

def produce():
    while not stop.is_set():
        outbox.enqueue("insight", {"from": "parent"})

threads = [threading.Thread(target=produce) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    for n in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            outbox.enqueue("insight", {"from": "child"}, idempotency_key=f"child-{n}")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
finally:
    stop.set()
for thread in threads:
    thread.join()
print(len(outbox._box.rows("SELECT 1 FROM events WHERE key GLOB 'child-*'")), verify_counters(outbox._box))
"""


def test_a_fork_in_the_middle_of_other_threads_commits_harms_neither(state):
    """No mutex that a thread of the parent held stops the child, and no commit is cut in two."""
    assert python(BUSY_FORKS, state.path) == "10 []\n"


FIRST_HINT = """
import os, signal, sys
from outbox import Outbox

outbox = Outbox.open("builder", state_dir=sys.argv[1])
outbox._waker._mutex.acquire()
child = os.fork()
if child == 0:
    signal.alarm(30)
    outbox.enqueue("insight", {"from": "child"})
    os._exit(0)
outbox._waker._mutex.release()
print(os.waitpid(child, 0)[1], outbox.depth)
outbox.close()
"""


def test_a_fork_while_a_thread_gives_the_first_hint_leaves_the_child_free(state):
    """The mutex of the hint to the daemon is the child's own, too."""
    assert python(FIRST_HINT, state.path) == "0 1\n"


# Space ------------------------------------------------------------------------------------------------------


def test_space_is_given_back_when_the_backlog_is_gone(box):
    """P16 in small: the file shrinks to what may stay of 30 MB, and the log is cut."""
    put(box, *(event({"body": "x" * 20_000, "n": n}) for n in range(1_500)))
    taken = take(box, 1_000)
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    deliver(box, 500)
    box.give_space_back()
    side = box.path.with_name(box.path.name + "-wal")
    assert box.path.stat().st_size < 1_500_000
    assert side.stat().st_size == 0
    assert fill(box, 1) == [1_501]


def test_a_long_log_is_cut_when_there_is_nothing_else_to_do(box):
    """Also when no page of the file is free; a short one stays for what comes next."""
    log = box.path.with_name(box.path.name + "-wal")
    fill(box, 1)
    box.give_space_back()
    assert log.stat().st_size > 0
    put(box, event({"body": "x" * 2_000_000}))
    box.give_space_back()
    assert log.stat().st_size == 0
    assert seqs(box) == [1, 2]


def test_a_short_lived_producer_leaves_the_checkpoint_to_others(box):
    """Closing flushes nothing again, unless it is asked to."""
    fill(box, 3)
    log = box.path.with_name(box.path.name + "-wal")
    box.close()
    assert log.stat().st_size > 0
    again = open_outbox(box.state, box.path)
    assert seqs(again) == [1, 2, 3]
    again.close(checkpoint=True)
    assert not log.exists()


def test_producers_without_a_daemon_do_not_let_the_log_grow(make):
    """Each of them reads all of it at its start, so a close begins it anew before that takes long."""
    box = make()
    logs_bytes = []
    for n in range(12):
        put(box, event({"body": "x" * 300_000, "n": n}))
        box.close()
        box = open_outbox(box.state, box.path)
        logs_bytes.append(box.log_bytes())
    assert max(logs_bytes) <= 1024 * 1024
    assert logs_bytes.count(0) >= 2
    assert seqs(box) == list(range(1, 13))
    box.close()


def test_a_long_log_that_others_use_is_left_to_them(box):
    """Whoever closes has no say in it while another has the file open."""
    put(box, event({"body": "x" * 2_000_000}))
    other = open_outbox(box.state, box.path)
    other.close()
    assert box.log_bytes() > 1_000_000
    assert fill(box, 1) == [2]


def test_an_outbox_that_nobody_closed_leaves_the_checkpoint_too(state):
    """Also when the interpreter ends, or the object is simply forgotten."""
    code = """
import sys
from outbox import Outbox
outbox = Outbox.open("builder", state_dir=sys.argv[1])
outbox.enqueue("insight", {})
"""
    python(code, state.path)
    (path,) = state.outbox_files()
    assert path.with_name(path.name + "-wal").stat().st_size > 0


MANY = """
import os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from outbox import Outbox
from outbox.store.directory import StateDirectory
from outbox.store.open_files import OpenFiles
from outbox.store.sending import claim, settle
from outbox.outcome import Ack

state = StateDirectory(Path(sys.argv[1]))
for n in range(300):
    with Outbox.open(f"agent-{n}", state_dir=sys.argv[1]) as outbox:
        outbox.enqueue("insight", {"n": n})
files = OpenFiles(state, 64)
before = len(os.listdir("/proc/self/fd"))
delivered = 0
for path in state.outbox_files():
    with files.borrow(path) as box:
        box.become_sender()
        taken = claim(box, lambda rows: [next(rows)], unsafe=False, now_ms=1)
        settle(box, taken, [Ack(1)], now_ms=1)
        delivered += 1
        most = len(os.listdir("/proc/self/fd"))
files.close()
print(delivered, most - before <= 3 * 64, len(os.listdir("/proc/self/fd")) - before)
"""


def test_300_agents_work_with_256_descriptors(state):
    """P09: all are served, and the descriptors go down again afterwards."""
    assert python(MANY, state.path).split() == ["300", "True", "0"]
