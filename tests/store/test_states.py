"""The store does what the table of states says, and nothing else."""

import pytest
from boxes import (
    NOW,
    ack,
    bury,
    deliver,
    event,
    fill,
    kill,
    put,
    receipt_of,
    release,
    take,
    tool_call,
    try_put,
)  # fmt: skip

from outbox.errors import StoreHeld, UsageError
from outbox.outcome import TRANSITIONS, Act, IllegalTransition, State, move
from outbox.store.dead import discard, replay
from outbox.store.people import skip
from outbox.store.sending import recover, settle

KEY = "the-one"


def state_of(box):
    """Where the event with KEY is."""
    claimed_through = box.one("SELECT claimed_through FROM outbox")[0]
    if row := box.maybe("SELECT seq FROM events WHERE key = ?", KEY):
        return State.IN_FLIGHT if row[0] <= claimed_through else State.WAITING
    if box.maybe("SELECT 1 FROM dead WHERE key = ?", KEY):
        return State.DEAD
    return State(receipt_of(box, KEY) or "new")


def enqueue_one(box):
    """The event with KEY waits."""
    put(box, event(idempotency_key=KEY, mode="coalesce", dedupe_key="status"))


def settle_as(outcome):
    """Claim it, and settle it with this outcome."""

    def act(box):
        taken = take(box)
        assert state_of(box) is State.IN_FLIGHT
        settle(box, taken, [outcome(taken.rows[0])], now_ms=NOW)

    return act


def bring_to(box, state):
    """Put the event with KEY into a state that an act can begin in."""
    if state is State.NEW:
        return
    enqueue_one(box)
    if state is State.DEAD:
        kill(box)
    assert state_of(box) in {state, State.WAITING}


PERFORMED = {
    (State.NEW, Act.ENQUEUE): enqueue_one,
    (State.WAITING, Act.CLAIM): take,
    (State.WAITING, Act.COALESCE): lambda box: put(box, event(mode="coalesce", dedupe_key="status")),
    (State.WAITING, Act.DROP): lambda box: fill(box, 3),
    (State.WAITING, Act.SKIP): lambda box: skip(box, 1, NOW),
    (State.IN_FLIGHT, Act.ACK): settle_as(ack),
    (State.IN_FLIGHT, Act.TOOL_SAID_NO): settle_as(lambda row: ack(row, tool_error=True)),
    (State.IN_FLIGHT, Act.RELEASE): settle_as(release),
    (State.IN_FLIGHT, Act.BURY): settle_as(bury),
    (State.DEAD, Act.REPLAY): lambda box: replay(box, 1, NOW),
    (State.DEAD, Act.DISCARD): lambda box: discard(box, 1, NOW),
    (State.DEAD, Act.DROP): lambda box: fill(box, 3),
}


def test_what_is_accepted_is_where_the_table_says(box):
    """An enqueue does not load the table: its one state is written out."""
    assert try_put(box, event()).state == str(move(State.NEW, Act.ENQUEUE))


def test_every_row_of_the_table_is_performed():
    """No act stands in the table that the store cannot do, and none is done that does not stand there."""
    assert PERFORMED.keys() == TRANSITIONS.keys()


@pytest.mark.parametrize(("before", "act"), TRANSITIONS, ids=str)
def test_an_act_of_the_table_leads_where_it_says(make, before, act):
    """The store moves an event as the table does."""
    box = make(max_events=3)
    bring_to(box, before)
    PERFORMED[before, act](box)
    assert state_of(box) is TRANSITIONS[before, act]


@pytest.mark.parametrize(
    ("state", "act"), [(state, act) for state in State for act in Act if (state, act) not in TRANSITIONS]
)
def test_an_act_that_is_not_in_the_table_raises(state, act):
    """An illegal act names itself and the state."""
    with pytest.raises(IllegalTransition, match=f"{act} does not apply to an event that is {state}"):
        move(state, act)


@pytest.mark.parametrize(
    ("begin", "act"),
    [
        (lambda box: None, lambda box: skip(box, 1, NOW)),
        (lambda box: None, lambda box: replay(box, 1, NOW)),
        (lambda box: None, lambda box: discard(box, 1, NOW)),
        (enqueue_one, lambda box: replay(box, 1, NOW)),
        (enqueue_one, lambda box: discard(box, 1, NOW)),
        (lambda box: (enqueue_one(box), take(box)), lambda box: skip(box, 1, NOW)),
        (lambda box: (enqueue_one(box), kill(box)), lambda box: skip(box, 1, NOW)),
        (lambda box: (enqueue_one(box), deliver(box)), lambda box: replay(box, 1, NOW)),
    ],
    ids=["skip none", "replay none", "discard none", "replay waiting", "discard waiting", "skip in flight",
         "skip dead", "replay delivered"],
)  # fmt: skip
def test_a_person_cannot_do_what_the_state_does_not_know(box, begin, act):
    """Such a request is refused as a usage error, and changes nothing."""
    begin(box)
    before = state_of(box)
    with pytest.raises(UsageError, match="Nothing was changed"):
        act(box)
    assert state_of(box) is before


def test_one_claim_is_out_at_a_time(box):
    """Claiming what is in flight already is refused."""
    fill(box, 2)
    take(box)
    with pytest.raises(StoreHeld):
        take(box)


def test_a_crash_releases_what_may_be_repeated_and_buries_what_may_not(make):
    """What a dead sender had in flight waits again; an unsafe call has an unknown outcome."""
    safe, unsafe = make("safe"), make("unsafe")
    put(safe, event(idempotency_key=KEY))
    put(unsafe, tool_call(idempotency_key=KEY))
    take(safe)
    take(unsafe, unsafe=True)
    assert recover(safe, now_ms=NOW) == []
    assert recover(unsafe, now_ms=NOW) == [1]
    assert (state_of(safe), state_of(unsafe)) == (State.WAITING, State.DEAD)


def test_a_key_that_is_known_takes_no_second_event(box):
    """ENQUEUE begins at NEW only: the same key again is the first one's receipt."""
    enqueue_one(box)
    for act, state in [(take, "in_flight"), (lambda box: recover(box, now_ms=NOW), "waiting")]:
        act(box)
        again = try_put(box, event(idempotency_key=KEY))
        assert (again.duplicate, again.state, again.seq) == (True, state, 1)
