"""Acceptance: order, keys, coalescing; what is refused leaves no trace."""

import json

import pytest
from boxes import (
    NOW,
    ack,
    bury,
    contents,
    counter,
    deliver,
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
    try_put,
)  # fmt: skip

from outbox.errors import StoreFull, UsageError
from outbox.event import Limits
from outbox.store.dead import discard, replay
from outbox.store.enqueue import enqueue
from outbox.store.file import open_outbox
from outbox.store.sending import head, settle


def coalesce(payload, key="status", **fields):
    """An event that replaces those before it."""
    return event(payload, mode="coalesce", dedupe_key=key, **fields)


def test_events_get_rising_numbers_that_are_never_used_again(box):
    """Also when the newest one is gone, and over a new opening of the file."""
    assert fill(box, 3) == [1, 2, 3]
    deliver(box, 3)
    assert fill(box, 1) == [4]
    deliver(box)
    box.close()
    box = open_outbox(box.state, box.path)
    assert fill(box, 2) == [5, 6]
    box.close()


def test_what_is_stored_is_what_is_sent(box):
    """The head has the event's own bytes, key, time and shape, and everything that belongs to it."""
    given = event(
        {"tool": "note_add", "arguments": {"text": "half \ud83d"}},
        kind="mcp-tool-call",
        idempotency_key="k-1",
        occurred_at_ms=5,
        retry={"maxAttempts": 3},
        run_id="r-1",
        metadata={"deep": [1, 2**70], "half": "\ud83d"},
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tracestate="a=b",
        limits=Limits(key_scope="agent"),
    )
    put(box, given)
    row = head(box)
    assert (row.key, row.wire_payload, row.shape, row.occurred_at_ms) == (
        "k-1",
        given.wire_payload,
        "tool",
        5,
    )
    assert row.sound
    assert row.extra == {
        "tool": "note_add",
        "scoped": True,
        "retry": {"maxAttempts": 3},
        "correlation": {"runId": "r-1", "metadata": {"deep": [1, 2**70], "half": "\ud83d"}},
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b",
    }


def test_what_was_cut_off_is_noted(box):
    """The row of an archive that was too long says by how much."""
    text = "x" * (8 * 1024 * 1024 + 7)
    put(box, event({"agentId": "a", "segment": 1, "text": text}, kind="continuation-archive"))
    assert head(box).extra["notes"]["archive_cut_bytes"] >= 7


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda box: None, "waiting"),
        (take, "in_flight"),
        (deliver, "delivered"),
        (kill, "dead"),
        (lambda box: settle(box, *_tool_error(box), now_ms=NOW), "tool_error"),
        (lambda box: put(box, coalesce({"n": 2})), "replaced"),
        (lambda box: (kill(box), discard(box, 1, NOW)), "discarded"),
        (lambda box: (kill(box), replay(box, 1, NOW)), "waiting"),
        (lambda box: (kill(box), replay(box, 1, NOW), deliver(box)), "delivered"),
        (lambda box: fill(box, 4), "dropped"),
        (lambda box: (kill(box), fill(box, 4)), "dropped"),
    ],
    ids=["waiting", "in flight", "delivered", "dead", "tool error", "replaced", "discarded", "replayed",
         "replayed and delivered", "dropped waiting", "dropped dead"],
)  # fmt: skip
def test_a_known_key_gives_the_first_receipt_wherever_its_event_is(make, act, expected):
    """The same event again is not taken again, and its receipt tells how the first one fares."""
    box = make(max_events=4)
    first = coalesce({"n": 1}, idempotency_key="k-1")
    put(box, first)
    act(box)
    before = contents(box)
    again = try_put(box, first)
    assert (again.duplicate, again.state, again.idempotency_key) == (True, expected, "k-1")
    assert again.seq in {1, counter(box, "last_seq")}
    assert contents(box) == before


def _tool_error(box):
    taken = take(box)
    return taken, [ack(taken.rows[0], tool_error=True)]


@pytest.mark.parametrize(
    "act", [lambda box: None, take, kill, deliver], ids=["waiting", "flying", "dead", "gone"]
)
@pytest.mark.parametrize("other", [{"n": 2}, "kind"])
def test_a_key_belongs_to_one_event_for_ever(box, act, other):
    """With another payload or kind it is refused, wherever the first event is by now, and nothing changes."""
    put(box, event({"n": 1}, idempotency_key="k-1"))
    act(box)
    before = contents(box)
    second = event({"n": 1}, kind="insight", idempotency_key="k-1")
    if other != "kind":
        second = event(other, idempotency_key="k-1")
    error = try_put(box, second)
    assert isinstance(error, UsageError)
    assert error.code == "key_reused"
    assert "'k-1'" in str(error)
    assert contents(box) == before


def test_two_equal_events_without_keys_are_two_events(box):
    """The user did say "ok" twice."""
    assert put(box, event({"text": "ok"}), event({"text": "ok"})) == [1, 2]


def test_a_key_may_come_twice_in_one_call(box):
    """The second one is a duplicate of the first; another payload is refused; those behind are taken."""
    results = enqueue(
        box,
        [
            event({"n": 1}, idempotency_key="k-1"),
            event({"n": 1}, idempotency_key="k-1"),
            event({"n": 2}, idempotency_key="k-1"),
            event({"n": 3}),
        ],
        now_ms=NOW,
    )
    assert [getattr(result, "seq", None) for result in results] == [1, 1, None, 2]
    assert [getattr(result, "duplicate", None) for result in results] == [False, True, None, False]
    assert seqs(box) == [1, 2]


def test_a_newer_coalesce_event_stands_at_the_tail(box):
    """It removes the waiting ones of its key and of no other; append events of no key stay."""
    put(box, coalesce({"n": 1}, idempotency_key="a"), coalesce({"n": 2}, "other"), event({"n": 3}))
    assert put(box, coalesce({"n": 4})) == [4]
    assert seqs(box) == [2, 3, 4]
    assert receipt_of(box, "a") == "replaced"
    assert total(box, "coalesced") == 1


def test_an_event_in_flight_is_never_replaced(box):
    """What is under way ends; the newer one follows it; the next replaces the waiting one only."""
    put(box, coalesce({"n": 1}, idempotency_key="a"))
    taken = take(box)
    put(box, coalesce({"n": 2}, idempotency_key="b"))
    put(box, coalesce({"n": 3}))
    assert seqs(box) == [1, 3]
    settle(box, taken, [ack(taken.rows[0])], now_ms=NOW)
    assert (receipt_of(box, "a"), receipt_of(box, "b")) == ("delivered", "replaced")


def test_events_replaced_in_their_own_call_say_so(box):
    """Each receipt tells the state at the end of the call."""
    results = enqueue(box, [coalesce({"n": n}) for n in range(3)], now_ms=NOW)
    assert [result.state for result in results] == ["replaced", "replaced", "waiting"]


def test_what_a_tried_event_remembered_goes_with_it(box):
    """Replacing an event that was sent before leaves nothing of its tries behind."""
    put(box, coalesce({"n": 1}))
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], attempts=1)], now_ms=NOW)
    put(box, coalesce({"n": 2}))
    assert box.rows("SELECT * FROM tries") == []


def test_a_coalesce_event_that_is_refused_replaces_nothing(make):
    """Refusing the newer one must not lose the older one as well."""
    box = make(max_bytes=400, overflow="refuse")
    put(box, coalesce({"n": 1}))
    before = seqs(box)
    error = try_put(box, coalesce({"body": "x" * 500}))
    assert isinstance(error, StoreFull)
    assert seqs(box) == before
    assert counter(box, "waiting") == 1


def test_a_replaced_event_makes_room_for_its_successor(make):
    """A full outbox that refuses still takes the newest state of something."""
    box = make(max_events=2, overflow="refuse")
    put(box, coalesce({"n": 1}), event({"n": 2}))
    assert isinstance(try_put(box, event({"n": 3})), StoreFull)
    assert put(box, coalesce({"n": 4})) == [3]
    assert seqs(box) == [2, 3]


def test_one_event_of_many_is_refused_alone(make):
    """The others of the call are taken, in order, with one commit."""
    box = make(max_bytes=2_000, overflow="refuse")
    results = enqueue(box, [event({"n": 1}), event({"body": "x" * 5_000}), event({"n": 2})], now_ms=NOW)
    assert [type(result).__name__ for result in results] == ["Receipt", "StoreFull", "Receipt"]
    assert seqs(box) == [1, 2]
    assert total(box, "refused:full") == 1


def test_the_rules_of_the_file_hold_at_once(box, state):
    """What the daemon wrote into the file binds a producer that opened it before, from its next event on."""
    other = open_outbox(state, box.path)
    other.set_rules(Limits(message_body_max_chars=3), roomy(max_events=1, overflow="refuse"))
    other.close()
    put(box, event({"n": 1}))
    assert isinstance(try_put(box, event({"n": 2})), StoreFull)
    assert box.limits.message_body_max_chars == 3


def test_a_body_limit_of_the_producer_stays_when_the_rules_change(box):
    """The environment of the producer stands above the daemon's rules."""
    box.override_body_limit(7)
    box.set_rules(Limits(message_body_max_chars=3), roomy())
    assert box.limits.message_body_max_chars == 7
    box.override_body_limit(0)
    assert box.limits.message_body_max_chars is None


def test_an_unsafe_call_keeps_its_tool(box):
    """The sender knows which tool it must not call twice."""
    put(box, tool_call("deploy"))
    assert head(box).extra == {"tool": "deploy"}


def test_a_huge_event_is_one_row_like_any_other(box):
    """8 MiB arrive byte for byte, and count with their bytes."""
    payload = {"body": "\U0001f600" * (2 * 1024 * 1024 - 100)}
    given = event(payload)
    put(box, event({"n": 1}), given, event({"n": 2}))
    taken = take(box, 3)
    assert taken.rows[1].wire_payload == given.wire_payload
    assert json.loads(taken.rows[1].wire_payload)["body"] == payload["body"]
    assert counter(box, "waiting_bytes") == sum(row.size_bytes for row in taken.rows)
    settle(box, taken, [ack(taken.rows[0]), bury(taken.rows[1]), ack(taken.rows[2])], now_ms=NOW)
    assert counter(box, "dead_bytes") == len(given.wire_payload)
