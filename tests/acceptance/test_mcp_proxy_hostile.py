"""`outbox mcp` before a relay that answers as it likes, token sources that hang, and clients that end it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from mcp_peers import ProxyProcess, proxy_environment, queued_of, text_of
from peers import http_response, read_http_request, thread_server
from processes import ROOT, outbox_command, status_of, wait_for

from outbox.capture.mcp_memory import Known, Memory
from outbox.store.directory import StateDirectory
from outbox.store.token_cache import TokenCache
from relay_client.reference.process import RelayProcess

TOKEN = "tok-proxy"
JSON, STREAM = "content-type: application/json", "content-type: text/event-stream"
SAFE = {"mcp.idempotent": "true"}
ABOUT = {"capabilities": {}, "serverInfo": {"name": "odd", "version": "1"}}
DISCOVERED = {"supportedVersions": ["2026-07-28"], **ABOUT}
INITIALIZED = {"protocolVersion": "2025-11-25", **ABOUT}


def rpc(asked, result):
    """The body of an answer."""
    return json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode()


def answered(asked, result, *fields):
    """A whole answer."""
    return http_response(200, rpc(asked, result), JSON, *fields)


class OddRelay:
    """Speaks one era and does nothing; `say` may answer in its place, by method."""

    def __init__(self, era="stateless"):
        self.heads, self.asked, self.url = [], [], ""
        self.say = {}
        self._era = era
        self._over = threading.Event()

    def never(self, asked):
        """No answer, until the end."""
        self._over.wait(60)
        return b""

    def end(self):
        """Let go whoever got no answer."""
        self._over.set()

    def handle(self, connection):
        """Answer each request of a connection."""
        while (found := read_http_request(connection)) is not None:
            head, body = found
            asked = json.loads(body) if body else {"method": head.split()[0].decode()}
            self.heads.append(head.decode("latin-1"))
            self.asked.append(asked)
            say = self.say.get(asked.get("method"), self._usual)
            connection.sendall(say(asked))

    def methods(self):
        """What was asked, in order."""
        return [asked.get("method") for asked in self.asked]

    def _usual(self, asked):
        method = asked.get("method")
        if method == "server/discover" and self._era == "stateless":
            return answered(asked, DISCOVERED)
        if method == "initialize" and self._era == "sessions":
            return answered(asked, INITIALIZED, "mcp-session-id: session-1")
        if method == "notifications/initialized":
            return http_response(202, b"")
        if method in {"tools/list", "tools/call"}:
            return answered(asked, {"tools": [], "content": []})
        return http_response(404, b"")


@contextlib.contextmanager
def odd_relay(era="stateless"):
    """Serve until the block ends."""
    relay = OddRelay(era)
    with thread_server(relay.handle) as server:
        relay.url = f"http://127.0.0.1:{server.port}"
        try:
            yield relay
        finally:
            relay.end()


def send_three(proxy):
    """Calls that may wait; all of them are read when this returns."""
    for own_id in range(3):
        proxy.send("tools/call", {"name": "note", "arguments": {}}, own_id)
    proxy.send("ping", None, "read")
    proxy.next(lambda message: message.get("id") == "read")


def calls_on_disk(folder):
    """How many events wait."""
    return status_of(folder / "state", "builder").waiting


# What a relay says -----------------------------------------------------------------------------------------


def echoes():
    """Answers to a call with the token in them: a header field, a page, a result, a stream."""
    challenge = f'WWW-Authenticate: Bearer error="invalid_token", error_description="not {TOKEN}"'
    told = {"content": [{"type": "text", "text": f"Bearer {TOKEN}"}]}
    message = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": TOKEN}})
    yield lambda asked: http_response(401, b"", challenge)
    yield lambda asked: http_response(403, f"<title>no {TOKEN}</title>".encode())
    yield lambda asked: answered(asked, told)
    yield lambda asked: http_response(
        200, b"data: %b\n\ndata: %b\n\n" % (message.encode(), rpc(asked, told)), STREAM
    )


@pytest.mark.parametrize("era", ["stateless", "sessions"])
def test_a_token_that_a_relay_throws_back_reaches_no_client(tmp_path, era):
    """An agent has no business with it: neither in results nor in messages, reasons or notices."""
    with odd_relay(era) as relay, ProxyProcess(tmp_path, relay.url, "--buffer", "note") as proxy:
        told = [proxy.hello()]
        for echo in echoes():
            relay.say["tools/call"] = echo
            told += [proxy.call("echo"), proxy.call("outbox_status")]
        relay.say["tools/call"] = next(echoes())
        told += [proxy.call("note"), proxy.call("outbox_status"), *proxy.unread()]
        assert TOKEN not in json.dumps(told) + proxy.said()
        assert "[token]" in json.dumps(told)
        assert any(TOKEN in head for head in relay.heads)


@pytest.mark.parametrize("queued", [False, True])
def test_a_call_that_the_relay_knows_already_was_not_refused(tmp_path, queued):
    """A 409 for its key says that it has run, or may have: nobody is told that it did not."""
    settings = {"mcp.idempotent": str(queued).lower()}
    seen = http_response(409, b'{"error": {"code": "duplicate"}}', JSON)
    with (
        odd_relay() as relay,
        ProxyProcess(tmp_path, relay.url, "--buffer", "note", settings=settings) as proxy,
    ):
        relay.say["tools/call"] = lambda asked: seen
        proxy.hello()
        result = proxy.call("note", meta={"relay-outbox/idempotencyKey": "again"})
        assert "did not run" not in text_of(result)
        assert ("relay-outbox/queued" in result.get("_meta", {})) is queued
        assert queued or "may or may not have run" in text_of(result)


def test_a_call_that_perhaps_ran_and_cannot_be_queued_is_told_so(tmp_path):
    """Its key is one that no event may have, and its answer was lost."""
    settings = {"mcp.idempotent": "true"}
    with (
        odd_relay() as relay,
        ProxyProcess(tmp_path, relay.url, "--buffer", "note", settings=settings) as proxy,
    ):
        relay.say["tools/call"] = lambda asked: http_response(502, b"")
        proxy.hello()
        result = proxy.call("note", meta={"relay-outbox/idempotencyKey": "k" * 5_000})
        assert text_of(result).startswith("note may or may not have run: it was sent, and")
        assert "could not be queued" in text_of(result)


def test_an_introduction_that_makes_no_sense(tmp_path):
    """It is of no relay that is known here; a client is greeted all the same, and served later."""
    with odd_relay("sessions") as relay, ProxyProcess(tmp_path, relay.url, "--buffer", "note") as proxy:
        for hello in ([], "hello", None, 7):
            relay.say["initialize"] = lambda asked, hello=hello: answered(asked, hello)
            assert "capabilities" in proxy.hello()
            assert "speaks no MCP that is known here" in text_of(proxy.call("echo"))
        odd = {**INITIALIZED, "protocolVersion": "2025-11-25\r\nX: y"}  # no header field could carry it
        relay.say["initialize"] = lambda asked: answered(asked, odd)
        proxy.hello()
        assert proxy.call("echo") == {"tools": [], "content": []}


def test_pages_without_an_end(tmp_path):
    """A cursor that comes again, or is none, ends the list; new ones for ever end it too."""
    with odd_relay() as relay, ProxyProcess(tmp_path, relay.url) as proxy:
        proxy.hello()
        for cursor, most in (("again", 2), (5, 1), ("", 1), (None, 1), (iter(range(10_000)), 101)):
            asked_before = relay.methods().count("tools/list")

            def page(asked, cursor=cursor):
                following = str(next(cursor)) if hasattr(cursor, "__next__") else cursor
                return answered(asked, {"tools": [{"name": "t"}], "nextCursor": following})

            relay.say["tools/list"] = page
            assert len(proxy.tools()) == most + 2, cursor
            assert relay.methods().count("tools/list") - asked_before == most


def test_half_a_list_takes_the_place_of_no_whole_one(tmp_path):
    """A further page that is refused: what was known whole is told, and kept."""
    with odd_relay() as relay, ProxyProcess(tmp_path, relay.url) as proxy:
        proxy.hello()
        relay.say["tools/list"] = lambda asked: answered(asked, {"tools": [{"name": "a"}, {"name": "b"}]})
        assert proxy.tools()[:2] == ["a", "b"]

        def half(asked):
            if "cursor" not in asked["params"]:
                return answered(asked, {"tools": [{"name": "a"}], "nextCursor": "2"})
            error = {"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32603, "message": "no"}}
            return http_response(200, json.dumps(error).encode(), JSON)

        relay.say["tools/list"] = half
        assert proxy.tools()[:2] == ["a", "b"]


def test_calls_before_a_relay_that_is_silent_do_not_wait_for_each_other(tmp_path):
    """Eight at once: one finds out, and all are told."""
    with (
        thread_server(lambda connection: connection.recv(1 << 20) and connection.recv(1)) as server,
        ProxyProcess(tmp_path, f"http://127.0.0.1:{server.port}") as proxy,
    ):
        for own_id in range(8):
            proxy.send("tools/call", {"name": "echo", "arguments": {}}, own_id)
        told = [proxy.next(lambda message: "result" in message) for _ in range(8)]
        assert all("did not run" in text_of(message["result"]) for message in told)
        assert server.connections == 1


def test_the_stream_of_a_session_is_asked_for_again_after_trouble(tmp_path):
    """Away for a moment, or cut off: what a relay says unasked is heard all the same, by one listener."""
    changed = b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n'
    says = [http_response(503, b""), http_response(200, changed, STREAM), http_response(405, b"")]
    with odd_relay("sessions") as relay, ProxyProcess(tmp_path, relay.url) as proxy:
        relay.say["GET"] = lambda asked: says.pop(0)
        proxy.hello()
        for own_id in range(5):
            proxy.send("tools/call", {"name": "echo", "arguments": {}}, own_id)
        proxy.next(lambda message: message.get("method") == "notifications/tools/list_changed", 60)
        wait_for(lambda: not says, 60)
        assert relay.methods().count("GET") == 3


def test_a_relay_that_comes_back_with_an_error_takes_no_tools_away(tmp_path):
    """An error is no list: what was remembered stays, and the client is told of no change."""
    listed = {"tools": [{"name": "kept", "inputSchema": {"type": "object"}}]}
    wrong = {"jsonrpc": "2.0", "error": {"code": -32603, "message": "starting"}}
    with odd_relay() as relay, ProxyProcess(tmp_path, relay.url) as proxy:
        relay.say["tools/list"] = lambda asked: answered(asked, listed)
        proxy.hello()
        known = proxy.tools()
        relay.say["tools/list"] = lambda asked: http_response(503, b"")
        assert proxy.tools() == known == ["kept", "outbox_status", "outbox_result"]
        before = len(relay.asked)
        failed = [json.dumps(wrong | {"id": "outbox-tools"}).encode()]
        relay.say["tools/list"] = lambda asked: (
            http_response(200, failed.pop(), JSON) if failed else answered(asked, listed)
        )
        wait_for(lambda: len(relay.asked) >= before + 2, 60)
        assert proxy.tools() == known
        assert not [message for message in proxy.unread() if "method" in message]


def test_what_does_not_reach_the_relay_is_told(tmp_path):
    """A notification that no answer came to."""
    with odd_relay("sessions") as relay, ProxyProcess(tmp_path, relay.url) as proxy:
        proxy.hello()
        relay.say["notifications/roots/list_changed"] = lambda asked: b"nonsense"
        proxy.send("notifications/roots/list_changed")
        wait_for(lambda: "roots/list_changed did not reach the relay" in proxy.said(), 60)


@pytest.mark.parametrize("wrong", [{"tools": [1]}, {"hello": 5, "era": "sessions"}, {"tools": {"a": 1}}])
def test_a_memory_that_is_none_is_forgotten(tmp_path, wrong):
    """A file with values of other types costs what it remembered, and not the start."""
    path = Memory(StateDirectory(tmp_path), "http://relay/mcp")._path
    sound = {"url": "http://relay/mcp", "era": None, "hello": None, "tools": None, "honoursKeys": False}
    path.write_text(json.dumps(sound | wrong))
    assert Memory(StateDirectory(tmp_path), "http://relay/mcp").known == Known()


# How it ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ended_by_a_signal_it_puts_on_disk_what_may_wait(tmp_path, number):
    """One call is under way, and two wait behind it; a second signal on the way changes nothing."""
    with (
        odd_relay() as relay,
        ProxyProcess(tmp_path, relay.url, "--buffer", "note", settings=SAFE) as proxy,
    ):
        proxy.hello()
        relay.say["tools/call"] = relay.never
        send_three(proxy)
        wait_for(lambda: "tools/call" in relay.methods(), 60)
        proxy.process.send_signal(number)
        proxy.process.send_signal(number)
        assert proxy.process.wait(30) == 0
        assert calls_on_disk(tmp_path) == 3


def proxy_with(tmp_path, **streams):
    """`outbox mcp` before no relay, with these streams."""
    env = proxy_environment(tmp_path, "http://127.0.0.1:9")
    words = [sys.executable, "-m", "outbox", "mcp", "--agent=builder"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, env=env, cwd=ROOT, **streams)


def test_a_stdout_that_does_not_wait_gets_whole_lines(tmp_path):
    """Another program has made the pipe non-blocking, and it is full for a moment."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    own_id = "x" * 200_000
    with (
        proxy_with(tmp_path, stdout=writing, stderr=subprocess.DEVNULL) as process,
        open(reading, "rb") as answers,  # noqa: PTH123 - a descriptor
    ):
        os.close(writing)
        try:
            process.stdin.write(
                json.dumps({"jsonrpc": "2.0", "id": own_id, "method": "ping"}).encode() + b"\n"
            )
            process.stdin.flush()
            wait_for(lambda: select.select([reading], [], [], 0)[0], 60)
            time.sleep(0.2)  # in which the pipe is full
            process.stdin.write(b'{"jsonrpc": "2.0", "id": 2, "method": "ping"}\n')
            process.stdin.close()
            assert [json.loads(line)["id"] for line in answers] == [own_id, 2]
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_stderr_that_nobody_reads_costs_no_answer(tmp_path):
    """What is told beside the answers is told to nobody then."""
    reading, broken = os.pipe()
    os.close(reading)
    with proxy_with(tmp_path, stdout=subprocess.PIPE, stderr=broken) as process:
        os.close(broken)
        try:
            asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
            out, _ = process.communicate(json.dumps(asked).encode() + b"\n", timeout=60)
            assert "result" in json.loads(out)
        finally:
            process.kill()


def is_gone(pid):
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


HANG = (
    "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
)


def test_a_token_command_that_hangs_keeps_no_call_from_the_disk(tmp_path):
    """The client goes while nobody knows a token: its calls are on disk, and the program is ended."""
    program, note = tmp_path / "hang.py", tmp_path / "pid"
    program.write_text(HANG)
    settings = {"relay.token": "", "relay.token_command": f"{sys.executable} {program} {note}"}
    with ProxyProcess(tmp_path, "http://127.0.0.1:1", "--buffer", "note", settings=settings) as proxy:
        send_three(proxy)
        pid = int(wait_for(lambda: note.exists() and note.read_text("ascii"), 60))
        assert proxy.leave() == 0
    assert calls_on_disk(tmp_path) == 3
    wait_for(lambda: is_gone(pid))


def test_another_process_that_gets_the_token_keeps_no_call_from_the_disk(tmp_path):
    """As above, where it is the token endpoint that another process waits for."""
    settings = {
        "relay.token": "",
        "relay.oauth.token_url": "http://127.0.0.1:1/",
        "relay.oauth.client_id": "c",
    }
    state = StateDirectory(tmp_path / "state").create()
    with (
        TokenCache(state).alone("", 10),
        ProxyProcess(tmp_path, "http://127.0.0.1:1", "--buffer", "note", settings=settings) as proxy,
    ):
        send_three(proxy)
        assert proxy.leave() == 0
    assert calls_on_disk(tmp_path) == 3


def test_a_session_is_ended_with_the_proxy(tmp_path):
    """The relay hears it, with session and token; for one that does not answer nobody waits long."""
    with odd_relay("sessions") as relay:
        for say in (lambda asked: http_response(405, b""), relay.never):
            relay.say["DELETE"] = say
            with ProxyProcess(tmp_path, relay.url) as proxy:
                proxy.hello()
                assert proxy.leave() == 0
            (head,) = [head.lower() for head in relay.heads if head.startswith("DELETE ")]
            assert "mcp-session-id: session-1" in head
            assert f"authorization: bearer {TOKEN}" in head
            relay.heads.clear()


# What goes with a queued call ------------------------------------------------------------------------------


TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"
TRACES = [
    ({"traceparent": TRACE, "tracestate": "v=1"}, True, "v=1"),
    ({"traceparent": TRACE, "tracestate": "\u00e4"}, True, None),
    ({"traceparent": "of another kind", "tracestate": "v=1"}, False, None),
    ({"tracestate": "v=1"}, False, None),
    ({"traceparent": 7, "tracestate": []}, False, None),
]


def test_the_trace_of_a_call_goes_with_it(tmp_path):
    """The queued event is in the client's trace; a broken one is left out."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        with ProxyProcess(tmp_path, "http://127.0.0.1:1", "--buffer", "note_add") as proxy:
            for trace, _, _ in TRACES:
                queued_of(proxy.call("note_add", meta=trace))
        settings = {"relay.url": relay.url, "relay.token": TOKEN}
        assert outbox_command(tmp_path / "state", "flush", settings=settings).returncode == 0
        calls = [dict(asked["headers"]) for asked in relay.requests() if asked["keys"]]
    for (trace, is_kept, state), headers in zip(TRACES, calls, strict=True):
        assert ("ab" * 16 in headers.get("traceparent", "")) is is_kept, trace
        assert headers.get("tracestate") == state, trace
