"""`outbox status --watch`: a live view on a terminal, a line for each change in a pipe, 0 at Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

import pytest
from command_line import environment
from processes import DaemonProcess, wait_for
from rich.console import Console

from outbox import Outbox
from outbox.api.report import OutboxLine, overview
from outbox.cli.status_view import LiveStatus
from outbox.cli.status_watch import DataLines, PlainLines, picture
from outbox.errors import StoreDamaged
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess


@pytest.fixture
def state(tmp_path):
    """A place for the events."""
    return tmp_path / "state"


def put(state, agent, count=1):
    """Enqueue some events."""
    with Outbox.open(agent, state_dir=state) as outbox:
        for n in range(count):
            outbox.enqueue("session-message", {"from": agent, "body": f"{n}"})


@contextlib.contextmanager
def watching(home, *words, stdout=subprocess.PIPE, **variables):
    """`outbox status --watch` as a process of its own, ended by its id."""
    command = [sys.executable, "-m", "outbox", "status", "--watch", *words]
    env = environment(home, PYTHONUNBUFFERED="1", **variables)
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_of(process):
    """The lines that a process prints, as they come."""
    lines = []

    def read():
        with contextlib.suppress(ValueError):  # closed at the end of the test
            for line in process.stdout:
                lines.append(line.decode())  # noqa: PERF401 - as they come

    threading.Thread(target=read, daemon=True).start()
    return lines


def test_in_a_pipe_each_change_is_a_line(state, tmp_path):
    """What is there at first, what comes, what is delivered, the daemon's coming; Ctrl-C ends it with 0."""
    put(state, "builder", 2)
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay, watching(tmp_path) as process:
        lines = lines_of(process)
        wait_for(lambda: any("agent builder: 2 waiting, 0 delivered; waits for a daemon" in x for x in lines))
        first = len(lines)
        put(state, "reviewer")
        wait_for(lambda: any("agent reviewer: 1 waiting" in line for line in lines))
        assert [line for line in lines[first:] if "builder" in line] == []
        with DaemonProcess(state, relay.url):
            wait_for(lambda: any("agent builder: 0 waiting, 2 delivered; nothing waits" in x for x in lines))
            wait_for(lambda: any(re.search(r"daemon pid \d+", line) for line in lines))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr.read() == b""
    assert [line for line in lines if not re.fullmatch(r"\d\d:\d\d:\d\d \S.*\n", line)] == []


def test_as_data_each_change_is_a_line(state, tmp_path):
    """The same as `status --json`, again when something changed."""
    put(state, "builder")
    with watching(tmp_path, "--json") as process:
        lines = lines_of(process)
        wait_for(lambda: lines)
        put(state, "builder")
        wait_for(lambda: len(lines) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert [json.loads(line)["agents"][0]["waiting"] for line in lines] == [1, 2]


def test_on_a_terminal_the_view_is_drawn_anew(state, tmp_path):
    """A real terminal: the numbers change in their place, and the cursor is there again at the end."""
    put(state, "builder", 1)
    mine, theirs = pty.openpty()
    try:
        with watching(tmp_path, stdout=theirs, TERM="xterm-256color", COLUMNS="120", LINES="40") as process:
            os.close(theirs)
            seen = bytearray()

            def read(text):
                if select.select([mine], [], [], 0.05)[0]:
                    with contextlib.suppress(OSError):
                        seen.extend(os.read(mine, 65_536))
                return re.search(text, seen)

            wait_for(lambda: read(rb"builder\s+1\s"))
            put(state, "builder", 2)
            wait_for(lambda: read(rb"\x1b\[\d*A[^\x00]*builder\s+3\s"))
            process.send_signal(signal.SIGINT)
            wait_for(lambda: read(rb"\x1b\[\?25h") and process.poll() is not None)
            assert (process.returncode, process.stderr.read()) == (0, b"")
    finally:
        os.close(mine)


def test_nobody_reads_any_more(state, tmp_path):
    """A closed pipe ends it quietly."""
    put(state, "builder")
    with watching(tmp_path) as process:
        assert process.stdout.readline()
        process.stdout.close()
        put(state, "builder")
        assert process.wait(20) == 141


def test_nobody_reads_any_more_and_nothing_changes(state, tmp_path):
    """As under `| head -1`: it does not stay until there is something to say."""
    put(state, "builder")
    with watching(tmp_path, "--json") as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(20) == 141


# One look after the other ----------------------------------------------------------------------------------


def seen_in(state):
    """How everything stands, as `status` sees it."""
    return overview(StateDirectory(state), time.time_ns() // 1_000_000, relay_url="http://relay.test:1")


def test_without_a_change_there_is_no_line(state, capsys):
    """Ages grow, and that is none."""
    put(state, "builder")
    for view in (PlainLines(), DataLines()):
        seen = seen_in(state)
        with view:
            view.show(seen)
            assert capsys.readouterr().out
            view.show(dataclasses.replace(seen, now_ms=seen.now_ms + 60_000))
            assert capsys.readouterr().out == ""


def test_what_is_gone_is_told(state, capsys):
    """An agent whose file was removed, and one whose file cannot be read."""
    put(state, "builder")
    put(state, "reviewer")
    view, seen = PlainLines(), seen_in(state)
    view.show(seen)
    capsys.readouterr()
    broken = OutboxLine("reviewer", None, None, StoreDamaged("made up"))
    view.show(dataclasses.replace(seen, outboxes=[broken]))
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in told] == [
        "agent reviewer: cannot be read: damaged",
        "agent builder: no outbox any more",
    ]


def test_a_small_terminal_shows_those_with_most_to_send(state):
    """As many as fit, and how many more there are."""
    for n in range(9):
        put(state, f"agent-{n}", n + 1)
    lines = picture(seen_in(state), 100, 12)
    shown = [line.split()[0] for line in lines if line.startswith("agent-")]
    assert shown == ["agent-8", "agent-7", "agent-6", "agent-5"]
    assert any(line.startswith("and 5 agents more") for line in lines)
    assert len(lines) <= 12


def test_a_narrow_terminal_shows_the_state(state):
    """Columns that tell least are left out; what an agent waits for is not cut off."""
    put(state, "builder", 3)
    for width in (100, 50, 44):
        (row,) = (line for line in picture(seen_in(state), width, 20) if line.startswith("builder"))
        assert row.split()[:2] == ["builder", "3"]
        assert row.endswith("waits for a daemon")
        assert len(row) <= width


def test_no_name_steers_the_terminal(state):
    """An agent's name is shown as text, whatever stands in it, also what looks like markup."""
    put(state, "[red]\x1b[31m\u202eagent")
    console = Console(force_terminal=True, width=100, height=30, file=io.StringIO())
    with LiveStatus(console) as view:
        view.show(seen_in(state))
    assert "[red]\\x1b[31m\\u202eagent" in console.file.getvalue()
    assert "\u202e" not in console.file.getvalue()


def test_nothing_there_yet(tmp_path):
    """No state directory: it waits for one to come, and makes none."""
    with watching(tmp_path) as process:
        lines = lines_of(process)
        wait_for(lambda: any("daemon none runs" in line for line in lines))
        assert not (tmp_path / "state").exists()
        put(tmp_path / "state", "a")
        wait_for(lambda: any("agent a: 1 waiting" in line for line in lines))
