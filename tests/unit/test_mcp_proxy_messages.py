"""JSON-RPC lines taken apart and joined again, each era in the other's words, what is remembered."""

import json
import tomllib
from pathlib import Path

import pytest

from outbox.capture import mcp_eras as eras
from outbox.capture import mcp_message as rpc
from outbox.capture.mcp_eras import Era, Hello
from outbox.capture.mcp_memory import Known, Memory
from outbox.cli import load, parser_of
from outbox.settings import load as load_settings
from outbox.store.directory import StateDirectory
from outbox.store.place import write_private

ROOT = Path(__file__).parent.parent.parent
OWN = {"name": "relay-outbox", "version": "1"}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "c"},
}


def message(method="tools/call", own_id="1", **params):
    """A request, as it was read."""
    return rpc.read_message(rpc.request(own_id, method, json.dumps(params)))


def test_params_ids_and_unknown_members_keep_their_text():
    """Only what is changed is changed."""
    text = '{"jsonrpc":"2.0", "id":1e2, "extra":[ 1 ], "method":"m", "params":{ "a" : 1e400, '
    text += '"_meta":{ "b":1 } }}'
    read = rpc.read_message(text)
    changed = rpc.with_params(read, rpc.with_meta(read.params, {"key": '"k"'}))
    assert (read.id, read.text, read.is_request) == ("1e2", text, True)
    assert '"a" : 1e400' in changed.text
    assert '"extra":[ 1 ]' in changed.text
    assert changed.member("_meta", "b") == "1"
    assert changed.string("_meta", "key") == "k"
    assert rpc.within(rpc.with_id(changed.text, '"x"'), "id") == '"x"'


def test_a_meta_that_is_no_object_is_replaced():
    """It could not hold anything."""
    assert rpc.with_meta('{"_meta":null}', {"a": "1"}) == '{"_meta":{"a":1}}'


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", "1", True),
        ('"1"', "1", False),
        ('"\\u0061"', '"a"', True),
        (None, None, False),
        ("1", "1.0", False),
    ],
)
def test_ids_are_compared_as_json_values_of_one_kind(one, other, same):
    """A string is no number."""
    assert rpc.same_id(one, other) is same


def test_sorts_of_messages():
    """A request, a notification, an answer, an error without a readable id."""
    request, told = message(), rpc.read_message(rpc.notification("notifications/initialized"))
    answered, failed = (
        rpc.read_message(rpc.answer("1", "{}")),
        rpc.read_message(rpc.failure("null", -1, "no")),
    )
    assert (request.is_request, request.is_answer) == (True, False)
    assert (told.is_request, told.is_answer, told.id) == (False, False, None)
    assert (answered.is_answer, failed.is_answer, failed.id) == (True, True, "null")


def test_texts_are_made_fit_for_one_line():
    """Line breaks between values go; those in strings are escapes already."""
    assert rpc.on_one_line('{\r\n"a": "x\\ny"\n}') == '{  "a": "x\\ny" }'


def test_the_era_of_a_request_stands_in_its_meta():
    """The stateless one names its version in each."""
    assert eras.era_of(message(_meta=META)) is Era.STATELESS
    assert eras.era_of(message(_meta={"progressToken": 1})) is Era.SESSIONS
    assert eras.era_of(message()) is Era.SESSIONS


def test_a_stateless_relay_in_the_words_of_sessions():
    """The version that was asked for when it is known; capabilities without what has other methods there."""
    said = {
        "supportedVersions": ["2026-07-28"],
        "capabilities": {"tools": {"listChanged": True}, "resources": {"subscribe": True}, "logging": {}},
        "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "r"}},
        "instructions": "be kind",
    }
    hello = Hello(Era.STATELESS, json.dumps(said))
    result = json.loads(eras.initialize_result(hello, "2025-06-18", OWN))
    assert result == {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {"listChanged": True}, "resources": {}},
        "serverInfo": {"name": "r"},
        "instructions": "be kind",
    }
    assert json.loads(eras.initialize_result(hello, "2031-01-01", OWN))["protocolVersion"] == "2025-11-25"


def test_a_relay_of_sessions_keeps_its_words_and_gets_tools():
    """The proxy has tools of its own, whatever the relay has."""
    said = '{"protocolVersion":"2025-03-26","capabilities":{"prompts":{}},"serverInfo":{"name":"r"}}'
    result = json.loads(eras.initialize_result(Hello(Era.SESSIONS, said), "2025-11-25", OWN))
    assert result["capabilities"] == {"prompts": {}, "tools": {}}
    assert result["protocolVersion"] == "2025-03-26"
    assert json.loads(eras.initialize_result(None, "2025-11-25", OWN))["serverInfo"] == OWN


def test_results_of_sessions_in_the_stateless_era():
    """What that era requires is added, and nothing that is there is changed."""
    assert eras.result_for(Era.SESSIONS, "tools/list", '{"tools":[]}') == '{"tools":[]}'
    listed = json.loads(eras.result_for(Era.STATELESS, "tools/list", '{"tools":[],"ttlMs":5}'))
    assert listed == {"tools": [], "ttlMs": 5, "resultType": "complete", "cacheScope": "private"}
    assert json.loads(eras.result_for(Era.STATELESS, "tools/call", "{}")) == {"resultType": "complete"}


def test_header_fields_repeat_what_stands_in_the_request():
    """The method, and the name that belongs to it, encoded where it is not plain ASCII."""
    fields = dict(eras.stateless_fields(message(name="grüß", _meta=META)))
    assert (fields["Mcp-Method"], fields["MCP-Protocol-Version"]) == ("tools/call", "2026-07-28")
    assert fields["Mcp-Name"] == "=?base64?Z3LDvMOf?="
    assert dict(eras.stateless_fields(message("resources/read", uri="a://b")))["Mcp-Name"] == "a://b"
    assert "Mcp-Name" not in dict(eras.stateless_fields(message("tools/list")))
    assert dict(eras.session_fields("2025-11-25", "s"))["Mcp-Session-Id"] == "s"
    assert "Mcp-Session-Id" not in dict(eras.session_fields("2025-11-25", None))


def test_what_is_remembered_is_read_again_by_the_next(tmp_path):
    """Of this endpoint alone; what is only half said leaves the rest as it was."""
    state = StateDirectory(tmp_path).create()
    first = Memory(state, "http://a/mcp")
    tool = '{"name":"a","inputSchema":{"maximum":1e400}}'
    first.learn(hello=Hello(Era.SESSIONS, '{"protocolVersion":"2025-11-25"}'), tools=(tool,))
    first.learn(honours_keys=True)
    again = Memory(state, "http://a/mcp").known
    assert again == first.known == Known(first.known.hello, (tool,), honours_keys=True)
    assert (again.described("a"), again.described("b")) == (tool, None)
    assert Memory(state, "http://b/mcp").known == Known()


@pytest.mark.parametrize(
    "change", [{"tools": ["no object"]}, {"tools": 7}, {"era": "later"}, {"hello": "[]"}, {"url": "http://b"}]
)
def test_a_memory_that_cannot_be_believed_is_none(tmp_path, change):
    """It is only there to be seen in an outage."""
    state = StateDirectory(tmp_path).create()
    Memory(state, "http://a").learn(hello=Hello(Era.STATELESS, "{}"), tools=())
    (path,) = tmp_path.glob("mcp-*.json")
    write_private(path, json.dumps(json.loads(path.read_text("utf-8")) | change))
    assert Memory(state, "http://a").known == Known()


@pytest.mark.parametrize(
    "text", ["", "{}", '{"url": 1', "[" * 5_000, "\0"], ids=["empty", "other", "cut", "deep", "nul"]
)
def test_a_damaged_memory_is_made_anew(tmp_path, text):
    """It costs nothing but the sight of the tools."""
    state = StateDirectory(tmp_path).create()
    Memory(state, "http://a").learn(tools=())
    (path,) = tmp_path.glob("mcp-*.json")
    path.write_text(text, "utf-8")
    memory = Memory(state, "http://a")
    assert memory.known == Known()
    memory.learn(tools=('{"name":"a"}',))
    assert Memory(state, "http://a").known.tools == ('{"name":"a"}',)


def snippets():
    """The files to copy: the command of each, and its variables."""
    folder = ROOT / "config" / "mcp"
    for path in sorted(folder.iterdir()):
        text = path.read_text("utf-8")
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        servers = value["mcp_servers"] if path.suffix == ".toml" else value["mcpServers"]
        yield path, text, servers["relay"]


def test_the_files_to_copy_name_a_command_that_is_there():
    """`outbox mcp` takes the arguments, and the settings the variables; the page shows the same files."""
    page = (ROOT / "docs" / "mcp.md").read_text("utf-8")
    found = list(snippets())
    assert [path.name for path, _, _ in found] == ["claude-code.json", "codex.toml", "gemini.json"]
    for path, text, server in found:
        assert server["command"] == "outbox"
        name, *words = server["args"]
        assert parser_of(name, load(name)).parse_args(words).agent == "builder"
        assert load_settings(environ=server["env"]).relay.url == "http://127.0.0.1:4850"
        assert f"\n{text.strip()}\n" in page, path
