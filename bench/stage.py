"""Who takes part: the daemon and the counting relay as processes of their own, and outboxes with events.

Every process is ended by its id when its block ends, whatever happened.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple, Self

from outbox import Outbox
from outbox.bounds import Bounds
from outbox.event import Limits, draft_event
from outbox.settings import KEYS
from outbox.store.directory import StateDirectory
from outbox.store.place import running_daemon
from outbox.store.rules import encode_rules

ROOT = Path(__file__).parent.parent
PAYLOAD = {"from": "builder", "to": "lead", "kind": "note", "body": "x" * 420}
KIND = "session-message"
AGENT = "builder"

_MOST_EVENTS = 10_000_000
_MOST_BYTES = 1 << 40
_AT_ONCE = 1_000
_WITHIN_S = 300.0
_LOOK_AGAIN_S = 0.01


def environment(home: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """An environment with nothing of ours in it but these settings ("relay.url")."""
    ours = {name for key in KEYS.values() for name in (key.variable, *key.aliases)}
    others = {"OUTBOX_CONFIG", "STATE_DIRECTORY", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "JOURNAL_STREAM"}
    others.add("PYTHONDONTWRITEBYTECODE")  # every process would compile what it loads
    kept = {name: text for name, text in os.environ.items() if name not in ours | others}
    named = {KEYS[name].variable: text for name, text in settings.items()}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), **named}


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds; a RuntimeError says what did not come."""
    ends = time.monotonic() + _WITHIN_S
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"{what}: not within {_WITHIN_S:.0f} s. The bench was given up.")
        time.sleep(_LOOK_AGAIN_S)


# Processes --------------------------------------------------------------------------------------------------


class Child:
    """A process that is ended with its block."""

    def __init__(
        self, words: list[str], env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        """Start it; what it says on stderr goes to `log`."""
        with (log or Path(os.devnull)).open("ab") as stderr:
            self.process = subprocess.Popen(
                words,
                env=None if env is None else dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr if log else None,
                text=True,
                cwd=ROOT,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def line(self) -> str:
        """The next line that it prints; a RuntimeError when it has ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}.")
        return line.strip()

    def tell(self, line: str) -> None:
        """Give it a line on stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()


class Count(NamedTuple):
    """What a relay has heard."""

    events: int
    requests: int
    first_events: int
    first_ns: int
    last_ns: int

    @property
    def per_s(self) -> float:
        """Events a second, from the first request to the last."""
        return (self.events - self.first_events) / max(1, self.last_ns - self.first_ns) * 1e9


class Relay(Child):
    """The counting relay at `url`."""

    def __init__(self, *, latency_ms: float = 0, batches: bool = True, notes: bool = False) -> None:
        """Start it and wait until it listens."""
        flags = [f"--latency-ms={latency_ms}"]
        flags += [] if batches else ["--no-batches"]
        flags += ["--notes"] if notes else []
        super().__init__([sys.executable, "-m", "bench.instant_relay", *flags])
        self._port = int(self.line().split()[1])
        self.url = f"http://127.0.0.1:{self._port}"

    def count(self) -> Count:
        """What it has heard so far."""
        found = self._ask("/bench/count")
        names = ("events", "requests", "firstEvents", "firstNs", "lastNs")
        return Count(*(found[name] for name in names))

    def notes(self) -> list[tuple[str, int, list[int]]]:
        """Each request: its agent, when it came, and the delays of its events (nanoseconds)."""
        return [(agent, at_ns, delays) for agent, at_ns, delays in self._ask("/bench/notes")]

    def wait(self, events: int) -> Count:
        """What it has heard once it has heard so many events."""
        until(lambda: self.count().events >= events, f"{events:,} events at the relay")
        return self.count()

    def _ask(self, path: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


class Daemon(Child):
    """`outbox serve` on a state directory, from when it serves; `descriptors` bounds what it may open."""

    def __init__(
        self, state: Path, url: str, settings: Mapping[str, str] | None = None, *, descriptors: int = 0
    ) -> None:
        """Start it; returns when it serves."""
        asked = {"relay.url": url, "relay.token": "tok-bench", "daemon.state_dir": str(state)}
        asked |= {"bounds.max_events": str(_MOST_EVENTS), "bounds.max_bytes": str(_MOST_BYTES)}
        words = [sys.executable, "-m", "outbox", "serve"]
        if descriptors:
            words = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *words]
        state.parent.mkdir(parents=True, exist_ok=True)
        env = environment(state.parent, {**asked, **(settings or {})})
        super().__init__(words, env, state.parent / "daemon.log")
        directory = StateDirectory(state)
        self.socket = state / "outbox.sock"
        try:
            until(lambda: self._serves(directory), "the daemon's start")
        except BaseException:
            self.__exit__()
            raise

    def _serves(self, state: StateDirectory) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the daemon ended with {self.process.returncode}; see daemon.log")
        there = running_daemon(state)
        return there is not None and there.pid == self.pid and self.socket.exists()


def connected(place: Path) -> socket.socket:
    """A connection to a Unix socket, however long its path is (a name has room for 108 bytes)."""
    line = socket.socket(socket.AF_UNIX)
    folder = os.open(place.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        line.connect(f"/proc/self/fd/{folder}/{place.name}")
    finally:
        os.close(folder)
    return line


# Outboxes ---------------------------------------------------------------------------------------------------


def open_outbox(state: Path, agent: str = AGENT) -> Outbox:
    """An outbox that takes as many events as a bench gives it."""
    if not (state / "rules.json").exists():
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        bounds = Bounds(max_events=_MOST_EVENTS, max_bytes=_MOST_BYTES)
        (state / "rules.json").write_text(encode_rules(Limits(), bounds), "utf-8")
    return Outbox.open(agent, state_dir=state, allow_network_fs=True)


def fill(state: Path, events: int, agent: str = AGENT) -> Path:
    """Let so many events more wait in an agent's outbox, many a commit."""
    draft = draft_event(KIND, PAYLOAD, limits=Limits())
    with open_outbox(state, agent) as outbox:
        for done in range(0, events, _AT_ONCE):
            outbox.enqueue_many([draft] * min(_AT_ONCE, events - done))
    return state


def file_of(state: Path, agent: str = AGENT) -> Path:
    """The file of an agent's outbox."""
    return StateDirectory(state).outbox_path(agent)


class Backlogs:
    """Outboxes with many events waiting, made once for a whole run and copied for each use."""

    def __init__(self, scratch: Path) -> None:
        """Nothing is made yet."""
        self._scratch = scratch

    def copy(self, events: int, state: Path) -> Path:
        """A state directory whose one agent has so many events waiting."""
        made = self._scratch / f"backlog-{events}"
        if not made.exists():
            fill(made, events)
        shutil.copytree(made, state, ignore=shutil.ignore_patterns("*.sock", "owners.lock"))
        return state
