"""`outbox run --self-resume` with a made-up claude: every way in which a hand-off can go."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
from processes import QUICK, ROOT, DaemonProcess, environment, outbox_command, wait_for

import outbox.sidecar.control
from outbox.sidecar.control import ControlSocket
from outbox.sidecar.handoff import note_compaction, note_session
from outbox.sidecar.record import Record, living
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess

# Prints its words, and does what it is told on stdin: note things as hooks do, end, vanish.
CLAUDE = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from outbox.sidecar.handoff import note_compaction, note_session
from outbox.store.directory import StateDirectory
state = StateDirectory(Path(os.environ["OUTBOX_STATE_DIR"]))
print("start", *sys.argv[1:], flush=True)
def line():  # never a byte more than the line: what follows is for the next start
    text = b""
    while not text.endswith(b"\\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(0)
        text += byte
    return text.decode().split()
while True:
    act, *words = line()
    if act == "session":
        note_session(state, os.environ["OUTBOX_AGENT"], words[0])
    elif act == "compact":
        note_compaction(state, os.environ["OUTBOX_AGENT"])
    elif act == "hook":
        call = json.dumps({{"hook_event_name": words[0], "session_id": words[1], "trigger": "auto"}})
        hook = [sys.executable, "-m", "outbox", "hook", "claude-code"]
        subprocess.run(hook, input=call.encode(), check=True)
    elif act == "vanish":
        os.unlink(sys.argv[0])
    elif act == "exit":
        sys.exit(int(words[0]))
    print("did", act, flush=True)
"""


@pytest.fixture
def state(tmp_path):
    """Where the events are kept."""
    return tmp_path / "state"


@pytest.fixture
def relay(tmp_path):
    """The reference relay."""
    with RelayProcess(tmp_path / "relay.db", ["tok-daemon"]) as process:
        yield process


class Claude:
    """The made-up claude under a sidecar."""

    def __init__(self, process, state):
        self.process, self.state = process, state

    def does(self, *acts):
        """Have it do things, and wait until it has."""
        for act in acts:
            self.tell(act)
            assert self.process.stdout.readline() == f"did {act.split()[0]}\n"

    def tell(self, act):
        """Have it do something that it does not survive."""
        self.process.stdin.write(f"{act}\n")
        self.process.stdin.flush()

    def started(self):
        """The words of its next start."""
        word, *words = self.process.stdout.readline().split()
        assert word == "start"
        return words

    def told(self):
        """What its sidecar tells."""
        return next(fields for _, fields in living(self.state))

    @contextlib.contextmanager
    def announced(self, command_id, *words):
        """A hand-off announced by `outbox handoff begin --wait`, whose end is awaited by `ended`."""
        with tempfile.TemporaryDirectory(prefix="home-") as home:
            argv = ["handoff", "begin", "--command-id", command_id, "--wait", "--json", *words]
            with subprocess.Popen(
                [sys.executable, "-m", "outbox", *argv],
                env=environment(home, {"daemon.state_dir": str(self.state)}),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as issuer:
                try:
                    wait_for(lambda: (self.told()["handoff"] or {}).get("commandId") == command_id, 60)
                    yield issuer
                finally:
                    issuer.kill()


def ended(issuer):
    """Exit status and answer of an issuer."""
    out, err = issuer.communicate(timeout=60)
    assert err == ""
    return issuer.returncode, json.loads(out)


@contextlib.contextmanager
def claude(state, tmp_path, url, settings=(), words=()):
    """It runs when the block begins; both are ended by their ids when it ends."""
    program = tmp_path / "claude"
    program.write_text(CLAUDE)
    program.chmod(0o755)
    named = {**QUICK, "daemon.state_dir": str(state), "relay.url": url, "relay.token": "tok-daemon"}
    named |= {"sidecar.settle_s": "30", "daemon.flush_timeout_s": "10", **dict(settings)}
    argv = ["run", "--agent", "builder", "--self-resume", "--", str(program), *words]
    with (
        tempfile.TemporaryDirectory(prefix="home-") as home,
        subprocess.Popen(
            [sys.executable, "-m", "outbox", *argv],
            env=environment(home, named),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            under_test = Claude(process, state)
            assert under_test.started() == list(words)
            wait_for(lambda: list(living(state)))
            yield under_test
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def test_the_hooks_of_claude_code_note_session_and_compaction(state, tmp_path, relay):
    """Nobody has to call `outbox handoff compacted`: its hooks do by themselves what a resume needs."""
    with claude(state, tmp_path, relay.url) as it:
        it.does("hook SessionStart s-9", "hook PreCompact s-9")
        with it.announced("cmd-1") as issuer:
            it.tell("exit 0")
            assert it.started() == ["--resume", "s-9"]
            it.does("hook SessionStart s-9")
            assert ended(issuer)[1]["via"] == "claude-resume"


def timeline(relay):
    """The timeline messages that the relay has, oldest first: their payloads."""
    bodies = [json.loads(event["body"]) for event in relay.events("builder")]
    assert all(body["from"] == "builder" for body in bodies)
    return [body["payload"] for body in bodies if body["kind"] == "timeline"]


def test_with_a_compaction_and_a_session_it_resumes(state, tmp_path, relay):
    """--resume ID; the decision is published, and the issuer hears of it once a hook tells the session."""
    with claude(state, tmp_path, relay.url, words=["--model", "opus"]) as it:
        it.does("session s-1", "compact")
        with it.announced("cmd-1", "--generation", "3") as issuer:
            assert it.told()["handoff"]["generation"] == 3
            it.tell("exit 0")
            assert it.started() == ["--model", "opus", "--resume", "s-1"]
            assert issuer.poll() is None
            it.does("session s-1")
            named = {"commandId": "cmd-1", "generation": 3}
            recovered = {"state": "recovered", "via": "claude-resume", "sessionId": "s-1", **named}
            assert ended(issuer) == (0, recovered)
        wait_for(lambda: timeline(relay))
        assert timeline(relay) == [
            {
                "event": "provider.restart_decision",
                "reason": "compaction_noted",
                "decision": "claude-resume",
                **named,
                "sessionId": "s-1",
            }
        ]
        assert it.told()["restarts"] == 1
        it.tell("exit 6")
        assert it.process.wait(60) == 6


@pytest.mark.parametrize(
    ("acts", "reason"),
    [(("session s-1",), "no_compaction"), (("compact",), "no_session")],
)
def test_else_it_starts_fresh(state, tmp_path, relay, acts, reason):
    """Without a compaction, or without a session; recovered when it has lived for long enough."""
    with claude(state, tmp_path, relay.url, {"sidecar.settle_s": "0.2"}, ["--resume", "old"]) as it:
        it.does(*acts)
        with it.announced("cmd-1") as issuer:
            it.tell("exit 1")
            assert it.started() == []
            status, answer = ended(issuer)
            assert (status, answer["state"], answer["via"]) == (0, "recovered", "fresh-launch")
            assert (answer["sessionId"], answer["generation"]) == (None, None)
        (payload,) = wait_for(lambda: timeline(relay))
        assert (payload["decision"], payload["reason"]) == ("fresh-launch", reason)


def test_without_a_handoff_it_ends(state, tmp_path, relay):
    """Whatever was noted; nothing is published."""
    with claude(state, tmp_path, relay.url) as it:
        it.does("session s-1", "compact")
        it.tell("exit 3")
        assert it.process.wait(60) == 3
    assert timeline(relay) == []


def test_a_handoff_times_out(state, tmp_path, relay):
    """The issuer is told; the command goes on, and its later end is an ordinary one."""
    with claude(state, tmp_path, relay.url, {"sidecar.handoff_timeout_s": "1"}) as it:
        with it.announced("cmd-1") as issuer:
            status, answer = ended(issuer)
        assert (status, answer["error"]["code"], answer["commandId"]) == (4, "timeout", "cmd-1")
        wait_for(lambda: it.told()["handoff"] is None)
        it.tell("exit 2")
        assert it.process.wait(60) == 2
    assert timeline(relay) == []


def test_a_second_announcement_rejects_the_first(state, tmp_path, relay):
    """The second one counts from then on."""
    with (
        claude(state, tmp_path, relay.url) as it,
        it.announced("cmd-1") as first,
        it.announced("cmd-2") as second,
    ):
        status, answer = ended(first)
        assert (status, answer["error"]["code"], answer["commandId"]) == (4, "superseded", "cmd-1")
        it.tell("exit 0")
        assert it.started() == []
        it.does("session s-9")
        answer = ended(second)[1]
        assert (answer["commandId"], answer["sessionId"]) == ("cmd-2", "s-9")


def test_a_restart_that_fails(state, tmp_path, relay):
    """It ends right away: published, reported, and the sidecar ends with the command's status."""
    with claude(state, tmp_path, relay.url) as it:
        with it.announced("cmd-1") as issuer:
            it.tell("exit 0")
            it.started()
            it.tell("exit 41")
            status, answer = ended(issuer)
        assert (status, answer["error"]["code"]) == (4, "restart_failed")
        assert "exit status 41" in answer["error"]["message"]
        assert it.process.wait(60) == 41
    decision, offline = timeline(relay)
    assert decision["decision"] == "fresh-launch"
    assert (offline["event"], offline["reason"]) == ("provider.offline", "restart_failed")
    assert "exit status 41" in offline["detail"]


def test_a_restart_that_cannot_begin(state, tmp_path, relay):
    """The program is gone: the same, with the status of the command's last run."""
    with claude(state, tmp_path, relay.url) as it:
        it.does("vanish")
        with it.announced("cmd-1") as issuer:
            it.tell("exit 5")
            status, answer = ended(issuer)
        assert (status, answer["error"]["code"]) == (4, "restart_failed")
        assert it.process.wait(60) == 5
    assert [payload["event"] for payload in timeline(relay)] == [
        "provider.restart_decision",
        "provider.offline",
    ]


def test_restarts_in_a_row_are_bounded(state, tmp_path, relay):
    """One more than allowed is not made: published, reported, over."""
    settings = {"sidecar.max_restarts": "1", "sidecar.settle_s": "0.1"}
    with claude(state, tmp_path, relay.url, settings) as it:
        with it.announced("cmd-1") as issuer:
            it.tell("exit 0")
            it.started()
            assert ended(issuer)[0] == 0
        with it.announced("cmd-2") as issuer:
            it.tell("exit 0")
            status, answer = ended(issuer)
        assert (status, answer["error"]["code"]) == (4, "too_many_restarts")
        assert it.process.wait(60) == 0
    assert [payload["event"] for payload in timeline(relay)] == [
        "provider.restart_decision",
        "provider.offline",
    ]


def test_a_sidecar_that_is_told_to_end_restarts_nothing(state, tmp_path, relay):
    """SIGTERM goes before a hand-off; its issuer is told."""
    with claude(state, tmp_path, relay.url) as it, it.announced("cmd-1") as issuer:
        it.process.send_signal(signal.SIGTERM)
        status, answer = ended(issuer)
        assert (status, answer["error"]["code"]) == (4, "stopping")
        assert it.process.wait(60) == -signal.SIGTERM
    assert timeline(relay) == []


def test_with_a_daemon(state, tmp_path, relay):
    """The decision goes out through it, and what waits is drained after the restart."""
    with (
        DaemonProcess(state, relay.url),
        claude(state, tmp_path, relay.url) as it,
        it.announced("cmd-1") as issuer,
    ):
        it.tell("exit 0")
        it.started()
        it.does("session s-1")
        assert ended(issuer)[0] == 0
        assert wait_for(lambda: timeline(relay))[0]["commandId"] == "cmd-1"


def test_announcing_without_waiting(state, tmp_path, relay):
    """It returns at once, and says what was announced; `compacted` notes from outside."""
    with claude(state, tmp_path, relay.url) as it:
        it.does("session s-1")
        done = outbox_command(state, "handoff", "compacted", "--agent", "builder", "--json")
        assert (done.returncode, json.loads(done.stdout)) == (0, {"noted": True})
        done = outbox_command(state, "handoff", "begin", "--command-id", "cmd-1")
        assert (done.returncode, b"cmd-1 is announced" in done.stdout) == (0, True)
        it.tell("exit 0")
        assert it.started() == ["--resume", "s-1"]


def test_nobody_to_announce_to(state):
    """2, and nothing was announced."""
    done = outbox_command(state, "handoff", "begin", "--command-id", "cmd-1", "--agent", "builder")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"'builder'" in done.stderr
    assert not state.exists()


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[]\n",
        b'{"act": "end"}\n',
        b'{"act": "begin", "commandId": ""}\n',
        b'{"act": "begin", "commandId": "c", "generation": "x"}\n',
        b"\xff\n",
        b"x" * 70_000 + b"\n",
    ],
)
def test_what_is_no_announcement(control, line):
    """It is refused, and the next one is heard."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(control))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(line)
        with connection.makefile("rb") as answers:
            assert json.loads(answers.readline())["error"]["code"] == "usage"


def test_an_announcement_that_drips_keeps_nobody_waiting(tmp_path, monkeypatch):
    """The time is that of the whole line: a byte now and then does not make it longer."""
    monkeypatch.setattr(outbox.sidecar.control, "_REQUEST_WITHIN_S", 0.3)
    listening = ControlSocket(tmp_path / "s.control", lambda: None)
    with contextlib.closing(listening), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "s.control"))
        connection.settimeout(0.05)

        def is_refused():
            try:
                connection.sendall(b"x")
                return b"error" in connection.recv(1_000)
            except TimeoutError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                return True

        wait_for(is_refused, 20)


# A caller comes while no descriptor is free, another one after that; prints whom the socket heard.
WITHOUT_DESCRIPTORS = r"""
import resource, socket, subprocess, sys, time
from pathlib import Path
from outbox.sidecar.control import ControlSocket
calling = "import socket as s, sys; sys.stdin.readline(); s.socket(s.AF_UNIX).connect(sys.argv[1]); print(1)"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
with subprocess.Popen([sys.executable, "-c", calling, sys.argv[1]], **pipes) as caller:
    listening = ControlSocket(Path(sys.argv[1]), lambda: None)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))
    caller.stdin.write("\n")
    caller.stdin.flush()
    caller.stdout.readline()
    time.sleep(0.3)  # in which it is accepted in vain
    resource.setrlimit(resource.RLIMIT_NOFILE, usual)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"act": "begin", "commandId": "second"}\n')
    end = time.monotonic() + 20
    while not (heard := listening.take()) and time.monotonic() < end:
        time.sleep(0.01)
    print(*(announcement.command_id for announcement in heard))
    listening.close()
"""


def test_a_time_without_descriptors_ends_no_hearing(tmp_path):
    """Who announces after it is heard."""
    words = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path / "s.control")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "second\n"


def test_a_compaction_is_noted_for_the_sidecar_that_is_named(tmp_path):
    """Also below another one; where it cannot be noted, nobody is told that it was."""

    def noted():
        words = [sys.executable, "-m", "outbox", "handoff", "compacted", "--agent", "other"]
        env = environment(str(tmp_path), {"daemon.state_dir": str(tmp_path)})
        env["OUTBOX_SIDECAR"] = around.place.name
        return subprocess.run(words, env=env, cwd=ROOT, capture_output=True, check=False)

    around, named = Record(tmp_path), Record(tmp_path)
    with contextlib.closing(around), contextlib.closing(named):
        for record, agent in ((around, "builder"), (named, "other")):
            record.write({"agent": agent, "selfResume": True})
            record.place.notes.touch()
        assert noted().returncode == 0
        assert around.place.notes.read_bytes() == b""
        assert json.loads(named.place.notes.read_bytes()) == {"note": "compacted"}
        named.place.notes.unlink()
        done = noted()
        assert (done.returncode, done.stdout) == (4, b"")
        assert b"could not be noted" in done.stderr


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    """A control socket in this process."""
    path = tmp_path_factory.mktemp("control") / "s.control"
    listening = ControlSocket(path, lambda: None)
    assert path.stat().st_mode & 0o777 == 0o600
    yield path
    listening.close()
    assert not path.exists()


def test_notes_go_to_the_sidecar_around_us_or_to_the_agents(tmp_path, monkeypatch):
    """Nothing is written where no sidecar listens; a session that looks like an option is none."""
    state = StateDirectory(tmp_path)
    monkeypatch.delenv("OUTBOX_SIDECAR", raising=False)
    assert note_compaction(state, "builder") is False
    folder = tmp_path / "sidecars"
    folder.mkdir()
    for name, agent in (("1-a", "builder"), ("2-b", "builder"), ("3-c", "other")):
        (folder / f"{name}.json").write_text(json.dumps({"agent": agent}) + "\n")
        (folder / f"{name}.notes").touch()
    assert note_session(state, "builder", "s-1")
    for none in ("--dangerous", "", "a\0b", "\ud800", "s" * 600):  # no word of a command line
        assert note_session(state, "builder", none) is False
    monkeypatch.setenv("OUTBOX_SIDECAR", "3-c")
    assert note_compaction(state, "whoever")
    sizes = {path.name: path.read_text().count("\n") for path in folder.glob("*.notes")}
    assert sizes == {"1-a.notes": 1, "2-b.notes": 1, "3-c.notes": 1}


def test_notes_are_cheap():
    """A hook pays for the standard library's json at most."""
    code = "import outbox.sidecar.handoff, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {
        "apsw",
        "asyncio",
        "httpx",
        "structlog",
        "argparse",
        "subprocess",
        "socket",
        "outbox.sidecar.record",
    }
    assert heavy & set(done.stdout.split()) <= {"apsw"}
