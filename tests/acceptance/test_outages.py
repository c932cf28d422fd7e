"""An outage costs nothing: a week of every kind of trouble, on a clock of our own ([P4])."""

from __future__ import annotations

import httpx
import pytest
from world import DAY_MS, MINUTE_MS, Lose, Refuse, World, answer

AGENTS = [f"agent-{n}" for n in range(50)]


def refuse(_request):
    """Nothing listens."""
    raise Refuse


def lose(_request):
    """The request is read, and no answer comes."""
    raise Lose


def login_page(_request):
    """A page with status 200."""
    return httpx.Response(200, html="<!doctype html><title>Sign in</title>")


def redirect(_request):
    """A redirect to another host."""
    return httpx.Response(302, headers={"location": "https://login.example/?next=x"})


OUTAGES = {
    "unreachable": (refuse, 0),
    "lost": (lose, 0),
    "unauthorized": (lambda r: answer(401, www_authenticate='Bearer error="invalid_token"'), 200),
    "forbidden": (lambda r: answer(403, {"error": {"code": "insufficient_scope"}}), 200),
    "wrong_url": (lambda r: answer(404), 404),
    "throttled": (lambda r: answer(429, retry_after="1800"), 200),
    "unavailable": (lambda r: answer(503), 503),
    "unavailable_but_healthy": (lambda r: answer(503), 200),
    "redirected": (redirect, 302),
    "login_page": (login_page, -1),
    "bad_gateway": (lambda r: answer(502), 502),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_a_week_of_trouble_costs_nothing(tmp_path, name):
    """Seven days of trouble with 50 agents: no attempt, no dead letter, and all in order afterwards."""
    behave, health = OUTAGES[name]
    with World(tmp_path, behave=behave, health=lambda: health, delivery__backoff_max_s=1_800) as world:
        for agent in AGENTS:
            world.enqueue(agent, 4)
        world.run(7 * DAY_MS)
        assert world.relay.requests, "the trouble has to be looked at again"
        assert world.attempts() == 0
        assert world.dead() == []
        world.relay.behave, world.relay.health = lambda request: None, lambda: 200
        world.run(90 * MINUTE_MS)
        for agent in AGENTS:
            assert world.numbers(agent) == [0, 1, 2, 3]
        assert world.relay.repeats == 0
        assert world.dead() == []


def test_a_week_of_pages_sends_no_unsafe_call(tmp_path):
    """A week of 502 and sign-in pages with unsafe tool calls waiting: none of them is sent."""

    def behave(request):
        return answer(502) if request.at_ms // MINUTE_MS % 2 else login_page(request)

    with World(tmp_path, behave=behave, health=lambda: -1) as world:
        world.enqueue("builder", 3, kind="mcp-tool-call")
        world.run(7 * DAY_MS)
        assert not [r for r in world.relay.requests if b"tools/call" in r.body]
        assert world.dead() == []
        world.relay.behave, world.relay.health = lambda request: None, lambda: 200
        world.run(10 * MINUTE_MS)
        assert world.numbers("builder") == [0, 1, 2]
        assert len(world.relay.effects) == 3


def test_half_an_outage_for_unsafe_calls(tmp_path):
    """502 for a week from a relay that answers health: the tools are asked for, no unsafe call is sent."""
    with World(tmp_path, behave=lambda r: answer(502), health=lambda: 200) as world:
        world.enqueue("builder", 30, kind="mcp-tool-call")
        world.run(7 * DAY_MS)
        assert not [r for r in world.relay.requests if b"tools/call" in r.body]
        assert world.dead() == []
