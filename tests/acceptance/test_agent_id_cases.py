"""Every group of tests/cases/agent_ids, from library or command to a real relay: each id exactly itself."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from command_line import in_process, process
from peers import fake_relay
from runs import QUICK, TOKEN, is_empty, serve_environment, serve_running, until

from outbox import Outbox, UsageError
from outbox.daemon.flush import flush_state
from outbox.settings import load
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess

CASES = Path(__file__).parents[1] / "cases" / "agent_ids" / "agent_ids.json"
GROUPS = json.loads(CASES.read_text("utf-8"))["groups"]
TAKEN = [group for group in GROUPS if group["want"] != "refuse"]
REFUSED = [group for group in GROUPS if group["want"] == "refuse"]
FLUSH_S = 60
FAR_AWAY = [Path("/abs/escape"), Path("/abs"), Path("/tmp/escape")]


@pytest.fixture(scope="module")
def relay(tmp_path_factory):
    """One reference relay for all groups: events are told apart by their keys."""
    with RelayProcess(tmp_path_factory.mktemp("relay") / "relay.db", [TOKEN]) as process:
        yield process


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder so deep that every `..` of an id still ends inside tmp_path; the working folder is near it."""
    place = tmp_path / "a" / "b" / "c" / "home"
    place.mkdir(parents=True)
    working = tmp_path / "a" / "b" / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    return place


def made_outside(home):
    """Everything below the test's folder that is neither in the state directory nor made by the fixture."""
    top = home.parents[3]
    state = home / "state"
    paths = [path for path in top.rglob("*") if path != state and state not in path.parents]
    return [path for path in paths if path not in {*home.parents, home, top / "a" / "b" / "working"}]


def depths(state_dir, agents):
    """How many events wait for each agent, in outboxes that are opened anew."""
    found = {}
    for agent in agents:
        with Outbox.open(agent, state_dir=state_dir) as box:
            assert box.agent == box.status().agent == agent
            found[agent] = box.depth
    return found


def flush_all(home, url):
    """Everything out, by engines of this process."""
    settings = load(QUICK | {"relay.url": url}, environ={}, config_path=None)
    return flush_state(settings, StateDirectory(home / "state"), None, FLUSH_S)


@pytest.mark.parametrize("group", TAKEN, ids=lambda group: group["group"])
def test_each_id_has_its_own_queue(group, home, relay, monkeypatch):
    """One event for each id; opened again each waits in its own queue, and arrives once under just its id."""
    in_process(monkeypatch, home)
    monkeypatch.setenv("OUTBOX_RELAY_URL", relay.url)
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN", TOKEN)
    monkeypatch.setenv("OUTBOX_RELAY_TRUST_ENV", "false")
    before = [path.exists() for path in FAR_AWAY]
    keys = {}
    for index, agent in enumerate(group["ids"]):
        with Outbox.open(agent) as box:
            keys[box.enqueue("insight", {"agent": index}).idempotency_key] = (agent, index)
    first, *others = group["ids"]
    assert depths(home / "state", group["ids"]) == dict.fromkeys(group["ids"], 1)
    with Outbox.open(first) as box:
        result = box.flush(FLUSH_S)
    assert (result.delivered, result.left, result.dead) == (1, 0, 0)
    assert depths(home / "state", group["ids"]) == dict.fromkeys(others, 1) | {first: 0}
    report = flush_all(home, relay.url)
    assert (report.delivered, report.left, report.dead) == (len(others), 0, 0)
    arrived = [event for event in relay.events() if event["key"] in keys]
    told = {event["key"]: (event["agent"], json.loads(event["body"])["agent"]) for event in arrived}
    assert told == keys
    assert len(arrived) == len({event["stream"] for event in arrived}) == len(keys)
    assert all((event["timesSeen"], event["seq"]) == (1, 1) for event in arrived)
    assert len(list(StateDirectory(home / "state").outbox_files())) == len(group["ids"])
    assert made_outside(home) == []
    assert [path.exists() for path in FAR_AWAY] == before


@pytest.mark.parametrize("group", REFUSED, ids=lambda group: group["group"])
def test_a_refused_id_makes_nothing_on_disk(group, home, relay, monkeypatch):
    """The error shows the id in printable form; no file or folder is made, by library and command alike."""
    env = serve_environment(home, relay.url)
    in_process(monkeypatch, home)
    for agent in group["ids"]:
        with pytest.raises(UsageError) as refusal:
            Outbox.open(agent)
        assert str(refusal.value).isprintable()
        assert agent.replace("\0", r"\x00") in str(refusal.value)
        if "\0" not in agent:  # no process can be given one
            done = process(env, "enqueue", "--agent", agent, "--kind", "insight", "--payload", "1")
            assert (done.returncode, done.stdout) == (2, b"")
            assert done.stderr.decode().rstrip("\n").isprintable()
    assert list(home.iterdir()) == []
    assert made_outside(home) == []


def test_the_header_alone_tells_the_id(home):
    """`Outbox-Agent` holds visible ASCII, and percent-decoded it is the id, code point by code point."""
    agents = sorted({agent for group in TAKEN for agent in group["ids"]})
    keys = {}
    for index, agent in enumerate(agents):
        with Outbox.open(agent, state_dir=home / "state") as box:
            keys[box.enqueue("insight", {"n": index}).idempotency_key] = agent
    with fake_relay({"events": [], "steps": []}) as scripted:
        assert flush_all(home, scripted.url).left == 0
        requests = [request for request in scripted.requests() if request["method"] == "POST"]
    told = {}
    for request in requests:
        fields = {name.lower(): value for name, value in request["headers"]}
        assert re.fullmatch(r"[!-~]+", fields["outbox-agent"])
        told[json.loads(request["body"])["idempotencyKey"]] = unquote(fields["outbox-agent"], errors="strict")
    assert told == keys
    assert len(requests) == len(keys)


@pytest.mark.parametrize("agent", ["-rf", "--help", "-", "*", "line\nbreak", "esc\x1b[31mred", "%s %d {0}"])
def test_an_id_on_the_command_line(agent, home, relay):
    """Handed over, flushed and asked for by real commands; output and log hold no raw control character."""
    env = serve_environment(home, relay.url)
    payload = ("--kind", "insight", "--payload", '{"agent": 0}', "--json")
    taken = process(env, "enqueue", f"--agent={agent}", *payload)
    beside = process(env, "enqueue", "--agent", "somebody-else", *payload)
    key = json.loads(taken.stdout)["idempotencyKey"]
    flushed = process(env, "flush", f"--agent={agent}", "--timeout", str(FLUSH_S))
    told = process(env, "why", "--", agent)
    assert [done.returncode for done in (taken, beside, flushed, told)] == [0, 0, 0, 0]
    assert [event["agent"] for event in relay.events() if event["key"] == key] == [agent]
    assert depths(home / "state", [agent, "somebody-else"]) == {agent: 0, "somebody-else": 1}
    for text in (taken.stderr, flushed.stdout, flushed.stderr, told.stdout, told.stderr):
        assert text.decode().replace("\n", "").isprintable()
    assert len(told.stdout.splitlines()) == 2
    assert made_outside(home) == []


def test_control_characters_of_an_id_do_not_reach_the_log(home):
    """A daemon that logs about such agents: every line is one line, of visible characters only."""
    group = next(group for group in GROUPS if group["group"] == "A16")
    refuses = {"status": 422, "headers": [], "body": "", "repeat": "forever"}
    with (
        fake_relay({"events": [], "steps": [refuses]}) as scripted,
        serve_running(home, scripted.url, daemon__log_format="lines") as daemon,
    ):
        for agent in group["ids"]:
            with Outbox.open(agent, state_dir=home / "state") as box:
                box.enqueue("insight", {})
        assert until(lambda: all(is_empty(home / "state", agent) for agent in group["ids"])), daemon.lines()
    lines = daemon.lines()
    assert all(line.isprintable() for line in lines)
    assert len([line for line in lines if "dead_letter" in line]) == len(group["ids"])
