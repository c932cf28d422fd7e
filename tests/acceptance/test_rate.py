"""The send rate: a backlog goes out no faster than asked for, and every agent has its turn."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from processes import DaemonProcess, outbox_command, wait_for
from world import MINUTE_MS, Refuse, TestClock, World

from outbox import Outbox
from outbox.delivery.rate import Place, Rate
from relay_client.reference.process import RelayProcess


def sent(world):
    """When each event went out, and whose it was, in order."""
    return [(request.at_ms, request.agent) for request in world.relay.requests for _ in request.messages]


def most_in_a_second(moments):
    """The largest number of events that went out within one second."""
    return max(sum(start <= at < start + 1_000 for at in moments) for start in moments)


def limited(world, per_s):
    """A world whose engine keeps to this rate."""
    world.engine.delivery.rate = Rate(per_s, world.clock)
    return world


@pytest.mark.parametrize(("per_s", "events"), [(3, 60), (50, 1_000), (400, 4_000)])
def test_a_backlog_goes_out_at_the_rate(per_s, events, tmp_path):
    """After an outage it takes as long as the rate says, in order, and no second has many more than it."""

    def refuse(_request):
        raise Refuse

    with limited(World(tmp_path, behave=refuse, health=lambda: 0), per_s) as world:
        world.enqueue("builder", events)
        world.run(MINUTE_MS)
        world.relay.requests.clear()
        world.relay.behave, world.relay.health = lambda request: None, lambda: 200
        world.run(10 * MINUTE_MS)
        moments = [at_ms for at_ms, _ in sent(world)]
        assert world.numbers("builder") == list(range(events))
        assert len(moments) == events
        assert most_in_a_second(moments) <= per_s * 1.25 + 1
        took_s = (moments[-1] - moments[0]) / 1_000
        assert events / per_s * 0.7 <= took_s <= events / per_s * 1.05 + 1


def test_the_rate_is_shared_fairly(tmp_path):
    """Ten small agents beside a large one are done after a few turns each, not after its backlog."""
    with limited(World(tmp_path), 20) as world:
        world.enqueue("big", 600)
        for n in range(10):
            world.enqueue(f"small-{n}", 5)
        world.run(5 * MINUTE_MS)
        order = [agent for _, agent in sent(world)]
        assert len(order) == 650
        last_small = max(index for index, agent in enumerate(order) if agent != "big")
        assert order[:last_small].count("big") <= 20
        assert most_in_a_second([at_ms for at_ms, _ in sent(world)]) <= 26


def test_without_a_rate_nothing_waits_for_it(tmp_path):
    """The default: a backlog goes out as fast as the relay takes it, in groups."""
    with World(tmp_path) as world:
        world.enqueue("builder", 1_000)
        world.run(MINUTE_MS)
        assert len(world.relay.requests) < 20
        assert len(world.numbers("builder")) == 1_000


def test_leave_that_is_not_used_is_given_back():
    """Whoever is let in and then may not send takes nothing away from the others."""
    clock = TestClock()
    rate = Rate(4, clock)
    assert rate.slots() == 1
    place = Place(rate)
    place.enter()
    assert not place.may_send()
    place.leave()
    assert (rate.take(5), rate.slots()) == (1, 0)  # the engine lets it in
    place.enter()
    assert place.may_send()
    place.leave()  # the gate was closed meanwhile
    assert rate.slots() == 1
    clock.now_ms += 3_600_000
    assert rate.slots() == 1, "an hour of silence is saved up for a quarter of a second only"


def test_the_next_moment_is_neither_too_early_nor_late():
    """A line that is looked at when it says so can always go on, and not a moment before."""
    clock = TestClock()
    rate = Rate(7, clock)
    assert rate.next_due_ms() == clock.now_ms
    for _ in range(50):
        while rate.take(1):
            pass
        due_ms = rate.next_due_ms()
        clock.now_ms = due_ms - 2
        assert rate.slots() == 0
        clock.now_ms = due_ms
        assert rate.slots() == 1


def test_many_threads_take_no_more_than_there_is():
    """Each event's leave is given once, whoever asks at the same time."""
    rate = Rate(1_000, TestClock())
    taken = itertools.count()

    def take():
        for _ in range(100):
            if rate.take(1):
                next(taken)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert next(taken) == 250


def test_the_setting_reaches_a_real_daemon(tmp_path):
    """`delivery.max_rate_per_s` through `outbox serve`: all arrive, and not in one group."""
    with (
        RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay,
        Outbox.open("builder", state_dir=tmp_path / "state") as outbox,
    ):
        for n in range(30):
            outbox.enqueue("session-message", {"from": "builder", "body": "x", "n": n})
        settings = {"delivery.max_rate_per_s": "20", "daemon.flush_timeout_s": "0"}
        with DaemonProcess(tmp_path / "state", relay.url, settings):
            wait_for(lambda: outbox.depth == 0)
        assert len(relay.events()) == 30
        posts = [request for request in relay.requests() if request["method"] == "POST"]
        assert len(posts) > 10, "what was saved up together, then one by one"


def test_a_flush_keeps_to_it(tmp_path):
    """What the time does not suffice for stays on disk, and the exit status says so.

    Beyond what it counted the relay has at most what was on its way at the deadline: one request, at this
    rate of one event. In three seconds 15 may leave, besides the one that was saved up.
    """
    state, settings = tmp_path / "state", {"delivery.max_rate_per_s": "5", "relay.token": "tok-daemon"}
    with Outbox.open("builder", state_dir=state) as outbox:
        for n in range(60):
            outbox.enqueue("session-message", {"from": "builder", "body": "x", "n": n})
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        settings |= {"relay.url": relay.url, "relay.trust_env": "false"}
        done = outbox_command(state, "flush", "--timeout", "3", "--json", settings=settings)
        told = json.loads(done.stdout)
        held = [json.loads(event["body"])["n"] for event in relay.events()]
    assert done.returncode == 3
    assert held == list(range(len(held)))
    assert 0 < told["delivered"] <= len(held) <= told["delivered"] + 1
    assert len(held) <= 16
    assert told["left"] == 60 - told["delivered"]
