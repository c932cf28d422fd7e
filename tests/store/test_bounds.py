"""Bounds are loud: what is dropped, in which order, how the gap tells of it, and when an event is refused."""

import json
import os
from types import SimpleNamespace

import pytest
from boxes import (
    NOW,
    ack,
    bury,
    contents,
    counter,
    dead_seqs,
    deliver,
    event,
    fill,
    gaps,
    kill,
    put,
    receipt_of,
    release,
    seqs,
    take,
    total,
    trouble,
    try_put,
)  # fmt: skip

from outbox.errors import StoreFull, UsageError
from outbox.outcome import Reason
from outbox.store.dropping import expire
from outbox.store.enqueue import enqueue
from outbox.store.inspect import read_status
from outbox.store.people import skip
from outbox.store.sending import head, recover, settle


def sized(size, **fields):
    """An event whose wire text has exactly this many bytes."""
    fields = {"idempotency_key": f"k-{size}-{len(fields)}-{sized.number}"} | fields
    sized.number += 1
    bare = len(event({"b": ""}, **fields).wire_payload)
    made = event({"b": "x" * (size - bare)}, **fields)
    assert len(made.wire_payload) == size
    return made


sized.number = 0


def test_the_oldest_waiting_event_goes_first(make):
    """P10: a bound of five and eight events leave the newest five; three are counted as dropped."""
    box = make(max_events=5)
    put(box, *(event({"n": n}, idempotency_key=f"k-{n}") for n in range(8)))
    status = read_status(box)
    assert (status.waiting, status.dropped, status.accepted) == (5, 3, 8)
    assert seqs(box) == [1, 4, 5, 6, 7, 8]  # the gap stands where the first dropped event was
    assert [receipt_of(box, f"k-{n}") for n in range(4)] == ["dropped", "dropped", "dropped", None]
    assert total(box, "dropped:max_events") == 3


def test_the_gap_tells_what_was_lost(make):
    """Numbers, bytes, kinds and times of everything it stands for."""
    box = make(max_events=2)
    lost = [
        event({"n": 1}, occurred_at_ms=50),
        event({"n": 2}, kind="insight", occurred_at_ms=10),
        event({"n": 3}, occurred_at_ms=30),
    ]
    put(box, *lost)
    fill(box, 2)
    assert gaps(box) == {
        1: {
            "firstSeq": 1,
            "lastSeq": 3,
            "count": 3,
            "bytes": sum(len(one.wire_payload) for one in lost),
            "kinds": {"insight": 1, "session-message": 2},
            "reason": "max_events",
            "fromAt": 10,
            "toAt": 50,
        }
    }


def test_dead_letters_go_before_anything_that_waits(make):
    """The oldest dead letter first; their loss is counted, and told to nobody."""
    box = make(max_events=4)
    fill(box, 4)
    kill(box, 2)
    assert put(box, event({"n": 5}), event({"n": 6})) == [5, 6]
    assert (dead_seqs(box), seqs(box), gaps(box)) == ([], [3, 4, 5, 6], {})
    assert (counter(box, "dropped"), total(box, "dropped_dead:max_events")) == (0, 2)
    put(box, event({"n": 7}))
    assert seqs(box) == [3, 4, 5, 6, 7]
    assert gaps(box)[3]["count"] == 1


def test_bytes_are_a_bound_too(make):
    """As many of the oldest go as the new one needs, and the reason is named."""
    box = make(max_bytes=1_000)
    put(box, *(sized(250) for _ in range(4)))
    assert gaps(box) == {}
    put(box, sized(600))
    assert seqs(box) == [1, 4, 5]
    assert (gaps(box)[1]["count"], gaps(box)[1]["reason"]) == (3, "max_bytes")
    assert counter(box, "waiting_bytes") == 850
    assert total(box, "dropped:max_bytes") == 3


def test_dead_letters_count_with_their_bytes(make):
    """Making a dead letter frees nothing; dropping it does."""
    box = make(max_bytes=1_000)
    put(box, sized(500), sized(400))
    kill(box)
    put(box, sized(200))
    assert (dead_seqs(box), seqs(box)) == ([], [2, 3])


def test_an_exact_fit_is_no_overflow(make):
    """Bounds are what is allowed, not what is too much."""
    box = make(max_bytes=1_000, max_events=2)
    put(box, sized(500), sized(500))
    assert (seqs(box), gaps(box)) == ([1, 2], {})


def test_a_refusing_outbox_takes_nothing_and_drops_nothing(make):
    """`overflow = refuse`: the error says how full it is; what waits and what is dead stay."""
    box = make(max_events=2, overflow="refuse")
    fill(box, 2)
    kill(box)
    before = contents(box)
    error = try_put(box, event({"n": 3}))
    assert isinstance(error, StoreFull)
    assert error.code == "full"
    assert "1 events and 1 dead letters" in str(error)
    after = contents(box)
    assert after.pop("totals") != before.pop("totals")
    assert after == before
    deliver(box)
    assert put(box, event({"n": 3})) == [3]


def test_an_event_larger_than_the_bound_is_refused_and_drops_nothing(make):
    """Dropping everything for it would not help."""
    box = make(max_bytes=1_000)
    put(box, sized(400), sized(400))
    assert isinstance(try_put(box, sized(1_001)), StoreFull)
    assert seqs(box) == [1, 2]


def test_what_is_in_flight_is_never_dropped(make):
    """The oldest that waits goes in its place, and its gap stands behind what is in flight."""
    box = make(max_events=3)
    fill(box, 3)
    taken = take(box, 2)
    put(box, event({"n": 4}))
    assert seqs(box) == [1, 2, 3, 4]
    assert gaps(box)[3]["firstSeq"] == 3
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    assert seqs(box) == [3, 4]


def test_if_all_is_in_flight_the_event_is_refused(make):
    """And can be taken as soon as something was settled."""
    box = make(max_events=2)
    fill(box, 2)
    taken = take(box, 2)
    assert isinstance(try_put(box, event({"n": 3})), StoreFull)
    settle(box, taken, [ack(taken.rows[0]), release(taken.rows[1])], now_ms=NOW)
    assert put(box, event({"n": 3})) == [3]


def test_an_event_that_cannot_fit_beside_what_is_in_flight_drops_nothing(make):
    """Room is planned before anything goes: else all would be lost, and the event refused all the same."""
    box = make(max_bytes=1_000)
    put(box, sized(300), sized(300))
    kill(box)
    put(box, sized(300))
    take(box)
    before = contents(box)
    assert isinstance(try_put(box, sized(800)), StoreFull)
    after = contents(box)
    del before["totals"], after["totals"]
    assert after == before


def test_a_gap_grows_while_another_claim_is_out(make):
    """One gap stands for all that is dropped behind what is in flight."""
    box = make(max_events=4)
    fill(box, 4)
    take(box, 2)
    fill(box, 2)
    assert seqs(box) == [1, 2, 3, 5, 6]
    assert (gaps(box)[3]["firstSeq"], gaps(box)[3]["lastSeq"], gaps(box)[3]["count"]) == (3, 4, 2)


def test_a_gap_moves_to_the_first_event_that_was_lost(make):
    """What was in flight waits again and is dropped then: the gap stands where the first loss was."""
    box = make(max_events=3)
    fill(box, 3)
    taken = take(box, 2)
    fill(box, 1)
    assert set(gaps(box)) == {3}
    settle(box, taken, [release(row) for row in taken.rows], now_ms=NOW)
    fill(box, 1)
    assert seqs(box) == [1, 2, 4, 5]
    assert (gaps(box)[1]["firstSeq"], gaps(box)[1]["lastSeq"], gaps(box)[1]["count"]) == (1, 3, 2)
    assert counter(box, "open_gap_seq") == 1
    assert head(box).sound


def test_a_claimed_gap_is_frozen_and_the_next_loss_opens_another(make):
    """What the relay is being told does not change any more; the frozen gap is no event of the bounds."""
    box = make(max_events=2)
    fill(box, 3)
    taken = take(box)
    assert taken.rows[0].kind == "outbox-gap"
    said = taken.rows[0].wire_payload
    fill(box, 1)
    assert {seq: gap["count"] for seq, gap in gaps(box).items()} == {1: 1, 2: 1}
    settle(box, taken, [release(taken.rows[0])], now_ms=NOW)
    again = take(box)
    assert again.rows[0].wire_payload == said
    assert again.rows[0].sound
    settle(box, again, [ack(again.rows[0])], now_ms=NOW)
    assert set(gaps(box)) == {2}
    assert (counter(box, "delivered"), counter(box, "waiting")) == (0, 2)


def test_the_gap_goes_out_as_a_message_of_its_kind(make):
    """A session message with a sentence and the numbers, with its own key and time on the wire."""
    box = make(max_events=1)
    fill(box, 2)
    row = take(box).rows[0]
    message = json.loads(row.wire_payload)
    assert (message["from"], message["kind"]) == ("builder", "outbox-gap")
    assert message["body"].startswith("1 event was not delivered (seq 1 to 1)")
    assert message["payload"]["count"] == 1
    assert (message["idempotencyKey"], message["occurredAt"]) == (row.key, NOW)


def test_a_refused_gap_is_removed(make):
    """It is no dead letter and counts nowhere but in the totals."""
    box = make(max_events=1)
    fill(box, 2)
    taken = take(box)
    settle(box, taken, [bury(taken.rows[0])], now_ms=NOW)
    assert (gaps(box), dead_seqs(box), total(box, "gap_refused")) == ({}, [], 1)
    assert counter(box, "dead") == 0


def test_a_gap_in_flight_when_its_sender_dies_goes_again(make):
    """It keeps its key; it is never a dead letter."""
    box = make(max_events=1)
    fill(box, 2)
    key = take(box).rows[0].key
    assert recover(box, now_ms=NOW) == []
    again = take(box)
    assert (again.rows[0].key, again.rows[0].crashes) == (key, 1)


def test_a_gap_cannot_be_skipped(make):
    """It tells the relay what was lost, and is in nobody's way."""
    box = make(max_events=1)
    fill(box, 2)
    with pytest.raises(UsageError, match="tells the relay what was dropped"):
        skip(box, 1, NOW)


def test_a_gap_with_a_damaged_row_stops_nothing(make):
    """New losses open a new gap; the damaged one is left to be set aside."""
    box = make(max_events=1)
    fill(box, 2)
    with box.transaction(durable=True):
        box.run("UPDATE events SET wire_payload = ? WHERE seq = 1", b"{")
    fill(box, 1)
    assert seqs(box) == [1, 2, 3]
    taken = take(box)
    assert not taken.rows[0].sound
    settle(box, taken, [bury(taken.rows[0], Reason.DAMAGED)], now_ms=NOW)
    assert gaps(box)[2]["count"] == 1


def test_events_dropped_in_their_own_call_say_so(make):
    """A call that is larger than the outbox does not claim that all of it waits."""
    box = make(max_events=2)
    results = enqueue(box, [event({"n": n}) for n in range(4)], now_ms=NOW)
    assert [result.state for result in results] == ["dropped", "dropped", "waiting", "waiting"]


def test_too_many_dead_letters_push_out_the_oldest(make):
    """`max_dead` holds for whoever makes them: a settlement, a person, a crash."""
    box = make(max_dead=2)
    fill(box, 4)
    kill(box, 2)
    kill(box)
    skip(box, 4, NOW)
    assert dead_seqs(box) == [3, 4]
    assert (total(box, "dropped_dead:max_dead"), counter(box, "dropped")) == (2, 0)


def test_dropped_events_leave_no_tries_behind(make):
    """Also when they had been sent before."""
    box = make(max_events=1)
    fill(box, 1)
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], attempts=1, why=trouble())], now_ms=NOW)
    fill(box, 1)
    assert box.rows("SELECT * FROM tries") == []


# Age --------------------------------------------------------------------------------------------------------


def aged(box):
    """Three events, accepted at NOW, NOW + 10 and NOW + 20."""
    for n in range(3):
        put(box, event({"n": n}, idempotency_key=f"k-{n}"), now_ms=NOW + 10 * n)


def test_events_grow_too_old_by_their_acceptance(box):
    """Those accepted before the horizon go, and one gap tells of them; a log line comes first."""
    aged(box)
    lines = []
    assert expire(box, NOW + 20, now_ms=NOW + 99, log=lambda name, fields: lines.append((name, fields))) == 2
    assert (seqs(box), gaps(box)[1]["count"], gaps(box)[1]["reason"]) == ([1, 3], 2, "max_age")
    assert lines == [("expiring", {"agent": "builder", "seq": 1, "reason": "max_age"})]
    assert receipt_of(box, "k-1") == "dropped"


def test_nothing_expires_silently_or_early(box):
    """Without anything to drop there is no log line, and a log that fails lets nothing go."""
    aged(box)

    def fails(name, fields):
        raise RuntimeError("no log")

    assert expire(box, NOW, now_ms=NOW, log=fails) == 0
    with pytest.raises(RuntimeError, match="no log"):
        expire(box, NOW + 1, now_ms=NOW, log=fails)
    assert seqs(box) == [1, 2, 3]


def test_what_is_in_flight_does_not_expire(box):
    """Its turn comes when it is settled."""
    aged(box)
    take(box, 2)
    assert expire(box, NOW + 11, now_ms=NOW) == 0
    assert expire(box, NOW + 21, now_ms=NOW) == 1
    assert seqs(box) == [1, 2, 3]
    assert gaps(box)[3]["count"] == 1


def test_expiry_takes_bounded_steps(box):
    """A huge backlog does not hold the lock for long."""
    aged(box)
    assert expire(box, NOW + 99, now_ms=NOW, most=2) == 2
    assert expire(box, NOW + 99, now_ms=NOW, most=2) == 1
    assert expire(box, NOW + 99, now_ms=NOW, most=2) == 0


# Disk -------------------------------------------------------------------------------------------------------


def test_a_nearly_full_disk_refuses_new_events_only(make, monkeypatch):
    """Nothing is accepted below the reserve; what waits is delivered; with space it goes on by itself."""
    box = make(min_free_disk_bytes=1_000_000)
    fill(box, 1)
    with monkeypatch.context() as scarce:
        scarce.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4_096))
        with pytest.raises(StoreFull, match="Only 40,960 bytes are free"):
            enqueue(box, [event({"n": 2})], now_ms=NOW)
        deliver(box)
    assert fill(box, 1) == [2]


def test_a_reserve_of_nothing_never_looks(make, monkeypatch):
    """0 turns the check off, for file systems that do not know their free space."""
    box = make(min_free_disk_bytes=0)
    monkeypatch.setattr(os, "statvfs", None)
    assert fill(box, 1) == [1]


def test_a_full_disk_refuses_clearly_and_loses_nothing(box):
    """SQLite has no page left: nothing is stored, what waits is there, and it goes on with space."""
    fill(box, 3)
    pages = box.one("PRAGMA page_count")[0]
    box.rows(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreFull, match="disk is full"):
        enqueue(box, [event({"body": "x" * 100_000})], now_ms=NOW)
    assert not box.in_transaction
    assert seqs(box) == [1, 2, 3]
    deliver(box)
    box.rows("PRAGMA max_page_count=1000000")
    assert put(box, event({"body": "x" * 100_000})) == [4]
