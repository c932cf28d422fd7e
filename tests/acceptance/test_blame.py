"""Blame needs evidence: who becomes a dead letter, and who only waits ([P4], [P5])."""

from __future__ import annotations

import itertools
import json

import pytest
from world import DAY_MS, HOUR_MS, MINUTE_MS, Lose, Refuse, World, answer

from outbox.delivery.tokens import HostToken
from relay_client import fingerprint


def numbers_in(request):
    """The numbers of the messages in a request."""
    return [message.get("n") for message in request.messages]


def test_500_to_one_event_only(tmp_path):
    """An event that alone gets 500 is dead after 12 attempts, exactly; those behind it arrive."""

    def behave(request):
        return answer(500) if 2 in numbers_in(request) else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 6)
        world.run(DAY_MS)
        (dead,) = world.dead()
        assert (dead.seq, dead.reason, dead.status, dead.attempts) == (3, "exhausted", 500, 12)
        assert world.numbers("builder") == [0, 1, 3, 4, 5]
        alone = [r for r in world.relay.requests if numbers_in(r) == [2]]
        assert len(alone) == 12


def test_500_to_all_for_a_day(tmp_path):
    """500 to everything for a day makes at most 12 dead letters; the rest arrives once it is mended."""
    with World(tmp_path, behave=lambda r: answer(500)) as world:
        world.enqueue("builder", 40)
        world.enqueue("reviewer", 40)
        world.run(DAY_MS)
        dead = world.dead()
        assert 0 < len(dead) <= 12
        assert {letter.reason for letter in dead} == {"exhausted"}
        assert world.engine.delivery.gate.relay.reason == "mass_rejection"
        world.relay.behave = lambda request: None
        world.run(HOUR_MS)
        assert len(world.relay.keys) == 80 - len(dead)
        assert len(world.dead()) == len(dead)


def test_a_poison_event_inside_a_run(tmp_path):
    """500 whenever one event is among them: it alone is dead, and the other 99 arrive in order."""

    def behave(request):
        return answer(500) if 41 in numbers_in(request) else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 100)
        world.run(DAY_MS)
        assert [letter.seq for letter in world.dead()] == [42]
        assert world.numbers("builder") == [n for n in range(100) if n != 41]
        assert world.relay.repeats == 0


def test_422_to_all_for_a_day(tmp_path):
    """422 to everything for a day with 10,000 waiting makes fewer than 200 dead letters."""
    refusal = answer(422, {"error": {"code": "validation_failed"}})
    with World(tmp_path, behave=lambda r: answer(422, json.loads(refusal.read()))) as world:
        world.enqueue("builder", 10_000)
        world.run(DAY_MS)
        dead = world.dead()
        assert 100 < len(dead) < 200
        assert world.statuses()["builder"].blocked.reason == "mass_rejection"
        world.relay.behave = lambda request: None
        world.run(HOUR_MS)
        assert world.numbers("builder") == list(range(len(dead), 10_000))


def test_ten_bad_events_in_a_row(tmp_path):
    """Ten refused events in a row of one agent become dead, and what is behind arrives without a person."""

    def behave(request):
        bad = [n for n in numbers_in(request) if n < 10]
        return answer(422, {"error": {"code": "validation_failed"}}) if bad else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 15)
        world.run(HOUR_MS)
        assert [letter.seq for letter in world.dead()] == list(range(1, 11))
        assert world.numbers("builder") == [10, 11, 12, 13, 14]


def test_ten_failing_events_in_a_row(tmp_path):
    """Ten events in a row that get 500 of a single agent do not block for ever either."""

    def behave(request):
        return answer(500) if [n for n in numbers_in(request) if n < 10] else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 15)
        world.run(14 * DAY_MS)
        assert [letter.seq for letter in world.dead()] == list(range(1, 11))
        assert world.numbers("builder") == [10, 11, 12, 13, 14]


def test_a_batch_event_whose_path_is_missing_is_said_to_have_none(tmp_path):
    """404 to the only message of a batch event, while others are accepted: no_endpoint, as for any event."""

    def behave(request):
        return answer(404) if request.agent == "builder" else None

    with World(tmp_path, behave=behave) as world:
        message = {"from": "builder", "to": "lead", "kind": "note", "body": "x"}
        world.enqueue("builder", 1, kind="session-message-batch", messages=[message])
        for n in range(100):
            world.enqueue("reviewer", 1, kind="insight", first=n)
            world.run(5 * MINUTE_MS)
        assert [letter.reason for letter in world.dead()] == ["no_endpoint"]


@pytest.mark.parametrize("parts", ["chunks", "messages"])
def test_an_events_own_first_part_is_no_evidence_against_its_second(tmp_path, parts):
    """The relay took a part of the event and fails then, also at health: its trouble, and no attempt."""
    seen = []

    def behave(request):
        seen.append(request)
        return answer(500) if len(seen) > 1 else None

    with World(tmp_path, behave=behave, health=lambda: 500, delivery__batch_max_items=2) as world:
        if parts == "chunks":
            fields = {"agentId": "builder", "segment": "s", "text": "x" * 100_000}
            world.enqueue("builder", 1, kind="continuation-archive", **fields)
        else:
            messages = [{"from": "builder", "to": "lead", "kind": "note", "body": "x"}] * 4
            world.enqueue("builder", 1, kind="session-message-batch", messages=messages)
        world.run(1)
        assert len(seen) == 2
        assert world.attempts() == 0
        assert world.engine.delivery.gate.relay.reason == "failed"


@pytest.mark.parametrize("kind", ["session-message", "session-message-batch"])
def test_what_a_request_brought_is_evidence_once(tmp_path, kind):
    """The others of its request show that a message is to blame for this attempt, not for the next one."""

    def behave(request):
        if request.path.endswith("/batch"):
            first = request.messages[0]
            return world.relay.accept(request, items=lambda one: (500, "x") if one is first else None)
        return answer(500)

    with World(tmp_path, behave=behave, health=lambda: 500) as world:
        if kind == "session-message":
            world.enqueue("builder", 3)
        else:
            messages = [{"from": "builder", "to": "lead", "kind": "note", "body": "x"}] * 3
            world.enqueue("builder", 1, kind=kind, messages=messages)
        world.run(1)
        assert world.attempts() == 1
        world.run(until=lambda: len(world.relay.requests) > 1)
        world.run(1)
        assert world.attempts() == 1
        assert world.engine.delivery.gate.relay.reason == "failed"


def test_a_relay_without_an_insight_path(tmp_path):
    """Insights end as dead letters (no_endpoint), the messages around them flow."""

    def behave(request):
        return answer(404) if request.path == "/api/insights/observations" else None

    with World(tmp_path, behave=behave) as world:
        for round_ in range(6):
            world.enqueue("builder", 3, first=3 * round_)
            world.enqueue("builder", 1, kind="insight")
        world.run(DAY_MS)
        assert world.numbers("builder") == list(range(18))
        dead = world.dead()
        assert [letter.reason for letter in dead] == ["no_endpoint"] * 6
        tried = [r for r in world.relay.requests if r.path == "/api/insights/observations"]
        assert len(tried) == 12, "only the first one is tried; the path never accepted anything"


def test_a_dead_end_is_tried_again_hourly(tmp_path):
    """A path that was a dead end is tried again after an hour, and works from then on when it is there."""
    there = False

    def behave(request):
        return answer(404) if request.path == "/api/insights/observations" and not there else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 2, kind="insight")
        world.run(50 * MINUTE_MS)
        assert len(world.dead()) == 2
        there = True
        world.run(70 * MINUTE_MS)
        world.enqueue("builder", 2, kind="insight", first=5)
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [5, 6]


def test_a_wrong_url_that_answers_health(tmp_path):
    """404 for every event with a health that answers: a few dead letters at most, never the whole queue."""
    with World(tmp_path, behave=lambda r: answer(404)) as world:
        for n in range(20):
            world.enqueue(f"agent-{n}", 20)
        world.run(DAY_MS)
        assert len(world.dead()) <= 12
        world.relay.behave = lambda request: None
        world.run(2 * HOUR_MS)
        assert len(world.relay.keys) == 400 - len(world.dead())


def test_one_agents_403_holds_that_agent_alone(tmp_path):
    """403 for one agent: it waits with `forbidden`, all others arrive, and it goes on once it is mended."""

    def behave(request):
        return answer(403, {"error": {"code": "insufficient_scope"}}) if request.agent == "builder" else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 5)
        world.enqueue("reviewer", 5)
        world.run(HOUR_MS)
        assert world.numbers("reviewer") == [0, 1, 2, 3, 4]
        status = world.statuses()["builder"]
        assert (status.waiting, status.blocked.reason) == (5, "forbidden")
        assert world.attempts() == 0
        world.relay.behave = lambda request: None
        world.run(2 * MINUTE_MS)
        assert world.numbers("builder") == [0, 1, 2, 3, 4]


def test_a_head_that_is_held_while_others_flow_is_stuck_after_a_day(tmp_path):
    """A head held for 24 h while others of the same token were accepted all along is dead: `stuck`."""

    def behave(request):
        return answer(403) if request.agent == "builder" else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 1)
        for hour in range(26):
            world.enqueue("reviewer", 1, first=hour)
            world.run(HOUR_MS)
        assert [(letter.seq, letter.reason) for letter in world.dead()] == [(1, "stuck")]
        assert world.numbers("reviewer") == list(range(26))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_bad_of_a_hundred_item_by_item(tmp_path, seed):
    """3 of 100 messages get 422 in their item result: 97 stored, 3 dead, order kept, at most 30 requests."""
    with World(tmp_path, seed=seed) as world:
        bad = set(world.rng.sample(range(100), 3))

        def refuse(message):
            return (422, {"code": "validation_failed", "message": "no"}) if message["n"] in bad else None

        def behave(request):
            if request.path.endswith("/batch"):
                return world.relay.accept(request, items=refuse)
            return answer(422) if request.messages[0]["n"] in bad else None

        world.relay.behave = behave
        world.enqueue("builder", 100)
        world.run(HOUR_MS)
        assert sorted(letter.seq - 1 for letter in world.dead()) == sorted(bad)
        assert world.numbers("builder") == [n for n in range(100) if n not in bad]
        assert len(world.relay.requests) <= 30


@pytest.mark.parametrize("status", [422, 400, 413, 409])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_three_bad_of_a_hundred_whole_batches(tmp_path, seed, status):
    """The same where the relay refuses whole batches: at most 45 requests."""
    with World(tmp_path, seed=seed) as world:
        bad = set(world.rng.sample(range(100), 3))
        code = {"error": {"code": "key_reused" if status == 409 else "validation_failed"}}

        def behave(request):
            return answer(status, code) if bad & set(numbers_in(request)) else None

        world.relay.behave = behave
        world.enqueue("builder", 100)
        world.run(HOUR_MS)
        assert sorted(letter.seq - 1 for letter in world.dead()) == sorted(bad)
        assert world.numbers("builder") == [n for n in range(100) if n not in bad]
        assert len(world.relay.requests) <= 45
        assert world.relay.repeats == 0


def test_a_wrong_number_of_results(tmp_path):
    """A batch answer that misses a result proves nothing: the same messages go singly, with the same keys."""

    def behave(request):
        if request.path.endswith("/batch"):
            return answer(207, {"results": [{"status": 201}] * (len(request.messages) - 1)})
        return None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 500)
        world.run(HOUR_MS)
        assert world.numbers("builder") == list(range(500))
        assert world.dead() == []
        batches = [r for r in world.relay.requests if r.path.endswith("/batch")]
        assert len(batches) == 3, "three unreadable answers mean: no batches here"


def test_item_results_of_500_and_429(tmp_path):
    """What failed in a batch goes again before anything not yet sent; nothing is lost or repeated."""
    failing = {3: 500, 7: 429}

    def items(message):
        return (failing[message["n"]], {"code": "later"}) if message["n"] in failing else None

    with World(tmp_path) as world:

        def behave(request):
            if request.path.endswith("/batch"):
                return world.relay.accept(request, items=items)
            status = failing.get(request.messages[0]["n"])
            return answer(status) if status else None

        world.relay.behave = behave
        world.enqueue("builder", 10)
        world.run(5_000)
        failing.clear()
        world.run(10 * MINUTE_MS)
        assert sorted(world.numbers("builder")) == list(range(10))
        assert world.numbers("builder")[-2:] == [3, 7]
        assert world.dead() == []
        assert world.relay.repeats == 0


def test_409_for_a_whole_batch(tmp_path):
    """409 for a batch says nothing of its messages: it is split, and each known key counts as delivered."""
    known = {4, 5}

    def behave(request):
        return answer(409, {"error": {"code": "duplicate"}}) if known & set(numbers_in(request)) else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 12)
        world.run(HOUR_MS)
        assert world.numbers("builder") == [n for n in range(12) if n not in known]
        assert world.dead() == []
        assert world.statuses()["builder"].delivered == 12


def test_200_with_a_top_level_error(tmp_path):
    """A 200 whose body has an `error` is no acceptance."""
    broken = True

    def behave(request):
        return answer(200, {"error": {"code": "storage", "message": "try later"}}) if broken else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 3)
        world.run(5_000)
        assert world.relay.keys == set()
        assert world.statuses()["builder"].waiting == 3
        broken = False
        world.run(10 * MINUTE_MS)
        assert world.numbers("builder") == [0, 1, 2]


def test_a_timeout_counts_only_with_evidence(tmp_path):
    """Lost answers to one agent, while health answers, count as attempts; the others are not disturbed."""

    def behave(request):
        if request.agent == "builder":
            raise Lose
        return

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 1)
        world.enqueue("reviewer", 20)
        world.run(DAY_MS)
        assert world.numbers("reviewer") == list(range(20))
        assert [(letter.reason, letter.attempts) for letter in world.dead()] == [("exhausted", 12)]


def test_an_unsafe_call_with_a_lost_answer_is_never_repeated(tmp_path):
    """A tool call whose answer is lost has an unknown outcome: a dead letter, sent exactly once."""

    def behave(request):
        if b"tools/call" in request.body:
            world.relay.accept(request)
            raise Lose
        return

    with World(tmp_path) as world:
        world.relay.behave = behave
        world.enqueue("builder", 1, kind="mcp-tool-call")
        world.enqueue("builder", 1)
        world.run(DAY_MS)
        assert [letter.reason for letter in world.dead()] == ["outcome_unknown"]
        assert len(world.relay.effects) == 1
        assert world.numbers("builder") == [0, 0]


def test_a_safe_call_with_a_lost_answer_goes_again_with_its_key(tmp_path):
    """A tool named safe to repeat goes again after a lost answer, with the same key."""
    lost = []

    def behave(request):
        if b"tools/call" in request.body and not lost:
            lost.append(request)
            world.relay.accept(request)
            raise Lose
        return

    with World(tmp_path, mcp__safe_to_repeat=["note_add"]) as world:
        world.relay.behave = behave
        world.enqueue("builder", 1, kind="mcp-tool-call")
        world.run(HOUR_MS)
        assert world.dead() == []
        assert len(world.relay.effects) == 2
        assert len(set(world.relay.effects)) == 1


def test_unsafe_calls_spend_the_budget_before_they_are_sent(tmp_path):
    """Many unsafe calls with unknown outcomes: three are free, the next waits for its interval unsent."""

    def behave(request):
        return answer(500) if b"tools/call" in request.body else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 20, kind="mcp-tool-call")
        world.run(5 * MINUTE_MS)
        assert len(world.dead()) == 3
        assert world.statuses()["builder"].blocked.reason == "mass_rejection"
        world.run(DAY_MS)
        assert len(world.dead()) <= 12


def test_a_restart_remembers_the_budget_and_the_gate(tmp_path):
    """Restarting again and again is no way to empty the queue into the dead letters."""
    with World(tmp_path, behave=lambda r: answer(422)) as world:
        world.enqueue("builder", 100)
        for _ in range(20):
            world.run(2_000)
            world.restart()
        assert len(world.dead()) < 12


def test_facts_of_another_release_stop_no_start(tmp_path):
    """What is kept of the relay may be another release's: what cannot be read counts as not known."""
    with World(tmp_path) as world:
        world.enqueue("builder", 2)
        world.engine.delivery.gate._state.write(
            {
                "gate": {"url": "http://relay.test:4850", "reason": None, "colour": 7},
                "path:/api/messages": {"inARow": "many", "deadEnd": [], "offUntil": 10**30},
                "path:/api/mcp": "what",
                "accepts": ["no"],
            }
        )
        world.restart()
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [0, 1]


def test_retry_after_binds_the_agent_that_got_it(tmp_path):
    """429 with Retry-After to one agent: it waits so long, another one is served meanwhile."""
    asked = []

    def behave(request):
        if request.agent == "builder" and not asked:
            asked.append(request)
            return answer(429, retry_after="600")
        return None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 2)
        world.enqueue("reviewer", 2)
        world.run(5 * MINUTE_MS)
        assert world.numbers("reviewer") == [0, 1]
        assert world.statuses()["builder"].blocked.reason == "retry_after"
        world.run(10 * MINUTE_MS)
        tries = [r.at_ms for r in world.relay.requests if r.agent == "builder"]
        assert tries[1] - tries[0] >= 600_000
        assert world.numbers("builder") == [0, 1]


def test_retry_after_outlives_a_restart(tmp_path):
    """What the relay asked to wait for is still waited for after a restart; an own backoff is not."""
    with World(tmp_path, behave=lambda r: answer(429, retry_after="600")) as world:
        world.enqueue("builder", 1)
        world.run(1_000)
        world.restart()
        world.run(5 * MINUTE_MS)
        assert len(world.relay.requests) == 1
        world.relay.behave = lambda request: None
        world.run(6 * MINUTE_MS)
        assert world.numbers("builder") == [0]


def test_a_stop_begins_no_unsafe_call_that_its_time_does_not_cover(tmp_path):
    """With a deadline half a second away an unsafe call is not begun, a message is sent."""
    with World(tmp_path) as world:
        world.enqueue("caller", 1, kind="mcp-tool-call")
        world.enqueue("builder", 1)
        world.engine.begin_flush(world.clock.now_ms / 1_000 + 0.5)
        world.run(100)
        assert world.numbers("builder") == [0]
        assert world.relay.effects == []
        world.engine.end_flush()
        world.run(MINUTE_MS)
        assert len(world.relay.effects) == 1


def test_dead_letters_tell_what_happened(tmp_path):
    """A dead letter keeps the relay's reason, code and status, and its history."""
    problem = {"error": {"code": "validation_failed", "message": "body is missing"}}
    with World(tmp_path, behave=lambda r: answer(422, problem)) as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        (letter,) = world.dead()
        assert (letter.status, letter.reason) == (422, "rejected")
        assert "body is missing" in letter.detail


def test_a_probe_rotates_over_agents(tmp_path):
    """While the relay is closed the probes come from different agents, one at a time."""

    def refuse(_request):
        raise Refuse

    with World(tmp_path, behave=refuse, health=lambda: 0) as world:
        for n in range(5):
            world.enqueue(f"agent-{n}", 1)
        world.run(10 * MINUTE_MS)
        assert {request.agent for request in world.relay.requests} == {f"agent-{n}" for n in range(5)}
        times = [request.at_ms for request in world.relay.requests]
        assert len(times) == len(set(times))


def test_an_event_waits_by_its_own_schedule(tmp_path):
    """An event with its own `retry` is tried again when it says, not when the settings do."""
    with World(tmp_path, behave=lambda r: answer(500)) as world:
        world.enqueue("builder", 1)
        box = world.boxes["builder"]
        retry = {"backoff": "fixed", "initialDelayMs": 7_000, "jitter": 0, "maxAttempts": 4}
        box.enqueue("insight", {"n": 1}, retry=retry)
        world.relay.behave = lambda r: answer(500) if r.path == "/api/insights/observations" else None
        world.run(10 * MINUTE_MS)
        tries = [r.at_ms for r in world.relay.requests if r.path == "/api/insights/observations"]
        assert [later - earlier for earlier, later in itertools.pairwise(tries)] == [7_000] * 3
        assert [letter.attempts for letter in world.dead()] == [4]


def test_a_token_that_somebody_else_read_first_ends_the_wait(tmp_path):
    """After 403 another token is used at once, whoever had looked at the source in the meantime."""
    token = ["tok-old"]

    class Source:
        def token(self):
            return token[0]

        def refresh(self):
            return False  # somebody else has noticed the change already

        def describe(self):
            return "a test"

        def fingerprint(self):
            return fingerprint(token[0])

    def behave(request):
        if request.headers["authorization"] == "Bearer tok-old":
            token[0] = "tok-new"
            return answer(403)
        return None

    with World(tmp_path, behave=behave) as world:
        world.engine.delivery.tokens = HostToken(Source())
        world.enqueue("builder", 1)
        world.run(100)
        assert world.numbers("builder") == [0]


def test_a_lesson_of_size_is_forgotten_after_an_hour(tmp_path):
    """A relay that took only small bodies for a while gets large ones again later, over a restart too."""
    small = True

    def behave(request):
        return answer(413) if small and len(request.body) > 4_000 else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 100, text="x" * 200)
        world.run(MINUTE_MS)
        small = False
        world.restart()
        world.enqueue("builder", 100, first=100, text="x" * 200)
        world.run(MINUTE_MS)
        assert max(len(request.messages) for request in world.relay.requests[-10:]) < 20
        world.clock.now_ms += HOUR_MS
        world.enqueue("builder", 100, first=200, text="x" * 200)
        world.run(MINUTE_MS)
        assert max(len(request.messages) for request in world.relay.requests[-3:]) > 50
        assert world.numbers("builder") == list(range(300))


def test_a_head_can_be_stuck_for_minutes(tmp_path):
    """`delivery.max_stuck_s` holds for short times as well as for a day."""

    def behave(request):
        return answer(403) if request.agent == "builder" else None

    with World(tmp_path, behave=behave, delivery__max_stuck_s=600) as world:
        world.enqueue("builder", 1)
        for minute in range(15):
            world.enqueue("reviewer", 1, first=minute)
            world.run(MINUTE_MS)
        assert [letter.reason for letter in world.dead()] == ["stuck"]
