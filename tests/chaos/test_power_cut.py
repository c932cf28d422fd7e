"""A power cut at any point of an outbox's life: what was promised is there, whatever else the disk kept."""

import os
import random
import shutil

from power_check import Story, check, next_state
from power_disk import NeverFlushed, Platter, RecordedDisk
from power_run import AGENTS, Run

ACTS = 90
POINTS = 300


def test_a_power_cut_at_any_point_loses_nothing_that_was_promised(tmp_path, monkeypatch, rounds, seed):
    """Every commit, checkpoint, new file, salvage and removal is cut off at every kind of place."""
    for number in range(rounds(1)):
        name = f"{seed}/{number}"
        play(tmp_path / str(number), name, monkeypatch)
        shutil.rmtree(tmp_path / str(number))


def play(folder, name, monkeypatch):
    """One run, and a power cut at so many points of it."""
    folder.mkdir()
    chance = random.Random(name)
    disk = RecordedDisk(folder)
    with monkeypatch.context() as patch, disk.recording(patch):
        run = Run(disk, chance, patch)
        run.play(ACTS)
    log, platter, stories = disk.log, Platter(folder), {agent: Story() for agent in AGENTS}
    points = set(random.Random(f"{name}/points").sample(range(len(log)), min(POINTS, len(log))))
    unflushed = NeverFlushed()
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for index, entry in enumerate(log):
        if index in points:
            cut(folder, name, index, log, platter, stories, run)
        platter.play(entry)
        if entry.act == "note":
            stories[entry.note.agent].hear(entry.note)
    unflushed.unregister()


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
