"""`outbox mcp` between the official SDK's client and the SDK's server, in both eras on either side."""

import asyncio
import contextlib
import json
import os
import sys

import pytest
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client
from mcp_peers import ProxyProcess, SdkServer, proxy_environment, queued_of, text_of
from mcp_types import ElicitResult
from peers import http_response, read_http_request, thread_server
from processes import ROOT, outbox_command, wait_for

from relay_client.reference.process import RelayProcess

TOKEN = "tok-proxy"
CLIENTS = ["legacy", "auto", "2026-07-28"]


@contextlib.asynccontextmanager
async def client_of(folder, url, mode, *words, **options):
    """The SDK's client, whose server is the proxy."""
    env = proxy_environment(folder, url, options.pop("settings", ()))
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "outbox", "mcp", "--agent", "builder", *words],
        env=env,
        cwd=ROOT,
    )
    with open(os.devnull, "w", encoding="utf-8") as errors:  # noqa: ASYNC230, PTH123 - of no length
        async with Client(stdio_client(server, errlog=errors), mode=mode, **options) as client:
            yield client


def flush(folder, url):
    """Send what waits."""
    settings = {"relay.url": url, "relay.token": TOKEN}
    done = outbox_command(folder / "state", "flush", "--timeout", "30", settings=settings)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", CLIENTS)
def test_list_call_outage_queued_and_looked_up(tmp_path, mode):
    """The whole way before the stateless reference relay; what was queued has its result later."""

    async def play(relay):
        async with client_of(tmp_path, relay.url, mode, "--buffer", "note_*") as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == ["note_add", "echo", "fail", "outbox_status", "outbox_result"]
            said = await client.call_tool("echo", {"n": 1})
            assert said.content[0].text == '{"n":1}'
            relay.kill()
            queued = await client.call_tool("note_add", {"n": 2})
            assert (queued.is_error, "Queued, not run yet" in queued.content[0].text) == (False, True)
            assert (await client.call_tool("echo", {})).is_error
            relay.start()
            flush(tmp_path, relay.url)
            key = queued.meta["relay-outbox/queued"]["idempotencyKey"]
            found = await client.call_tool("outbox_result", {"key": key})
            assert [block.text.split(" ")[0] for block in found.content] == ["Event", "note"]
        assert len(relay.events("builder")) == 2

    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        asyncio.run(play(relay))


@pytest.mark.parametrize("eras", ["sessions", "both"])
@pytest.mark.parametrize("mode", CLIENTS)
def test_every_client_reaches_every_server(tmp_path, mode, eras):
    """Results fit the schemas that the client checks; progress is heard; errors are errors."""

    async def play(server):
        heard = []

        async def progress(done, total, message):
            heard.append(done)

        async with client_of(tmp_path, server.url, mode) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert tools["double"].output_schema
            assert not tools["note"].output_schema
            doubled = await client.call_tool("double", {"number": 21})
            assert doubled.structured_content == {"result": 42}
            assert (await client.call_tool("note", {"text": "x"})).content[0].text == "noted x"
            assert (await client.call_tool("double", {"number": "no"})).is_error
            assert (await client.call_tool("steps", {}, progress_callback=progress)).content[0].text == "done"
        assert heard == [1, 2]
        assert [run["tool"] for run in server.ran()] == ["double", "note"]

    with SdkServer(tmp_path, eras) as server:
        asyncio.run(play(server))


def test_a_servers_request_reaches_the_client_and_its_answer_the_server(tmp_path):
    """In the era of sessions a tool may ask the person at the client."""

    async def answer(_context, params):
        assert params.message == "Who are you?"
        return ElicitResult(action="accept", content={"name": "Ada"})

    async def play(server):
        async with client_of(tmp_path, server.url, "legacy", elicitation_callback=answer) as client:
            assert (await client.call_tool("greet", {})).content[0].text == "hello Ada"

    with SdkServer(tmp_path, "sessions") as server:
        asyncio.run(play(server))


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_a_server_that_was_started_anew_knows_no_session_and_is_called_all_the_same(tmp_path, mode):
    """A new session is opened, and the call sent once more: it runs once."""

    async def play(server):
        async with client_of(tmp_path, server.url, mode) as client:
            assert (await client.call_tool("note", {"text": "before"})).content[0].text == "noted before"
            server.kill()
            server.start()
            assert (await client.call_tool("note", {"text": "after"})).content[0].text == "noted after"
            assert (await client.call_tool("double", {"number": 1})).structured_content == {"result": 2}
        assert [run.get("text") for run in server.ran()] == ["before", "after", None]

    with SdkServer(tmp_path, "sessions") as server:
        asyncio.run(play(server))


@pytest.mark.parametrize("eras", ["sessions", "both"])
def test_started_in_an_outage_it_comes_to_the_relay_when_it_is_back(tmp_path, eras):
    """Greeted from memory; what may wait waits and is delivered; the session is opened later."""
    with SdkServer(tmp_path, eras) as server:
        with ProxyProcess(tmp_path, server.url) as proxy:
            known = proxy.hello()
            names = proxy.tools()
        server.kill()
        with ProxyProcess(tmp_path, server.url) as proxy:
            assert proxy.hello() == known
            assert proxy.tools() == names
            assert queued_of(proxy.call("note", text="waits"))["seq"] == 1
            assert "did not run" in text_of(proxy.call("double", number=1))
            server.start()
            assert proxy.call("double", number=4)["structuredContent"] == {"result": 8}
            flush(tmp_path, server.url)
            assert text_of(proxy.call("note", text="later")) == "noted later"
        assert [run.get("text") for run in server.ran("note")] == ["waits", "later"]


@pytest.mark.parametrize("eras", ["sessions", "both"])
def test_a_cancelled_call_is_cancelled_at_the_server(tmp_path, eras):
    """In a session by the notification, else by the connection that ends."""
    with SdkServer(tmp_path, eras) as server, ProxyProcess(tmp_path, server.url) as proxy:
        proxy.hello()
        proxy.send("tools/call", {"name": "slow", "arguments": {}, "_meta": {"progressToken": 1}}, "slow")
        heard = proxy.next(lambda message: message.get("method") == "notifications/progress")
        assert heard["params"]["progressToken"] == 1
        proxy.send("notifications/cancelled", {"requestId": "slow", "reason": "enough"})
        wait_for(lambda: server.ran("cancelled"))
        assert proxy.call("double", number=2)["structuredContent"] == {"result": 4}
        assert [message for message in proxy.unread() if message.get("id") == "slow"] == []


def test_what_a_server_sends_unasked_reaches_the_client(tmp_path):
    """By the stream that a session has beside its answers, also of a session that was opened anew."""
    with SdkServer(tmp_path, "sessions") as server, ProxyProcess(tmp_path, server.url) as proxy:
        proxy.hello()
        for _ in range(2):
            proxy.send("tools/call", {"name": "announce", "arguments": {}}, "announce")
            told = proxy.next(lambda message: message.get("method") == "notifications/tools/list_changed")
            assert "id" not in told
            proxy.send("notifications/cancelled", {"requestId": "announce"})
            server.kill()
            server.start()
            assert proxy.call("double", number=1)["structuredContent"] == {"result": 2}


def test_a_list_in_pages_comes_whole(tmp_path):
    """The proxy's tools stand once, at its end; the list is known whole in an outage."""
    names = [f"tool_{n}" for n in range(5)]
    pages = {None: (names[:2], "a"), "a": (names[2:4], "b"), "b": ([names[4], "outbox_status"], None)}

    def handle(connection):
        while (found := read_http_request(connection)) is not None:
            head, body = found
            asked = json.loads(body) if body else {}
            if asked.get("method") != "tools/list":
                connection.sendall(http_response(200, discovered(asked)))
                continue
            listed, cursor = pages[asked["params"].get("cursor")]
            result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in listed]}
            result |= {"nextCursor": cursor} if cursor else {}
            assert b"Mcp-Method: tools/list" in head
            connection.sendall(
                http_response(200, rpc_answer(asked, result), "content-type: application/json")
            )

    with thread_server(handle) as server, ProxyProcess(tmp_path, f"http://127.0.0.1:{server.port}") as proxy:
        proxy.hello()
        assert proxy.tools() == [*names, "outbox_status", "outbox_result"]
    with ProxyProcess(tmp_path, f"http://127.0.0.1:{server.port}") as proxy:
        assert proxy.tools() == [*names, "outbox_status", "outbox_result"]


def rpc_answer(asked, result):
    """The body of an answer."""
    return json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()


def discovered(asked):
    """What a server of the stateless era says of itself; nothing to what is no request."""
    about = {
        "supportedVersions": ["2026-07-28"],
        "capabilities": {},
        "serverInfo": {"name": "s", "version": "1"},
    }
    return rpc_answer(asked, about) if "id" in asked else b"{}"
