"""The README runs: every shell and Python example in it, one after the other, as a newcomer would."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outbox.store.directory import StateDirectory
from outbox.store.place import running_daemon
from relay_client.reference.process import RelayProcess

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text("utf-8")
RELAY, TOKEN_FILE = "http://relay.internal:4850", "/etc/outbox/token"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INTRODUCTION, REST = README.split("## A five-minute tour\n")
TOUR, REST = REST.split("## Use it\n")
EXAMPLES = FENCED.findall(INTRODUCTION + REST)
SETS_UP = ("make ", "python3 -m venv")  # not inside the very environment that such a command makes


@pytest.fixture
def relay(tmp_path):
    """The reference relay in the place of the one that the README names."""
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-readme"]) as relay:
        yield relay


@pytest.fixture
def environ(tmp_path):
    """A newcomer's environment: `outbox` on the PATH, and nothing set but a place for the events."""
    settings = re.compile("OUTBOX_|AGENT_RELAY_|XDG_|.*_proxy$", re.IGNORECASE)
    kept = {name: text for name, text in os.environ.items() if not settings.match(name)}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**kept, "PATH": path, "HOME": str(tmp_path), "OUTBOX_STATE_DIR": str(tmp_path / "state")}


@contextlib.contextmanager
def serving(example, environ, log):
    """The daemon as an example starts it, from when it serves; ended by its id."""
    with log.open("wb") as lines:
        daemon = subprocess.Popen(shlex.split(example), env=environ, stdout=lines, stderr=lines)
    try:
        state = StateDirectory(Path(environ["OUTBOX_STATE_DIR"]))
        while not ((there := running_daemon(state)) and there.pid == daemon.pid and there.socket.exists()):
            assert daemon.poll() is None, log.read_text("utf-8")
            time.sleep(0.05)
        yield
    finally:
        daemon.terminate()
        daemon.wait(30)


def run(language, example, environ):
    """What an example prints; it has to end with 0."""
    command = {"sh": ["bash", "-euc"], "python": [sys.executable, "-c"]}[language]
    done = subprocess.run(
        [*command, example], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, (example, done.stdout, done.stderr)
    return done.stdout


def test_the_readme_begins_with_the_two_commands():
    """Set-up and run, set-up and test: before anything else, and the Makefile has both."""
    assert re.match(r"# [^\n]+\n\n```sh\nmake run +#[^\n]*\nmake test +#[^\n]*\n```\n", README)
    for target in ("run", "test"):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
        assert {"run": "outbox demo", "test": "pytest"}[target] in done.stdout


def test_every_example_runs(relay, environ, tmp_path):
    """In their order, with a daemon as the README starts it; in the end the relay holds what they sent."""
    token_file = tmp_path / "token"
    token_file.write_text("tok-readme\n", encoding="utf-8")
    said = ""
    with contextlib.ExitStack() as daemons:
        for language, text in EXAMPLES:
            example = text.replace(RELAY, relay.url).replace(TOKEN_FILE, str(token_file))
            if example.startswith("outbox serve"):
                daemons.enter_context(serving(example, environ, tmp_path / "daemon.log"))
            elif not example.startswith(SETS_UP):
                said += run(language, example, environ)
        held = [row["path"].removeprefix("/api/") for row in relay.events("builder")]
    assert held == ["messages", "messages", "insights/observations", "messages"]
    assert "2 events accepted" in said
    assert "4 waiting" in said


def test_the_tour_runs(environ, tmp_path):
    """Typed into one shell, it goes through an outage and a mended dead letter, and leaves nothing behind."""
    script = "".join(text for language, text in FENCED.findall(TOUR) if language == "sh")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        ["bash", "-euc", script.replace("4850", port)],
        env={**environ, "TMPDIR": str(temporary)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    for pattern in (
        r"builder: 3 events wait",
        r"builder +3 +session-message +rejected +422",
        r"again as seq 5, behind what waits, with the new key",
        r"builder +0 +0 +4 +0  nothing waits",
    ):
        assert re.search(pattern, done.stdout), (pattern, done.stdout, done.stderr)
    assert list(temporary.iterdir()) == []


def test_every_command_of_the_readme_is_an_example_or_has_one():
    """Commands in the running text stand in an example too, or the examples of their own pages are run."""
    inline = {match.split()[0] for match in re.findall(r"`(?:\.venv/bin/)?outbox ([a-z][^`]*)`", README)}
    examples = {
        match
        for _, text in FENCED.findall(README)
        for match in re.findall(r"^outbox ([a-z]+)", text, re.MULTILINE)
    }
    assert inline - examples <= {"demo", "config", "mcp", "hook", "run", "handoff", "install", "auth"}
