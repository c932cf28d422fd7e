"""An outbox under way against a real relay: the engine in this process, or `outbox serve` as one of its own.

And what a relay's log says became of the events, in the words of tests/cases/README.md.
"""

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from command_line import environment

from outbox import Outbox, StoreError
from outbox.daemon.compose import build_engine
from outbox.settings import KEYS, load
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import dead_letters, read_status

AGENT = "builder"
TOKEN = "tok-test-0123456789"
WAIT_S = 30
QUICK = {
    "relay.token": TOKEN,
    "relay.trust_env": False,
    "delivery.backoff_initial_s": 0.05,
    "delivery.backoff_max_s": 0.5,
    "delivery.max_attempts": 5,
    "delivery.workers": 4,
}
"""Settings of a run: a case's second of back-off is a twentieth of one here."""


def until(found, within_s=WAIT_S):
    """What `found()` returns once it is true; None when it does not become so in time."""
    end = time.monotonic() + within_s
    while not (value := found()):
        if time.monotonic() > end:
            return None
        time.sleep(0.01)
    return value


# The outbox ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(state_dir, agent=AGENT):
    """The file of an agent's outbox, to look into."""
    state = StateDirectory(state_dir)
    box = open_outbox(state, state.outbox_path(agent))
    try:
        yield box
    finally:
        box.close()


def status_of(state_dir, agent=AGENT):
    """What the file says of an outbox now."""
    with opened(state_dir, agent) as box:
        return read_status(box)


def letters_of(state_dir, agent=AGENT):
    """Its dead letters, each with the text that is kept of the event."""
    with opened(state_dir, agent) as box:
        kept = dict(box.rows("SELECT seq, CAST(wire_payload AS TEXT) FROM dead"))
        return [(letter, json.loads(kept[letter.seq])) for letter in dead_letters(box)]


def left_in(state_dir, agent=AGENT):
    """The payloads that still wait, in order."""
    with opened(state_dir, agent) as box:
        return [
            json.loads(text)
            for (text,) in box.rows("SELECT CAST(wire_payload AS TEXT) FROM events ORDER BY seq")
        ]


def is_empty(state_dir, agent=AGENT):
    """Whether nothing waits any more (a file in use says so later)."""
    with contextlib.suppress(StoreError):
        return status_of(state_dir, agent).waiting == 0
    return False


def hand_over(state_dir, events, agent=AGENT):
    """Put events of a case into an outbox, with one commit; every one is taken."""
    with Outbox.open(agent, state_dir=state_dir) as box:
        receipts = box.enqueue_many(events)
        assert [receipt.seq for receipt in receipts], receipts
        return receipts


# Who sends -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InProcess:
    """The real engine, client and store in this process; `log` holds (event, fields)."""

    state_dir: Path
    log: list
    engine: object

    def wake(self):
        """Something was handed over."""
        self.engine.wake_all(StateDirectory(self.state_dir).outbox_files())


@contextlib.contextmanager
def engine_running(state_dir, url, **settings):
    """The engine with its threads, until the block ends."""
    flags = QUICK | {"relay.url": url} | {name.replace("__", "."): value for name, value in settings.items()}
    state = StateDirectory(state_dir).create()
    log = []
    own = load(flags, environ={}, config_path=None)
    engine = build_engine(own, state, log=lambda event, fields: log.append((event, fields)))
    engine.wake_all(state.outbox_files())
    engine.start(own.delivery.workers)
    try:
        yield InProcess(state_dir, log, engine)
    finally:
        engine.delivery.client.abort()
        ended = engine.stop(20)
        engine.resign()
        engine.delivery.files.close()
        engine.delivery.gate.close_state()
        engine.delivery.client.close()
        assert ended, "a turn of the engine does not end"
    assert not [entry for entry in log if entry[0] in {"fault", "file_trouble"}], log


@dataclass(frozen=True)
class Served:
    """`outbox serve` as a process."""

    process: subprocess.Popen
    stderr: Path

    def lines(self):
        """What it logged, split at line feeds only."""
        return self.stderr.read_bytes().decode("utf-8").split("\n")[:-1]

    def memory_kib(self, name="VmHWM"):
        """The most memory it had in use so far ("VmRSS": now)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


def serve_environment(home, url, **settings):
    """The environment of a command that sends to `url`; the state directory is HOME's own."""
    flags = QUICK | {"relay.url": url, "daemon.poll_interval_s": 0.2}
    flags |= {name.replace("__", "."): value for name, value in settings.items()}
    return environment(home, **{KEYS[name].variable: _as_text(value) for name, value in flags.items()})


def _as_text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def serve_running(home, url, **settings):
    """`outbox serve`, until the block ends; it ends with 0 when it is told to stop."""
    stderr = home / "serve.log"
    command = [sys.executable, "-m", "outbox", "serve"]
    with (
        stderr.open("wb") as log,
        subprocess.Popen(command, env=serve_environment(home, url, **settings), stderr=log) as process,
    ):
        served = Served(process, stderr)
        try:
            assert until(lambda: any("serving" in line for line in served.lines())), served.lines()
            yield served
            process.terminate()
            assert process.wait(WAIT_S) == 0, served.lines()
        finally:
            if process.poll() is None:
                process.kill()


# What the scripted relay saw -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Delivery:
    """One request that carries an event, and how it was answered."""

    at_s: float
    n: int
    key: str
    body: str
    headers: dict
    status: int | None  # of the answer's status line; None without one
    full: bool  # a whole 2xx answer that a client with its time limit could read


def deliveries(relay, steps, limit_s):
    """The deliveries in the log of a scripted relay; the batch path and those beside it do not count."""
    return [
        _delivery(request, steps, limit_s)
        for request in relay.requests()
        if request["method"] == "POST" and not request["target"].endswith("/batch")
    ]


def _delivery(request, steps, limit_s):
    body = json.loads(request["body"])
    headers = {name.lower(): value for name, value in request["headers"]}
    step = steps[request["step"]] if isinstance(request["step"], int) else {"status": 200}
    status = None if step.get("action") in {"close", "reset", "hang", "raw"} else step["status"]
    page = any(
        value.startswith("text/html") for name, value in step.get("headers", ()) if name == "content-type"
    )
    whole = "action" not in step and step.get("delay_s", 0) < limit_s and not page
    full = whole and status is not None and 200 <= status < 300
    return Delivery(request["t"], body["n"], body["idempotencyKey"], request["body"], headers, status, full)


def arrived(seen):
    """`arrives`: the numbers in the order of their whole 2xx answers, each once for its key."""
    first = {}
    for delivery in seen:
        if delivery.full:
            first.setdefault(delivery.key, delivery.n)
    return list(first.values())
