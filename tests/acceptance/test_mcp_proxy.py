"""`outbox mcp` by raw lines, before the reference relay: outages, queued calls, ids, what is no message."""

import json
import subprocess
import sys
import tomllib

import pytest
from mcp_peers import STATELESS_META, ProxyProcess, proxy_environment, queued_of, text_of
from processes import ROOT, DaemonProcess, outbox_command, wait_for

from relay_client.reference.process import RelayProcess

TOKEN = "tok-proxy"


class SinceNow:
    """A relay as one test sees it: what was there before is left out."""

    def __init__(self, relay):
        self._relay = relay
        self._events, self._requests = len(relay.events()), len(relay.requests())

    def __getattr__(self, name):
        return getattr(self._relay, name)

    def events(self, agent):
        """What came since, of this agent."""
        return [event for event in self._relay.events()[self._events :] if event["agent"] == agent]

    def requests(self):
        """What was asked since."""
        return self._relay.requests()[self._requests :]


@pytest.fixture(scope="module")
def one_relay(tmp_path_factory):
    """The reference relay that the tests of this file share."""
    with RelayProcess(tmp_path_factory.mktemp("relay") / "relay.sqlite", [TOKEN]) as process:
        yield process


@pytest.fixture
def relay(one_relay):
    """It works when a test begins."""
    if one_relay.pid is None:
        one_relay.start()
    one_relay.clear_faults()
    return SinceNow(one_relay)


def flushed(tmp_path, relay):
    """Send what waits, and give what the relay holds of the agent: the arguments of each call."""
    settings = {"relay.url": relay.url, "relay.token": TOKEN}
    done = outbox_command(tmp_path / "state", "flush", "--timeout", "30", "--json", settings=settings)
    assert done.returncode == 0, done.stderr
    return arguments(relay)


def arguments(relay, agent="builder"):
    """The arguments of each call that the relay holds, in the order of their arrival."""
    return [json.loads(event["body"])["params"]["arguments"] for event in relay.events(agent)]


def test_the_whole_way(tmp_path, relay):
    """Listed, called, queued in an outage, behind older ones after it, delivered, looked up."""
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_*") as proxy:
        assert proxy.hello()["serverInfo"]["name"] == "relay-outbox-reference"
        assert proxy.tools() == ["note_add", "echo", "fail", "outbox_status", "outbox_result"]
        assert text_of(proxy.call("note_add", n=1)).endswith('kept: {"n": 1}')
        relay.kill()
        queued = queued_of(first := proxy.call("note_add", n=2))
        assert text_of(first).startswith("Queued, not run yet: the relay does not answer (connection refused")
        assert (queued["agent"], queued["seq"], queued["ahead"]) == ("builder", 1, 0)
        assert queued["idempotencyKey"] in text_of(first)
        relay.start()
        behind = proxy.call("note_add", n=3)
        assert queued_of(behind)["ahead"] == 1
        assert "older calls of this agent wait" in text_of(behind)
        waiting = proxy.call("outbox_result", key=queued["idempotencyKey"])
        assert waiting["_meta"]["relay-outbox/state"] == "waiting"
        assert "it has not run yet" in text_of(waiting)
        assert "Nobody sends" in text_of(waiting)
        assert "2 events wait" in text_of(proxy.call("outbox_status"))
        assert flushed(tmp_path, relay) == [{"n": 1}, {"n": 2}, {"n": 3}]
        found = proxy.call("outbox_result", key=queued["idempotencyKey"])
        assert found["_meta"]["relay-outbox/state"] == "delivered"
        assert found["content"][1]["text"].endswith('kept: {"n": 2}')
        assert text_of(proxy.call("note_add", n=4)).endswith('kept: {"n": 4}')
        assert (proxy.leave(), proxy.said().count("fault")) == (0, 0)


def test_other_calls_are_told_at_once_that_they_did_not_run(tmp_path, relay):
    """And leave nothing on disk."""
    with ProxyProcess(tmp_path, relay.url) as proxy:
        proxy.hello()
        relay.kill()
        result = proxy.call("echo", text="x")
        assert result["isError"] is True
        assert text_of(result).startswith("echo did not run: the relay does not answer")
    assert not list(tmp_path.glob("state/agents/*"))


def test_an_agent_that_starts_in_an_outage_sees_its_tools(tmp_path, relay):
    """In both eras, from what the relay said last; the file is private."""
    with ProxyProcess(tmp_path, relay.url) as proxy:
        proxy.hello()
        names = proxy.tools()
    relay.kill()
    (memory,) = tmp_path.glob("state/mcp-*.json")
    assert memory.stat().st_mode & 0o777 == 0o600
    assert TOKEN not in memory.read_text("utf-8")
    with ProxyProcess(tmp_path, relay.url) as proxy:
        assert proxy.hello()["serverInfo"]["name"] == "relay-outbox-reference"
        assert proxy.tools() == names
    with ProxyProcess(tmp_path, relay.url) as proxy:
        about = proxy.ask("server/discover", {"_meta": STATELESS_META})["result"]
        assert about["supportedVersions"] == ["2026-07-28"]
        assert proxy.tools(STATELESS_META) == names


def test_nothing_known_and_no_relay(tmp_path):
    """The client is greeted, sees the two tools of the proxy, and hears what is missing."""
    with ProxyProcess(tmp_path, "http://127.0.0.1:1", "--buffer", "note") as proxy:
        assert proxy.hello()["capabilities"] == {"tools": {"listChanged": True}}
        assert proxy.tools() == ["outbox_status", "outbox_result"]
        told = text_of(proxy.call("outbox_status"))
        assert "nothing was ever queued" in told
        assert "The relay cannot be reached now: connection refused" in told
        assert queued_of(proxy.call("note"))["seq"] == 1
        assert "does not answer" in proxy.ask("prompts/list")["error"]["message"]
        assert proxy.ask("ping")["result"] == {}


def test_the_status_tells_of_an_outage_as_it_is_now(tmp_path, relay):
    """Nothing waits, and nobody has asked the relay since: it is asked, and said while it is so only."""
    with ProxyProcess(tmp_path, relay.url) as proxy:
        proxy.hello()
        assert "The relay" not in text_of(proxy.call("outbox_status"))
        relay.kill()
        assert "cannot be reached now: connection refused" in text_of(proxy.call("outbox_status"))
        relay.start()
        assert "The relay" not in text_of(proxy.call("outbox_status"))
        relay.add_faults({"match": {"path": "/api/health"}, "times": 1, "action": {"status": 503}})
        assert "does not work now: it answers 503" in text_of(proxy.call("outbox_status"))


def test_an_agent_that_never_saw_the_relay_hears_when_there_are_tools(tmp_path, relay):
    """Its client lists them anew, without being started again."""
    url = relay.url
    relay.kill()
    with ProxyProcess(tmp_path, url) as proxy:
        proxy.hello()
        assert proxy.tools() == ["outbox_status", "outbox_result"]
        relay.start()
        proxy.next(lambda message: message.get("method") == "notifications/tools/list_changed", 60)
        assert "note_add" in proxy.tools()


def test_killed_right_after_its_result_the_call_still_arrives(tmp_path, relay):
    """What was told as queued is on disk."""
    relay.kill()
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add") as proxy:
        assert queued_of(proxy.call("note_add", n=7))["seq"] == 1
        proxy.kill()
    relay.start()
    assert flushed(tmp_path, relay) == [{"n": 7}]


def test_a_daemon_sends_what_the_proxy_queued(tmp_path, relay):
    """The proxy only queues; the daemon hears of it and delivers when the relay is back."""
    with DaemonProcess(tmp_path / "state", relay.url, {"relay.token": TOKEN}):
        relay.kill()
        with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add") as proxy:
            results = [proxy.call("note_add", n=n) for n in range(5)]
            assert [queued_of(result)["seq"] for result in results] == [1, 2, 3, 4, 5]
            assert "Nobody sends" not in text_of(results[0])
            relay.start()
            wait_for(lambda: len(arguments(relay)) == 5, 60)
            assert arguments(relay) == [{"n": n} for n in range(5)]


@pytest.mark.parametrize("own_id", ["a string", "", 7, 0, -3, 2**80, "9"])
def test_the_clients_ids_come_back_as_they_were(tmp_path_factory, shared_proxy, own_id):
    """Strings, numbers, big ones; of calls to the relay and of the proxy's own answers."""
    assert shared_proxy.ask("tools/call", {"name": "echo", "arguments": {}}, own_id)["id"] == own_id
    answer = shared_proxy.ask("ping", None, own_id)
    assert (answer["id"], type(answer["id"])) == (own_id, type(own_id))


@pytest.fixture(scope="module")
def shared_proxy(tmp_path_factory):
    """A proxy before a relay that works, for what leaves nothing behind."""
    folder = tmp_path_factory.mktemp("shared")
    with RelayProcess(folder / "relay.sqlite", [TOKEN]) as relay, ProxyProcess(folder, relay.url) as proxy:
        proxy.hello()
        yield proxy


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("this is no JSON", -32700),
        ('{"jsonrpc": "2.0", "id": 1, "method": "ping"', -32700),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": NaN}}', -32700),
        ("[" * 100_000, -32600),
        ('{"a":' * 100_000, -32700),
        ('[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', -32600),
        ('{"id": 1, "method": "ping"}', -32600),
        ('{"jsonrpc": "2.0", "id": {}, "method": "ping"}', -32600),
        ('{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}', -32600),
        ('{"jsonrpc": "2.0", "id": 1}', -32600),
        ("17", -32600),
    ],
)
def test_what_is_no_message_is_refused_and_the_next_is_served(shared_proxy, line, code):
    """As JSON-RPC says: an error with the id null; batches too, since MCP has none."""
    shared_proxy.send_line(line)
    refused = shared_proxy.next(lambda message: message.get("id", 0) is None)
    assert refused["error"]["code"] == code
    assert shared_proxy.ask("ping")["result"] == {}


def test_blank_lines_and_line_ends_of_other_systems(shared_proxy):
    """Are no messages, and no part of one."""
    shared_proxy.send_line("")
    shared_proxy.send_line('{"jsonrpc": "2.0", "id": "crlf", "method": "ping"}\r')
    assert shared_proxy.next(lambda message: message.get("id") == "crlf")["result"] == {}


def test_an_argument_of_five_mebibytes_and_numbers_as_they_were_written(shared_proxy):
    """Arguments reach the relay to the letter."""
    text = '{ "n":1e400, "half":"\\ud83d", "big":"' + "x" * 5 * 2**20 + '" }'
    params = f'{{"name":"echo","arguments":{text}}}'
    shared_proxy.send_line(f'{{"jsonrpc":"2.0","id":"big","method":"tools/call","params":{params}}}')
    answer = shared_proxy.next(lambda message: message.get("id") == "big")
    assert text_of(answer["result"]) == text


def test_a_queued_argument_of_five_mebibytes(tmp_path, relay):
    """It is on disk to the letter too."""
    relay.kill()
    with ProxyProcess(tmp_path, relay.url, "--buffer", "*") as proxy:
        queued_of(proxy.call("note_add", text="x" * 5 * 2**20))
        refused = proxy.call("note_add", text="x" * 9 * 2**20)
        assert (refused["isError"], "could not be queued" in text_of(refused)) == (True, True)
    relay.start()
    assert [len(call["text"]) for call in flushed(tmp_path, relay)] == [5 * 2**20]


def test_an_error_of_the_relay_is_the_clients(shared_proxy):
    """JSON-RPC errors and results with isError pass as they are."""
    assert shared_proxy.ask("tools/call", {"name": "absent"})["error"]["code"] == -32602
    assert shared_proxy.ask("no/such", {})["error"]["code"] == -32601
    assert shared_proxy.call("fail")["isError"] is True


CALLS = {"path": "/api/mcp", "bodyContains": "tools/call"}


@pytest.mark.parametrize("status", [429, 503, 401])
def test_what_ran_nothing_is_queued(tmp_path, relay, status):
    """The relay asked to wait, or does not take the token."""
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add") as proxy:
        proxy.hello()
        relay.add_faults({"match": CALLS, "action": {"status": status}})
        result = proxy.call("note_add", n=1)
        assert queued_of(result)["seq"] == 1
        assert str(status) in text_of(result)
        relay.clear_faults()
    assert flushed(tmp_path, relay) == [{"n": 1}]


def test_a_refusal_is_told_and_not_queued(tmp_path, relay):
    """Waiting would not help."""
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add") as proxy:
        proxy.hello()
        for status in (403, 413):
            relay.add_faults({"match": CALLS, "times": 1, "action": {"status": status}})
            result = proxy.call("note_add", n=1)
            assert (result["isError"], f"answered {status}" in text_of(result)) == (True, True)
        assert "nothing was ever queued" in text_of(proxy.call("outbox_status"))


SAFE = {
    "by the setting": {"mcp.idempotent": "true", "relay.paths.spec": "/api/none"},
    "by its name": {"mcp.safe_to_repeat": "other, note_add", "relay.paths.spec": "/api/none"},
    "by the relay": {},
}
UNKNOWN = [{"status": 500}, {"status": 502}, {"storeThenClose": True}, {"status": 200, "body": "<html>"}]


@pytest.mark.parametrize("settings", SAFE.values(), ids=SAFE)
def test_a_call_that_may_be_repeated_is_queued_with_the_key_of_the_try(tmp_path, relay, settings):
    """The answer was lost after the tool ran: it goes again, and has one effect."""
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add", settings=settings) as proxy:
        proxy.hello()
        relay.add_faults({"match": CALLS, "times": 1, "action": {"storeThenClose": True}})
        queued = queued_of(proxy.call("note_add", n=1))
    assert flushed(tmp_path, relay) == [{"n": 1}]
    (event,) = relay.events("builder")
    assert event["key"] == queued["idempotencyKey"]
    assert [event["key"] in asked["keys"] for asked in relay.requests()].count(True) == 2


def test_a_call_that_must_not_be_repeated_is_told_as_it_is(tmp_path, relay):
    """It may or may not have run; it is not queued, and not sent again."""
    settings = {"relay.paths.spec": "/api/none"}
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add", settings=settings) as proxy:
        proxy.hello()
        for fault in UNKNOWN:
            relay.add_faults({"match": CALLS, "times": 1, "action": fault})
            result = proxy.call("note_add", n=1)
            assert "may or may not have run" in text_of(result), fault
            assert result["isError"] is True
            assert proxy.call("echo")["isError"] is False
        assert "nothing was ever queued" in text_of(proxy.call("outbox_status"))


def test_the_keys_of_agents_may_be_apart(tmp_path, relay):
    """With `relay.key_scope` of the agent, try and event have the same key as the relay sees it."""
    (tmp_path / "state").mkdir()
    settings = {"relay.key_scope": "agent", "mcp.idempotent": "true"}
    with DaemonProcess(
        tmp_path / "state", relay.url, {"relay.token": TOKEN, "relay.key_scope": "agent"}
    ) as daemon:
        with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add", settings=settings) as proxy:
            proxy.hello()
            relay.add_faults({"match": CALLS, "times": 1, "action": {"storeThenClose": True}})
            queued = queued_of(proxy.call("note_add", n=1))
            wait_for(
                lambda: "delivered" in text_of(proxy.call("outbox_result", key=queued["idempotencyKey"])), 60
            )
        assert daemon.said("dead_letter") == []
    (event,) = relay.events("builder")
    assert event["key"].endswith(f":{queued['idempotencyKey']}")


def test_the_clients_own_key_is_kept(tmp_path, relay):
    """The same key twice is one call: the second is told what became of the first."""
    relay.kill()
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add") as proxy:
        meta = {"relay-outbox/idempotencyKey": "mine-1"}
        assert queued_of(proxy.call("note_add", meta=meta, n=1))["idempotencyKey"] == "mine-1"
        assert text_of(proxy.call("note_add", meta=meta, n=1)).startswith("Known already")
        refused = proxy.call("note_add", meta=meta, n=2)
        assert (refused["isError"], "could not be queued" in text_of(refused)) == (True, True)
        assert text_of(proxy.call("outbox_result", key="mine-1")).startswith("Event 1 of builder waits")


def test_what_became_of_a_call(tmp_path, relay):
    """The tool said no, the relay refused, a person set it aside, nobody knows it."""
    relay.kill()
    with ProxyProcess(tmp_path, relay.url, "--buffer", "*") as proxy:
        keys = [queued_of(proxy.call(tool))["idempotencyKey"] for tool in ("fail", "absent", "note_add")]
        settings = {"relay.url": relay.url, "relay.token": TOKEN}
        assert outbox_command(tmp_path / "state", "skip", "builder", "3").returncode == 0
        relay.start()
        outbox_command(tmp_path / "state", "flush", "--timeout", "30", settings=settings)
        no, rejected, skipped = (proxy.call("outbox_result", key=key) for key in keys)
        unknown = proxy.call("outbox_result", key="never")
    states = [result["_meta"]["relay-outbox/state"] for result in (no, rejected, skipped, unknown)]
    assert states == ["tool_error", "dead", "dead", "unknown"]
    assert "the tool ran and said no" in text_of(no)
    assert no["content"][1]["text"] == "This tool always fails."
    assert "rejected" in text_of(rejected)
    assert "outbox dead replay builder 2" in text_of(rejected)
    assert "No call 'never' of builder is known" in text_of(unknown)
    assert all(result["isError"] for result in (no, rejected, skipped, unknown))


def test_a_cancelled_call_is_cut_off_and_not_queued(tmp_path, relay):
    """No answer is written; what comes after it is served."""
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add") as proxy:
        proxy.hello()
        relay.add_faults({"match": CALLS, "action": {"hang": 3000}})
        for tool in ("note_add", "echo"):
            proxy.send("tools/call", {"name": tool, "arguments": {}}, tool)
        wait_for(lambda: len([r for r in relay.requests() if r["path"] == "/api/mcp"]) >= 1)
        for tool in ("note_add", "echo"):
            proxy.send("notifications/cancelled", {"requestId": tool})
        relay.clear_faults()
        assert "nothing was ever queued" in text_of(proxy.call("outbox_status", own_id="status"))
        assert proxy.call("note_add", own_id="later", n=1)["isError"] is False
        assert proxy.unread() == []


def test_a_client_that_goes_loses_nothing_that_may_wait(tmp_path, relay):
    """Its calls are under way when its input ends: what may go again is on disk, and it ends with 0."""
    settings = {"mcp.idempotent": "true"}
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add", settings=settings) as proxy:
        proxy.hello()
        relay.add_faults({"match": CALLS, "action": {"hang": 3000}})
        for n in range(3):
            proxy.send("tools/call", {"name": "note_add", "arguments": {"n": n}}, n)
        proxy.send("tools/call", {"name": "echo", "arguments": {}}, "echo")
        assert proxy.leave() == 0
    relay.clear_faults()
    assert flushed(tmp_path, relay) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_lines_from_a_pipe_are_all_answered(tmp_path, relay):
    """A script that writes its calls and ends gets each answer before the proxy does."""
    lines = [
        json.dumps(
            {"jsonrpc": "2.0", "id": n, "method": "tools/call", "params": {"name": "echo", "arguments": {}}}
        )
        for n in range(20)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "outbox", "mcp", "--agent", "builder"],
        input="\n".join(lines),
        env=proxy_environment(tmp_path, relay.url),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(json.loads(line)["id"] for line in done.stdout.splitlines()) == list(range(20))


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        ([], {}, "Name the agent with --agent, or in $OUTBOX_AGENT"),
        (["--agent", ""], {}, "Name the agent with --agent"),
        (["--agent", "a"], {"relay.url": ""}, "no relay is set"),
    ],
)
def test_what_is_missing_is_said(tmp_path, words, settings, said):
    """A usage error on stderr, and nothing on stdout, which is the protocol's."""
    done = outbox_command(
        tmp_path / "state", "mcp", *words, settings={"relay.url": "http://127.0.0.1:1", **settings}
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert said in done.stderr.decode()


def test_the_agent_may_stand_in_the_environment(tmp_path, relay):
    """As the snippets of clients have it."""
    done = subprocess.run(
        [sys.executable, "-m", "outbox", "mcp"],
        input='{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"outbox_status"}}',
        env=proxy_environment(tmp_path, relay.url) | {"OUTBOX_AGENT": "of the environment"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "of the environment: nothing waits" in done.stdout


def test_a_token_that_is_missing_lets_calls_wait(tmp_path, relay):
    """And one that is mended is used; the token stands nowhere."""
    secret = tmp_path / "token"
    settings = {"relay.token_file": str(secret), "relay.token": ""}
    with ProxyProcess(tmp_path, relay.url, "--buffer", "note_add", settings=settings) as proxy:
        result = proxy.call("note_add", n=1)
        assert "no usable token" in text_of(result)
        secret.write_text(TOKEN)
        secret.chmod(0o600)
        assert proxy.call("echo")["isError"] is False
        assert TOKEN not in json.dumps(result) + proxy.said()
    done = outbox_command(
        tmp_path / "state",
        "flush",
        "--timeout",
        "30",
        settings={"relay.url": relay.url, "relay.token": TOKEN},
    )
    assert (done.returncode, arguments(relay)) == (0, [{}, {"n": 1}])


def test_each_agent_has_a_token_of_its_own_where_the_relay_mints_them(tmp_path, relay):
    """The call goes out with the minted one, not with the host's that it was minted with."""
    settings = {"relay.runtime_token.path": "/api/runtime-tokens"}
    with ProxyProcess(tmp_path, relay.url, settings=settings) as proxy:
        proxy.hello()
        assert proxy.call("echo")["isError"] is False
    minted, called = (
        [r for r in relay.requests() if r["path"] == path] for path in ("/api/runtime-tokens", "/api/mcp")
    )
    assert len(minted) == 1
    assert {asked["token"] for asked in called}.isdisjoint({minted[0]["token"], None})


@pytest.mark.parametrize("name", ["claude-code.json", "codex.toml", "gemini.json"])
def test_the_command_of_each_file_to_copy_runs(tmp_path, name):
    """Started as the client starts it, it answers."""
    text = (ROOT / "config" / "mcp" / name).read_text("utf-8")
    value = tomllib.loads(text)["mcp_servers"] if name.endswith(".toml") else json.loads(text)["mcpServers"]
    server = value["relay"]
    done = subprocess.run(
        [sys.executable, "-m", server["command"], *server["args"]],
        input='{"jsonrpc":"2.0","id":1,"method":"ping"}\n',
        env=proxy_environment(tmp_path, "") | server["env"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["result"], done.stderr) == (0, {}, "")
