"""Daemons, commands and producers as processes of their own, and conditions to wait for."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket

from outbox import Outbox
from outbox.settings import KEYS
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import dead_letters, read_status

ROOT = Path(__file__).parent.parent
QUICK = {"delivery.backoff_initial_s": "0.05", "delivery.backoff_max_s": "0.5"}
LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (?:debug|info|warning|error) event=[a-z_]+( [a-z_]+=\S.*)?"
)
_FIELD = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S*)')
_OTHER = ("OUTBOX_CONFIG", "STATE_DIRECTORY", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "JOURNAL_STREAM")
_VARIABLES = {name for key in KEYS.values() for name in (key.variable, *key.aliases)}


def wait_for(condition, timeout_s=20.0):
    """What `condition()` gives as soon as it is true; else an AssertionError that shows its last answer."""
    ends = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends, f"not within {timeout_s} s; the last answer was {found!r}"
        time.sleep(0.01)
    return found


def environment(home, settings=(), **variables):
    """An environment with nothing of ours in it but these settings ("relay.url") and variables."""
    kept = {name: text for name, text in os.environ.items() if name not in _VARIABLES and name not in _OTHER}
    named = {KEYS[name].variable: text for name, text in dict(settings).items()}
    return {**kept, "HOME": str(home), **named, **variables}


class DaemonProcess:
    """`outbox serve` as a process: started, killed, started again; what it says is kept in `log`.

    `with` ends it by its id, whatever happened.
    """

    def __init__(self, state, url, settings=(), *, flags=(), umask=None, environ=()):
        self.state = StateDirectory(Path(state))
        self.url = url
        self.settings = {**QUICK, "relay.token": "tok-daemon", **dict(settings)}
        self.flags = list(flags)
        self.log = Path(tempfile.mkdtemp(prefix="daemon-")) / "log"
        self.process = None
        self._umask = -1 if umask is None else umask
        self._environ = dict(environ)

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.end()
            raise

    def __exit__(self, *_):
        self.end()

    def end(self):
        """End it, whatever happened, and forget its log."""
        self.kill()
        shutil.rmtree(self.log.parent)

    def launch(self):
        """Start it, and wait for nothing."""
        assert self.process is None
        relay = [] if self.url is None else ["--relay", self.url]
        words = ["serve", "--state-dir", str(self.state.path), *relay, *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outbox", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment(self.log.parent, self.settings, **self._environ),
                cwd=ROOT,
                umask=self._umask,
            )
        return self

    def start(self):
        """Start it, and wait until it serves."""
        served = len(self.said("serving"))
        self.launch()
        wait_for(lambda: len(self.said("serving")) > served or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text("utf-8")
        return self

    def send(self, number):
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self):
        """End it with SIGKILL, in the middle of whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def stop(self, timeout_s=20):
        """End it with SIGTERM; the exit status."""
        self.send(signal.SIGTERM)
        return self.ended(timeout_s)

    def ended(self, timeout_s=20):
        """Wait for its end; the exit status."""
        status = self.process.wait(timeout_s)
        self.process = None
        return status

    @contextlib.contextmanager
    def frozen(self):
        """It does nothing at all for the length of the block."""
        if self.process is None:
            yield
            return
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def lines(self):
        """The whole lines of its log so far."""
        text = self.log.read_text("utf-8") if self.log.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def said(self, event):
        """The fields of each line about an event."""
        return [fields for fields in map(_fields, self.lines()) if fields.get("event") == event]

    def ask(self, method, path, body=None, **fields):
        """One request to its local socket: the status and the JSON value of the answer."""
        return ask(self.state.path / "outbox.sock", method, path, body, fields)


def _fields(line):
    if line.startswith("{"):
        return json.loads(line)
    found = _FIELD.findall(line)
    return {name: ast.literal_eval(text) if text.startswith('"') else text for name, text in found}


class UnixConnection(HTTPConnection):
    """HTTP over a Unix socket, however long its path is."""

    def __init__(self, path, timeout_s=20):
        super().__init__("localhost", timeout=timeout_s)
        self._path = Path(path)

    def connect(self):
        """Connect by way of the folder's descriptor."""
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


def ask(path, method, target, body=None, fields=()):
    """One request to a local socket: the status and the JSON value of the answer."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    named = {name.replace("_", "-"): text for name, text in dict(fields).items()}
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body, {"Content-Type": "application/json", **named})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def outbox_command(state, *words, settings=(), stdin=b"", timeout_s=60):
    """`outbox WORDS` to its end."""
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        return subprocess.run(
            [sys.executable, "-m", "outbox", *words],
            input=stdin,
            env=environment(home, {**QUICK, "daemon.state_dir": str(state), **dict(settings)}),
            cwd=ROOT,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )


@contextlib.contextmanager
def program(state, text, *words, settings=(), python=sys.executable):
    """A host program with this text: its process, with pipes; ended by its id when the block ends."""
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        env = environment(home, {**QUICK, "daemon.state_dir": str(state), **dict(settings)})
        with subprocess.Popen(
            [python, "-c", text, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            cwd=ROOT,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def status_of(state, agent):
    """What an agent's file says."""
    directory = StateDirectory(Path(state))
    with contextlib.closing(open_outbox(directory, directory.outbox_path(agent))) as box:
        return read_status(box)


def dead_of(state, agent):
    """The dead letters of an agent."""
    directory = StateDirectory(Path(state))
    with contextlib.closing(open_outbox(directory, directory.outbox_path(agent))) as box:
        return list(dead_letters(box))


def put(state, agent, *numbers):
    """Enqueue messages with these numbers through the library; their receipts."""
    with Outbox.open(agent, state_dir=state) as outbox:
        return [outbox.enqueue("session-message", {"from": agent, "body": f"{n}", "n": n}) for n in numbers]


def numbers(relay, agent=None):
    """The numbers of the messages that the reference relay holds, in the order in which they came."""
    return [json.loads(event["body"])["n"] for event in relay.events(agent)]


def deliveries(relay):
    """The POSTs that a scripted relay has read; what asks about the relay itself is left out."""
    return [request for request in relay.requests() if request["method"] == "POST"]
