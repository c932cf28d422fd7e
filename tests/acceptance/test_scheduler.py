"""Who takes a turn when: no wake-up is lost, and what has to wait is remembered once."""

from __future__ import annotations

import httpx
import pytest
from world import MINUTE_MS, World, answer

from outbox.delivery import pump
from outbox.errors import StoreFull
from outbox.store.file import OutboxFile


@pytest.fixture
def world(tmp_path):
    """An outbox on a clock of our own."""
    with World(tmp_path) as world:
        yield world


def at_the_end_of_a_turn(world, monkeypatch, act):
    """Do something once, when the next turn knows already what it wants, and has not said it yet."""
    leave, done = pump.Place.leave, []

    def leave_and_act(place):
        leave(place)
        if not done:
            done.append(True)
            act()

    monkeypatch.setattr(pump.Place, "leave", leave_and_act)
    assert world.engine.step()
    assert done


def test_an_event_that_comes_while_a_turn_finds_nothing_is_sent_at_once(world, monkeypatch):
    """It does not wait for the next look at all files, nor until old receipts are dropped again."""
    for n in range(2):  # the first time old receipts are dropped, and then again in a minute
        world.enqueue("builder", 1, first=n)
        world.run(1)
    world.wake()
    at_the_end_of_a_turn(world, monkeypatch, lambda: world.enqueue("builder", 1, first=2))
    world.run(1)
    assert world.numbers("builder") == [0, 1, 2]


def test_a_person_is_heard_while_a_turn_finds_that_the_head_waits(world, monkeypatch):
    """To wait no longer holds whenever a person says it, also during a look that finds the head waiting."""
    world.relay.behave = lambda _request: answer(409, {"code": "in_progress"}, retry_after="600")
    world.enqueue("builder", 1)
    world.run(1)
    world.relay.behave = lambda _request: None
    world.wake()
    path = next(world.state.outbox_files())
    at_the_end_of_a_turn(world, monkeypatch, lambda: world.engine.forget_wait(path))
    world.run(1)
    assert world.numbers("builder") == [0]


def test_a_flush_that_begins_while_a_turn_finds_that_the_head_waits_sends_it(world, monkeypatch):
    """A flush ignores backoff, whenever it begins."""
    world.relay.behave = lambda _request: answer(409, {"code": "in_progress"})
    world.enqueue("builder", 1)
    world.run(1)
    world.relay.behave = lambda _request: None
    world.wake()
    at_the_end_of_a_turn(world, monkeypatch, lambda: world.engine.begin_flush(1e12))
    world.run(1)
    assert world.numbers("builder") == [0]


def test_wake_ups_during_a_long_wait_take_no_room(world):
    """A busy producer whose relay asked for an hour is woken for once at its end, not once for each event."""
    world.relay.behave = lambda _request: answer(429, retry_after="3600")
    world.enqueue("builder", 1)
    world.run(1)
    for _ in range(100):
        world.wake()
        world.run(1)
    assert len(world.engine._due) <= 2
    world.relay.behave = lambda _request: None
    world.run(61 * MINUTE_MS)
    assert world.numbers("builder") == [0]


def test_a_wait_that_was_asked_for_outlasts_a_restart_on_a_full_disk(world, monkeypatch):
    """Rules that cannot be written at the start keep nobody from remembering what the relay asked for."""
    world.relay.behave = lambda _request: answer(409, {"code": "in_progress"}, retry_after="600")
    world.enqueue("builder", 1)
    world.run(1)
    set_rules = OutboxFile.set_rules

    def full_once(box, *rules):
        monkeypatch.setattr(OutboxFile, "set_rules", set_rules)
        raise StoreFull("made up: the disk is full")

    monkeypatch.setattr(OutboxFile, "set_rules", full_once)
    world.restart()
    world.run(9 * MINUTE_MS)
    assert len(world.relay.requests) == 1


@pytest.mark.parametrize("kind", ["session-message", "insight", "mcp-tool-call"])
def test_an_event_for_which_no_connection_was_free_goes_soon(world, kind):
    """More workers than connections, and a slow relay: our own shortage holds nothing up for ever."""

    def shortage(_request):
        world.relay.behave = lambda _request: None
        raise httpx.PoolTimeout("no connection was free in time")

    world.relay.behave = shortage
    world.enqueue("builder", 1, kind=kind)
    world.run(5_000)
    assert world.statuses()["builder"].waiting == 0
    assert len(world.relay.keys) == 1
