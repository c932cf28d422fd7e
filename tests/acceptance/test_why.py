"""`outbox why` in each row of the outcome table: the true reason in three parts, and the true next moment.

Each situation is made by a relay, on a clock of our own; the command reads the files as anywhere. Some rows
are asked for by a real command beside a real daemon.
"""

import json
import time

import apsw
import httpx
import pytest
from command_line import command, in_process, process
from peers import fake_relay
from runs import AGENT, WAIT_S, hand_over, serve_environment, serve_running, status_of, until
from world import DAY_MS, HOUR_MS, MINUTE_MS, Lose, Refuse, World, answer

import outbox.cli.why
from outbox.bounds import Bounds
from outbox.delivery.tokens import HostToken
from outbox.event import Limits
from outbox.store.directory import StateDirectory
from outbox.store.rules import encode_rules
from relay_client import TokenFile

ASKED_MS = 4_000  # after the first request
SAFE = "Nothing is lost and no attempt is counted while the relay is in trouble"
ONLY_IT = "Only this agent waits; nothing is lost, no attempt is counted"
COUNTED = "After the last attempt it becomes a dead letter, and what is behind it goes on."
ONLY_PATH = "Only events that go there wait, and those behind them; nothing is lost"
GOES_ON = "goes on by itself"
SKIP = "outbox skip builder 1"


def says(status, code="", **fields):
    """This answer to everything."""
    return lambda _request: answer(
        status, {"error": {"code": code, "message": "m"}} if code else {}, **fields
    )


def refuse(_request):
    """The connection is refused."""
    raise Refuse


def lose(_request):
    """The request is read, and no answer comes."""
    raise Lose


def page(_request):
    """A page for people."""
    return httpx.Response(200, html="<!doctype html><title>Sign in</title>")


def redirect(_request):
    """To a login page, with something in the address that is nobody's business."""
    return httpx.Response(302, headers={"location": "https://login.example/in?session=s3cret"})


# What stands in the way: the answer to everything, what health says (0: nothing, -1: a page), and what `why`
# tells: the reason; what happened; what it means for the events; what to do.
ROWS = {
    "2xx with something else": (
        page, -1, "not_a_relay",
        ('is no relay: the answer is no JSON but an HTML page, "Sign in"', SAFE, "Check the address"),
    ),
    "3xx": (
        redirect, 302, "redirected",
        ("redirects are not followed: redirected to https://login.example", SAFE, "Set relay.url"),
    ),
    "409 in progress": (
        says(409, "in_progress"), 200, "in_progress",
        ("The relay is still at work on an earlier try", "again with the same key", "Nothing is to be done."),
    ),
    "409 with Retry-After": (
        says(409, retry_after="40"), 200, "retry_after", ("(Retry-After): Conflict", ONLY_IT, GOES_ON),
    ),
    "401": (
        says(401, "invalid_token"), 200, "unauthorized",
        ("The relay refuses the token: invalid_token: m", SAFE, "Renew the token"),
    ),
    "403": (
        says(403, "insufficient_scope"), 200, "forbidden",
        ("The relay refuses this agent (403): insufficient_scope", ONLY_IT, "Give its token the right"),
    ),
    "404 of a relay without health": (
        says(404), 404, "no_endpoint",
        ("The relay has no /api/messages: Not Found", ONLY_PATH, "[relay.paths]"),
    ),
    "404 of a relay that works": (
        says(404), 200, "no_endpoint", ("The relay has no /api/messages, asked ", COUNTED, SKIP),
    ),
    "405": (says(405), 200, "no_endpoint", ("The relay has no /api/messages, asked ", COUNTED, SKIP)),
    "501": (says(501), 200, "no_endpoint", ("The relay has no /api/messages, asked ", COUNTED, SKIP)),
    "429": (says(429), 200, "busy", ("The relay asks to wait: Too Many Requests", SAFE, GOES_ON)),
    "429 with Retry-After": (
        says(429, retry_after="1800"), 200, "retry_after",
        ("The relay asked this agent to wait until", ONLY_IT, GOES_ON),
    ),
    "500 with Retry-After": (
        says(500, retry_after="1800"), 200, "retry_after",
        ("The relay asked this agent to wait until", ONLY_IT, GOES_ON),
    ),
    "503": (says(503), 200, "busy", ("The relay asks to wait: Service Unavailable", SAFE, GOES_ON)),
    "408": (says(408), 200, "busy", ("The relay asks to wait: Request Timeout", SAFE, GOES_ON)),
    "421": (says(421), 200, "busy", ("The relay asks to wait: Misdirected Request", SAFE, GOES_ON)),
    "423": (says(423), 200, "busy", ("The relay asks to wait: Locked", SAFE, GOES_ON)),
    "425": (says(425), 200, "busy", ("The relay asks to wait: Too Early", SAFE, GOES_ON)),
    "502": (says(502), 502, "gateway", ("A gateway answers in the relay's place: Bad Gat", SAFE, GOES_ON)),
    "504": (says(504), 504, "gateway", ("A gateway answers in the relay's place", SAFE, GOES_ON)),
    "500 of a broken relay": (
        says(500), 500, "failed", ("The relay fails on everything: Internal Server Error", SAFE, "own log"),
    ),
    "500 of a relay that works": (says(500), 200, "failed", ("The relay answered 500 to it", COUNTED, SKIP)),
    "599": (says(599), 200, "failed", ("The relay answered 599 to it", COUNTED, SKIP)),
    "418": (says(418), 200, "failed", ("The relay answered 418 to it", COUNTED, SKIP)),
    "cannot connect": (
        refuse, 0, "unreachable", ("The relay does not answer: connection refused", SAFE, GOES_ON),
    ),
    "no answer, no health": (
        lose, 0, "lost", ("The relay takes requests and gives no whole answer", SAFE, GOES_ON),
    ),
    "no answer, but health": (
        lose, 200, "lost", ("The relay took it and gave no whole answer", COUNTED, SKIP),
    ),
}  # fmt: skip


@pytest.fixture
def why(monkeypatch, capsys, tmp_path):
    """`why(world, agent)`: what the command says, as data and as text, on that world's clock."""
    in_process(monkeypatch, tmp_path)

    def ask(world, agent="builder"):
        monkeypatch.setattr(outbox.cli.why, "now_ms", world.clock.wall_ms)
        status, data, errors = command(capsys, "why", "--json", "--", agent)
        assert (status, errors) == (0, "")
        status, text, errors = command(capsys, "why", "--", agent)
        assert (status, errors) == (0, "")
        told = json.loads(data)
        assert text.splitlines() == told["lines"]
        assert told["agent"] == agent
        return told

    return ask


def world_at(tmp_path, behave=lambda _request: None, health=200, **flags):
    """A world whose clock tells the time of day, as producers in it do."""
    world = World(tmp_path / "state", behave=behave, health=lambda: health, **flags)
    world.clock.offset_ms = time.time_ns() // 1_000_000 - world.clock.now_ms
    return world


def next_request(world, agent="builder"):
    """When the next request of this agent really goes out (epoch ms)."""
    before = len(world.relay.requests)

    def is_there():
        return any(request.agent in {agent, ""} for request in world.relay.requests[before:])

    world.run(DAY_MS, until=is_there)
    assert is_there()
    return world.relay.requests[-1].at_ms + world.clock.offset_ms


# Rows where the event waits --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_a_waiting_event_is_told_its_true_reason(row, why, tmp_path):
    """The reason code, the three parts, and the moment at which the next try really comes."""
    behave, health, reason, (happened, means, do) = ROWS[row]
    with world_at(tmp_path, behave, health) as world:
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        told = why(world)
        assert told["reason"] == reason
        queue, first, *rest = told["lines"]
        assert queue.startswith("builder: 1 event waits, seq 1 (session-message), since ")
        assert happened in first
        assert means in " ".join(rest)
        assert do in " ".join(rest)
        assert "s3cret" not in " ".join(told["lines"])
        assert told["since"] <= world.clock.wall_ms()
        assert told["head"]["attempts"] == world.attempts()
        assert next_request(world) == told["nextTryAt"]


@pytest.mark.parametrize("row", ROWS)
def test_it_goes_on_once_that_is_mended(row, why, tmp_path):
    """What `why` says of waiting is true: once mended, the event is delivered by itself; nothing is dead."""
    behave, health, *_ = ROWS[row]
    with world_at(tmp_path, behave, health) as world:
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        world.relay.behave, world.relay.health = lambda _request: None, lambda: 200
        world.run(HOUR_MS)
        assert world.numbers("builder") == [0]
        assert world.dead() == []
        assert why(world)["lines"] == [
            "builder: nothing waits; 1 delivered.",
            "What is enqueued now goes out next.",
        ]


@pytest.mark.parametrize(
    ("row", "reason", "happened"),
    [
        ("429", "busy", "The relay asks this agent to wait: Too Many Requests"),
        ("503", "busy", "The relay asks this agent to wait: Service Unavailable"),
        ("502", "gateway", "A gateway answered in the relay's place: Bad Gateway"),
        ("403", "forbidden", "The relay refuses this agent (403)"),
        ("409 in progress", "in_progress", "The relay is still at work on an earlier try"),
        ("500 of a relay that works", "failed", "The relay answered 500 to it"),
    ],
)
def test_what_concerns_one_agent_is_said_of_it_alone(row, reason, happened, why, tmp_path):
    """While others are accepted all along, the relay is not said to be in trouble; they have no reason."""

    def behave(request):
        return ROWS[row][0](request) if request.agent == "builder" else None

    with world_at(tmp_path, behave) as world:
        world.enqueue("builder", 1)
        for n in range(40):
            world.enqueue("other", 1, first=n)
            world.run(100)
        told = why(world)
        assert told["reason"] == reason
        assert happened in told["lines"][1]
        assert why(world, "other")["reason"] == "empty"
        assert len(world.numbers("other")) == 40
        assert next_request(world) == told["nextTryAt"]


def test_a_path_that_is_missing_holds_its_kind_alone(why, tmp_path):
    """Insights wait for their path, which is named; messages of another agent go on."""

    def behave(request):
        return answer(404) if request.path == "/api/insights/observations" else None

    with world_at(tmp_path, behave, health=404) as world:
        world.enqueue("thinker", 1, kind="insight")
        world.run(ASKED_MS)
        told = why(world, "thinker")
        assert told["reason"] == "no_endpoint"
        assert "The relay has no /api/insights/observations" in told["lines"][1]
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        assert why(world)["reason"] == "empty"


def test_the_next_moment_is_the_last_of_all_that_hold_an_event(why, tmp_path):
    """An insight held by its own wait and by its path goes when both are over; that is the moment told."""

    def behave(request):
        return answer(404) if request.path == "/api/insights/observations" else None

    with world_at(tmp_path, behave) as world:
        world.enqueue("builder", 1, kind="insight")
        world.run(ASKED_MS)
        for n in range(8):
            world.enqueue("other", 1, first=n)
            told = why(world)
            assert told["reason"] == "no_endpoint"
            assert next_request(world) == told["nextTryAt"], f"try {n}"


def test_refusals_of_everything_are_held_back(why, tmp_path):
    """After three dead letters in a row: how many, of which path, why, and what a person may do."""
    with world_at(tmp_path, says(422, "validation_failed")) as world:
        world.enqueue("builder", 8)
        world.run(200)
        told = why(world)
        assert told["reason"] == "mass_rejection"
        happened, means, do = told["lines"][1:]
        assert "The last 3 events for /api/messages became dead letters in a row" in happened
        assert "validation_failed" in happened
        assert "it stays and is tried" in means
        assert "outbox resume" in do
        assert next_request(world) == told["nextTryAt"]


def test_failures_of_everything_are_held_back(why, tmp_path):
    """The same when a relay that answers health fails on all events: it is not only "in trouble"."""
    with world_at(tmp_path, says(500)) as world:
        world.enqueue("builder", 9)
        world.run(40 * MINUTE_MS)
        assert len(world.dead()) >= 3
        told = why(world)
        assert told["reason"] == "mass_rejection"
        assert "became dead letters in a row" in " ".join(told["lines"])
        assert "outbox resume" in " ".join(told["lines"])


# Rows that make a dead letter ------------------------------------------------------------------------------


def dead_letters(capsys):
    """`outbox dead list --json`."""
    status, told, errors = command(capsys, "dead", "list", "--json")
    assert (status, errors) == (0, "")
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.parametrize(
    ("behave", "reason", "status", "attempts"),
    [
        (says(400, "malformed"), "rejected", 400, 0),
        (says(410), "rejected", 410, 0),
        (says(413), "rejected", 413, 0),
        (says(415), "rejected", 415, 0),
        (says(422, "validation_failed"), "rejected", 422, 0),
        (says(404, "unknown_recipient"), "rejected", 404, 0),
        (says(409, "key_reused"), "rejected", 409, 0),
        (says(500), "exhausted", 500, 3),
        (says(418), "exhausted", 418, 3),
        (says(404), "no_endpoint", 404, 3),
        (lose, "exhausted", None, 3),
    ],
)
def test_a_dead_letter_is_told_and_holds_nobody_up(behave, reason, status, attempts, why, capsys, tmp_path):
    """Nothing waits any more; the dead letter is counted, with the reason and the answer that made it one."""
    with world_at(tmp_path, behave, delivery__max_attempts=3) as world:
        world.enqueue("builder", 1)
        world.run(HOUR_MS)
        told = why(world)
        assert (told["reason"], told["waiting"], told["head"]) == ("empty", 0, None)
        assert told["lines"][0] == "builder: nothing waits; 0 delivered, 1 dead letter."
        (letter,) = dead_letters(capsys)
        assert (letter["reason"], letter["status"], letter["attempts"]) == (reason, status, attempts)


@pytest.mark.parametrize("status", [200, 409])
def test_what_was_delivered_has_no_reason(status, why, tmp_path):
    """2xx, and 409 for a key that is known: delivered, nothing waits."""
    with world_at(tmp_path, says(status)) as world:
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        assert why(world)["lines"][0] == "builder: nothing waits; 1 delivered."


@pytest.mark.parametrize("failure", [says(502), says(504), says(500), lose, page])
def test_a_call_whose_outcome_is_unknown(failure, why, capsys, tmp_path):
    """Sent, and nobody knows what became of it: a dead letter that says so; those behind are held back."""

    def behave(request):
        return failure(request) if b"tools/call" in request.body else None

    with world_at(tmp_path, behave) as world:
        world.enqueue("builder", 8, kind="mcp-tool-call")
        world.run(MINUTE_MS)
        assert [letter["reason"] for letter in dead_letters(capsys)] == ["outcome_unknown"] * 3
        told = why(world)
        assert (told["reason"], told["waiting"]) == ("mass_rejection", 5)
        assert "The last 3 events for /api/mcp became dead letters in a row" in told["lines"][1]
        assert "outbox resume" in told["lines"][3]


def test_a_stuck_head_is_set_aside_and_told(why, capsys, tmp_path):
    """A day of 403 while others are accepted all along: `stuck`; what was only in a group with it goes on."""
    with world_at(tmp_path, lambda r: answer(403) if r.agent == "builder" and r.seq == 1 else None) as world:
        world.enqueue("builder", 20)
        for n in range(26):
            world.enqueue("other", 1, first=n)
            world.run(HOUR_MS)
        assert [(letter["reason"], letter["seq"]) for letter in dead_letters(capsys)] == [("stuck", 1)]
        assert "forbidden" in dead_letters(capsys)[0]["detail"]
        assert why(world)["lines"][0] == "builder: nothing waits; 19 delivered, 1 dead letter."


def test_a_kind_of_a_newer_version(why, capsys, tmp_path):
    """A kind that this version does not know is kept as `unknown_kind`, and what is behind it goes on."""
    state = StateDirectory(tmp_path / "state").create()
    state.rules_file.write_text(encode_rules(Limits(custom_kinds=("from-next-year",)), Bounds()), "utf-8")
    with world_at(tmp_path) as world:
        world.enqueue("builder", 1, kind="from-next-year")
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        (letter,) = dead_letters(capsys)
        assert (letter["reason"], letter["kind"]) == ("unknown_kind", "from-next-year")
        assert why(world)["lines"][0] == "builder: nothing waits; 1 delivered, 1 dead letter."


@pytest.mark.parametrize("seq", [1, 2])
@pytest.mark.parametrize(
    "harm",
    [
        "wire_payload = replace(wire_payload, 'note', 'nota')",
        "kind = 'session-messagf'",  # one bit: no kind that anybody knows
        "kind = CAST(x'f3657373696f6e2d6d657373616765' AS TEXT)",  # one bit: no UTF-8
        "kind = 'insight'",
    ],
    ids=["text", "kind unknown", "kind no text", "kind of another path"],
)
def test_a_row_that_was_damaged(why, capsys, tmp_path, harm, seq):
    """What does not match its checksum is kept as `damaged`, its kind too, alone; the others go on."""
    with world_at(tmp_path) as world:
        world.enqueue("builder", 3)
        (path,) = world.state.outbox_files()
        db = apsw.Connection(str(path))
        db.execute(f"UPDATE events SET {harm} WHERE seq = ?", (seq,))
        assert db.changes() == 1
        db.close()
        world.run(ASKED_MS)
        assert [(letter["reason"], letter["seq"]) for letter in dead_letters(capsys)] == [("damaged", seq)]
        assert why(world)["lines"][0] == "builder: nothing waits; 2 delivered, 1 dead letter."
        assert world.numbers("builder") == [n for n in range(3) if n != seq - 1]


# What is in the way on our own side ------------------------------------------------------------------------


def test_no_token(why, tmp_path):
    """The file that is missing is named, and that it is noticed by itself."""
    with world_at(tmp_path) as world:
        world.engine.delivery.tokens = HostToken(TokenFile(tmp_path / "token"))
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        told = why(world)
        assert told["reason"] == "no_token"
        happened, means, do = told["lines"][1:]
        assert str(tmp_path / "token") in happened
        assert SAFE in means
        assert "noticed by itself" in do


def test_paused(why, capsys, tmp_path):
    """A person paused it: that comes before everything else, and how to go on is told."""
    with world_at(tmp_path, refuse, health=0) as world:
        world.enqueue("builder", 1)
        world.run(ASKED_MS)
        assert command(capsys, "pause", "builder")[0] == 0
        told = why(world)
        assert told["reason"] == "paused"
        assert "events are accepted and kept, and none is sent" in told["lines"][1]
        assert "outbox resume builder" in told["lines"][2]


def test_no_daemon(why, tmp_path):
    """Nobody sends: what was in the way before is told too, and how to send it."""
    with world_at(tmp_path, refuse, health=0) as world:
        world.enqueue("builder", 2)
        world.run(ASKED_MS)
        world.engine.resign()
        told = why(world)
        assert told["reason"] == "no_daemon"
        nobody, before, do = told["lines"][1:]
        assert nobody.startswith("Nobody sends")
        assert "unreachable: connection refused" in before
        assert "Nothing is lost" in do
        assert "outbox serve, or once: outbox flush" in do


# Real processes --------------------------------------------------------------------------------------------

BACK_OFF = {"delivery__backoff_initial_s": 60, "delivery__backoff_max_s": 600}
HTML = [["content-type", "text/html"]]
REAL = {
    "not_a_relay": {"status": 200, "headers": HTML, "body": "<title>Sign in</title>"},
    "redirected": {"status": 307, "headers": [["location", "http://other.invalid:9/"]]},
    "unauthorized": {"status": 401, "headers": []},
    "forbidden": {"status": 403, "headers": []},
    "busy": {"status": 429, "headers": []},
    "gateway": {"status": 502, "headers": []},
    "retry_after": {"status": 503, "headers": [["retry-after", "1800"]]},
    "failed": {"status": 500, "headers": []},
    "lost": {"action": "close"},
}


@pytest.mark.parametrize("reason", REAL)
def test_a_real_daemon_and_a_real_command(reason, tmp_path):
    """Beside `outbox serve`, `outbox why` and `outbox status` tell the same true reason."""
    step = {"body": "", **REAL[reason], "repeat": "forever"}
    event = {"kind": "session-message", "payload": {"n": 0, "text": "event 0"}}
    with fake_relay({"events": [event], "steps": [step]}) as relay:
        hand_over(tmp_path / "state", [event])
        with serve_running(tmp_path, relay.url, daemon__flush_timeout_s=0, **BACK_OFF):
            env = serve_environment(tmp_path, relay.url, **BACK_OFF)
            assert until(lambda: told_by(env)["reason"] not in {"ready", "in_flight"}, WAIT_S)
            told = told_by(env)
            assert told["reason"] == reason
            assert len(told["lines"]) >= 3
            status = json.loads(process(env, "status", "--json").stdout)
            assert [agent["blocked"]["reason"] for agent in status["agents"]] == [reason]
    assert status_of(tmp_path / "state").waiting == 1


def told_by(env):
    """`outbox why --json` as a process."""
    done = process(env, "why", "--json", AGENT)
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)
