"""The reference relay's MCP endpoint: protocol revision 2026-07-28, and calls that run once for each key."""

import base64
import json

import pytest
from reference_calls import MCP, MESSAGES, TOKEN, client, event, origin, post_rpc, post_text, rpc

from relay_client.reference.process import RelayProcess


@pytest.fixture(scope="module")
def relay(tmp_path_factory):
    """The relay that the tests of this file share; each has agents of its own."""
    db = tmp_path_factory.mktemp("relay") / "relay.sqlite"
    with RelayProcess(db, [TOKEN]) as process:
        yield process


@pytest.fixture
def http(relay):
    """A connection with the host's token."""
    with client(relay.url) as http:
        yield http


def error_of(answer):
    """The HTTP status and the JSON-RPC code of a refusal."""
    return answer.status_code, answer.json()["error"]["code"]


def said(answer):
    """The text of a tool's result."""
    return answer.json()["result"]["content"][0]["text"]


def test_tools_are_listed(http):
    """`tools/list` names three tools; `server/discover` the revision."""
    tools = post_rpc(http, rpc("tools/list")).json()["result"]
    about = post_rpc(http, rpc("server/discover")).json()["result"]
    assert [tool["name"] for tool in tools["tools"]] == ["note_add", "echo", "fail"]
    assert (tools["resultType"], about["supportedVersions"]) == ("complete", ["2026-07-28"])


def test_a_call_is_answered_with_its_id_and_kept(relay, http):
    """The result comes under the request's id, and the call stands among the events."""
    request = rpc("tools/call", 17, key="call-1", name="note_add", arguments={"text": "é"})
    answer = post_rpc(http, request, Idempotency_Key='"call-1"', **origin("caller", seq=4))
    [kept] = relay.events("caller")
    assert (answer.status_code, answer.json()["id"]) == (200, 17)
    assert answer.json()["result"]["isError"] is False
    assert said(answer) == f'note {kept["n"]} kept: {{"text": "\\u00e9"}}'
    assert (kept["path"], kept["key"], kept["seq"]) == (MCP, "call-1", 4)
    assert json.loads(kept["body"]) == request


def test_echo_gives_the_arguments_as_they_were_written(http):
    """Digits, escapes and spaces are those of the request."""
    text = json.dumps(rpc("tools/call", name="echo", arguments={})).replace(
        '"arguments": {}', '"arguments": { "n":1e400, "half":"\\ud83d" }'
    )
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "echo"}
    assert said(post_text(http, MCP, text, **headers)) == '{ "n":1e400, "half":"\\ud83d" }'


def test_the_same_key_gives_the_kept_result_and_runs_nothing(relay, http):
    """A repeat has another JSON-RPC id and the same result; also after kill -9."""
    call = {"name": "note_add", "arguments": {"n": 1}}
    first = post_rpc(http, rpc("tools/call", "a", key="once", **call), **origin("once"))
    relay.kill()
    relay.start()
    with client(relay.url) as http_again:
        again = post_rpc(http_again, rpc("tools/call", "b", key="once", **call), **origin("once"))
    assert again.json()["id"] == "b"
    assert again.json()["result"] == first.json()["result"]
    assert len(relay.events("once")) == 1


def test_the_key_may_stand_in_the_header_alone(relay, http):
    """Header and `_meta` are one key."""
    call = {"name": "note_add", "arguments": {}}
    first = post_rpc(http, rpc("tools/call", **call), Idempotency_Key='"in-header"')
    again = post_rpc(http, rpc("tools/call", key="in-header", **call))
    assert again.json()["result"] == first.json()["result"]


def test_without_a_key_each_call_runs(relay, http):
    """There is nothing to know a repeat by."""
    for _ in range(2):
        post_rpc(http, rpc("tools/call", name="note_add", arguments={}), **origin("keyless"))
    assert [kept["key"] for kept in relay.events("keyless")] == [None, None]


@pytest.mark.parametrize("second", ["tool", "arguments", "message"])
def test_a_key_used_for_something_else_is_refused(relay, http, second):
    """Another tool, other arguments, or an event that had the key before."""
    key, agent = f"other-{second}", f"other-{second}"
    call = {"name": "note_add", "arguments": {"n": 1}}
    if second == "message":
        http.post(MESSAGES, json=event(key), headers=origin(agent))
    else:
        post_rpc(http, rpc("tools/call", key=key, **call), **origin(agent))
        call = {**call, "name": "echo"} if second == "tool" else {**call, "arguments": {"n": 2}}
    answer = post_rpc(http, rpc("tools/call", key=key, **call), **origin(agent))
    assert error_of(answer) == (200, -32602)
    assert answer.json()["error"]["data"] == {"code": "key_reused"}
    assert len(relay.events(agent)) == 1


def test_a_tool_that_says_no_is_an_answer(http):
    """`isError` is a result, not an error of the call."""
    answer = post_rpc(http, rpc("tools/call", name="fail", arguments={}))
    assert answer.status_code == 200
    assert answer.json()["result"]["isError"] is True


def test_what_is_not_there_is_said_so(http):
    """An unknown tool is -32602, an unknown method -32601 with 404."""
    assert error_of(post_rpc(http, rpc("tools/call", name="nothing", arguments={}))) == (200, -32602)
    assert error_of(post_rpc(http, rpc("tools/call", name="echo", arguments=[]))) == (200, -32602)
    assert error_of(post_rpc(http, rpc("resources/list"))) == (404, -32601)


@pytest.mark.parametrize(
    "headers",
    [
        {"MCP_Protocol_Version": None},
        {"Mcp_Method": None},
        {"Mcp_Method": "tools/list"},
        {"Mcp_Name": None},
        {"Mcp_Name": "fail"},
        {"Mcp_Name": "=?base64?!!?="},
    ],
)
def test_headers_that_disagree_with_the_body_are_refused(http, headers):
    """400 with -32020, so that nobody between is deceived about what runs."""
    assert error_of(post_rpc(http, rpc("tools/call", name="echo"), **headers)) == (400, -32020)


def test_a_name_may_come_encoded(http):
    """`=?base64?…?=` is decoded before it is compared."""
    encoded = f"=?base64?{base64.b64encode(b'echo').decode()}?="
    assert post_rpc(http, rpc("tools/call", name="echo"), Mcp_Name=encoded).status_code == 200


def test_another_revision_is_refused_with_the_one_that_works(http):
    """-32022 names the revisions; a session's `initialize` is told the same."""
    other = post_rpc(http, rpc("tools/list"), MCP_Protocol_Version="2025-11-25")
    session = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}}
    for answer in (other, post_text(http, MCP, json.dumps(session))):
        assert error_of(answer) == (400, -32022)
        assert answer.json()["error"]["data"]["supported"] == ["2026-07-28"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", -32700),
        ("[]", -32600),
        ('{"jsonrpc":"1.0","id":1,"method":"tools/list"}', -32600),
        ('{"jsonrpc":"2.0","id":null,"method":"tools/list"}', -32600),
        ('{"jsonrpc":"2.0","id":1,"method":"tools/list","params":[]}', -32602),
        ('{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{}}', -32602),
    ],
)
def test_what_is_no_request_of_this_revision_is_refused(http, text, code):
    """With the codes of JSON-RPC, and 400."""
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/list"}
    assert error_of(post_text(http, MCP, text, **headers)) == (400, code)


def test_keys_that_disagree_are_refused(relay, http):
    """Header and `_meta` naming two keys is a mistake, and nothing runs."""
    request = rpc("tools/call", key="one-key", name="note_add", arguments={})
    answer = post_rpc(http, request, Idempotency_Key='"another-key"', **origin("two-keys"))
    assert error_of(answer) == (200, -32602)
    assert relay.events("two-keys") == []


def test_a_notification_is_taken_and_not_answered(http):
    """202, and no body."""
    text = '{"jsonrpc":"2.0","method":"notifications/initialized"}'
    answer = post_text(http, MCP, text)
    assert (answer.status_code, answer.content) == (202, b"")
    assert http.get(MCP).status_code == 405
