"""`outbox run` on a real terminal, under a real shell with job control: as if it were not there."""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest
from processes import ROOT, environment, wait_for

from outbox.sidecar.record import living

# Says the number of each signal that it gets, and of SIGWINCH the new size too; SIGUSR2 ends it.
LISTENER = """
import os, signal, sys
heard = {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("rea" + "dy", flush=True)
while (number := signal.sigwait(heard)) != signal.SIGUSR2:
    size = os.get_terminal_size() if number == signal.SIGWINCH else ""
    print(f"<{int(number)}{size and '=' + str(size.columns)}>", flush=True)
print("<end>", flush=True)
"""

# Tidies up the terminal before it stops, as full-screen programs do.
TIDY = """
import os, select, signal, termios, time
modes = termios.tcgetattr(0)
raw = termios.tcgetattr(0)
raw[3] &= ~termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, raw)
def stop(*_):
    time.sleep(0.5)
    termios.tcsetattr(0, termios.TCSADRAIN, modes)
    print("ti" + "died", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print("ba" + "ck", flush=True)
signal.signal(signal.SIGTSTP, stop)
print("rea" + "dy", flush=True)
while not select.select([0], [], [], 0.1)[0]:
    pass
print("by" + "e", flush=True)
"""

# Leaves the terminal without echo and in the hands of its own process group, and is killed.
RUDE = """
import os, signal, termios
os.setpgid(0, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.tcsetpgrp(0, os.getpgrp())
modes = termios.tcgetattr(0)
modes[3] &= ~(termios.ECHO | termios.ICANON)
termios.tcsetattr(0, termios.TCSANOW, modes)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Shell:
    """A shell on a terminal of its own."""

    def __init__(self, master, process, state):
        self.master, self.process, self.state = master, process, state
        self.seen = ""

    def types(self, text):
        """Press these keys."""
        os.write(self.master, text.encode())

    def shows(self, pattern, timeout_s=60.0):
        """Wait until this stands on the screen; what was before it is passed over."""
        ends = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < ends, f"{pattern!r} is not in {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.master, 65_536).decode("utf-8", "replace")
        self.seen = self.seen[found.end() :]
        return found

    def asks(self, keys, pattern):
        """Press these keys again and again until this stands on the screen."""
        ends = time.monotonic() + 60
        self.types(keys)
        while not re.search(pattern, answer := self.shows("(.*)% ")[1]):
            assert time.monotonic() < ends, f"{pattern!r} is not in {answer!r}"
            self.types(keys)

    def resize(self, columns):
        """Make the window so wide."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def sidecar(self):
        """What the one sidecar tells, once it does."""
        return wait_for(lambda: [told for _, told in living(self.state)], 60)[0]


@pytest.fixture
def shell(tmp_path):
    """An interactive bash with `run` for `outbox run --`, and the programs above as files."""
    for name, text in (("listener", LISTENER), ("tidy", TIDY), ("rude", RUDE)):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}")
        (tmp_path / name).chmod(0o755)
    run = f"{sys.executable} -m outbox run --agent builder --flush-timeout 1"
    (tmp_path / "rc").write_text(f"PS1='% '; run() {{ {run} -- \"$@\"; }}\n")
    settings = {"daemon.state_dir": str(tmp_path / "state"), "relay.url": "http://127.0.0.1:9"}
    master, slave = os.openpty()
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", "bash", "--rcfile", str(tmp_path / "rc"), "-i"],
            env={
                **environment(home, settings),
                "TERM": "dumb",
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
            },
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        under_test = Shell(master, process, tmp_path / "state")
        try:
            under_test.shows("% ")
            yield under_test
        finally:
            for told in [told for _, told in living(tmp_path / "state")]:
                for pid in (told["command"]["pid"], told["pid"]):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            os.close(master)
            process.kill()
            process.wait(60)


def letter(pid):
    """The state of a process, T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_keys_reach_the_command_once(shell):
    """Ctrl-C and Ctrl-Backslash come once each, and neither ends the sidecar; nor is a new size doubled."""
    shell.types("run listener\n")
    shell.shows("ready")
    shell.types("\x03")
    shell.shows("<2>")
    shell.types("\x1c")
    shell.shows("<3>")
    shell.resize(123)
    shell.shows("<28=123>")
    told = shell.sidecar()
    os.kill(told["pid"], signal.SIGTERM)
    shell.shows("<15>")
    os.kill(told["command"]["pid"], signal.SIGUSR2)
    between = shell.shows("(.*)<end>")[1]
    assert "<" not in between
    shell.types("echo sta''tus=$?\n")
    shell.shows("status=0\\s")


def test_ctrl_c_ends_a_command_as_it_does_without(shell):
    """And a list of commands with it."""
    shell.types("for i in 1 2; do run sleep 600; done; echo sta''tus=$?\n")
    wait_for(lambda: letter(shell.sidecar()["command"]["pid"]) == "S", 60)
    shell.types("\x03")
    shell.shows("% ")
    shell.types("echo sta''tus=$?\n")
    shell.shows("status=130\\s")


def test_job_control(shell):
    """Ctrl-Z, fg, bg with reading in the background, fg, and the end of the input."""
    shell.types("run sh -c 'while read x; do echo got=$x; done; exit 7'\n")
    told = shell.sidecar()
    shell.types("one\n")
    shell.shows("got=one")
    shell.types("\x1a")
    shell.shows("Stopped")
    shell.shows("% ")
    assert [letter(told["pid"]), letter(told["command"]["pid"])] == ["T", "T"]
    shell.types("fg\n")
    wait_for(lambda: letter(told["command"]["pid"]) == "S", 60)
    shell.types("two\n")
    shell.shows("got=two")
    shell.types("\x1a")
    shell.shows("Stopped")
    shell.types("bg\n")
    shell.asks("jobs -l\n", "tty input")  # it reads in the background: SIGTTIN
    shell.types("fg\n")
    wait_for(lambda: letter(told["command"]["pid"]) == "S", 60)
    shell.types("three\n")
    shell.shows("got=three")
    shell.types("\x04")
    shell.shows("% ")
    shell.types("echo sta''tus=$?\n")
    shell.shows("status=7\\s")


def test_a_command_that_tidies_up_before_it_stops(shell):
    """The shell has the terminal only when the command has stopped, not while it tidies up."""
    shell.types("run tidy\n")
    shell.shows("ready")
    shell.types("\x1a")
    assert "Stopped" not in shell.shows("(.*)tidied")[1]
    shell.shows("Stopped")
    shell.types("fg\n")
    shell.shows("back")
    shell.types("\n")
    shell.shows("bye")


def test_a_command_that_stops_alone(shell):
    """Stopped by itself, the shell is told, as without a sidecar."""
    shell.types("run sh -c 'kill -STOP $$; echo conti''nued'\n")
    shell.shows("Stopped")
    shell.types("fg\n")
    shell.shows("continued")


def test_a_pipeline_shares_the_terminal(shell):
    """Who reads our output is in the same foreground group: Ctrl-C ends it too, Ctrl-Z stops it too."""
    shell.types("run sh -c 'echo begun; exec sleep 600' | sed s/begun/pip''ed/\n")
    told = shell.sidecar()
    shell.types("\x1a")
    shell.shows("Stopped")
    shell.types("fg\n")
    wait_for(lambda: letter(told["command"]["pid"]) == "S", 60)
    shell.types("\x03")
    shell.shows("% ")
    wait_for(lambda: not list(living(shell.state)), 60)


def test_what_a_killed_command_leaves_behind(shell):
    """Modes and foreground are as before, also for a script, which would not see to it itself."""
    shell.types(f"sh -c '{sys.executable} -m outbox run -- rude; stty -a; read x; echo re''ad=$x'\n")
    modes = shell.shows("speed(.*)echoke")[1]
    assert " icanon" in modes
    assert " echo " in modes
    shell.types("me\n")
    shell.shows("read=me")


def test_modes_that_a_command_sets_and_leaves_stay(shell):
    """`stty` does under a sidecar what it does without."""
    shell.types(f"sh -c '{sys.executable} -m outbox run -- stty -echo; stty -a; stty echo'\n")
    assert " -echo " in shell.shows("speed(.*)echoke")[1]


def test_a_terminal_that_hangs_up(shell):
    """SIGHUP reaches the command, and nobody is left behind."""
    shell.types("run sleep 600\n")
    told = shell.sidecar()
    hang_up(shell)
    wait_for(lambda: not Path(f"/proc/{told['command']['pid']}").exists(), 60)
    wait_for(lambda: not list(living(shell.state)), 60)


def hang_up(shell):
    """Close the terminal's other end; the fixture closes what stands in its place."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, shell.master)
    os.close(null)
