"""The count of lost calls, and what was noted of a session."""

import os
import random
import threading

from outbox.capture.hook_faults import note_fault, read_faults
from outbox.capture.hook_session import SessionNotes, insight_payload
from outbox.store.directory import StateDirectory
from outbox.store.reserve import keep_reserve


def test_none_yet(tmp_path):
    """No file, no faults; looking makes nothing."""
    assert read_faults(StateDirectory(tmp_path / "state")) is None
    assert not (tmp_path / "state").exists()


def test_each_is_counted_and_the_last_is_told(tmp_path):
    """In a folder and a file for their owner alone, whatever stands in the sentence."""
    state = StateDirectory(tmp_path / "state")
    assert note_fault(state, "the first", 5)
    assert note_fault(state, "two\nlines \x1b[31m\ud800", 7)
    found = read_faults(state)
    assert (found.lost, found.last_at_ms) == (2, 7)
    assert "two" in found.last
    assert "\n" not in found.last
    assert "\x1b" not in found.last
    file = state.path / "hooks" / "faults"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_the_file_stays_small_and_the_count_true(tmp_path):
    """Old lines go, their number stays; several writers lose none of it."""
    state = StateDirectory(tmp_path / "state")

    def many():
        for number in range(150):
            assert note_fault(state, f"{number} " + "x" * 450, number)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_faults(state).lost == 600
    assert (state.path / "hooks" / "faults").stat().st_size < 80_000


def test_a_line_that_is_none_costs_that_line_only(tmp_path):
    """Digits of other alphabets, and numbers that nobody wrote, are damage: they end no `outbox status`."""
    state = StateDirectory(tmp_path / "state")
    assert note_fault(state, "sound", 5)
    with (state.path / "hooks" / "faults").open("ab") as file:
        file.write("² 1 not ours\n7 ³ not ours\n".encode() + b"9" * 5_000 + b" 1 not ours\n")
    assert read_faults(state) == (1, 5, "sound")


def test_where_nothing_can_be_noted_nothing_is_raised(tmp_path):
    """A file stands where the folder should be."""
    (tmp_path / "state").write_text("")
    state = StateDirectory(tmp_path / "state")
    assert note_fault(state, "lost", 1) is False
    assert read_faults(state) is None


def test_on_a_full_disk_the_reserve_is_given_up_for_it(tmp_path, monkeypatch):
    """The first try fails as on a full disk; with what the reserve frees the second goes well."""
    state = StateDirectory(tmp_path / "state").create()
    keep_reserve(state)
    write = os.write

    def full(fd, data):
        if state.reserve_file.exists():
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    assert note_fault(state, "lost", 1)
    assert read_faults(state).lost == 1


def test_a_session_is_added_up(tmp_path):
    """Messages by role, from the first moment to the last; another session's are not among them."""
    notes = SessionNotes(tmp_path / "hooks" / "sessions", "codex", "s")
    SessionNotes(tmp_path / "hooks" / "sessions", "codex", "t").add("tool", 1, 0)
    for role, at_ms, redacted in (("status", 1_000, 0), ("user", 2_000, 1), ("tool", 1_500, 0)):
        notes.add(role, at_ms, redacted)
    tally = notes.tally("status", 61_000, 2)
    assert tally == (1_000, 61_000, {"status": 2, "user": 1, "tool": 1}, 3)
    assert '"durationMs":60000' in insight_payload("a", "codex", "s", "other", tally)
    assert "after 1 min 0 s: 4 messages recorded" in insight_payload("a", "codex", "s", None, tally)


def test_notes_that_are_broken_cost_a_count_only(tmp_path):
    """Half a line, other bytes, other words."""
    folder = tmp_path / "hooks" / "sessions"
    notes = SessionNotes(folder, "codex", "s")
    notes.add("user", 5, 0)
    seed = random.randrange(2**32)
    print("seed", seed)
    with next(folder.iterdir()).open("ab") as file:
        file.write(random.Random(seed).randbytes(200) + b"\n7 nobody 0\n8 user x\n9")
    assert notes.tally("status", 10, 0).messages == {"status": 1, "user": 1}


def test_notes_with_a_number_that_nobody_wrote(tmp_path):
    """They cost a count: a session's end is recorded all the same."""
    notes = SessionNotes(tmp_path / "sessions", "codex", "s")
    notes.add("user", 1_000, 0)
    (file,) = (tmp_path / "sessions").iterdir()
    file.write_bytes(file.read_bytes() + b"9" * 5_000 + b" user 0\n")
    assert notes.tally("status", 2_000, 0).messages == {"status": 1, "user": 1}


def test_old_notes_go(tmp_path):
    """A month after the last one."""
    folder = tmp_path / "hooks" / "sessions"
    old, new = (SessionNotes(folder, "codex", name) for name in ("old", "new"))
    old.add("user", 1, 0)
    (file,) = folder.iterdir()
    new.add("user", 1, 0)
    os.utime(file, (1_000, 1_000))
    new.forget_old(40 * 24 * 3_600_000 + 1_000_000)
    assert not file.exists()
    assert len(list(folder.iterdir())) == 1
