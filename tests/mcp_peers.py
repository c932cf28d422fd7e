"""What MCP tests talk to and through: a server of the official SDK, and `outbox mcp` by its lines."""

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from processes import ROOT, environment

INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}
STATELESS_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


class SdkServer:
    """The SDK's server as a process; `with` ends it. Started again it has its port, and knows no session."""

    def __init__(self, folder, eras="both"):
        self.log = Path(folder) / "ran.jsonl"
        self.url, self._eras, self._port, self._process = "", eras, "0", None

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.kill()

    def start(self):
        """Start it, and wait until it listens."""
        script = str(Path(__file__).with_name("mcp_sdk_server.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(self.log), self._eras, self._port], stdout=subprocess.PIPE, text=True
        )
        self.url = self._process.stdout.readline().split()[1]
        self._port = self.url.rpartition(":")[2]
        return self

    def kill(self):
        """End it with SIGKILL."""
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None

    def ran(self, tool=None):
        """Each run of a tool so far."""
        lines = self.log.read_text("utf-8").splitlines() if self.log.exists() else []
        runs = [json.loads(line) for line in lines]
        return [run for run in runs if tool in {None, run["tool"]}]


def proxy_environment(folder, url, settings=()):
    """The environment of `outbox mcp` and of the other commands beside it."""
    named = {"daemon.state_dir": f"{folder}/state", "relay.token": "tok-proxy", **dict(settings)}
    return environment(folder, {"relay.url": url, **named})


class ProxyProcess:
    """`outbox mcp` as a process, by raw lines; `with` ends it by its id."""

    def __init__(self, folder, url, *words, settings=(), agent="builder"):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of `with`
        words = [*(("--agent", agent) if agent else ()), *words]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outbox", "mcp", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=proxy_environment(folder, url, settings),
            cwd=ROOT,
        )
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._kept = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._reader.join(10)
        self.process.stdout.close()
        self._errors.close()

    def kill(self):
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait(10)
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def leave(self, timeout_s=30):
        """Close its input, as a client that goes; the exit status."""
        self.process.stdin.close()
        return self.process.wait(timeout_s)

    def send_line(self, line):
        """Send one line as it is."""
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def send(self, method, params=None, own_id=None):
        """Send a request, or a notification when there is no id."""
        message = {"jsonrpc": "2.0", "method": method}
        message |= {} if own_id is None else {"id": own_id}
        self.send_line(json.dumps(message | ({} if params is None else {"params": params})))

    def next(self, matches=lambda message: True, timeout_s=30):
        """The next message that matches; the others are kept for later."""
        for at, message in enumerate(self._kept):
            if matches(message):
                return self._kept.pop(at)
        while True:
            line = self._lines.get(timeout=timeout_s)
            assert line is not None, f"it ended: {self.said()}"
            message = json.loads(line)
            if matches(message):
                return message
            self._kept.append(message)

    def ask(self, method, params=None, own_id=1):
        """Send a request, and give its answer."""
        self.send(method, params, own_id)
        return self.next(lambda message: "method" not in message and message["id"] == own_id)

    def call(self, tool, own_id=1, meta=None, **arguments):
        """Call a tool, and give its result."""
        params = {"name": tool, "arguments": arguments} | ({} if meta is None else {"_meta": meta})
        return self.ask("tools/call", params, own_id)["result"]

    def hello(self):
        """What a client of the era of sessions says first."""
        result = self.ask("initialize", INITIALIZE, "hello")["result"]
        self.send("notifications/initialized")
        return result

    def tools(self, meta=None):
        """The names of the tools."""
        listed = self.ask("tools/list", None if meta is None else {"_meta": meta}, "tools")["result"]
        return [tool["name"] for tool in listed["tools"]]

    def unread(self):
        """The messages that came and that nobody has read."""
        while not self._lines.empty():
            self._kept.append(json.loads(self._lines.get()))
        return self._kept

    def said(self):
        """What stands on its stderr so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def text_of(result):
    """The first text of a tool's result."""
    return result["content"][0]["text"]


def queued_of(result):
    """What a result says of a call that was queued."""
    return result["_meta"]["relay-outbox/queued"]
