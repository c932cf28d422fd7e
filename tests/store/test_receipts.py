"""The memory of keys: a window of time and of bytes, bounded wherever it grows."""

import pytest
from boxes import (
    NOW,
    ack,
    counter,
    deliver,
    event,
    fill,
    put,
    receipt_of,
    roomy,
    take,
    try_put,
)  # fmt: skip

from outbox.store.receipts import forget_old
from outbox.store.sending import settle

DAY = 24 * 60 * 60 * 1000


def receipts(box):
    """The remembered keys, oldest first."""
    return [key for (key,) in box.rows("SELECT key FROM receipts ORDER BY at_ms, seq")]


def deliver_at(box, *keys, now_ms=NOW, result=None):
    """Enqueue and deliver one event under each key, at this moment."""
    put(box, *(event({"k": key}, idempotency_key=key) for key in keys))
    taken = take(box, len(keys))
    settle(box, taken, [ack(row, result=result) for row in taken.rows], now_ms=now_ms)


def test_a_key_is_remembered_for_the_window(box):
    """Seven days after its event went it is known; after that it may be used anew."""
    deliver_at(box, "old", now_ms=NOW)
    deliver_at(box, "new", now_ms=NOW + DAY)
    assert forget_old(box, box.bounds, NOW + 7 * DAY) == 0
    assert forget_old(box, box.bounds, NOW + 7 * DAY + 1) == 1
    assert receipts(box) == ["new"]
    assert try_put(box, event({"k": "new"}, idempotency_key="new")).duplicate
    again = try_put(box, event({"k": "another"}, idempotency_key="old"))
    assert (again.duplicate, again.seq) == (False, 3)


def test_beyond_the_bytes_the_oldest_are_forgotten(box):
    """At once, where they are written: an agent that never rests keeps the bound too."""
    one = 64 + 1
    box.set_rules(box.limits, roomy(receipt_max_bytes=3 * one))
    for n in range(9):
        deliver_at(box, str(n), now_ms=NOW + n)
        assert counter(box, "receipt_bytes") <= 3 * one
    assert receipts(box) == ["6", "7", "8"]


def test_replaced_and_dropped_events_are_bounded_too(make):
    """Without any relay, coalescing alone must not fill the disk with memories."""
    box = make(receipt_max_bytes=200, max_events=3)
    for n in range(50):
        put(box, event({"n": n}, mode="coalesce", dedupe_key="status", idempotency_key=f"c-{n}"))
        put(box, event({"n": n}, idempotency_key=f"d-{n}"))
    assert 0 < counter(box, "receipt_bytes") <= 200


def test_a_lowered_bound_is_reached_in_bounded_steps(box):
    """500 at a time when there is nothing else to do, and twice as many as come while there is."""
    for first in range(0, 1_100, 100):
        deliver_at(box, *(f"k-{n}" for n in range(first, first + 100)), now_ms=NOW + first)
    tight = roomy(receipt_max_bytes=0)
    assert forget_old(box, tight, NOW) == 500
    box.set_rules(box.limits, tight)
    deliver_at(box, "x", now_ms=NOW + 5_000)
    assert len(receipts(box)) == 1_101 - 502
    assert forget_old(box, tight, NOW) == 500
    assert forget_old(box, tight, NOW) == 99
    assert (receipts(box), counter(box, "receipt_bytes")) == ([], 0)


def test_results_count_with_their_bytes(box):
    """What a tool said is kept with the receipt, in UTF-8."""
    deliver_at(box, "k", result='"é\U0001f600"')
    assert counter(box, "receipt_bytes") == 64 + 1 + len('"é\U0001f600"'.encode())


def test_forgetting_nothing_writes_nothing(box):
    """A look at rest costs no commit."""
    fill(box, 1)
    deliver(box)
    changes = box.db.total_changes()
    assert forget_old(box, box.bounds, NOW) == 0
    assert box.db.total_changes() == changes


@pytest.mark.parametrize("number", [1, 7])
def test_every_delivered_event_is_remembered(box, number):
    """Also those with keys of our own making: `why` and duplicates at the relay need them."""
    put(box, *(event({"n": n}, idempotency_key=f"k-{n}") for n in range(number)))
    deliver(box, number)
    assert [receipt_of(box, f"k-{n}") for n in range(number)] == ["delivered"] * number
