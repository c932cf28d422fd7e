"""What must hold of what a power cut left: all that was promised is there, and nothing that never was."""

import apsw
from boxes import NOW, ack, event, first, put
from power_run import held

from outbox.errors import StoreDamaged
from outbox.store.aside import is_being_replaced
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.relay_state import RelayState
from outbox.store.salvage import set_aside
from outbox.store.sending import claim, recover, settle
from outbox.store.verify import unsound_rows, verify_counters, verify_pages

NO_FILE = None


class Story:
    """One agent's outbox as the notes tell it, up to a moment."""

    def __init__(self):
        """There is no file."""
        self.states = [NO_FILE]  # what the file may hold: from the last promise on
        self.accepted = {}  # key -> seq, of this life of the file
        self.may_not_go = set()  # unsafe calls that were sent, and neither answered nor replayed
        self.is_damaged = self.is_retiring = False

    def hear(self, note):
        """The next note about this agent."""
        match note.what:
            case "commit":
                self.states.append(note.value)
            case "promise":
                self.states = self.states[-1:]
            case "accepted":
                self.accepted |= {key: seq for seq, key in note.value}
            case "sent":
                self.may_not_go |= set(note.value)
            case "answered":
                self.may_not_go -= set(note.value)
            case "damaged":
                self.is_damaged = True
            case "mended":
                self.is_damaged = False
            case "retiring":
                self.is_retiring = True
                self.states.append(NO_FILE)
            case "retired":
                self.is_retiring = False
                # Its keys were kept for as long as was promised: whoever imports one again means a new event.
                self.states, self.accepted, self.may_not_go = [NO_FILE], {}, set()


def next_state(log, agent, after):
    """What the commit that was under way would have made, or None: nothing was under way."""
    for entry in log[after:]:
        if entry.act == "note" and entry.note.agent == agent and entry.note.what in ("commit", "retired"):
            return [entry.note.value]
    return []


def check(folder, stories, nexts):
    """Start on what is left below `folder`, as the next daemon would."""
    state = StateDirectory(folder / "state")
    there = {path.name for path in state.outbox_files()}
    for agent, story in stories.items():
        allowed = [*story.states, *nexts[agent]]
        path = state.outbox_path(agent)
        if path.name not in there:
            assert NO_FILE in allowed, f"{agent}: the file is gone"
            continue
        state.create()
        box = _opened(state, path, story)
        try:
            _check_box(box, story, allowed)
            _go_on(box, story)
        finally:
            box.close()
    if state.relay_state.exists():
        RelayState(state.relay_state).close()


def _opened(state, path, story):
    """The file, set aside first where it is damaged; only damage of our own may ask for that."""
    if is_being_replaced(path):
        assert story.is_damaged, "it is hidden"
        set_aside(state, path, None, NOW)
    try:
        box = open_outbox(state, path)
        faults = verify_pages(box)
    except StoreDamaged as error:
        raise AssertionError(f"damaged by the cut: {error}") from error
    if faults and story.is_damaged:
        box.close()
        set_aside(state, path, None, NOW)
        box = open_outbox(state, path)
        faults = verify_pages(box)
    if faults:
        box.close()
    assert faults == []
    return box


def _check_box(box, story, allowed):
    now = held(box)
    assert now in allowed, "\n".join(["this never was, or is older than a promise:", now, *map(str, allowed)])
    assert verify_counters(box) == []
    assert unsound_rows(box) == []
    known = {
        row[0] for table in ("events", "dead", "receipts") for row in box.rows(f"SELECT key FROM {table}")
    }
    assert not story.accepted.keys() - known, "accepted and gone"


def _go_on(box, story):
    """The next sender: it repeats no unsafe call, and delivers the rest in order; seqs go on above."""
    box.become_sender()
    recover(box, now_ms=NOW)
    (seq,) = put(box, event({"n": "after"}))
    assert seq > max(story.accepted.values(), default=0)
    sent = []
    while taken := claim(box, first(50), unsafe=False, now_ms=NOW):
        sent += taken.rows
        settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    assert not story.may_not_go & {row.key for row in sent}, "an unsafe call goes twice"
    assert [row.seq for row in sent] == sorted(row.seq for row in sent)
    assert sent[-1].seq == seq
    assert verify_counters(box) == []
    box.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
    assert verify_pages(box) == []
    box.resign_sender()
