"""`outbox run` as a careful init: status, signals, orphans, streams, with and without a daemon."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import (
    QUICK,
    ROOT,
    DaemonProcess,
    ask,
    environment,
    numbers,
    outbox_command,
    put,
    status_of,
    wait_for,
)

from outbox.sidecar.record import living
from relay_client.reference.process import RelayProcess

NOBODY = "http://127.0.0.1:9"
SIGNALS = sorted(
    signal.valid_signals()
    - {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS),
        signal.SIGTRAP,
    }
)

# Says "ready", then the number of each signal it gets, until SIGTERM or SIGINT.
LISTENER = """
import signal, sys
heard = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("ready", flush=True)
while True:
    number = signal.sigwait(heard)
    print(int(number), flush=True)
    if number == signal.SIGUSR2:
        sys.exit(5)
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


@contextlib.contextmanager
def sidecar(state, *words, url=NOBODY, settings=(), agent="builder", before=(), **options):
    """`outbox run WORDS`; ended by its id when the block ends. Streams are pipes unless given otherwise."""
    named = {**QUICK, "daemon.state_dir": str(state), "relay.token": "tok-daemon", **dict(settings)}
    named |= {"relay.url": url} if url else {}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        tempfile.TemporaryDirectory(prefix="home-") as home,
        subprocess.Popen(
            [*before, sys.executable, "-m", "outbox", "run", f"--agent={agent}", *words],
            env=environment(home, named),
            cwd=ROOT,
            text=True,
            **{**streams, **options},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def ran(state, *words, timeout_s=60, **options):
    """The same to its end: exit status, stdout, stderr."""
    with sidecar(state, *words, **options) as process:
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err


def stopped(process, number):
    """Signal a sidecar until it ends: one that comes while its command ends is still the command's."""
    wait_for(lambda: process.send_signal(number) or process.poll() is not None, 60)


def told(state):
    """What the one living sidecar tells, None while there is none."""
    found = [fields for _, fields in living(Path(state))]
    return found[0] if found else None


# How it ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 7])
def test_the_exit_status_is_the_commands(state, status):
    """Whatever it is; nothing is said when nothing is left."""
    assert ran(state, "--", "sh", "-c", f"exit {status}") == (status, "", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGRTMIN])
def test_a_command_that_a_signal_killed(state, number):
    """Whoever waits for us sees death by the same signal, as it would have seen the command's."""
    assert ran(state, "--", "sh", "-c", f"kill -{int(number)} $$")[0] == -number


@pytest.mark.parametrize(
    ("word", "status", "words"),
    [("no-such-command", 127, "PATH"), ("/no/such", 127, "no such file"), ("/", 126, "cannot be run")],
)
def test_a_command_that_cannot_be_started(state, word, status, words):
    """127 and 126, as a shell has it, and one line that says why."""
    put(state, "builder", 0)
    got, out, err = ran(state, "--", word)
    assert (got, out, err.count("\n")) == (status, "", 1)
    assert words in err
    assert repr(word) in err


def test_a_text_without_an_interpreter_is_run_by_sh(state, tmp_path):
    """As execvp does it."""
    script = tmp_path / "script"
    script.write_text('echo "$0" "$1"; exit 3\n')
    script.chmod(0o755)
    assert ran(state, "--", str(script), "--word")[:2] == (3, f"{script} --word\n")


def test_its_words_are_the_commands_own(state):
    """Options behind `--` are not ours, a second `--` included."""
    program = "import sys; print(sys.argv[1:])"
    words = ["--json", "--agent", "x", "--", "--version"]
    assert ran(state, "--", sys.executable, "-c", program, *words)[1] == f"{words}\n"


@pytest.mark.parametrize("settings", [{"relay.url": "nonsense"}, {"relay.url": ""}])
def test_a_fault_in_the_configuration(state, settings, tmp_path):
    """2, and the command is not started: it would run for hours with nobody to deliver."""
    status, _, err = ran(state, "--", "touch", str(tmp_path / "ran"), url=None, settings=settings)
    assert (status, err.count("\n")) == (2, 1)
    assert not (tmp_path / "ran").exists()


# What the command has ---------------------------------------------------------------------------------------


def test_streams_descriptors_and_signals_are_as_without(state):
    """Stdin goes through, other descriptors too, no signal is blocked or ignored, the group is ours."""
    program = (
        "import os, sys; print(sys.stdin.read(), os.getpgrp() == os.getpgid(os.getppid()), "
        "[line.split()[1] for line in open('/proc/self/status') if line.startswith(('SigBlk', 'ShdPnd'))])"
    )
    ours = 'exec 5</dev/null; exec "$@"'
    words = ["--", "sh", "-c", 'test -e /dev/fd/5 && grep SigIgn /proc/self/status && exec "$@"', "sh"]
    with sidecar(state, *words, sys.executable, "-c", program, before=["sh", "-c", ours, "sh"]) as process:
        out, err = process.communicate("hello", timeout=60)
    assert (process.returncode, err) == (0, "")
    ignored, rest = out.splitlines()
    assert int(ignored.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0
    assert rest == f"hello True {['0' * 16] * 2}"


def test_a_reader_is_not_kept_waiting(state):
    """The pipe ends with the command, not with our last flush."""
    put(state, "builder", 0)
    with sidecar(state, "--flush-timeout", "60", "--", "echo", "done") as process:
        assert process.stdout.read() == "done\n"
        assert process.poll() is None
        stopped(process, signal.SIGTERM)
        assert process.returncode == 0


def test_what_the_command_finds(state, relay):
    """Agent, state directory and a socket that answers; what it enqueues is delivered meanwhile."""
    script = (
        'test "$OUTBOX_AGENT" = builder && test -S "$OUTBOX_SOCKET" && echo "$OUTBOX_SOCKET" && '
        "read line; exit 4"
    )
    with sidecar(state, "--", "sh", "-c", script, url=relay.url) as process:
        socket = process.stdout.readline().strip()
        events = [{"kind": "session-message", "payload": {"n": 0}}]
        status, answer = ask(socket, "POST", "/v1/agents/builder/events", events)
        assert (status, answer["accepted"]) == (200, 1)
        assert ask(socket, "POST", "/v1/agents/other/events", events)[0] == 404
        put(state, "builder", 1)
        wait_for(lambda: numbers(relay) == [0, 1])
        put(state, "other", 0)
        (agent,) = ask(socket, "GET", "/v1/status")[1]["agents"]
        assert (agent["agent"], agent["delivered"]) == ("builder", 2)
        assert Path(socket).stat().st_mode & 0o777 == 0o600
        _, err = process.communicate("go\n", timeout=60)
    assert (process.returncode, err) == (4, "")
    assert numbers(relay) == [0, 1]
    assert list((state / "sidecars").iterdir()) == []


def test_the_name_of_the_command_is_the_agent(state):
    """Without --agent and OUTBOX_AGENT."""
    with tempfile.TemporaryDirectory() as home:
        env = environment(home, {"daemon.state_dir": str(state), "relay.url": NOBODY})
        env.pop("OUTBOX_AGENT", None)
        done = subprocess.run(
            [sys.executable, "-m", "outbox", "run", "--", "/bin/sh", "-c", "echo $OUTBOX_AGENT"],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    assert done.stdout == "sh\n"


def test_the_status_knows_the_command(state):
    """Under its agent, as data and as a line; a sidecar that was killed is not shown, and cleared away."""
    tmux = ["env", "TMUX=/tmp/tmux-0/de,fault,77,3", "TMUX_PANE=%5"]
    with sidecar(state, "--", "sh", "-c", "read x", before=tmux) as process:
        fields = wait_for(lambda: told(state))
        (agent,) = json.loads(outbox_command(state, "status", "--json").stdout)["agents"]
        assert agent["sidecars"] == [{name: fields[name] for name in fields if name != "agent"}]
        (shown,) = agent["sidecars"]
        assert (shown["pid"], shown["command"]["name"]) == (process.pid, "sh")
        assert (shown["engine"], shown["selfResume"], shown["handoff"]) == ("own", False, None)
        assert shown["tmux"] == {"socket": "/tmp/tmux-0/de,fault", "session": "$3", "pane": "%5"}
        (record,) = (state / "sidecars").glob("*.json")
        assert record.stat().st_mode & 0o777 == 0o600
        line = f"builder: sh (pid {shown['command']['pid']}) under outbox run since "
        assert line.encode() in outbox_command(state, "status").stdout
        process.kill()
        process.wait(60)
        (agent,) = json.loads(outbox_command(state, "status", "--json").stdout)["agents"]
        assert "sidecars" not in agent
    assert ran(state, "--", "true")[0] == 0
    assert list((state / "sidecars").iterdir()) == []


# Delivery ---------------------------------------------------------------------------------------------------


def test_the_last_event_is_delivered(state, relay):
    """What the command enqueued right before its end goes out before we end."""
    script = f"{sys.executable} -m outbox enqueue --kind session-message --payload '{{\"n\": 7}}' >/dev/null"
    assert ran(state, "--", "sh", "-c", script, url=relay.url) == (0, "", "")
    assert numbers(relay, "builder") == [7]


def test_with_the_relay_down(state):
    """The status of the command is kept, and one line says what is left."""
    put(state, "builder", 0, 1)
    status, out, err = ran(state, "--flush-timeout", "0.3", "--", "sh", "-c", "exit 9")
    assert (status, out, err.count("\n")) == (9, "", 1)
    assert err.startswith("outbox: 2 events of builder left on disk: unreachable")
    assert status_of(state, "builder").waiting == 2


def test_with_a_daemon_nothing_is_started(state, relay):
    """The command gets the daemon's socket; the sidecar has no engine and no socket of its own."""
    with (
        DaemonProcess(state, relay.url),
        sidecar(state, "--", "sh", "-c", "echo $OUTBOX_SOCKET; read x") as process,
    ):
        assert process.stdout.readline() == f"{state / 'outbox.sock'}\n"
        assert wait_for(lambda: told(state))["engine"] == "daemon"
        assert [path.suffix for path in (state / "sidecars").iterdir()] == [".json"]
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1
        put(state, "builder", 3)
        _, err = process.communicate("go\n", timeout=60)
        assert (process.returncode, err) == (0, "")
        assert numbers(relay) == [3]


def test_with_a_daemon_and_the_relay_down(state):
    """The line says that the daemon goes on."""
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}):
        put(state, "builder", 0)
        status, _, err = ran(state, "--flush-timeout", "0.3", "--", "sh", "-c", "exit 2", url=None)
    assert status == 2
    assert err.startswith("outbox: 1 event of builder left on disk")
    assert "The daemon goes on with them" in err


def test_two_sidecars_of_one_state_directory(state, relay):
    """Each has its own socket, and delivers its own agent's events."""
    words = ["--", "sh", "-c", "echo $OUTBOX_SOCKET; read x"]
    with (
        sidecar(state, *words, url=relay.url, agent="a") as one,
        sidecar(state, *words, url=relay.url, agent="b") as other,
    ):
        sockets = [process.stdout.readline().strip() for process in (one, other)]
        assert len(set(sockets)) == 2
        for agent, n in (("a", 1), ("b", 2)):
            put(state, agent, n)
        wait_for(lambda: sorted(numbers(relay)) == [1, 2])
        assert [one.communicate("\n", timeout=60)[1], other.communicate("\n", timeout=60)[1]] == ["", ""]


def test_a_signal_ends_the_last_flush(state):
    """Whoever stops us while we flush does not wait for the deadline; the line is said all the same."""
    put(state, "builder", 0)
    with sidecar(state, "--flush-timeout", "600", "--", "echo", "done") as process:
        assert process.stdout.read() == "done\n"
        stopped(process, signal.SIGINT)
        assert "1 event of builder left on disk" in process.communicate(timeout=60)[1]
        assert process.returncode == 0


def test_a_signal_ends_the_last_flush_by_a_daemon(state):
    """The line says that it was a signal, since the time was not over, and that the daemon goes on."""
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}):
        put(state, "builder", 0)
        with sidecar(state, "--flush-timeout", "600", "--", "echo", "done", url=None) as process:
            assert process.stdout.read() == "done\n"
            stopped(process, signal.SIGINT)
            err = process.communicate(timeout=60)[1]
    assert "left on disk: a signal ended the flush. The daemon goes on with them." in err


def test_a_signal_ends_the_last_flush_to_a_slow_relay(state, relay):
    """The same where the sidecar sends by itself and nothing but the answer is missing."""
    relay.add_faults({"match": {"method": "POST"}, "action": {"hang": 3000}})
    put(state, "builder", 0)
    words = ["--flush-timeout", "600", "--", "echo", "done"]
    with sidecar(state, *words, url=relay.url) as process:
        assert process.stdout.read() == "done\n"
        wait_for(lambda: status_of(state, "builder").in_flight)
        stopped(process, signal.SIGINT)
        assert "left on disk: a signal ended the flush. They go out" in process.communicate(timeout=60)[1]


@pytest.mark.parametrize("broken", ["companion", "flush"])
def test_a_fault_of_ours_does_not_keep_the_command(state, tmp_path, broken):
    """Whatever ends the threads that send (a release half installed): the command's status, and one line."""
    hook = "import sys\nclass Broken:\n    def find_spec(self, name, path, target=None):\n"
    hook += f"        if name == 'outbox.daemon.{broken}':\n            raise ImportError('half installed')\n"
    (tmp_path / "sitecustomize.py").write_text(hook + "sys.meta_path.insert(0, Broken())\n")
    before = ["env", f"PYTHONPATH={tmp_path}"]
    with contextlib.ExitStack() as stack:
        if broken == "flush":
            stack.enter_context(DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}))
        put(state, "builder", 0)
        status, _, err = ran(state, "--", "sh", "-c", "exit 3", before=before)
    assert status == 3
    assert "1 event of builder left on disk: a fault of this program" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("gone", [True, False])
def test_nobody_hears_the_last_line(state, gone):
    """Be stderr's reader gone or its disk full, the status is the command's."""
    put(state, "builder", 0)
    reading, broken = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("wb") as full:
        status = ran(
            state, "--flush-timeout", "0", "--", "sh", "-c", "exit 3", stderr=broken if gone else full
        )
    os.close(broken)
    assert status[0] == 3


# Signals ----------------------------------------------------------------------------------------------------


def waits_for_signals(pid):
    """Whether the main thread sleeps, and in sigtimedwait(2) where the kernel tells (proc(5))."""
    state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    where = Path(f"/proc/{pid}/wchan").read_text("ascii")
    return state == "S" and (where == "0" or "sigtimedwait" in where)


def test_every_signal_is_handed_on(state):
    """Each that can be caught, real-time ones included, once and in order.

    What Python ignores is sent when the main thread waits: another one would take it, and drop it.
    """
    with sidecar(state, "--kill-after", "0", "--", sys.executable, "-c", LISTENER) as process:
        assert process.stdout.readline() == "ready\n"
        for number in [number for number in SIGNALS if number != signal.SIGUSR2]:
            if number in {signal.SIGPIPE, signal.SIGXFSZ}:
                wait_for(lambda: waits_for_signals(process.pid))
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
        process.send_signal(signal.SIGUSR2)
        assert process.communicate(timeout=60)[0] == f"{int(signal.SIGUSR2)}\n"
        assert process.returncode == 5


def test_a_signal_that_comes_at_once(state):
    """One that comes while we start ends us or the command; nobody is left behind."""
    with sidecar(state, "--flush-timeout", "0", "--", "sleep", "600") as process:
        wait_for(lambda: told(state))
        pid = told(state)["command"]["pid"]
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_ignores_sigterm(state):
    """It gets a second one, and SIGKILL when its time is over."""
    script = "trap 'echo again' TERM; echo ready; while :; do sleep 0.05; done"
    with sidecar(state, "--kill-after", "1", "--", "sh", "-c", script) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=60)[0] == "again\nagain\n"
        assert process.returncode == -signal.SIGKILL


def test_a_command_that_takes_its_time(state):
    """With --kill-after 0 nothing follows a SIGTERM."""
    script = "trap 'sleep 1.5; echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    with sidecar(state, "--kill-after", "0", "--", "sh", "-c", script) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=60)[0] == "bye\n"
        assert process.returncode == 3


def in_a_sidecar(program):
    """What a program prints whose main thread holds its signals, as that of `outbox run` does."""
    begin = """
import os, signal, subprocess, sys
from outbox.sidecar.runner import Runner, asked_to_end, hold_signals
from outbox.sidecar.terminal import Terminal
def send(number):
    subprocess.run([sys.executable, "-c", f"import os; os.kill({os.getpid()}, {int(number)})"], check=True)
def held(kill_after_ms=0):
    return Runner(os.environ, hold_signals(), Terminal(), kill_after_ms)
"""
    words = [sys.executable, "-c", begin + program]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert not done.stderr
    return done.stdout.split()


def test_a_signal_before_the_commands_end_was_the_commands():
    """`kill %1` of a stopped job ends the command before the signal is heard here: the flush has its time."""
    assert in_a_sidecar("""
runner = held()
runner.start(["true"])
os.waitid(os.P_PID, runner.pid, os.WEXITED | os.WNOWAIT)
send(signal.SIGTERM)
print(runner.wait(), runner.is_stopping, asked_to_end(0))
""") == ["0", "True", "False"]


def test_a_signal_that_is_ignored_asks_nothing_of_us():
    """As under nohup: it goes to the command, is no reason to kill it, and ends no flush."""
    assert in_a_sidecar("""
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
runner = held(kill_after_ms=1)
said, says = os.pipe()
os.set_inheritable(says, True)
listener = "import os, signal as s; s.signal(15, lambda *_: os._exit(7)); os.write(%d, b'.'); s.pause()"
runner.start([sys.executable, "-c", listener % says])
os.read(said, 1)
for number in (signal.SIGHUP, signal.SIGTERM):
    send(number)
status = runner.wait()
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
    send(number)
print(os.waitstatus_to_exitcode(status), runner.is_stopping, asked_to_end(0))
""") == ["7", "False", "False"]


def test_a_command_that_has_become_another_users():
    """What may not be signalled (sudo) goes on as it is, and so do we."""
    assert in_a_sidecar("""
runner = held()
runner.pid = 1
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
runner._hear(0, 0)
print("on")
""") == ["on"]


def test_a_parent_that_ignores_the_end_of_children(state):
    """The kernel would take the command's status away, and we would wait for ever."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    before = [sys.executable, "-c", ignoring + "os.execv(sys.argv[1], sys.argv[1:])"]
    assert ran(state, "--", "sh", "-c", "exit 3", before=before)[0] == 3


# Orphans ----------------------------------------------------------------------------------------------------

ORPHANS = "for i in 1 2 3; do (sh -c 'sleep 0.2; exit 3' & ) ; done; echo ready; read x"


def children(pid):
    """The state letters of a process's children."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, _, rest = (folder / "stat").read_text().rpartition(") ")
            letter, parent = rest.split()[:2]
            if int(parent) == pid:
                found[int(folder.name)] = letter
    return found


def test_orphans_are_reaped(state):
    """What loses its parent below us becomes our child, and no zombie stays."""
    with sidecar(state, "--", "sh", "-c", ORPHANS) as process:
        assert process.stdout.readline() == "ready\n"
        command = told(state)["command"]["pid"]
        wait_for(lambda: list(children(process.pid)) == [command])
        assert process.communicate("\n", timeout=60)[1] == ""


def test_as_pid_1(state):
    """In a pid namespace of its own: signals are handed on, orphans reaped, the status is 128 + N."""
    before = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
    script = (
        "(sh -c 'sleep 0.1; exit 3' &); echo $PPID; trap 'echo TERM; kill -INT $$' TERM; "
        "while :; do sleep 0.05; echo $(grep -l '^State:.*zombie' /proc/[0-9]*/status | wc -l); done"
    )
    with sidecar(state, "--", "sh", "-c", script, before=before) as process:
        assert process.stdout.readline() == "1\n"
        (init,) = wait_for(lambda: children(process.pid))
        wait_for(lambda: process.stdout.readline() == "0\n")
        os.kill(init, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert "TERM" in out
    assert (process.returncode, err) == (130, "")


def test_a_token_command_of_ours_is_not_taken_for_an_orphan(state, relay, tmp_path):
    """What the engine starts in its own threads is waited for there, and begins with no signal blocked."""
    program = tmp_path / "token"
    program.write_text("#!/bin/sh\nsleep 0 &\nwait\ntimeout 60 echo tok-daemon\n")
    program.chmod(0o755)
    settings = {"relay.token_command": str(program), "relay.token": ""}
    with sidecar(state, "--", "sh", "-c", "read x", url=relay.url, settings=settings) as process:
        put(state, "builder", 1)
        wait_for(lambda: numbers(relay) == [1], 60)
        assert process.communicate("\n", timeout=60)[1] == ""
