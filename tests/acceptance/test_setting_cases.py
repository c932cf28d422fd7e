"""The setting cases E01 to E18 through `outbox serve`: delivered, refused or waiting, as each case says."""

import contextlib
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from peers import fake_relay
from processes import ROOT, DaemonProcess, deliveries, environment, put, status_of, wait_for

TOKEN = "tok-abc123"
AGENT = "builder"
WITHIN_S = 10  # as the cases say
CASES = {
    case["case"]: case
    for case in json.loads((Path(__file__).parent.parent / "cases/process/settings.json").read_text("utf-8"))[
        "cases"
    ]
}
VARIABLES = {"MAX_ROWS": "OUTBOX_BOUNDS_MAX_EVENTS"}
"""What the cases call otherwise than we do."""
ANSWERS = {"steps": []}
DEFAULT_BACKOFF = {"delivery.backoff_initial_s": "1", "delivery.backoff_max_s": "60"}


def cases(want):
    """The cases with this outcome, except the one of the default folder."""
    return [name for name, case in CASES.items() if case["want"] == want and "default_folder" not in case]


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch):
    """What the case says is all that there is."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


def started(state, case, url, tmp_path, **environ):
    """The daemon of a case, not started yet: its settings come from the environment, as in a unit."""
    address = case.get("relay_url", url).replace("PORT", url.rpartition(":")[2])
    settings = {**DEFAULT_BACKOFF, "relay.url": address, "relay.token": TOKEN}
    if "token_file_text" in case or "token_file_missing" in case:
        settings |= {"relay.token": "", "relay.token_file": str(tmp_path / "token")}
    if "token_file_text" in case:
        (tmp_path / "token").write_text(case["token_file_text"])
    own = {VARIABLES.get(name, name): text for name, text in case.get("env", {}).items()}
    return DaemonProcess(state, None, settings, environ={**environ, **own})


def sent_to(relay, name):
    """The one delivery of a case, checked for its path and its token."""
    (request,) = deliveries(relay)
    assert request["target"] == ("/base/path" if name == "E07" else "") + "/api/messages"
    assert dict(request["headers"])["Authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("name", cases("delivered"))
def test_delivered(state, tmp_path, name):
    """E01 to E07, E11, E15, E17: what waited arrives at its path, with the token and without a warning."""
    case = CASES[name]
    put(state, AGENT, 0)
    with (
        fake_relay(ANSWERS, host=case.get("relay_listens", "127.0.0.1")) as relay,
        started(state, case, relay.url, tmp_path) as daemon,
    ):
        wait_for(lambda: deliveries(relay), WITHIN_S)
        wait_for(lambda: not status_of(state, AGENT).waiting, WITHIN_S)
        assert daemon.stop() == 0
        assert [line for line in daemon.lines() if " info event=" not in line] == []
        sent_to(relay, name)


@pytest.mark.parametrize("name", ["E01", "E02"])
def test_delivered_past_a_dead_proxy(state, tmp_path, name):
    """E01, E02: where there is a proxy too, the odd list excepts the relay from it."""
    put(state, AGENT, 0)
    with (
        fake_relay(ANSWERS) as relay,
        started(state, CASES[name], relay.url, tmp_path, HTTP_PROXY="http://127.0.0.1:9"),
    ):
        wait_for(lambda: deliveries(relay), WITHIN_S)
        sent_to(relay, name)


@pytest.mark.parametrize("name", cases("refused"))
def test_refused(state, tmp_path, name):
    """E08 to E10, E16, E18: one line with the setting, its value and who set it; nothing changes."""
    case = CASES[name]
    put(state, AGENT, 0)
    before = contents(state)
    with fake_relay(ANSWERS) as relay, contextlib.ExitStack() as stack:
        daemon = started(state, case, relay.url, tmp_path)
        stack.callback(daemon.end)
        assert daemon.launch().ended() == 2
        (line,) = daemon.lines()
        assert line.startswith(refusal(case, relay.port)), line
        assert deliveries(relay) == []
    assert contents(state) == before


def refusal(case, port):
    """How the one line begins."""
    if "relay_url" not in case:
        (value,) = case["env"].values()
        return f'bounds.max_events = "{value}" (OUTBOX_BOUNDS_MAX_EVENTS)'
    value = case["relay_url"].replace("PORT", str(port))
    return f'relay.url = "{value}" ({"OUTBOX_RELAY_URL" if value else "built-in"})'


def contents(state):
    """Everything in the state directory, byte for byte."""
    return {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", cases("waiting"))
def test_waiting(state, tmp_path, name):
    """E12, E13: it runs and warns once; once the file is right the event arrives, with no restart."""
    put(state, AGENT, 0)
    with (
        fake_relay(ANSWERS) as relay,
        started(state, CASES[name], relay.url, tmp_path) as daemon,
    ):
        (line,) = wait_for(lambda: [line for line in daemon.lines() if " warning event=" in line])
        assert f'gate_closed reason=no_token detail="file {tmp_path / "token"}: ' in line
        assert status_of(state, AGENT).waiting == 1
        (tmp_path / "token").write_text(TOKEN)
        wait_for(lambda: deliveries(relay), WITHIN_S)
        assert daemon.stop() == 0
        assert len([line for line in daemon.lines() if " info event=" not in line]) == 1
        sent_to(relay, name)


def test_the_default_folder(tmp_path):
    """E14: below HOME, nothing in a temporary folder; 0700 and 0600 for all that is made, under umask 000."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    for folder in (home, temporary):
        folder.mkdir(mode=0o700)
    with fake_relay(ANSWERS) as relay:
        settings = {"relay.url": relay.url, "relay.token": TOKEN}
        env = environment(home, settings, TMPDIR=str(temporary), SQLITE_TMPDIR="")
        event = ["enqueue", "--agent", AGENT, "--kind", "session-message", "--payload", '{"n": 0}']
        assert outbox(env, *event).wait(20) == 0
        folder = home / ".local/state/relay-outbox"
        assert status_of(folder, AGENT).waiting == 1
        daemon = outbox(env, "serve")
        try:
            wait_for(lambda: deliveries(relay), WITHIN_S)
            wait_for(lambda: not status_of(folder, AGENT).waiting)
            assert outbox(env, *event).wait(20) == 0
            made = {path: stat.filemode(path.lstat().st_mode) for path in home.rglob("*")}
            daemon.terminate()
            assert daemon.wait(20) == 0
        finally:
            daemon.kill()
            daemon.wait(20)
    assert {path.name for path in made} >= {".local", "relay-outbox", "agents", "outbox.sock", "wake.sock"}
    assert set(made.values()) == {"drwx------", "-rw-------", "srw-------"}
    assert list(temporary.iterdir()) == []


def outbox(env, *words):
    """`outbox WORDS` with this environment and umask 000, started."""
    return subprocess.Popen(
        [sys.executable, "-m", "outbox", *words],
        env=env,
        cwd=ROOT,
        umask=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
