"""Events that travel alone are claimed and settled as a series; each of them still stands for itself."""

from __future__ import annotations

import pytest
from world import MINUTE_MS, World, answer

from outbox.delivery.grouping import Size, is_over, next_length, take_series
from outbox.store.inspect import read_status
from outbox.store.row import Row

SINGLY = {"delivery__batch_max_items": 1}


def row(seq, *, shape="object", path="/a", size=10, tried=False, crashes=0, sound=True):
    """A stored event of which only some things matter here; its kind is its path."""
    return Row(
        seq, path, f"key-{seq}", b"x" * size, shape, 0, 0, b"", {}, sound, 0, 0, crashes,
        1 if tried else None, "[]", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([row(1), row(2), row(3), row(4)], 3),
        ([row(1), row(2, path="/b"), row(3)], 1),
        ([row(1), row(2), row(3, shape="batch")], 2),
        ([row(1), row(2), row(3, shape="tool")], 2),
        ([row(1, shape="tool"), row(2)], 1),
        ([row(1, shape="gap"), row(2)], 1),
        ([row(1, tried=True), row(2)], 2),
        ([row(1), row(2, tried=True)], 1),
        ([row(1), row(2, crashes=2)], 1),
        ([row(1), row(2, sound=False)], 1),
        ([row(1, size=600), row(2, size=600)], 1),
        ([row(1, size=2_000), row(2)], 1),
        ([], 0),
    ],
)
def test_who_follows_the_head(rows, taken):
    """Only events that were never sent, to the same path, as plain as the head; within the bounds."""
    series = take_series(iter(rows), Size(3, 1_000), lambda row: row.kind)
    assert series == rows[:taken]


def test_the_length_of_a_series_follows_the_relay():
    """It doubles while 25 ms are not used up; with a slow relay it is one event, claimed as it goes."""
    lengths = [1]
    for _ in range(8):
        lengths.append(next_length(lengths[-1], lengths[-1] // 2))
    assert lengths == [1, 2, 4, 8, 16, 32, 50, 50, 50]
    assert next_length(1, 50) == 1
    assert next_length(8, 400) == 1
    assert next_length(0, 0) == 1
    assert (is_over(24), is_over(25)) == (False, True)


def test_a_series_ends_at_the_first_that_stays(tmp_path):
    """It waits by its own backoff and is tried again before anything behind it leaves; nothing goes twice."""
    refused = []

    def behave(request):
        if request.messages[0].get("n") == 5 and len(refused) < 3:
            refused.append(request.at_ms)
            return answer(503)
        return None

    with World(tmp_path, behave=behave, **SINGLY) as world:
        world.enqueue("builder", 12)
        world.run(30 * MINUTE_MS)
        assert world.numbers("builder") == list(range(12))
        assert [request.messages[0]["n"] for request in world.relay.requests] == [
            0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8, 9, 10, 11,
        ]  # fmt: skip
        assert refused[0] < refused[1] < refused[2]
        assert world.relay.repeats == 0


def test_the_acceptances_before_it_are_no_evidence_against_it(tmp_path):
    """They came before it was sent: one that then gets 500 on and on is blamed only with what came after."""

    def behave(request):
        return answer(500) if request.messages[0].get("n") >= 5 else None

    with World(tmp_path, behave=behave, health=lambda: 503, **SINGLY) as world:
        world.enqueue("builder", 12)
        world.run(60 * MINUTE_MS)
        status = world.statuses()["builder"]
        assert world.numbers("builder") == [0, 1, 2, 3, 4]
        assert (world.dead(), status.waiting, status.head.attempts) == ([], 7, 0)


def test_a_series_heeds_what_others_learn_of_the_relay(tmp_path):
    """When the relay gets into trouble meanwhile, the next one asks for leave again before it goes."""
    reasons = []

    def behave(request):
        gate, number = world.engine.delivery.gate, request.messages[0]["n"]
        reasons.append((number, gate.relay.reason))
        if number == 4 and len(reasons) == 5:  # the second of a series of four
            permit = gate.admit("/api/insights/observations")
            gate.close(permit, "unavailable", "another agent's")
            gate.finish(permit)

    with World(tmp_path, behave=behave, **SINGLY) as world:
        world.enqueue("builder", 12)
        world.run(MINUTE_MS)
        assert world.numbers("builder") == list(range(12))
        assert reasons == [(n, "") for n in range(12)]


def test_what_did_not_go_was_never_tried(tmp_path):
    """Claimed, but not sent: no send and no attempt is counted for it."""

    def behave(request):
        return answer(503) if request.messages[0].get("n") == 5 else None

    with World(tmp_path, behave=behave, health=lambda: 503, **SINGLY) as world:
        world.enqueue("builder", 12)
        world.run(MINUTE_MS)
        rows = world.boxes["builder"]._box.rows("SELECT seq, sends FROM tries")
        status = read_status(world.boxes["builder"]._box)
        assert [seq for seq, _ in rows] == [6]
        assert (status.waiting, status.in_flight) == (7, 0)
