"""`outbox status` and `outbox why`: how things stand, told from the files alone."""

import json
import time

import pytest
from command_line import command, in_process

from outbox import Outbox
from outbox.capture.hook_faults import note_fault
from outbox.outcome import Blocked
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.locks import DAEMON_BYTE, owners_lock
from outbox.store.relay_state import RelayState
from outbox.store.sending import note_blocked

URL = "http://relay.test:4850"
MINUTE_MS = 60_000
COUNTERS = ("waiting", "inFlight", "dead", "delivered", "dropped", "bytes", "oldestAgeMs")


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)


@pytest.fixture
def state(tmp_path):
    """The state directory that the commands will look at; not made yet."""
    return StateDirectory(tmp_path / "state")


def now_ms():
    """The wall clock, as the commands read it."""
    return time.time_ns() // 1_000_000


def enqueue(state, agent, count=1, **fields):
    """Put some events on disk."""
    with Outbox.open(agent, state_dir=state.path) as outbox:
        for n in range(count):
            outbox.enqueue("insight", {"n": n}, **fields)


def know(state, **facts):
    """What is known of the relay."""
    relay_state = RelayState(state.relay_state)
    relay_state.write({name.replace("__", ":"): fact for name, fact in facts.items()})
    relay_state.close()


def closed_gate(url=URL):
    """A relay that does not answer for 18 minutes."""
    since = now_ms() - 18 * MINUTE_MS
    detail = "connection refused at relay.test:4850"
    valve = {"reason": "unreachable", "detail": detail, "since": since, "failures": 37}
    return {**valve, "url": url, "nextTryAt": now_ms() + 50_000}


@pytest.fixture
def daemon(state):
    """A daemon's lock and its file, as if one ran (in this process)."""
    lock = owners_lock(state.path.parent)  # another state directory: the one under test may not be there yet
    assert lock
    held = []

    def start(version="0.1.0"):
        state.create(allow_network_fs=True)
        assert owners_lock(state.path).try_exclusive(DAEMON_BYTE)
        held.append(state)
        told = {"pid": 4711, "version": version, "startedAtMs": now_ms() - 90_000, "socket": "/nowhere"}
        state.daemon_file.write_text(json.dumps(told), "utf-8")

    yield start
    for one in held:
        owners_lock(one.path).release(DAEMON_BYTE)


def status_json(capsys, *words):
    """What `status --json` tells."""
    status, told, errors = command(capsys, "status", "--json", *words)
    assert (status, errors, told.count("\n")) == (0, "", 1)
    return json.loads(told)


def listing(folder):
    """Every file below a folder, with its size and the time of its last change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_nothing_yet(capsys, tmp_path):
    """No folder, no relay, no daemon: told as that, and nothing is made by looking."""
    assert status_json(capsys) == {
        "agents": [],
        "relay": {"url": None, "gate": "unknown", "reason": None, "since": None, "auth": None},
        "daemon": None,
    }
    told = command(capsys, "status")[1]
    assert "relay   not set" in told
    assert "daemon  none runs" in told
    assert "No outbox yet below" in told
    assert not (tmp_path / "state").exists()


def test_looking_leaves_nothing_behind(capsys, state):
    """A state directory at rest is the same, file by file, after `status`, `why` and `dead list`."""
    enqueue(state, "builder", 3)
    box = open_outbox(state, state.outbox_path("builder"))
    box.close(checkpoint=True)
    know(state, gate=closed_gate())
    before = listing(state.path)
    for words in (["status"], ["status", "--json"], ["why", "builder"], ["dead", "list"]):
        assert command(capsys, *words)[0] == 0
        assert listing(state.path) == before


def test_an_agent_as_data(capsys, state):
    """The fields of design section 8, and no other ones."""
    enqueue(state, "builder", 3)
    (agent,) = status_json(capsys)["agents"]
    assert list(agent) == ["agent", *COUNTERS, "blocked"]
    assert [agent[name] for name in ("agent", "waiting", "inFlight", "dead", "delivered", "dropped")] == [
        "builder", 3, 0, 0, 0, 0,
    ]  # fmt: skip
    assert agent["bytes"] > 30
    assert 0 <= agent["oldestAgeMs"] < 60_000
    assert list(agent["blocked"]) == ["reason", "since", "nextTryAt", "detail"]
    assert (agent["blocked"]["reason"], agent["blocked"]["nextTryAt"]) == ("no_daemon", None)


def test_a_closed_gate_holds_every_agent(capsys, state, daemon, monkeypatch):
    """With a daemon, the relay's trouble is what blocks those that wait, and nobody else."""
    monkeypatch.setenv("OUTBOX_RELAY_URL", URL)
    daemon()
    enqueue(state, "builder")
    enqueue(state, "idle")
    command(capsys, "skip", "idle", "1")
    gate = closed_gate()
    know(state, gate=gate, auth={"source": "file /t", "state": "refused", "detail": "expired"})
    seen = status_json(capsys)
    assert seen["relay"] == {
        "url": URL, "gate": "closed", "reason": "unreachable", "since": gate["since"], "auth": "refused",
    }  # fmt: skip
    assert {agent["agent"]: agent["blocked"] for agent in seen["agents"]} == {
        "builder": {
            "reason": "unreachable",
            "since": gate["since"],
            "nextTryAt": gate["nextTryAt"],
            "detail": gate["detail"],
        },
        "idle": None,
    }
    assert seen["daemon"] == {"pid": 4711, "version": "0.1.0", "uptimeS": seen["daemon"]["uptimeS"]}
    assert seen["daemon"]["uptimeS"] >= 90
    told = command(capsys, "status")[1].splitlines()
    assert f"relay   {URL}   closed since" in told[0]
    assert "(18 min), unreachable: connection refused at relay.test:4850; next try in" in told[0]
    assert told[1] == "token   file /t, refused: expired"
    assert told[2].startswith("daemon  pid 4711, 0.1.0, up 90 s")
    assert told[3].split() == ["agent", "waiting", "oldest", "in", "flight", "delivered", "dead", "state"]
    assert told[4].endswith("waits for the relay")
    assert told[5].endswith("nothing waits")
    assert told[6] == "1 dead letter: outbox dead list"


def test_an_open_gate(capsys, state, daemon):
    """A relay that works is said to be open, and a daemon's word on its address counts."""
    daemon()
    know(state, gate=closed_gate() | {"reason": ""}, **{"path:/api/messages": {"accepted": True}})
    relay = status_json(capsys)["relay"]
    assert relay == {"url": URL, "gate": "open", "reason": None, "since": None, "auth": None}
    assert command(capsys, "status")[1].startswith(f"relay   {URL}   works\n")


@pytest.mark.parametrize(
    ("paths", "gate", "said"),
    [
        ({}, "unknown", "not tried yet"),
        (
            {"path:/api/insights/observations": {"accepted": False}},
            "open",
            "answers, and has accepted nothing yet",
        ),
    ],
)
def test_a_relay_that_has_accepted_nothing_is_not_said_to_work(capsys, state, daemon, paths, gate, said):
    """Its address is known as soon as the daemon serves; a web server that answers is no relay yet."""
    daemon()
    know(state, gate=closed_gate() | {"reason": ""}, **paths)
    assert status_json(capsys)["relay"]["gate"] == gate
    assert command(capsys, "status")[1].startswith(f"relay   {URL}   {said}\n")


def test_what_is_known_of_another_relay_does_not_count(capsys, state, monkeypatch):
    """Without a daemon the configured relay is the one that matters."""
    enqueue(state, "builder")
    know(state, gate=closed_gate("http://old.test"))
    monkeypatch.setenv("OUTBOX_RELAY_URL", URL)
    assert status_json(capsys)["relay"] == {
        "url": URL, "gate": "unknown", "reason": None, "since": None, "auth": None,
    }  # fmt: skip


def test_the_daemons_file_alone_proves_nothing(capsys, state, daemon):
    """What a killed daemon left is no daemon; a lock without a readable file is one that starts."""
    daemon()
    owners_lock(state.path).release(DAEMON_BYTE)
    assert status_json(capsys)["daemon"] is None
    assert owners_lock(state.path).try_exclusive(DAEMON_BYTE)
    state.daemon_file.write_text("{", "utf-8")
    assert status_json(capsys)["daemon"] == {"pid": None, "version": None, "uptimeS": 0}
    assert "daemon  is starting" in command(capsys, "status")[1]


def test_files_that_cannot_be_opened_hide_nobody(capsys, state):
    """Damaged, empty, too new, a folder: each is shown as what it is, and the others with their numbers."""
    enqueue(state, "healthy", 2)
    for agent in ("damaged", "newer", "empty", "folder"):
        enqueue(state, agent)
        path = state.outbox_path(agent)
        for side in ("-wal", "-shm"):
            path.with_name(path.name + side).unlink(missing_ok=True)
    state.outbox_path("damaged").write_bytes(b"no database at all " * 400)
    state.outbox_path("empty").write_bytes(b"")
    state.outbox_path("folder").unlink()
    state.outbox_path("folder").mkdir()
    newer = bytearray(state.outbox_path("newer").read_bytes())
    newer[60:64] = (99).to_bytes(4, "big")  # user_version (fileformat2.html, 1.3)
    state.outbox_path("newer").write_bytes(newer)
    seen = {agent["agent"].partition("-")[0]: agent for agent in status_json(capsys)["agents"]}
    reasons = {name: agent["blocked"]["reason"] for name, agent in seen.items()}
    assert reasons == {
        "healthy": "no_daemon",
        "damaged": "damaged",
        "empty": "damaged",
        "newer": "too_new",
        "folder": "store",
    }
    assert seen["healthy"]["waiting"] == 2
    assert {seen["damaged"][name] for name in COUNTERS} == {None}
    assert "newer release" in seen["newer"]["blocked"]["detail"]
    status, told, _ = command(capsys, "status")
    assert status == 0
    assert [line.count("cannot be read: ") for line in told.splitlines()].count(1) >= 4
    assert "healthy" in told


@pytest.mark.parametrize(
    ("agent", "status", "said"), [("damaged", 5, "damaged-"), ("nobody", 2, "no outbox of 'nobody'")]
)
def test_why_of_what_cannot_be_told(capsys, state, agent, status, said):
    """A damaged file ends with 5, an agent that is not there with 2."""
    enqueue(state, "damaged")
    state.outbox_path("damaged").write_bytes(b"no database at all " * 400)
    found, told, errors = command(capsys, "why", agent)
    assert (found, told) == (status, "")
    assert said in errors


def test_why_names_the_nearest_agent(capsys, state):
    """A slip of the hand costs one look."""
    enqueue(state, "builder")
    assert "Did you mean 'builder'?" in command(capsys, "why", "bulider")[2]


def test_why_in_lines_and_as_data(capsys, state, daemon):
    """The same reason both ways; an event's own number of attempts is the one that is told."""
    daemon()
    enqueue(state, "builder", retry={"maxAttempts": 5})
    box = open_outbox(state, state.outbox_path("builder"))
    note_blocked(box, Blocked("failed", now_ms(), now_ms() + 30_500, "boom"))
    box.close()
    status, told, errors = command(capsys, "why", "builder")
    assert (status, errors) == (0, "")
    assert "attempt 1 of 5 in 30 s" in told
    data = json.loads(command(capsys, "why", "builder", "--json")[1])
    assert (data["agent"], data["reason"], data["waiting"], data["detail"]) == (
        "builder",
        "failed",
        1,
        "boom",
    )
    assert data["head"] == {"seq": 1, "kind": "insight", "attempts": 0}
    assert len(data["lines"]) >= 3


def test_paths_of_the_settings_are_those_that_are_held(capsys, state, daemon, monkeypatch):
    """A kind that goes elsewhere waits for that path, not for the usual one."""
    daemon()
    enqueue(state, "builder")
    know(state, **{"path__/mine": closed_gate() | {"reason": "no_endpoint"}})
    assert status_json(capsys)["agents"][0]["blocked"] is None
    monkeypatch.setenv("OUTBOX_RELAY_PATHS_INSIGHTS", "/mine")
    assert status_json(capsys)["agents"][0]["blocked"]["reason"] == "no_endpoint"
    assert command(capsys, "status")[1].splitlines()[-1].endswith("waits for /mine")
    assert "has no /mine" in command(capsys, "why", "builder")[1]


def test_a_fault_in_the_settings_does_not_hide_how_things_are(capsys, monkeypatch):
    """It is noted on stderr, unless it leaves open where to look: then the command stops, exit 2."""
    monkeypatch.setenv("OUTBOX_DELIVERY_WORKERS", "none")
    status, told, errors = command(capsys, "status")
    assert status == 0
    assert "daemon  none runs" in told
    assert errors.startswith("note: delivery.workers")
    monkeypatch.delenv("OUTBOX_STATE_DIR")
    status, told, errors = command(capsys, "status")
    assert (status, told) == (2, "")
    assert "--state-dir" in errors


def test_names_of_agents_cannot_steer_the_terminal(capsys, state):
    """Control characters are shown as escapes; the data has the exact name."""
    enqueue(state, "esc\x1b[31mred\n")
    assert status_json(capsys)["agents"][0]["agent"] == "esc\x1b[31mred\n"
    told = command(capsys, "status")[1]
    assert "\x1b" not in told
    assert "esc\\x1b[31mred\\n" in told


def test_a_state_directory_that_cannot_be_read(capsys, state):
    """Said as what it is, exit 4."""
    state.path.mkdir()
    state.agents.write_text("no folder", "utf-8")
    status, told, errors = command(capsys, "status")
    assert (status, told) == (4, "")
    assert "cannot be read: Not a directory" in errors


@pytest.mark.parametrize(("days_ago", "is_shown"), [(0, True), (2, False)])
def test_what_hooks_lost_is_told_for_a_day(capsys, state, days_ago, is_shown):
    """A slip of last week is no news; as data it stays."""
    state.create()
    assert note_fault(state, "bad JSON", now_ms() - days_ago * 86_400_000)
    assert ("Hooks could not record 1 call" in command(capsys, "status")[1]) is is_shown
    assert status_json(capsys)["hooks"]["lost"] == 1
