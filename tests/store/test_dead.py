"""What a person does with dead letters: choose, replay, edit, discard; counters, receipts and durability."""

import pytest
from boxes import (
    NOW,
    bury,
    counter,
    dead_seqs,
    event,
    fill,
    kill,
    put,
    receipt_of,
    release,
    roomy,
    seqs,
    take,
    tool_call,
    total,
    trouble,
    try_put,
)  # fmt: skip

from outbox.errors import StoreFull, UsageError
from outbox.outcome import Reason
from outbox.store.dead import Choice, chosen, discard, discard_each, replay, replay_as, replay_each
from outbox.store.enqueue import Receipt
from outbox.store.records import find, letter_of, listed
from outbox.store.sending import head, settle

FULL = 2


def bury_head(box, reason=Reason.REJECTED, *, now_ms=NOW, progress=None):
    """Claim the head and make a dead letter of it; its seq."""
    taken = take(box)
    settle(box, taken, [bury(taken.rows[0], reason, progress=progress)], now_ms=now_ms)
    return taken.rows[0].seq


# Choosing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (Choice(), [1, 2, 3, 4]),
        (Choice(seqs=(4, 2, 99)), [2, 4]),
        (Choice(seqs=()), []),
        (Choice(reasons=("rejected",)), [1, 3]),
        (Choice(reasons=("stuck", "exhausted")), [2, 4]),
        (Choice(kinds=("insight",)), [3, 4]),
        (Choice(failed_before_ms=NOW + 2), [1, 2]),
        (Choice(failed_after_ms=NOW + 1), [3, 4]),
        (Choice(seqs=(1, 2), reasons=("rejected",), failed_before_ms=NOW + 9), [1]),
        (Choice(kinds=("'; DROP TABLE dead; --",)), []),
    ],
)
def test_what_is_given_together_must_all_be_the_case(box, choice, found):
    """By number, reason, kind and time; oldest first, whatever the order of the words."""
    put(
        box,
        event({"n": 1}),
        event({"n": 2}),
        event({"n": 3}, kind="insight"),
        event({"n": 4}, kind="insight"),
    )
    for at, reason in enumerate(("rejected", "exhausted", "rejected", "stuck")):
        bury_head(box, Reason(reason), now_ms=NOW + at)
    assert [letter.seq for letter in chosen(box, choice)] == found


# Replay -----------------------------------------------------------------------------------------------------


def test_several_go_to_the_tail_in_the_order_given(box):
    """One that is not there, and one that is damaged, stop none of the others."""
    fill(box, 5)
    kill(box, 4)
    with box.transaction(durable=True):
        box.run("UPDATE dead SET checksum = checksum + 1 WHERE seq = 2")
    done = replay_each(box, [3, 2, 9, 1], NOW)
    assert [one if isinstance(one, int) else type(one) for one in done] == [6, UsageError, UsageError, 7]
    assert (seqs(box), dead_seqs(box)) == ([5, 6, 7], [2, 4])
    assert (counter(box, "waiting"), counter(box, "dead"), total(box, "replayed")) == (3, 2, 2)


def test_a_letter_whose_text_rotted_after_its_death_is_not_replayed(box):
    """Its reason does not say so, its checksum does."""
    fill(box, 1)
    kill(box)
    with box.transaction(durable=True):
        box.run("UPDATE dead SET wire_payload = ?", b'{"n": 7}')
        box.run("UPDATE outbox SET dead_bytes = 8")
    with pytest.raises(UsageError, match="damaged"):
        replay(box, 1, NOW)
    assert dead_seqs(box) == [1]


def test_a_replayed_key_waits_again(box):
    """A producer that sends it once more is told so, and nothing is stored twice."""
    put(box, event({"n": 1}, idempotency_key="k"))
    kill(box)
    replay(box, 1, NOW)
    assert try_put(box, event({"n": 1}, idempotency_key="k")) == Receipt(
        2, "k", duplicate=True, state="waiting"
    )
    assert find(box, "k").record.event.replayed_from == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, None),
        ('{"stored":[0,2],"refused":{"1":"422 no"}}', '{"stored":[0,2]}'),
        ('{"stored":[]}', '{"stored":[]}'),
        ('{"chunks":3,"generation":7}', '{"chunks":3,"generation":7}'),
    ],
)
def test_what_the_relay_has_is_kept_and_what_it_refused_goes_again(box, before, after):
    """The marks of a batch or an archive go with it; only its refusals are forgotten."""
    fill(box, 1)
    bury_head(box, progress=before)
    replay(box, 1, NOW)
    assert head(box).progress == after
    assert (head(box).sends, head(box).attempts, head(box).history) == (0, 0, "[]")


# Another payload, another key -------------------------------------------------------------------------------


def test_an_edited_letter_is_another_event_in_its_place(box):
    """The new key waits, the old one is known as discarded, the counters hold the new size."""
    put(box, event({"n": 1, "body": "x" * 100}, idempotency_key="old"), event({"n": 2}))
    kill(box)
    new = event({"n": 1}, idempotency_key="new")
    assert replay_as(box, 1, new, None, NOW) == 3
    assert (seqs(box), dead_seqs(box), receipt_of(box, "old")) == ([2, 3], [], "discarded")
    assert find(box, "new").record.event.wire_payload == new.wire_payload
    assert find(box, "new").record.event.replayed_from == 1
    assert try_put(box, event({"n": 1, "body": "x" * 100}, idempotency_key="old")).state == "discarded"
    assert (counter(box, "accepted"), total(box, "replayed"), total(box, "discarded")) == (2, 1, 0)


def test_an_edit_without_room_changes_nothing_and_drops_nobody(make):
    """Not even a dead letter: a person asked for one event to go, not for others to be lost."""
    box = make(max_bytes=300)
    fill(box, 3)
    kill(box)
    large = event({"body": "x" * 300})
    with pytest.raises(StoreFull, match="no room"):
        replay_as(box, 1, large, None, NOW)
    assert (seqs(box), dead_seqs(box)) == ([2, 3], [1])


def test_an_edit_that_is_no_larger_needs_no_room(make):
    """Also where the bounds were lowered below what is there."""
    box = make()
    put(box, event({"n": 10}), event({"n": 2}))
    kill(box)
    box.set_rules(box.limits, roomy(max_bytes=10))
    assert replay_as(box, 1, event({"n": 1}, idempotency_key="n"), None, NOW) == 3


def test_an_edit_of_what_is_gone_is_refused(box):
    """Somebody else replayed it meanwhile."""
    fill(box, 1)
    kill(box)
    replay(box, 1, NOW)
    with pytest.raises(UsageError, match="no dead letter 1"):
        replay_as(box, 1, event({"n": 2}), None, NOW)
    assert seqs(box) == [2]


# Discard ----------------------------------------------------------------------------------------------------


def test_several_are_thrown_away_and_their_keys_known(box):
    """One that is not there stops none of the others."""
    put(box, *(event({"n": n}, idempotency_key=f"k-{n}") for n in range(3)))
    kill(box, 3)
    done = discard_each(box, [1, 7, 3], NOW)
    assert [one if isinstance(one, int) else type(one) for one in done] == [1, UsageError, 3]
    assert (dead_seqs(box), total(box, "discarded")) == ([2], 2)
    assert [receipt_of(box, f"k-{n}") for n in range(3)] == ["discarded", None, "discarded"]


@pytest.mark.parametrize(
    "act",
    [
        lambda box: replay_each(box, [1], NOW),
        lambda box: replay_as(box, 1, event({"n": 1}), None, NOW),
        lambda box: discard_each(box, [1], NOW),
        lambda box: discard(box, 1, NOW),
    ],
    ids=["replay", "replay edited", "discard each", "discard"],
)
def test_what_a_person_does_survives_a_power_cut(box, act):
    """It is committed with synchronous = FULL, though the connection settled with NORMAL before."""
    fill(box, 1)
    kill(box)
    assert box.one("PRAGMA synchronous")[0] != FULL
    act(box)
    assert box.one("PRAGMA synchronous")[0] == FULL


# Seeing -----------------------------------------------------------------------------------------------------


def test_what_is_listed(box):
    """In order, with what was tried of each and where it is; of one state or kind where that is asked."""
    put(box, event({"n": 1}), event({"n": 2}, kind="insight"), event({"n": 3}))
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], attempts=2, why=trouble())], now_ms=NOW)
    take(box)
    found = list(listed(box))
    assert [(one.seq, one.kind, one.in_flight) for one in found] == [
        (1, "session-message", True), (2, "insight", False), (3, "session-message", False),
    ]  # fmt: skip
    assert (found[0].sends, found[0].attempts, found[1].sends) == (1, 2, 0)
    assert found[1].size_bytes == len(head(box).wire_payload)
    assert [one.seq for one in listed(box, state="waiting")] == [2, 3]
    assert [one.seq for one in listed(box, state="in_flight")] == [1]
    assert [one.seq for one in listed(box, kind="insight")] == [2]


def test_a_long_list_comes_in_pages(box):
    """None is missed, and none comes twice, though events go between two pages."""
    fill(box, 1_203)
    found = listed(box)
    first = [next(found).seq for _ in range(3)]
    kill(box, 2)
    assert first + [one.seq for one in found] == list(range(1, 1_204))
    assert [one.seq for one in listed(box)] == list(range(3, 1_204))


def test_an_event_is_found_wherever_it_is(box):
    """By number or key, waiting, in flight, dead or gone; a number goes before a key that looks like one."""
    put(box, event({"n": 1}, idempotency_key="a"), event({"n": 2}, idempotency_key="b"), tool_call(),
        event({"n": 4}, idempotency_key="2"), event({"n": 5}, idempotency_key="777"))  # fmt: skip
    kill(box)
    taken = take(box)
    assert (find(box, "b").state, find(box, "2").state, find(box, "3").state) == (
        "in_flight",
        "in_flight",
        "waiting",
    )
    settle(box, taken, [], now_ms=NOW)
    assert (find(box, "a").state, find(box, "1").record.letter.reason) == ("dead", "rejected")
    assert find(box, "2").record.event.key == "b"
    assert find(box, "777").record.seq == 5
    discard(box, 1, NOW)
    assert (find(box, "a").state, find(box, "1").state, find(box, "1").record.key) == (
        "discarded",
        "discarded",
        "a",
    )
    assert find(box, "nothing") is None
    assert find(box, "9" * 30) is None


def test_a_letter_that_was_never_sent_has_no_first_try(box):
    """And its history can be read all the same."""
    fill(box, 1)
    taken = take(box)
    settle(box, taken, [bury(taken.rows[0], sent=False)], now_ms=NOW)
    tries = letter_of(box, 1).tries
    assert (tries.sends, tries.first_try_at_ms) == (0, None)
    assert '"rejected"' in tries.history
