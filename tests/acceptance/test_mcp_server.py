"""Tool calls to a server of the official MCP SDK, as its own process, in both eras: by way of the daemon.

The server's own log says how often each call had its effect.
"""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import DaemonProcess, dead_of, outbox_command, status_of, wait_for

from outbox import Outbox

AGENT = "builder"
SCRIPT = str(Path(__file__).parents[1] / "mcp_tool_server.py")
WAIT_S = 60
ERAS = {"stateless": (), "sessions": ("sessions",)}


class ToolServer:
    """The server as a process; `with` ends it. Started again, it has the same port and knows no session."""

    def __init__(self, folder, *options):
        self.folder, self.options = Path(folder), options
        self.url, self._port, self._process = "", "0", None
        self.folder.mkdir()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.kill()

    def start(self, *options):
        """Start it, with other options than before where some are given, and wait until it listens."""
        self.options = options or self.options
        command = [sys.executable, SCRIPT, str(self.folder), self._port, *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self._process.stdout.readline().split()[1]
        self._port = self.url.rpartition(":")[2]
        return self

    def kill(self):
        """End it with SIGKILL."""
        if self._process is not None:
            with self._process as process:
                process.kill()
            self._process = None

    def restart(self, *options):
        """Kill it and start it again."""
        self.kill()
        self.start(*options)

    def lose_an_answer(self):
        """The answer to one call is cut off, after the tool ran."""
        (self.folder / "lose").touch()

    def end_session(self):
        """End the session that was used last, as its client would."""
        session = self.asked("tools/call")[-1]["mcp-session-id"]
        answer = httpx.delete(f"{self.url}/api/mcp", headers={"mcp-session-id": session}, trust_env=False)
        assert answer.status_code == 200

    def knows_no_session(self):
        """Whether the session that was used last is gone."""
        session = self.asked("tools/call")[-1]["mcp-session-id"]
        headers = {"mcp-session-id": session, "accept": "application/json, text/event-stream"}
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        answer = httpx.post(f"{self.url}/api/mcp", headers=headers, json=ping, trust_env=False)
        return answer.status_code == 404

    def effects(self):
        """What the tools did, in order."""
        return [json.loads(line) for line in (self.folder / "ran.jsonl").read_text("utf-8").splitlines()]

    def asked(self, method):
        """The header fields of the requests with this method."""
        lines = map(json.loads, (self.folder / "http.jsonl").read_text("utf-8").splitlines())
        return [line["headers"] for line in lines if line["method"] == method]


def call(state, *texts, tool="append", **arguments):
    """Hand over calls; their receipts."""
    with Outbox.open(AGENT, state_dir=state) as outbox:
        return [
            outbox.enqueue("mcp-tool-call", {"tool": tool, "arguments": {"text": text, **arguments}})
            for text in texts
        ]


def settled(state):
    """Wait until nothing is left to send."""
    wait_for(lambda: not status_of(state, AGENT).waiting, WAIT_S)


@pytest.fixture
def state(tmp_path):
    """A state directory."""
    return tmp_path / "state"


@contextlib.contextmanager
def served(tmp_path, *options, **settings):
    """The server and a daemon that sends to it."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    with (
        ToolServer(tmp_path / "server", *options) as server,
        DaemonProcess(tmp_path / "state", server.url, named) as daemon,
    ):
        yield server, daemon


def texts(server):
    """The texts of all effects."""
    return [effect["text"] for effect in server.effects()]


@pytest.mark.parametrize("options", [(), ("json",), ("sessions",), ("sessions", "json")])
def test_tools_are_called_in_each_era(options, state, tmp_path):
    """Once each and in order, with the key; results are shown, a no is told; the era is found out once.

    A session ends with the daemon.
    """
    with served(tmp_path, *options) as (server, daemon):
        first, _ = call(state, "one", "two")
        refused, _ = call(state, "three", tool="refuse") + call(state, "four")
        settled(state)
        assert texts(server) == ["one", "two", "four"]
        assert server.effects()[0]["key"] == first.idempotency_key
        in_sessions = "sessions" in options
        assert len(server.asked("initialize")) == in_sessions
        assert len({fields.get("mcp-session-id") for fields in server.asked("tools/call")}) == 1
        assert all(("mcp-session-id" in fields) is in_sessions for fields in server.asked("tools/call"))
        assert len(server.asked("tools/list")) == 1
        assert len(daemon.said("tool_error")) == 1
        assert daemon.stop() == 0
        assert not in_sessions or server.knows_no_session()
    shown = outbox_command(state, "show", AGENT, first.idempotency_key).stdout.decode()
    assert "appended one" in shown
    told = outbox_command(state, "show", AGENT, str(refused.seq)).stdout.decode()
    assert "the tool ran and said no" in told
    assert "not three" in told
    assert dead_of(state, AGENT) == []


def test_sessions_and_servers_come_and_go(state, tmp_path):
    """A session ended, a server restarted, of the other era and back: every call has its effect once."""
    with served(tmp_path, "sessions") as (server, _):
        call(state, "one")
        settled(state)
        server.end_session()
        call(state, "two", "three")
        settled(state)
        assert len(server.asked("initialize")) == 2
        for number, options in enumerate([("sessions", "json"), ("stateless",), ("sessions",)]):
            server.restart(*options)
            call(state, f"after restart {number}")
            settled(state)
        last = server.asked("tools/call")
        assert texts(server) == ["one", "two", "three", *(f"after restart {number}" for number in range(3))]
    assert "mcp-session-id" in last[-1]
    assert any(fields["mcp-protocol-version"] == "2026-07-28" for fields in last)
    assert status_of(state, AGENT).delivered == 6
    assert dead_of(state, AGENT) == []


@pytest.mark.parametrize("era", ERAS)
def test_a_lost_answer_of_a_server_that_honours_keys(era, state, tmp_path):
    """The call goes again with its key, and has one effect."""
    with served(tmp_path, *ERAS[era], "keys", mcp__idempotent="true") as (server, _):
        server.lose_an_answer()
        receipts = call(state, "one", "two")
        settled(state)
        assert [effect["key"] for effect in server.effects()] == [r.idempotency_key for r in receipts]
        assert len(server.asked("tools/call")) == 3
    assert status_of(state, AGENT).delivered == 2


@pytest.mark.parametrize("era", ERAS)
def test_a_lost_answer_to_an_unsafe_call(era, state, tmp_path):
    """It is not repeated: one effect, and a dead letter for a person to decide; the next call goes on."""
    with served(tmp_path, *ERAS[era]) as (server, _):
        server.lose_an_answer()
        receipts = call(state, "one", "two")
        settled(state)
        assert [effect["key"] for effect in server.effects()] == [r.idempotency_key for r in receipts]
        assert len(server.asked("tools/call")) == 2
    (letter,) = dead_of(state, AGENT)
    assert (letter.seq, letter.reason) == (1, "outcome_unknown")


def test_arguments_are_mirrored_where_the_tool_asks(state, tmp_path):
    """SEP-2243, checked by the SDK: also under another name after a restart, and never in a session."""
    with served(tmp_path) as (server, _):
        call(state, "one", tool="move", where="K\u00f6ln", far=True)
        settled(state)
        server.restart("zone")
        call(state, "two", tool="move", where="here", far=False)
        settled(state)
        server.restart("sessions")
        call(state, "three", tool="move", where="there", far=False)
        settled(state)
        assert texts(server) == ["one to K\u00f6ln", "two to here", "three to there"]
        calls = server.asked("tools/call")
    assert calls[0]["mcp-param-region"] == "=?base64?S8O2bG4=?="
    assert next(fields["mcp-param-zone"] for fields in calls if "mcp-param-zone" in fields) == "here"
    assert not [name for name in calls[-1] if name.startswith("mcp-param")]
    assert dead_of(state, AGENT) == []
