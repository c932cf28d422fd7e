"""A power cut at any point of an outbox's life: what was promised is there, whatever else the disk kept."""

import contextlib
import random
import shutil
from collections import Counter

import apsw
from boxes import (
    NOW,
    ack,
    dead_seqs,
    deliver,
    event,
    kill,
    make_box,
    put,
    seqs,
    state_in,
    take,
    tool_call,
)  # fmt: skip
from later_schema import LATER, upgrade
from power_check import Story, check, next_state
from power_disk import Least, Platter, RecordedDisk, never_flushed
from power_run import AGENTS, Run

from outbox.store import schema
from outbox.store.file import open_outbox
from outbox.store.sending import recover, settle
from outbox.store.verify import unsound_rows, verify_counters, verify_pages

ACTS = 90
POINTS = 300


def test_a_power_cut_at_any_point_loses_nothing_that_was_promised(tmp_path, monkeypatch, rounds, seed):
    """Every commit, checkpoint, new file, salvage and removal is cut off at every kind of place."""
    runs = rounds(1)
    for number in range(runs):
        play(tmp_path / str(number), f"{seed}/{number}", monkeypatch, POINTS if runs == 1 else POINTS // 3)
        shutil.rmtree(tmp_path / str(number))
        shutil.rmtree(tmp_path / f"{number}-elsewhere")


def play(folder, name, monkeypatch, number):
    """One run, and a power cut at so many points of it."""
    folder.mkdir()
    chance = random.Random(name)
    disk, elsewhere = RecordedDisk(folder), folder.with_name(f"{folder.name}-elsewhere")
    with monkeypatch.context() as patch, disk.recording(patch):
        run = Run(disk, chance, patch, elsewhere)
        run.play(ACTS)
    log, platter, stories = disk.log, Platter(folder), {agent: Story() for agent in AGENTS}
    points = chosen(log, number, random.Random(f"{name}/points"))
    with never_flushed(monkeypatch):
        for index, entry in enumerate(log):
            if index in points:
                cut(folder, name, index, log, platter, stories, run)
            platter.play(entry)
            if entry.act == "note":
                stories[entry.note.agent].hear(entry.note)


def chosen(log, number, chance):
    """So many points: half of those where names change or are flushed, which is seldom, and any others."""
    names = [index for index, entry in enumerate(log) if entry.act in ("names", "sync_folder")]
    rare = {index + chance.randint(0, 1) for index in chance.sample(names, min(len(names), number) // 2)}
    return rare | set(chance.sample(range(len(log)), max(0, min(number, len(log)) - len(rare))))


def cut(folder, name, index, log, platter, stories, run):
    """The power fails before entry `index` of the log."""
    left = folder / f"cut-{index}"
    left.mkdir()
    platter.lay_out(left, random.Random(f"{name}/{index}"))
    nexts = {agent: next_state(log, agent, index) for agent in stories}
    try:
        check(left, stories, nexts)
    except BaseException:
        act = max((act for act in run.acts if act[2] <= index), key=lambda act: act[2], default=None)
        print(f"run {name}, cut before entry {index} of {len(log)} ({log[index].act}), in {act}; see {left}")
        raise
    shutil.rmtree(left)


def test_a_settlement_that_was_not_flushed_repeats_no_unsafe_call(tmp_path, monkeypatch):
    """What the relay answered is lost in the cut; that the call was sent is not."""
    disk = RecordedDisk(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with disk.recording(monkeypatch):
        box = make_box(state_in(f"{disk.root}/state"))
        put(box, tool_call(idempotency_key="call"))
        taken = take(box, unsafe=True)
        settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
        box.close()
    platter = Platter(disk.root)
    for entry in disk.log:
        platter.play(entry)
    (tmp_path / "left").mkdir()
    platter.lay_out(tmp_path / "left", Least())
    state = state_in(tmp_path / "left/state")
    left = open_outbox(state, state.outbox_path("builder"))
    assert recover(left, now_ms=NOW) == [1]
    assert (seqs(left), dead_seqs(left)) == ([], [1])
    left.close()


def test_a_power_cut_at_any_point_of_a_migration_leaves_one_version_or_the_other(tmp_path, monkeypatch, seed):
    """Both steps are cut off before each entry of the log; the next to open the file goes on from there."""
    (tmp_path / "disk").mkdir()
    disk, older = RecordedDisk(tmp_path / "disk"), schema.VERSION
    with monkeypatch.context() as patch, disk.recording(patch):
        box = make_box(state_in(f"{disk.root}/state"))
        put(box, *(event({"n": n, "body": "x" * 700}, idempotency_key=f"key-{n}") for n in range(30)))
        kill(box, 3)
        deliver(box, 4)
        box.checkpoint(apsw.SQLITE_CHECKPOINT_PASSIVE)
        put(box, event(idempotency_key="key-30"))
        held, path = (seqs(box), dead_seqs(box)), box.path
        box.close()
        begins = len(disk.log)
        upgrade(patch)
        open_outbox(state_in(f"{disk.root}/state"), path).close(checkpoint=True)
    platter, versions = Platter(disk.root), Counter()
    with never_flushed(monkeypatch):
        for index, entry in enumerate((*disk.log, None)):
            if index >= begins:
                left = tmp_path / f"cut-{index}"
                left.mkdir()
                platter.lay_out(left, random.Random(f"{seed}/{index}"))
                versions[opened_by_either(left, held, monkeypatch, older)] += 1
                shutil.rmtree(left)
            if entry is not None:
                platter.play(entry)
    assert set(versions) == {older, older + 1, LATER}, versions


def opened_by_either(left, held, monkeypatch, older):
    """The version that was found: the older release goes on with its own, the later one with each."""
    state = state_in(left / "state")
    (path,) = state.outbox_files()
    with contextlib.closing(apsw.Connection(str(path))) as db:
        found = db.pragma("user_version")
    if found == older:
        look_through(state, path, held, older)
    with monkeypatch.context() as patch:
        upgrade(patch)
        look_through(state, path, held, LATER)
    return found


def look_through(state, path, held, version):
    """All that was there is there, and whole."""
    with contextlib.closing(open_outbox(state, path)) as box:
        assert box.one("PRAGMA user_version") == (version,)
        assert (seqs(box), dead_seqs(box)) == held
        assert verify_pages(box) == verify_counters(box) == unsound_rows(box) == []
        if version == LATER:
            assert box.one("SELECT count(label) FROM events") == (len(held[0]),)
            assert box.one("SELECT count(*) FROM labels") == (len(held[0]),)
