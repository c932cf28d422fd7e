"""Every case of tests/cases/relay/retry_after.json against the engine, on a clock set as it says."""

import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from world import MINUTE_MS, World, answer

CASES = json.loads((Path(__file__).parents[1] / "cases" / "relay" / "retry_after.json").read_text("utf-8"))[
    "cases"
]
ARRIVES = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
CEILING_MS = 60 * MINUTE_MS  # relay.max_retry_after_s, as docs/configuration.md has it
FIRST_BACKOFF_MS = (500, 1_000)  # delivery.backoff_initial_s, with its jitter
JITTER_MS = 1_000


def windows(want):
    """When the next attempt may come, as ranges of milliseconds; any of them is right."""
    for one in want if isinstance(want, list) else [want]:
        if one == "ignored":
            yield FIRST_BACKOFF_MS
        else:
            least = CEILING_MS if one == "capped" else round(one["wait_s"] * 1_000)
            yield least, max(least + JITTER_MS, FIRST_BACKOFF_MS[1])


def asks_to_wait(status, values):
    """A relay that once asks the agent "patient" to wait, and serves everybody else."""
    asked = []

    def behave(request):
        if request.agent != "patient" or asked:
            return None
        asked.append(request)
        fields = [("retry-after", value.encode()) for value in values]
        return httpx.Response(status, headers=fields, json={"error": {"code": f"e{status}"}})

    return behave


def at_noon(world):
    """The wall clock stands at the moment the cases speak of; it goes on only when nothing can be done."""
    world.clock.offset_ms = round(ARRIVES.timestamp() * 1_000) - world.clock.now_ms


def tries_of(world, agent):
    """When the relay got a request of this agent, from the first one on."""
    moments = [request.at_ms for request in world.relay.requests if request.agent == agent]
    return [moment - moments[0] for moment in moments]


@pytest.mark.parametrize("works_for_others", [False, True], ids=["alone", "while it works"])
@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_the_next_attempt_comes_when_the_answer_asks_for_it(case, status, works_for_others, tmp_path):
    """Neither sooner nor later than the case allows; no busy loop, no attempt counted, nothing lost."""
    with World(tmp_path, behave=asks_to_wait(status, case["headers"])) as world:
        at_noon(world)
        world.enqueue("patient", 1)
        if works_for_others:
            world.enqueue("other", 50)
        world.run(30_000)
        if works_for_others:
            assert world.numbers("other") == list(range(50))
        world.run(3 * CEILING_MS)
        tries = tries_of(world, "patient")
        assert len(tries) == 2
        assert any(least <= tries[1] <= most for least, most in windows(case["want"])), tries
        assert world.numbers("patient") == [0]
        assert world.relay.repeats == 0
        assert world.attempts() == 0
        assert world.dead() == []


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_a_relay_that_goes_on_asking_is_not_asked_all_the_time(case, status, tmp_path):
    """The same answer to everything, for a minute: at most three tries in the first second, then fewer."""

    def behave(_request):
        return httpx.Response(status, headers=[("retry-after", value.encode()) for value in case["headers"]])

    with World(tmp_path, behave=behave) as world:
        at_noon(world)
        world.enqueue("patient", 2)
        world.run(MINUTE_MS)
        tries = tries_of(world, "patient")
        assert len([moment for moment in tries if moment < 1_000]) <= 3
        assert len(tries) <= 60
        assert world.attempts() == 0
        assert world.dead() == []
        world.relay.behave = lambda _request: None
        world.run(2 * CEILING_MS)
        assert world.numbers("patient") == [0, 1]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["want"] == "capped"], ids=lambda case: case["case"]
)
def test_a_wait_that_was_capped_concerns_one_agent_only(case, tmp_path):
    """While one agent waits for the ceiling, another one that comes later is served within seconds."""
    with World(tmp_path, behave=asks_to_wait(503, case["headers"])) as world:
        at_noon(world)
        world.enqueue("patient", 1)
        world.run(10 * MINUTE_MS)
        world.enqueue("other", 3)
        world.run(10_000)
        assert world.numbers("other") == [0, 1, 2]
        assert world.numbers("patient") == []
        blocked = world.statuses()["patient"].blocked
        assert blocked.reason == "retry_after"
        assert blocked.next_try_at_ms == round(ARRIVES.timestamp() * 1_000) + CEILING_MS


@pytest.mark.parametrize("setting_s", [0, 90])
def test_the_ceiling_is_a_setting(setting_s, tmp_path):
    """`relay.max_retry_after_s` is what a wait of ten days becomes; 0 leaves the ordinary backoff."""
    flags = {"relay__max_retry_after_s": setting_s}
    with World(tmp_path, behave=asks_to_wait(503, ["864000"]), **flags) as world:
        at_noon(world)
        world.enqueue("patient", 1)
        world.run(10 * MINUTE_MS)
        least = max(setting_s * 1_000, FIRST_BACKOFF_MS[0])
        assert least <= tries_of(world, "patient")[1] <= least + JITTER_MS


# Calls that must not be repeated, put off without a Retry-After ------------------------------


@pytest.mark.parametrize("method", ["tools/call", "tools/list"])
@pytest.mark.parametrize("status", [401, 403, 429, 503])
def test_a_call_that_is_put_off_waits_longer_each_time(status, method, tmp_path):
    """Ten minutes of it are some twenty tries by backoff, though health or asking for the tools succeeds."""

    def behave(request):
        return answer(status) if method.encode() in request.body else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("patient", 2, kind="mcp-tool-call")
        world.run(10 * MINUTE_MS)
        put_off = [request for request in world.relay.requests if method.encode() in request.body]
        assert len(put_off) <= 30
        assert world.dead() == []
        world.relay.behave = lambda _request: None
        world.run(2 * MINUTE_MS)
        assert world.numbers("patient") == [0, 1]
        assert len(world.relay.effects) == 2
