"""Any sequence of acts of producers, sender, people and time on two agents' outboxes keeps the promises.

Each step is done to real files and to plain lists; besides, a ledger of what the relay would have got is
held against the promises themselves: order, one text for each key, nothing twice, nobody else's event.
"""

import contextlib
import tempfile
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from model import PromisedOutbox
from store import boxes
from store.later_schema import LATER, upgrade

from outbox.errors import OutboxError, StoreClosed, StoreHeld
from outbox.gap import GAP_KIND, widen
from outbox.outcome import Ack, Bury, Reason, Release
from outbox.store import schema
from outbox.store.dead import discard, replay
from outbox.store.dropping import expire
from outbox.store.enqueue import enqueue, enqueue_together
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.people import is_paused, pause, resume, skip
from outbox.store.receipts import forget_old
from outbox.store.retiring import retire
from outbox.store.salvage import set_aside
from outbox.store.sending import claim, recover, settle
from outbox.store.verify import verify_counters

AGENTS = ["builder", "../builder"]
WINDOW_MS = 60
EVENTS = st.fixed_dictionaries(
    {
        "key": st.sampled_from([f"k-{n}" for n in range(5)]) | st.none(),
        "size": st.integers(1, 60),
        "kind": st.sampled_from(["session-message", "insight"]),
        "dedupe_key": st.sampled_from([None, None, "one", "two"]),
    }
)
OUTCOMES = st.tuples(
    st.sampled_from(["ack", "ack", "ack", "tool_error", "release", "bury"]), st.booleans(), st.booleans()
)


ACTS = [
    *["enqueue"] * 4, *["enqueue_many"] * 2, "producer_dies",
    *["claim"] * 4, *["settle"] * 4, "sender_dies", "settle_too_late",
    "skip", *["replay_or_discard"] * 2, "pause_or_resume",
    "time_passes", "time_passes", "expire", "forget", "retire", "set_aside", "new_release",
]  # fmt: skip


class Side:
    """One agent: its real outbox, open as a producer and as the sender; its lists; what its relay got."""

    def __init__(self, state, agent, bounds):
        self.state, self.agent, self.bounds = state, agent, bounds
        self.relay, self.texts = [], {}
        self.begin(boxes.NOW)

    def begin(self, now_ms):
        """A new file, and new lists."""
        names = ("max_events", "max_bytes", "max_dead")
        self.plain = PromisedOutbox(
            *(self.bounds[name] for name in names), self.bounds["overflow"] == "refuse",
            now_ms=now_ms, window_ms=WINDOW_MS,
        )  # fmt: skip
        self.sender = boxes.make_box(self.state, self.agent, receipt_window_ms=WINDOW_MS, **self.bounds)
        self.producer = self.opened()
        self.taken = self.old = None

    def opened(self):
        """The file, opened once more."""
        return open_outbox(self.state, self.state.outbox_path(self.agent))

    def close(self):
        """Leave nothing open."""
        self.sender.close()
        self.producer.close()

    def reopen(self):
        """Whoever had it open begins again."""
        self.close()
        self.sender, self.producer = self.opened(), self.opened()

    def drawn(self, given):
        """An event as a producer makes it, and as the lists take it."""
        mode = {"mode": "coalesce", "dedupe_key": given["dedupe_key"]} if given["dedupe_key"] else {}
        event = boxes.event(
            {"b": "x" * given["size"]}, kind=given["kind"], agent=self.agent, idempotency_key=given["key"],
            occurred_at_ms=given["size"], **mode,
        )  # fmt: skip
        size = len(event.wire_payload)
        return event, (event.key, given["kind"], given["size"], size, given["dedupe_key"])

    def note(self, events, results):
        """What was taken has its text for good."""
        for event, result in zip(events, results, strict=True):
            if not isinstance(result, OutboxError) and not result.duplicate:
                self.texts[event.key] = event.wire_payload


class KeepsItsPromises(RuleBasedStateMachine):
    """Two agents of one state directory."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.sides = []
        self.installed = pytest.MonkeyPatch()

    @initialize(
        max_events=st.integers(1, 8),
        max_bytes=st.sampled_from([300, 700, 5_000]),
        max_dead=st.integers(0, 3),
        overflow=st.sampled_from(["refuse", "drop-oldest", "drop-oldest"]),
    )
    def begin(self, **bounds):
        """Bounds are part of each example."""
        state = boxes.state_in(Path(self.folder.name) / "state")
        self.sides = [Side(state, agent, bounds) for agent in AGENTS]

    def teardown(self):
        """Leave nothing open."""
        for side in self.sides:
            side.close()
        self.installed.undo()
        self.folder.cleanup()

    def any_of(self, data, fits=lambda side: True):
        """One of the sides that this act applies to; None when there is none."""
        found = [side for side in self.sides if fits(side)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def act(self, data):
        """One act: of rules of their own hypothesis would leave some out of a whole example."""
        name = data.draw(st.sampled_from(ACTS))
        getattr(self, name)(data)

    # Producers

    def enqueue(self, data):
        """A producer hands over one event."""
        self.hand_over(self.any_of(data), [data.draw(EVENTS)], enqueue_together)

    def enqueue_many(self, data):
        """A producer hands over several, with one commit."""
        given = data.draw(st.lists(EVENTS, min_size=2, max_size=5))
        self.hand_over(self.any_of(data), given, enqueue)

    def hand_over(self, side, given, how):
        """The real outbox and the lists say the same of each."""
        drawn = [side.drawn(one) for one in given]
        events = [event for event, _ in drawn]
        results = how(side.producer, events, now_ms=side.plain.now_ms)
        assert [
            result.code if isinstance(result, OutboxError) else (result.seq, result.duplicate, result.state)
            for result in results
        ] == side.plain.enqueue_many([as_listed for _, as_listed in drawn])
        side.note(events, results)

    def producer_dies(self, data):
        """It is opened anew; nobody else notices."""
        side = self.any_of(data)
        side.producer.close()
        side.producer = side.opened()

    # The sender

    def claim(self, data):
        """The sender takes the head run: its own agent's events, in order, with the texts they came with."""
        number = data.draw(st.integers(1, 4))
        unsafe = data.draw(st.booleans())
        side = self.any_of(data, lambda one: one.taken is None and one.plain.rows)
        if side is None:
            return
        expected = side.plain.claim(number, unsafe)
        side.taken = claim(side.sender, boxes.first(number), unsafe=unsafe, now_ms=side.plain.now_ms)
        assert [(row.seq, row.sends, row.attempts, row.crashes) for row in side.taken.rows] == [
            (row.seq, row.sends, row.attempts, row.crashes) for row in expected
        ]
        for row in side.taken.rows:
            assert row.sound
            assert row.kind == GAP_KIND or row.wire_payload == side.texts[row.key]

    def settle(self, data):
        """The relay answered: each event of the claim goes its own way."""
        outcomes = data.draw(st.lists(OUTCOMES, min_size=4, max_size=4))
        side = self.any_of(data, lambda one: one.taken is not None)
        if side is None:
            return
        chosen = list(zip(side.taken.rows, outcomes, strict=False))
        side.plain.settle({row.seq: outcome for row, outcome in chosen})
        settlements = [as_settlement(row, *outcome) for row, outcome in chosen]
        settle(side.sender, side.taken, settlements, now_ms=side.plain.now_ms)
        got = [row for row, outcome in chosen if outcome[0] in {"ack", "tool_error"}]
        behind = [row.seq for row in side.plain.rows if row.seq > side.taken.rows[-1].seq]
        assert all(row.seq < seq for row in got for seq in behind)
        side.relay += got
        side.old, side.taken = side.taken, None

    def sender_dies(self, data):
        """Its claim, if it had one, is taken over; whoever comes back too late changes nothing."""
        side = self.any_of(data)
        side.sender.close()
        side.sender = side.opened()
        assert recover(side.sender, now_ms=side.plain.now_ms) == side.plain.crash()
        side.old, side.taken = side.taken or side.old, None

    def settle_too_late(self, data):
        """A sender that lost its claim, or settled it before, changes nothing."""
        side = self.any_of(data, lambda one: one.old is not None)
        if side is None:
            return
        before = boxes.contents(side.sender)
        with contextlib.suppress(StoreHeld):
            acks = [Ack(row.seq) for row in side.old.rows]
            settle(side.sender, side.old, acks, now_ms=side.plain.now_ms)
        assert boxes.contents(side.sender) == before

    # People

    def skip(self, data):
        """A person sets a waiting event aside."""
        side = self.any_of(data, lambda one: one.plain.idle())
        if side is not None:
            row = data.draw(st.sampled_from(side.plain.idle()))
            skip(side.producer, row.seq, side.plain.now_ms)
            side.plain.skip(row)

    def replay_or_discard(self, data):
        """A person sends a dead letter again, or throws it away."""
        again = data.draw(st.booleans())
        side = self.any_of(data, lambda one: one.plain.dead)
        if side is None:
            return
        row = data.draw(st.sampled_from(side.plain.dead))
        if again:
            new_seq = replay(side.producer, row.seq, side.plain.now_ms)
            row.accepted_at_ms = side.plain.now_ms
            side.plain.replay(row)
            assert new_seq == row.seq
        else:
            discard(side.producer, row.seq, side.plain.now_ms)
            side.plain.discard(row)

    def pause_or_resume(self, data):
        """A person stops one agent, or lets it go on."""
        side = self.any_of(data)
        side.plain.paused = not side.plain.paused
        if side.plain.paused:
            pause(side.producer, side.plain.now_ms)
        else:
            resume(side.producer)

    # Time

    def time_passes(self, data):
        """Nothing happens by itself."""
        later_ms = data.draw(st.integers(1, 50))
        self.any_of(data).plain.now_ms += later_ms

    def expire(self, data):
        """What has waited too long goes, and is told of."""
        age_ms = data.draw(st.integers(0, 60))
        side = self.any_of(data)
        horizon_ms, now_ms = side.plain.now_ms - age_ms, side.plain.now_ms
        assert expire(side.sender, horizon_ms, now_ms=now_ms) == side.plain.expire(horizon_ms)

    def forget(self, data):
        """Keys are remembered for the window, and no longer."""
        side = self.any_of(data)
        assert forget_old(side.sender, side.sender.bounds, side.plain.now_ms) == side.plain.forget()

    # Files

    def retire(self, data):
        """The file of an agent goes when nothing of it is of use, and only then; it takes nothing more."""
        side = self.any_of(data)
        path = side.state.outbox_path(side.agent)
        stream, finished = side.sender.stream, side.plain.is_finished
        assert retire(side.state, path, side.plain.now_ms) == finished
        assert path.exists() != finished
        if finished:
            event, _ = side.drawn({"key": None, "size": 1, "kind": "insight", "dedupe_key": None})
            try:
                enqueue(side.producer, [event], now_ms=side.plain.now_ms)
            except StoreClosed:
                side.close()
                side.relay, side.texts = [], {}
                side.begin(side.plain.now_ms)
                assert side.sender.stream != stream
            else:
                raise AssertionError("an event was accepted into a file that is gone")

    def set_aside(self, data):
        """A sound file stays as it is; one whose rows are whole gives all of them to the new file."""
        harmed = data.draw(st.booleans())
        side = self.any_of(data)
        side.close()
        path = side.state.outbox_path(side.agent)
        if harmed:
            orphan_an_index(path)
        damage = set_aside(side.state, path, None, side.plain.now_ms)
        side.sender, side.producer = side.opened(), side.opened()
        if not harmed:
            assert damage is None
            return
        assert (damage.agent, damage.lost, damage.outcome_unknown) == (side.agent, 0, side.plain.mend())
        side.old, side.taken = side.taken or side.old, None

    def new_release(self, _data):
        """Another schema is installed: whoever opens a file now brings it there, the others go on."""
        if schema.VERSION < LATER:
            upgrade(self.installed)

    # What always holds

    @invariant()
    def the_files_say_what_the_lists_say(self):
        """What waits, what is dead, what is remembered, what a person is shown, whether it is paused."""
        for side in self.sides:
            box, plain = side.producer, side.plain
            stored = box.rows("SELECT seq, kind, key FROM events ORDER BY seq")
            assert [(seq, "gap" if kind == GAP_KIND else key) for seq, kind, key in stored] == [
                (row.seq, row.key) for row in plain.rows
            ]
            assert box.rows("SELECT seq, key FROM dead ORDER BY seq") == [
                (row.seq, row.key) for row in plain.dead
            ]
            remembered = {key: (seq, state) for key, seq, state in box.rows(
                "SELECT key, seq, state FROM receipts")}  # fmt: skip
            assert remembered == {key: (seq, state) for key, (seq, _, _, state) in plain.memory.items()}
            status = read_status(box)
            assert (status.waiting, status.dead, status.accepted, status.delivered, status.dropped) == (
                len(plain.events()), len(plain.dead), plain.accepted, plain.delivered, plain.dropped,
            )  # fmt: skip
            assert is_paused(box) == plain.paused

    @invariant()
    def the_counters_are_true(self):
        """They agree with the rows."""
        for side in self.sides:
            assert verify_counters(side.sender) == []

    @invariant()
    def every_loss_is_told_in_its_place(self):
        """Each waiting event that a bound took is counted by one gap, until that is delivered or refused."""
        for side in self.sides:
            told = {
                seq: (gap["firstSeq"], gap["lastSeq"], gap["count"])
                for seq, gap in boxes.gaps(side.producer).items()
            }
            assert told == {
                row.seq: (
                    min(lost.seq for lost in row.lost), max(lost.seq for lost in row.lost), len(row.lost),
                )
                for row in side.plain.rows
                if row.is_gap
            }  # fmt: skip

    @invariant()
    def the_relay_got_each_once_and_it_waits_no_more(self):
        """A number comes once, and is neither queued nor a dead letter afterwards."""
        for side in self.sides:
            got = [row.seq for row in side.relay if row.kind != GAP_KIND]
            assert len(set(got)) == len(got)
            assert not set(got) & {row.seq for row in (*side.plain.rows, *side.plain.dead) if not row.is_gap}


def as_settlement(row, outcome, counted, sent):
    """What the sender hands over for this outcome."""
    if outcome == "release":
        return Release(row.seq, sent, row.attempts + counted, boxes.trouble() if counted else None)
    if outcome == "bury":
        return Bury(row.seq, Reason.REJECTED, row.attempts, boxes.trouble())
    return Ack(row.seq, tool_error=outcome == "tool_error")


def orphan_an_index(path):
    """Damage that harms no row: the schema forgets an index, whose pages are nobody's from then on."""
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.pragma("writable_schema", 1)
        db.execute("DELETE FROM sqlite_schema WHERE name = 'receipts_by_time'")


def play(examples, **more):
    """Play so many sequences; raises what the first that broke a promise raised."""
    run_state_machine_as_test(
        KeepsItsPromises,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_any_sequence_of_acts_keeps_the_promises(rounds):
    """P1 to P3, P6, P8, P10 and P11, on real files; `--rounds N` plays N sequences."""
    play(rounds(25))


# The comparison itself --------------------------------------------------------------------------------------

FAULTS = {
    "delivered keys are forgotten": ("outbox.store.sending.remember", lambda *_: None),
    "blamed too early": ("outbox.store.sending._CRASHES_FOR_BLAME", 2),
    "repeated after mending": ("outbox.store.rebuild._Rebuilding._may_be_in_flight", lambda *_: False),
    "told of one alone": ("outbox.store.dropping.widen", lambda _, lost, reason: widen(None, lost, reason)),
}
FOUND_BY_CHANCE = FAULTS.keys() - {"blamed too early"}  # one event that crashes twice is seldom
SIDE = object()  # in the place of an answer: the first agent's side
ENQUEUE = ("enqueue", SIDE, {"key": None, "size": 9, "kind": "insight", "dedupe_key": None})
CLAIM, CLAIM_UNSAFE = ("claim", 1, False, SIDE), ("claim", 1, True, SIDE)
DELIVER = ("settle", [("ack", False, True)] * 4, SIDE)
DIE, MEND = ("sender_dies", SIDE), ("set_aside", True, SIDE)
WAYS = {
    "delivered keys are forgotten": [ENQUEUE, CLAIM, DELIVER],
    "blamed too early": [ENQUEUE, CLAIM, DIE, CLAIM, DIE, CLAIM, DIE, CLAIM],
    "repeated after mending": [ENQUEUE, CLAIM_UNSAFE, MEND],
    "told of one alone": [ENQUEUE] * 4,
}


class Answers:
    """In the place of hypothesis' own data: what is drawn stands here, in order."""

    def __init__(self, answers):
        self._answers = iter(answers)

    def draw(self, _strategy):
        """The next one."""
        return next(self._answers)


def play_way(way):
    """Play these acts instead of any, with what always holds looked at after each."""
    machine = KeepsItsPromises()
    try:
        machine.begin(max_events=2, max_bytes=5_000, max_dead=3, overflow="drop-oldest")
        for name, *answers in way:
            getattr(machine, name)(Answers(machine.sides[0] if one is SIDE else one for one in answers))
            for held in machine.invariants:
                held.function(machine)
    finally:
        machine.teardown()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_sequence_that_meets_the_fault_finds_it_out(monkeypatch, fault):
    """Each of these faults is noticed for certain, and it is the fault that is noticed."""
    play_way(WAYS[fault])
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        play_way(WAYS[fault])


@pytest.mark.parametrize("fault", sorted(FOUND_BY_CHANCE))
def test_a_store_that_breaks_a_promise_is_found_out(monkeypatch, fault):
    """Sequences of chance are worth something: they meet the fault, and it is noticed."""
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        play(500, phases=[Phase.generate], database=None, report_multiple_bugs=False)
