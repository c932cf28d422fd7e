"""The wall clock is set by minutes and years, both ways, while events wait, are in flight, over restarts."""

import random
import socket

from processes import put, status_of, wait_for
from world import DAY_MS, HOUR_MS, MINUTE_MS, Lose, Refuse, TestClock, World, answer

from outbox import Outbox
from outbox.daemon.companion import Companion
from outbox.delivery.clock import Steadiness
from outbox.settings import load
from outbox.store.directory import StateDirectory

YEAR_MS = 365 * DAY_MS
STEPS_MS = [sign * step for sign in (-1, 1) for step in (2 * MINUTE_MS, HOUR_MS, 3 * DAY_MS, 20 * YEAR_MS)]
AGENTS = [f"agent-{n}" for n in range(5)]
KEYED = [{"kind": "insight", "payload": {"text": "pears"}, "idempotencyKey": "k-pears"}]


class Weather:
    """A relay whose trouble changes by chance; in flight means that the clock is set before it answers."""

    def __init__(self, chance):
        self.chance, self.calm, self.world = chance, False, None

    def __call__(self, request):
        """Answer one request."""
        if self.chance.random() < 0.1 and not self.calm:
            self.world.clock.offset_ms += self.chance.choice(STEPS_MS)
        trouble = (
            "none" if self.calm else self.chance.choice(["none", "none", "503", "429", "refuse", "lose"])
        )
        if trouble == "refuse":
            raise Refuse
        if trouble == "lose":
            self.world.relay.accept(request)
            raise Lose
        return {
            "none": None,
            "503": answer(503),
            "429": answer(429, retry_after=str(self.chance.randrange(1, 120))),
        }[trouble]


def test_no_step_of_the_clock_stalls_or_loses(tmp_path, rounds, seed):
    """All arrive once, in order, with the times they were given; none pays an attempt or waits for long."""
    for number in range(rounds(3)):
        chance = random.Random(seed + number)
        weather = Weather(chance)
        with World(tmp_path / f"{number}", behave=weather, seed=seed) as world:
            weather.world = world
            given = dict.fromkeys(AGENTS, 0)
            for _ in range(40):
                agent, many = chance.choice(AGENTS), chance.randrange(1, 6)
                world.enqueue(agent, many, first=given[agent])
                given[agent] += many
                world.run(chance.choice([0, 1_000, MINUTE_MS, HOUR_MS]))
                world.clock.offset_ms += chance.choice([0, *STEPS_MS])
                if chance.random() < 0.2:
                    world.restart()
            weather.calm, began_ms = True, world.clock.now_ms
            world.run(10 * MINUTE_MS, until=lambda: len(world.relay.keys) == sum(given.values()))  # noqa: B023
            assert {agent: world.numbers(agent) for agent in AGENTS} == {
                agent: list(range(many)) for agent, many in given.items()
            }
            assert world.clock.now_ms - began_ms <= 2 * MINUTE_MS
            world.run(2 * MINUTE_MS)  # what was stored without an answer is asked again, and settled
            assert (world.dead(), world.attempts()) == ([], 0)
            sent = [message for one in world.relay.requests for message in one.messages]
            assert len({(one["idempotencyKey"], one["occurredAt"]) for one in sent}) == sum(given.values())


def test_a_clock_far_ahead_at_a_start_forgets_no_key(tmp_path):
    """It has an hour to be set right; by a clock that goes evenly a key is forgotten after the window."""
    with World(tmp_path) as world:
        handed_over(world)
        world.clock.offset_ms += 10 * YEAR_MS
        world.restart()
        rest(world, 59)
        assert handed_over(world).duplicate
        world.clock.offset_ms -= 10 * YEAR_MS
        rest(world, 59)
        assert handed_over(world).duplicate
        world.clock.now_ms += 7 * DAY_MS
        rest(world, 2)
        assert not handed_over(world).duplicate


def handed_over(world):
    """The event with its own key, given once more and delivered."""
    with Outbox.open("builder", state_dir=world.folder, allow_network_fs=True) as outbox:
        (receipt,) = outbox.enqueue_many(KEYED)
    world.wake()
    world.run(1_000)
    return receipt


def rest(world, minutes):
    """So many minutes in which the engine puts its files in order."""
    for _ in range(minutes):
        world.clock.now_ms += MINUTE_MS
        world.wake()
        world.run(100)


def test_a_step_is_noticed_by_whoever_decides():
    """Not only at the next poll: what was an even clock a second ago may be years ahead now."""
    clock = TestClock()
    steady = Steadiness(clock)
    assert not steady.lasts()
    clock.now_ms += HOUR_MS
    assert steady.lasts()
    for step_ms in STEPS_MS:
        clock.offset_ms += step_ms
        assert not steady.lasts()
        clock.now_ms += HOUR_MS - 1
        assert not steady.lasts()
        clock.now_ms += 1
        assert steady.lasts()
    assert steady.steps == len(STEPS_MS)


def test_a_clock_that_drifts_is_even():
    """A correction of less than a minute, as time servers make them, begins no new hour."""
    clock = TestClock()
    steady = Steadiness(clock)
    clock.now_ms += HOUR_MS
    clock.offset_ms += 50_000
    assert (steady.lasts(), steady.steps) == (True, 0)


def test_nothing_expires_at_the_start_of_a_sidecar(tmp_path):
    """It has the same hour as a daemon: what waited while nobody ran may be too old only by a wrong clock."""
    state = StateDirectory(tmp_path / "state").create(allow_network_fs=True)
    put(state.path, "builder", 0, 1)
    settings = load(
        {"relay.url": "http://127.0.0.1:9", "bounds.max_age_s": 0.001}, environ={}, config_path=None
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "sidecar.sock"))
        listening.listen()
        with Companion(settings, state, "builder", "test", listening).running() as companion:
            companion._expire()
            assert status_of(state.path, "builder").waiting == 2
            companion.engine.delivery.steady._since_ms -= HOUR_MS

            def expired():
                companion._expire()  # what is in flight just now stays
                return status_of(state.path, "builder").waiting == 0

            wait_for(expired, 60)
