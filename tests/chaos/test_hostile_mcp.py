"""Lines that no MCP client should send, to `outbox mcp`: each is answered or passed over; none ends it."""

import contextlib
import json
import random

import pytest
from mcp_peers import INITIALIZE, ProxyProcess
from mutations import hostile, is_safe

from outbox.store.directory import StateDirectory, file_name
from outbox.store.file import open_outbox
from outbox.store.verify import verify_counters

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there
NOTE = {"name": "note_add", "arguments": {"n": 1}}
LINES = [
    {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE},
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": "two", "method": "tools/list", "params": {"cursor": "c"}},
    {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": NOTE},
    {"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": {
        **NOTE, "_meta": {"relay-outbox/idempotencyKey": "k"}}},
    {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {
        "name": "outbox_result", "arguments": {"key": "k"}}},
    {"jsonrpc": "2.0", "id": 6, "method": "ping"},
    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}},
    {"jsonrpc": "2.0", "id": 7, "result": {}},
]  # fmt: skip


@pytest.mark.parametrize("agent", ["builder", "../builder"])
def test_lines_of_every_ugliness(tmp_path, seed, rounds, agent):
    """Without a relay: it goes on to the last line, ends with 0, and what it queued is that agent's."""
    chance = random.Random(seed)
    lines = [hostile(chance, chance.choice(LINES)).replace(b"\n", b" ") for _ in range(rounds(15) * 10)]
    with ProxyProcess(tmp_path, NOBODY, "--buffer", "note_*", agent=agent) as proxy:
        proxy.hello()
        for line in lines:
            proxy.process.stdin.write(line + b"\n")
        proxy.process.stdin.flush()
        assert proxy.ask("ping", own_id="the last one")["result"] == {}
        for message in proxy.unread():
            assert message["jsonrpc"] == "2.0"
            assert "tok-proxy" not in json.dumps(message)
        assert proxy.leave() == 0
        said = proxy.said()
    assert "Traceback" not in said
    assert "tok-proxy" not in said
    assert is_safe(said.replace("\n", ""))
    state = StateDirectory(tmp_path / "state")
    assert [path.name for path in state.outbox_files()] in ([], [file_name(agent)])
    for path in state.outbox_files():
        with contextlib.closing(open_outbox(state, path)) as box:
            assert (box.agent, verify_counters(box)) == (agent, [])
