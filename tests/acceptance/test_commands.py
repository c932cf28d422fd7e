"""The commands as people and scripts meet them: real processes, a real relay, every reason of `why`."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from command_line import command, environment, in_process, process
from world import Lose, Refuse, World, answer

from outbox import Unavailable
from outbox.api.client import LocalClient
from outbox.api.explain import explain
from outbox.api.obstacle import Scope
from outbox.delivery.tokens import HostToken
from outbox.store.directory import StateDirectory
from outbox.store.place import running_daemon
from outbox.store.relay_state import read_facts
from relay_client import TokenFile
from relay_client.reference.process import RelayProcess

CASES = Path(__file__).parent.parent / "cases"
GROUPS = json.loads((CASES / "agent_ids" / "agent_ids.json").read_text("utf-8"))["groups"]
WAIT_S = 60


def until(found):
    """What `found()` returns once it is true."""
    end = time.monotonic() + WAIT_S
    while not (value := found()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def daemon(env, *words):
    """`outbox serve` as a process, once it answers; ended by us if the test did not."""
    state = StateDirectory(Path(env["OUTBOX_STATE_DIR"]))

    def answers():
        assert server.poll() is None, server.stderr.read()
        there = running_daemon(state)
        if there is None or there.pid != server.pid:
            return False
        try:
            return LocalClient(there.socket).get("/v1/status")[0] == 200
        except Unavailable:
            return False

    words = [sys.executable, "-m", "outbox", "serve", *words]
    with subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            until(answers)
            yield server
        finally:
            if server.poll() is None:
                server.kill()
            server.communicate()


def status_of(env):
    """`outbox status --json`."""
    done = process(env, "status", "--json")
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


def agent_of(env, name):
    """One agent of `outbox status --json`."""
    return next(agent for agent in status_of(env)["agents"] if agent["agent"] == name)


def messages(count):
    """That many session messages, a line each."""
    lines = (
        f'{{"kind":"session-message","payload":{{"from":"a","to":"b","body":"{n}"}}}}' for n in range(count)
    )
    return "\n".join(lines).encode()


# Names of agents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["group"])
def test_names_of_agents(group, monkeypatch, capsys, tmp_path):
    """Each name its own queue, exactly as given, or refused with nothing made; no file outside the folder."""
    in_process(monkeypatch, tmp_path)
    outcomes = []
    for index, agent in enumerate(group["ids"]):
        payload = json.dumps({"agent": index})
        status, told, errors = command(
            capsys, "enqueue", "--agent", agent, "--kind", "insight", "--payload", payload
        )
        outcomes.append(status)
        assert (told + errors).replace("\n", "").isprintable()
    assert set(outcomes) == ({2} if group["want"] == "refuse" else {0})
    seen = json.loads(command(capsys, "status", "--json")[1])["agents"]
    if group["want"] == "refuse":
        assert seen == []
        assert list(tmp_path.iterdir()) == []
        return
    assert {agent["agent"]: agent["waiting"] for agent in seen} == dict.fromkeys(group["ids"], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    for agent in group["ids"]:
        status, told, errors = command(capsys, "why", "--json", "--", agent)
        assert (status, json.loads(told)["agent"]) == (0, agent)


@pytest.mark.parametrize("agent", ["-rf", "--help", "-", "*", "🧪 lab", "line\nbreak"])
def test_names_on_a_real_command_line(tmp_path, agent):
    """A dash at the start, a pattern, an emoji, a line break: as a value of --agent, and behind `--`."""
    env = environment(tmp_path)
    first = process(env, "enqueue", "--agent", agent, "--json", stdin=messages(1))
    second = process(env, "enqueue", f"--agent={agent}", "--json", stdin=messages(1))
    assert [json.loads(done.stdout)["seq"] for done in (first, second)] == [1, 2]
    assert agent_of(env, agent)["waiting"] == 2
    assert process(env, "pause", "--", agent).returncode == 0
    assert agent_of(env, agent)["blocked"]["reason"] == "paused"


# A life ---------------------------------------------------------------------------------------------------


def test_from_the_first_event_to_the_last(tmp_path):
    """Enqueue, flush without a daemon, serve, pause, resume, flush through it, an outage, stop."""
    with RelayProcess(tmp_path / "relay.db", ["tok-test"]) as relay:
        (tmp_path / "token").write_text("tok-test\n", "utf-8")
        env = environment(
            tmp_path,
            OUTBOX_RELAY_URL=relay.url,
            OUTBOX_RELAY_TOKEN_FILE=str(tmp_path / "token"),
            NO_PROXY="*",
        )
        assert process(env, "enqueue", "--agent", "builder", stdin=messages(3)).returncode == 0
        flushed = process(env, "flush", "--timeout", "30", "--json")
        assert (flushed.returncode, flushed.stderr) == (0, b"")
        assert json.loads(flushed.stdout) == {"delivered": 3, "left": 0, "dead": 0}
        relay_status = status_of(env)["relay"]
        assert relay_status == {"url": relay.url, "gate": "open", "reason": None, "since": None, "auth": "ok"}
        with daemon(env) as server:
            second = process(env, "serve")
            assert (second.returncode, second.stdout) == (6, b"")
            assert str(server.pid).encode() in second.stderr
            assert status_of(env)["daemon"]["pid"] == server.pid
            process(env, "pause", "builder")
            process(env, "enqueue", "--agent", "builder", stdin=messages(2))
            assert agent_of(env, "builder")["waiting"] == 2
            process(env, "resume", "builder")
            until(lambda: agent_of(env, "builder")["delivered"] == 5)
            process(env, "enqueue", "--agent", "reviewer", stdin=messages(2))
            flushed = process(env, "flush", "--agent", "reviewer", "--timeout", "30")
            assert (flushed.returncode, flushed.stderr) == (0, b"")
            assert flushed.stdout.decode().endswith("delivered, nothing left.\n")
            relay.stop()
            process(env, "enqueue", "--agent", "builder", stdin=messages(4))
            until(lambda: status_of(env)["relay"]["gate"] == "closed")
            assert agent_of(env, "builder")["blocked"]["reason"] == "unreachable"
            assert "The relay does not answer" in process(env, "why", "builder").stdout.decode()
            flushed = process(env, "flush", "--timeout", "0.5", "--json")
            assert (flushed.returncode, json.loads(flushed.stdout)) == (
                3,
                {"delivered": 0, "left": 4, "dead": 0},
            )
            assert process(env, "skip", "builder", "6").returncode == 0
            assert process(env, "stop").returncode == 0
            assert server.wait(WAIT_S) == 0
        assert agent_of(env, "builder")["blocked"]["reason"] == "no_daemon"
        flushed = process(env, "flush", "--timeout", "0.5")
        assert flushed.returncode == 3
        assert "What is left goes out with the next daemon or flush." in flushed.stdout.decode()
        relay.start()
        assert process(env, "flush", "--timeout", "30").returncode == 0
        (dead,) = process(env, "dead", "list", "--json").stdout.splitlines()
        assert (json.loads(dead)["seq"], json.loads(dead)["reason"]) == (6, "skipped")
        assert [len(relay.events(agent)) for agent in ("builder", "reviewer")] == [8, 2]


def test_the_socket_and_the_command_tell_the_same(tmp_path):
    """GET /v1/status has the fields of `status --json`."""
    env = environment(tmp_path, OUTBOX_RELAY_URL="http://127.0.0.1:9", NO_PROXY="*")
    process(env, "enqueue", "--agent", "builder", stdin=messages(1))
    with daemon(env, "--socket", str(tmp_path / "own.sock")):
        status, told = LocalClient(tmp_path / "own.sock").get("/v1/status")
        mine = status_of(env)
    assert status == 200
    assert told.keys() == mine.keys()
    assert told["agents"][0].keys() == mine["agents"][0].keys()
    assert told["relay"].keys() == mine["relay"].keys()
    assert told["daemon"].keys() == mine["daemon"].keys()


def test_the_reference_relay(tmp_path):
    """It says where it listens, takes what a flush sends with the token of its file, and ends with 0."""
    (tmp_path / "tokens").write_text("tok-a\ntok-b\n", "utf-8")
    words = [sys.executable, "-m", "outbox", "relay", "--port", "0", "--db", str(tmp_path / "relay.db")]
    words += ["--token-file", str(tmp_path / "tokens"), "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment(tmp_path), stdout=pipe, stderr=pipe, text=True) as relay:
        told = json.loads(relay.stdout.readline())
        assert told["db"] == str(tmp_path / "relay.db")
        env = environment(tmp_path, OUTBOX_RELAY_URL=told["url"], OUTBOX_RELAY_TOKEN="tok-b", NO_PROXY="*")
        process(env, "enqueue", "--agent", "builder", stdin=messages(1))
        assert process(env, "flush", "--timeout", "30").returncode == 0
        taken = process(
            env, "relay", "--db", str(tmp_path / "other.db"), "--port", told["url"].rpartition(":")[2]
        )
        assert (taken.returncode, taken.stdout) == (69, b"")
        relay.terminate()
        assert relay.wait(WAIT_S) == 0
        assert relay.stderr.read() == ""
    missing = process(env, "relay", "--db", str(tmp_path / "x.db"), "--token-file", str(tmp_path / "none"))
    assert (missing.returncode, missing.stdout) == (2, b"")
    assert b"cannot be read" in missing.stderr


# The true reason in each row of the outcome table ---------------------------------------------------------


def refuse(_request):
    """The connection is refused."""
    raise Refuse


def lose(_request):
    """The request is read, and no answer comes."""
    raise Lose


def problem(status, code="", **headers):
    """A behaviour: this answer to everything."""
    return lambda _request: answer(
        status, {"error": {"code": code, "message": "m"}} if code else {}, **headers
    )


def login_page(_request):
    """A page for people, in place of the relay."""
    return httpx.Response(200, html="<!doctype html><title>Sign in</title>")


ROWS = [
    ("2xx with something else", login_page, -1, "not_a_relay", Scope.RELAY),
    (
        "3xx",
        lambda _: httpx.Response(302, headers={"location": "https://l.example/"}),
        302,
        "redirected",
        Scope.RELAY,
    ),
    ("409 in progress", problem(409, "in_progress"), 200, "in_progress", Scope.AGENT),
    ("409 with Retry-After", problem(409, retry_after="40"), 200, "retry_after", Scope.AGENT),
    ("401", problem(401), 200, "unauthorized", Scope.RELAY),
    ("403", problem(403), 200, "forbidden", Scope.AGENT),
    ("404 everywhere", problem(404), 404, "no_endpoint", Scope.PATH),
    ("405 while health works", problem(405), 200, "no_endpoint", Scope.AGENT),
    ("429", problem(429), 200, "busy", Scope.RELAY),
    ("429 with Retry-After", problem(429, retry_after="1800"), 200, "retry_after", Scope.AGENT),
    ("503", problem(503), 503, "busy", Scope.RELAY),
    ("502", problem(502), 502, "gateway", Scope.RELAY),
    ("504", problem(504), 502, "gateway", Scope.RELAY),
    ("500 of a broken relay", problem(500), 500, "failed", Scope.RELAY),
    ("500 of a relay that works", problem(500), 200, "failed", Scope.AGENT),
    ("599", problem(599), 200, "failed", Scope.AGENT),
    ("cannot connect", refuse, 0, "unreachable", Scope.RELAY),
    ("no answer, no health", lose, 0, "lost", Scope.RELAY),
    ("no answer, health works", lose, 200, "lost", Scope.AGENT),
]


def reason(world, agent):
    """What `why` tells of an agent while a daemon runs."""
    return explain(
        world.statuses()[agent],
        read_facts(world.state.relay_state),
        daemon_running=True,
        now_ms=world.clock.wall_ms(),
    )


@pytest.mark.parametrize(
    ("behave", "health", "why", "scope"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_the_reason_is_the_true_one(tmp_path, behave, health, why, scope):
    """What stands in the way of a head is what the relay did to it; it goes on once that is mended."""
    with World(tmp_path, behave=behave, health=lambda: health) as world:
        world.enqueue("builder", 1)
        world.run(4_000)
        told = reason(world, "builder")
        assert (told.reason, told.scope) == (why, scope)
        assert len(told.lines) >= 3
        world.relay.behave, world.relay.health = lambda _request: None, lambda: 200
        world.run(3_600_000)
        assert reason(world, "builder").reason == "empty"
        assert world.numbers("builder") == [0]


def test_the_reason_when_the_relay_refuses_everything(tmp_path):
    """After three dead letters in a row the next one is kept back, and `why` says so."""
    with World(tmp_path, behave=problem(422, "validation_failed")) as world:
        world.enqueue("builder", 8)
        world.run(200)
        told = reason(world, "builder")
        assert (told.reason, told.scope) == ("mass_rejection", Scope.AGENT)
        assert "The last 3 events for /api/messages became dead letters in a row" in " ".join(told.lines)
        assert "validation_failed" in " ".join(told.lines)


def test_the_reason_when_there_is_no_token(tmp_path):
    """The file that is missing is named, and that it is noticed by itself."""
    with World(tmp_path) as world:
        world.engine.delivery.tokens = HostToken(TokenFile(tmp_path / "token"))
        world.enqueue("builder", 1)
        world.run(4_000)
        told = reason(world, "builder")
        assert (told.reason, told.scope) == ("no_token", Scope.RELAY)
        assert str(tmp_path / "token") in " ".join(told.lines)


def test_only_the_path_that_is_missing_holds_its_kind(tmp_path):
    """Insights wait for their path while messages of another agent flow: each agent's reason is its own."""

    def no_insights(request):
        return answer(404) if "insights" in request.path else None

    with World(tmp_path, behave=no_insights, delivery__max_attempts=1_000) as world:
        world.enqueue("thinker", 1, kind="insight")
        world.enqueue("builder", 1)
        world.run(100)
        assert reason(world, "thinker").reason == "no_endpoint"
        assert reason(world, "builder").reason == "empty"
