"""Files of agents that are done for good are removed, nothing that is of use is, and no event is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time

import pytest
from processes import program, wait_for
from runs import TOKEN, engine_running
from world import DAY_MS, World, answer

from outbox import Outbox
from outbox.daemon.retire import Retirement
from outbox.daemon.supervisor import Daemon
from outbox.daemon.watch import FileWatch
from outbox.gap import GAP_KIND
from outbox.settings import load
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.locks import lifecycle_byte
from outbox.store.people import pause
from outbox.store.retiring import retire
from relay_client.reference.process import RelayProcess

AFTER_MS = 30 * DAY_MS


@pytest.fixture
def world(tmp_path):
    """An outbox whose one event was delivered long ago."""
    with World(tmp_path) as world:
        world.enqueue("builder", 1)
        world.run(1_000)
        age(world, 40 * DAY_MS)
        yield world


def age(world, for_ms):
    """Let time pass in which nobody touches any file."""
    world.clock.now_ms += for_ms
    for path in world.state.agents.iterdir():
        touched_s = (world.clock.wall_ms() - for_ms) / 1_000
        os.utime(path, (touched_s, touched_s))


def look(world, after_ms=AFTER_MS):
    """One look of the daemon: what it logged."""
    said = []
    retirement = Retirement(world.state, lambda event, fields: said.append((event, fields["agent"])))
    retirement.turn(world.engine, list(world.state.outbox_files()), after_ms)
    return said


def names(world):
    """Every file in the folder of outboxes."""
    return sorted(path.name for path in world.state.agents.iterdir())


def test_a_finished_file_is_removed(world):
    """With its side files, and one line of the log."""
    assert look(world) == [("retired", "builder")]
    assert names(world) == []


def test_an_agent_that_comes_back_has_a_new_outbox(world):
    """The producer that has the old file open notices at its next event, and so does the sender."""
    old = world.boxes["builder"].status().stream
    assert look(world) == [("retired", "builder")]
    (receipt,) = world.enqueue("builder", 1, first=1)
    world.run(1_000)
    assert (receipt.seq, receipt.state) == (1, "waiting")
    assert world.boxes["builder"].status().stream != old
    assert world.numbers("builder") == [0, 1]


@pytest.mark.parametrize("after_ms", [0, 50 * DAY_MS])
def test_it_stays_for_as_long_as_it_is_set(world, after_ms):
    """0 means for ever; a file that was touched since is too young."""
    before = names(world)
    assert look(world, after_ms) == []
    assert names(world) == before


def waiting(world):
    """An event that nobody has sent yet."""
    world.boxes["builder"].enqueue("insight", 1)


def dead_letter(world):
    """An event that was set aside."""
    world.relay.behave = lambda request: answer(422)
    world.enqueue("builder", 1, first=1)
    world.run(1_000)


def remembered_key(world):
    """A key that is still recognised when it is given again."""
    world.enqueue("builder", 1, first=1)
    world.run(1_000)
    with opened(world) as box, box.transaction(durable=False):
        box.run("UPDATE receipts SET at_ms = ?", world.clock.wall_ms())


def paused(world):
    """A person's pause, which holds for what comes later."""
    with opened(world) as box:
        pause(box, world.clock.wall_ms())


def gap(world):
    """A gap that the relay was not told of yet."""
    with opened(world) as box, box.transaction(durable=False):
        row = (5, GAP_KIND, "key-of-gap", b"{}", "gap", 0, 0, b"", None, None, 0)
        box.run(
            "INSERT INTO events (seq, kind, key, wire_payload, shape, occurred_at_ms, accepted_at_ms, digest,"
            " dedupe_key, extra, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *row,
        )


@contextlib.contextmanager
def opened(world):
    """The file, to change something in it."""
    box = open_outbox(world.state, world.state.outbox_path("builder"))
    try:
        yield box
    finally:
        box.close()


@pytest.mark.parametrize("use", [waiting, dead_letter, remembered_key, paused, gap], ids=lambda f: f.__name__)
def test_what_is_of_use_stays(world, use):
    """However long ago it was touched."""
    use(world)
    for path in world.state.agents.iterdir():
        os.utime(path, (1, 1))
    before = names(world)
    assert look(world) == []
    assert names(world) == before


def test_another_sender_is_left_alone(world):
    """A flush that is at work in another process keeps its file."""
    world.engine.resign()
    text = (
        "import sys; from pathlib import Path; from outbox.store.directory import StateDirectory\n"
        "from outbox.store.file import open_outbox\n"
        "state = StateDirectory(Path(sys.argv[1])); box = open_outbox(state, state.outbox_path('builder'))\n"
        "box.become_sender(); print('there', flush=True); sys.stdin.read()"
    )
    with program(world.folder, text, str(world.folder)) as other:
        assert other.stdout.readline() == "there\n"
        assert look(world) == []
    assert names(world) != []
    world.run(5_000)  # what was seen at work looks once more, and forgets old keys
    age(world, 40 * DAY_MS)
    assert look(world) == [("retired", "builder")]


def test_a_reader_is_waited_for(world):
    """Who reads an older state of the file keeps its log in use: the file goes at a later look."""
    world.engine.resign()
    path = world.state.outbox_path("builder")
    with opened(world) as reader, opened(world) as writer:
        with reader.snapshot():
            reader.one("SELECT waiting FROM outbox")
            with writer.transaction(durable=False):
                writer.run("UPDATE outbox SET rules = rules")
            assert not retire(world.state, path, world.clock.wall_ms())
        assert retire(world.state, path, world.clock.wall_ms())


PRODUCER = """
import random, sys, time
from outbox import Outbox
state, agent, seed = sys.argv[1:]
chance = random.Random(int(seed))
outbox = Outbox.open(agent, state_dir=state)
for n in range(40):
    receipt = outbox.enqueue("session-message", {"from": agent, "body": "x", "n": n})
    print(receipt.idempotency_key, flush=True)
    time.sleep(chance.choice([0, 0.001, 0.02, 0.3]))
"""


def test_no_accepted_event_is_lost_to_a_retirement(tmp_path):
    """Producers write while their files are removed again and again: each event with a receipt arrives."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    state, retired, over = StateDirectory(tmp_path / "state").create(), [], threading.Event()
    with (
        RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay,
        engine_running(state.path, relay.url, bounds__receipt_window_s=0) as running,
        contextlib.ExitStack() as stack,
    ):

        def keep_retiring():
            retirement = Retirement(state, lambda _event, fields: retired.append(fields["agent"]))
            watch = FileWatch(state)
            while not over.is_set():
                for path in watch.changed():
                    running.engine.wake(path)
                retirement.turn(running.engine, watch.paths, 1)
                time.sleep(0.002)

        thread = threading.Thread(target=keep_retiring)
        thread.start()
        try:
            producers = [
                stack.enter_context(program(state.path, PRODUCER, str(state.path), agent, str(seed + number)))
                for number, agent in enumerate(["a", "a", "b"])
            ]
            told = [producer.communicate(timeout=60) for producer in producers]
        finally:
            over.set()
            thread.join()
        print(*(errors for _, errors in told))
        assert [errors for _, errors in told] == ["", "", ""]
        accepted = {key for keys, _ in told for key in keys.split()}
        assert len(accepted) == 120
        running.wake()
        held = wait_for(lambda: len(events := relay.events()) >= 120 and {event["key"] for event in events})
    assert held == accepted
    assert len(retired) > 5, "the files were hardly ever removed: the test shows nothing"


def test_the_daemon_retires(tmp_path, monkeypatch):
    """`bounds.retire_after_s` in a real daemon; it begins an hour after the start, which is over here."""
    monkeypatch.setattr("outbox.delivery.clock.HOUR_MS", 0)
    monkeypatch.setattr("outbox.daemon.supervisor._HOUSEKEEPING_S", 0.05)
    said = []
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        flags = {
            "relay.url": relay.url,
            "relay.token": TOKEN,
            "bounds.retire_after_s": 0.5,
            "bounds.receipt_window_s": 0,
            "daemon.poll_interval_s": 0.05,
        }
        settings = load(flags, environ={})
        state = StateDirectory(tmp_path / "state").create()
        with Outbox.open("builder", state_dir=state.path) as outbox:
            outbox.enqueue("session-message", {"from": "builder", "body": "x", "n": 0})
        daemon = Daemon(
            settings, state, lambda: settings, "0", lambda event, fields: said.append((event, fields))
        )

        def end_it():
            with contextlib.suppress(AssertionError):
                wait_for(lambda: "retired" in [event for event, _ in said])
            daemon.stop()

        thread = threading.Thread(target=end_it)
        thread.start()
        assert daemon.run() == 0
        thread.join()
        assert [json.loads(event["body"])["n"] for event in relay.events()] == [0]
    assert ("retired", {"agent": "builder", "file": state.outbox_path("builder").name}) in said
    assert list(state.outbox_files()) == []


def test_who_closes_an_old_file_leaves_the_new_log_alone(world):
    """A connection to a removed file ends with a checkpoint: the log of the new file, by its name, stays."""
    path = world.state.outbox_path("builder")
    world.engine.resign()
    old = open_outbox(world.state, path)
    assert retire(world.state, path, world.clock.wall_ms())
    (receipt,) = world.boxes["builder"].enqueue_many([{"kind": "insight", "payload": {"n": 7}}])
    old.close(checkpoint=True)
    assert path.with_name(f"{path.name}-wal").stat().st_size
    with opened(world) as box:
        assert box.one("SELECT key FROM events") == (receipt.idempotency_key,)


def test_a_checkpoint_at_the_end_waits_for_nobody(world):
    """Where the file is being replaced, it closes without one, and at once."""
    box = open_outbox(world.state, world.state.outbox_path("builder"))
    byte = lifecycle_byte(box.path.name)
    assert box.locks.try_exclusive(byte)
    try:
        box.close(checkpoint=True)
        assert box.closed
    finally:
        box.locks.release(byte)
