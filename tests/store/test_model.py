"""Any sequence of acts leaves the store as it leaves plain lists: order, keys, bounds, gaps, counters."""

import contextlib
import tempfile
from pathlib import Path

import boxes
from boxes import NOW, first, make_box, state_in, trouble
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_outbox import PlainOutbox

from outbox.errors import StoreHeld
from outbox.gap import GAP_KIND
from outbox.outcome import Ack, Bury, Reason, Release
from outbox.store.dead import discard, replay
from outbox.store.dropping import expire
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.people import skip
from outbox.store.sending import claim, head, recover, settle
from outbox.store.verify import verify_counters

KEYS = st.sampled_from([f"k-{n}" for n in range(6)]) | st.none()
SIZES = st.integers(1, 60)
OUTCOMES = st.tuples(
    st.sampled_from(["ack", "ack", "tool_error", "release", "release", "bury"]), st.booleans(), st.booleans()
)


class AgainstPlainLists(RuleBasedStateMachine):
    """One outbox on a real file, and the same as plain lists."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.taken = None
        self.old = None
        self.now_ms = NOW

    @initialize(
        max_events=st.integers(1, 8),
        max_bytes=st.sampled_from([250, 700, 5_000]),
        max_dead=st.integers(0, 4),
        refuse=st.booleans(),
    )
    def begin(self, max_events, max_bytes, max_dead, refuse):
        """Bounds are part of each example."""
        self.plain = PlainOutbox(max_events, max_bytes, max_dead, refuse)
        self.box = make_box(
            state_in(Path(self.folder.name) / "state"), max_events=max_events, max_bytes=max_bytes,
            max_dead=max_dead, overflow="refuse" if refuse else "drop-oldest",
        )  # fmt: skip

    def teardown(self):
        """Leave nothing open."""
        if hasattr(self, "box"):
            self.box.close()
        self.folder.cleanup()

    # Producers

    @rule(
        key=KEYS,
        size=SIZES,
        kind=st.sampled_from(["session-message", "insight"]),
        dedupe_key=st.sampled_from([None, None, "one", "two"]),
        later_ms=st.integers(0, 5),
    )
    def enqueue(self, key, size, kind, dedupe_key, later_ms):
        """A producer hands over an event, perhaps under a key that was used before."""
        self.now_ms += later_ms
        mode = {"mode": "coalesce", "dedupe_key": dedupe_key} if dedupe_key else {}
        given = boxes.event({"b": "x" * size}, kind=kind, idempotency_key=key, occurred_at_ms=size, **mode)
        result = boxes.try_put(self.box, given, now_ms=self.now_ms)
        expected = self.plain.enqueue(
            given.key, kind, size, len(given.wire_payload), dedupe_key, self.now_ms, size
        )
        if isinstance(expected, str):
            assert getattr(result, "code", result) == expected
        elif expected[0] == "taken":
            assert (result.duplicate, result.state, result.seq) == (False, "waiting", expected[1])
        else:
            assert (result.duplicate, result.state, result.seq) == (True, expected[2], expected[1])

    # The sender

    @precondition(lambda self: self.taken is None and self.plain.rows)
    @rule(number=st.integers(1, 4), unsafe=st.booleans())
    def claim(self, number, unsafe):
        """The sender takes the head run."""
        expected = self.plain.claim(number, unsafe)
        self.taken = claim(self.box, first(number), unsafe=unsafe, now_ms=self.now_ms)
        assert [row.seq for row in self.taken.rows] == [row.seq for row in expected]
        assert all(row.sound for row in self.taken.rows)
        assert [(row.sends, row.attempts, row.crashes) for row in self.taken.rows] == [
            (row.sends, row.attempts, row.crashes) for row in expected
        ]

    @precondition(lambda self: self.taken is not None)
    @rule(outcomes=st.lists(OUTCOMES, min_size=4, max_size=4))
    def settle(self, outcomes):
        """The relay answered: each event of the claim goes its own way."""
        chosen = {row.seq: outcome for row, outcome in zip(self.taken.rows, outcomes, strict=False)}
        self.plain.settle(chosen)
        rows = {row.seq: row for row in self.taken.rows}
        settle(
            self.box,
            self.taken,
            [as_settlement(rows[seq], *outcome) for seq, outcome in chosen.items()],
            now_ms=self.now_ms,
        )
        self.old, self.taken = self.taken, None

    @precondition(lambda self: self.taken is not None)
    @rule()
    def crash(self):
        """The process dies: the file is opened anew, and the claim taken over."""
        path, state = self.box.path, self.box.state
        self.box.close()
        self.box = open_outbox(state, path)
        assert recover(self.box, now_ms=self.now_ms) == self.plain.crash()
        self.old, self.taken = self.taken, None

    @precondition(lambda self: self.old is not None)
    @rule()
    def settle_too_late(self):
        """A sender that lost its claim, or settled it before, changes nothing."""
        before = boxes.contents(self.box)
        with contextlib.suppress(StoreHeld):
            settle(self.box, self.old, [Ack(row.seq) for row in self.old.rows], now_ms=self.now_ms)
        assert boxes.contents(self.box) == before

    # People and time

    @precondition(lambda self: self.plain.idle())
    @rule(data=st.data())
    def skip(self, data):
        """A person sets a waiting event aside."""
        row = data.draw(st.sampled_from(self.plain.idle()))
        skip(self.box, row.seq, self.now_ms)
        self.plain.skip(row)

    @precondition(lambda self: self.plain.dead)
    @rule(data=st.data())
    def replay(self, data):
        """A person sends a dead letter again."""
        row = data.draw(st.sampled_from(self.plain.dead))
        new_seq = replay(self.box, row.seq, self.now_ms)
        row.accepted_at_ms = self.now_ms
        self.plain.replay(row)
        assert new_seq == row.seq

    @precondition(lambda self: self.plain.dead)
    @rule(data=st.data())
    def discard(self, data):
        """A person throws a dead letter away."""
        row = data.draw(st.sampled_from(self.plain.dead))
        discard(self.box, row.seq, self.now_ms)
        self.plain.discard(row)

    @rule(age_ms=st.integers(0, 20))
    def expire(self, age_ms):
        """Time passes."""
        horizon_ms = self.now_ms - age_ms
        assert expire(self.box, horizon_ms, now_ms=self.now_ms) == self.plain.expire(horizon_ms)

    # What always holds

    @invariant()
    def the_counters_are_true(self):
        """They agree with the rows."""
        if hasattr(self, "box"):
            assert verify_counters(self.box) == []

    @invariant()
    def the_rows_are_those_of_the_lists(self):
        """What waits, what is dead and what is remembered."""
        if not hasattr(self, "box"):
            return
        stored = self.box.rows("SELECT seq, kind, key FROM events ORDER BY seq")
        assert [(seq, "gap" if kind == GAP_KIND else key) for seq, kind, key in stored] == [
            (row.seq, row.key) for row in self.plain.rows
        ]
        assert self.box.rows("SELECT seq, key FROM dead ORDER BY seq") == [
            (row.seq, row.key) for row in self.plain.dead
        ]
        found = self.box.rows("SELECT key, seq, state FROM receipts")
        remembered = {key: (seq, state) for key, seq, state in found}
        assert remembered == {key: (seq, state) for key, (seq, _, _, state) in self.plain.memory.items()}

    @invariant()
    def the_status_tells_the_truth(self):
        """What a person is shown."""
        if not hasattr(self, "box"):
            return
        status, plain = read_status(self.box), self.plain
        flying = [row for row in plain.flying() if not row.is_gap]
        assert (status.waiting, status.in_flight, status.dead) == (
            len(plain.events()), len(flying), len(plain.dead),
        )  # fmt: skip
        assert (status.accepted, status.delivered, status.dropped) == (
            plain.accepted, plain.delivered, plain.dropped,
        )  # fmt: skip

    @invariant()
    def the_gaps_tell_what_was_lost(self):
        """In their places of the order."""
        if not hasattr(self, "box"):
            return
        expected = {
            row.seq: (
                min(lost.seq for lost in row.lost), max(lost.seq for lost in row.lost), len(row.lost),
                sum(lost.size for lost in row.lost), min(lost.occurred_at_ms for lost in row.lost),
                max(lost.occurred_at_ms for lost in row.lost),
            )
            for row in self.plain.rows
            if row.is_gap
        }  # fmt: skip
        told = {
            seq: (gap["firstSeq"], gap["lastSeq"], gap["count"], gap["bytes"], gap["fromAt"], gap["toAt"])
            for seq, gap in boxes.gaps(self.box).items()
        }
        assert told == expected


def as_settlement(row, outcome, counted, sent):
    """What the sender hands over for this outcome."""
    if outcome == "release":
        return Release(row.seq, sent, row.attempts + counted, trouble() if counted else None)
    if outcome == "bury":
        return Bury(row.seq, Reason.REJECTED, row.attempts, trouble())
    return Ack(row.seq, tool_error=outcome == "tool_error")


TestAgainstPlainLists = AgainstPlainLists.TestCase
TestAgainstPlainLists.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_the_plain_lists_would_notice_a_lost_event(box):
    """The comparison is worth something: an event removed behind the store's back is seen."""
    boxes.fill(box, 2)
    size = head(box).size_bytes
    with box.transaction(durable=True):
        box.run("DELETE FROM events WHERE seq = 1")
    assert [fault.split(":")[0] for fault in verify_counters(box)] == ["waiting", "waiting_bytes"]
    assert head(box).seq == 2
    with box.transaction(durable=True):
        box.run("UPDATE outbox SET waiting = 1, accepted = 1, waiting_bytes = waiting_bytes - ?", size)
