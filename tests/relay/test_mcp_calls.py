"""MCP tool calls, stateless: what goes out, and M01 to M09 as far as one call goes."""

import base64
import json
import re
import threading

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peers import fake_relay, http_response, read_http_request, thread_server

from relay_client import Failure, RelayClient, Sort, read_tool_call, speaks_other_era
from relay_client.mcp import encode_name, tool_call_body

PARAMS = b'{"name":"note_add","arguments":{"n":0,"text":"first"}}'


@pytest.fixture
def call(origin):
    """Calls a tool with what does not matter to the test filled in; gives the answer and its reading."""

    def send(client, params=PARAMS, **options):
        given_options = {"tool": "note_add", "token": "tok-abc12345", "key": "k-1", "request_id": "r-1"}
        given_options |= {"origin": origin, **options}
        answer = client.call_tool(params, **given_options)
        reading = read_tool_call(answer, given_options["request_id"], now_ms=0, max_retry_after_ms=60_000)
        return answer, reading

    return send


def recording(requests, response=None):
    """A client whose requests end in the list."""

    def answer(request):
        requests.append(request)
        return response or httpx.Response(200, json={"jsonrpc": "2.0", "id": "r-1", "result": {}})

    return RelayClient(
        "http://relay.example", transport=httpx.MockTransport(answer), user_agent="relay-outbox/9"
    )


def test_a_call_carries_what_the_revision_asks_for(call, origin):
    """Streamable HTTP 2026-07-28: the header fields, and the stored text within the request."""
    requests = []
    _, reading = call(recording(requests))
    assert reading.sort is Sort.ACCEPTED
    [request] = requests
    assert (request.method, request.url.path) == ("POST", "/api/mcp")
    wanted = {
        "accept": "application/json, text/event-stream",
        "content-type": "application/json",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "tools/call",
        "mcp-name": "note_add",
        "authorization": "Bearer tok-abc12345",
        "idempotency-key": '"k-1"',
        "outbox-agent": origin.agent,
        "outbox-seq": "7",
    }
    assert wanted.items() <= dict(request.headers).items()
    assert "mcp-session-id" not in request.headers
    assert PARAMS[:-1] in request.content
    body = json.loads(request.content)
    meta = body["params"].pop("_meta")
    assert body == {"jsonrpc": "2.0", "id": "r-1", "method": "tools/call", "params": json.loads(PARAMS)}
    client_info = meta.pop("io.modelcontextprotocol/clientInfo")
    assert client_info["name"] == "relay-outbox"
    assert meta == {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
        "relay-outbox/idempotencyKey": "k-1",
    }


def test_the_stored_text_is_kept_byte_for_byte():
    """Numbers, escapes and order as the producer gave them; only white space around is dropped."""
    params = rb' {"arguments" : {"n": 1e400, "h":"\ud83d"},"name":"x" } '
    body = tool_call_body(params, request_id='r"1', key='k"1', version="1")
    assert params.strip()[:-1] in body
    assert json.loads(body)["id"] == 'r"1'
    assert json.loads(body)["params"]["_meta"]["relay-outbox/idempotencyKey"] == 'k"1'


@pytest.mark.parametrize("params", [b"", b"{}", b"[1]", b'{"name":"x"', b"null"])
def test_params_that_are_no_call_are_a_fault_of_the_caller(params):
    """Joining texts around them would make something else."""
    with pytest.raises(ValueError, match="JSON object"):
        tool_call_body(params, request_id="r", key=None, version="1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("us-west1", "us-west1"),
        ("Hello, \u4e16\u754c", "=?base64?SGVsbG8sIOS4lueVjA==?="),
        (" padded ", "=?base64?IHBhZGRlZCA=?="),
        ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
        ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ("=?base64?open", "=?base64?open"),
        ("two words", "two words"),
        ("tab\tinside", "=?base64?dGFiCWluc2lkZQ==?="),
        ("", "=?base64??="),
    ],
)
def test_the_specifications_examples_of_names(name, value):
    """Streamable HTTP, "Value Encoding"."""
    assert encode_name(name) == value


@given(st.text(max_size=60))
def test_any_name_can_be_read_back(name):
    """Decoded by the specification's rule, every name is what it was."""
    value = encode_name(name)
    assert re.fullmatch(r"[\x20-\x7e]+", value)
    encoded = re.fullmatch(r"=\?base64\?(.*)\?=", value)
    assert (base64.b64decode(encoded[1]).decode() if encoded else value) == name


@pytest.mark.parametrize("case", ["M01", "M02", "M03"])
def test_results_are_read_alike(connect, call, case):
    """JSON, a stream, and one with comments, an empty event, a note and a split result before it."""
    with fake_relay("mcp.json", case) as relay:
        answer, reading = call(connect(relay.url))
        assert (answer.status, reading.sort) == (200, Sort.ACCEPTED)
        assert json.loads(answer.body)["id"] == "r-1"
        assert "isError" in json.loads(reading.result)
        [request] = relay.requests()
        assert json.loads(request["body"])["method"] == "tools/call"


def test_m04_a_stream_left_open_delays_nothing(connect, call):
    """Done as soon as the result is there, and the connection is closed by us."""
    closed = threading.Event()
    event = b'data: {"jsonrpc":"2.0","id":"r-1","result":{}}\n\n'
    fields = b"content-type: text/event-stream;charset=utf-8\r\ntransfer-encoding: chunked"

    def hold(connection):
        read_http_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%x\r\n%b\r\n" % (fields, len(event), event))
        while connection.recv(100):
            pass
        closed.set()

    with thread_server(hold) as server:
        _, reading = call(connect(f"http://127.0.0.1:{server.port}"), timeout_ms=60_000)
        assert (reading.sort, reading.result) == (Sort.ACCEPTED, "{}")
        assert closed.wait(10)


def test_m05_a_tools_no(connect, call):
    """The tool ran; its words are kept."""
    with fake_relay("mcp.json", "M05") as relay:
        _, reading = call(connect(relay.url))
        assert (reading.sort, reading.detail) == (Sort.TOOL_ERROR, "no such note")


def test_m06_a_gone_session_is_not_the_calls_fault(connect, call):
    """A 404 of the other era holds the path; the same call goes through later."""
    with fake_relay("mcp.json", "M06") as relay:
        client = connect(relay.url)
        answer, reading = call(client)
        assert reading.sort is Sort.NO_ENDPOINT
        assert speaks_other_era(answer)
        assert call(client)[1].sort is Sort.ACCEPTED


def test_m07_passing_conditions(connect, call):
    """429 with its wait, then 503, then done; the key is the same in each."""
    with fake_relay("mcp.json", "M07") as relay:
        client = connect(relay.url)
        readings = [call(client, request_id=f"r-{number}")[1] for number in range(3)]
        assert [reading.sort for reading in readings] == [Sort.BUSY, Sort.BUSY, Sort.ACCEPTED]
        assert readings[0].retry_after_ms == 1000
        bodies = [json.loads(request["body"]) for request in relay.requests()]
        assert [body.pop("id") for body in bodies] == ["r-0", "r-1", "r-2"]
        assert bodies[0] == bodies[1] == bodies[2]


def test_m08_a_stream_without_a_result(connect, call):
    """Whole, and yet no answer: the outcome is not known."""
    with fake_relay("mcp.json", "M08") as relay:
        client = connect(relay.url)
        answer, reading = call(client)
        assert (answer.status, answer.body, reading.sort) == (200, b"", Sort.LOST)
        assert call(client)[1].sort is Sort.ACCEPTED


def test_m09_an_unknown_tool(connect, call):
    """Refused, with the code and the words."""
    with fake_relay("mcp.json", "M09") as relay:
        _, reading = call(connect(relay.url))
        assert (reading.sort, reading.code) == (Sort.REFUSED, "-32602")
        assert "Unknown tool: note_add" in reading.detail


def test_a_stream_that_breaks_off_is_lost(connect, call):
    """No end of the stream came, so the result may have been on its way."""
    step = {
        "status": 200,
        "headers": [["content-type", "text/event-stream"]],
        "body": ": ping\n\n: ping\n\n",
        "action": "cut_chunk",
    }
    with fake_relay({"steps": [step]}) as relay:
        answer, reading = call(connect(relay.url))
        assert (answer.failure, answer.sent, reading.sort) == (Failure.LOST, True, Sort.LOST)


def test_an_error_as_a_stream_is_read_as_an_error(connect, call):
    """Only a 2xx is searched for the answer; the body of an error is kept as it is."""
    step = {"status": 500, "headers": [["content-type", "text/event-stream"]], "body": "data: x\n\n"}
    with fake_relay({"steps": [step]}) as relay:
        answer, reading = call(connect(relay.url))
        assert (answer.body, reading.sort) == (b"data: x\n\n", Sort.FAILED)


def test_each_call_has_a_connection_of_its_own(connect, call, post):
    """No idle connection that ends on the way can make a call's outcome unknown."""
    served_by = []

    def answer(connection):
        number = server.connections
        while read_http_request(connection):
            served_by.append(number)
            connection.sendall(http_response(200, b'{"jsonrpc":"2.0","id":"r-1","result":{}}'))

    with thread_server(answer) as server:
        client = connect(f"http://127.0.0.1:{server.port}")
        post(client)
        call(client)
        call(client)
        post(client)
        assert served_by == [1, 2, 3, 1]


def test_the_era_is_found_without_a_call():
    """`tools/list`, stateless, with an id of its own or the caller's; no tool is named."""
    requests = []
    client = recording(requests)
    client.discover_tools(token=None)
    client.discover_tools(token="tok-abc12345", request_id="r-7")
    first, second = (json.loads(request.content) for request in requests)
    assert first["method"] == second["method"] == "tools/list"
    assert first["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    assert second["id"] == "r-7" != first["id"]
    assert requests[0].headers["mcp-method"] == "tools/list"
    assert not {"mcp-name", "idempotency-key", "authorization"} & set(requests[0].headers)


def test_a_call_has_the_longer_limit(connect, call):
    """`mcp_timeout_ms` bounds a call where the request's own limit would have ended it."""
    release = threading.Event()

    def slow(connection):
        read_http_request(connection)
        release.wait(0.3)
        connection.sendall(http_response(200, b'{"jsonrpc":"2.0","id":"r-1","result":{}}'))

    with thread_server(slow) as server:
        client = connect(f"http://127.0.0.1:{server.port}", request_timeout_ms=50, mcp_timeout_ms=60_000)
        assert call(client)[1].sort is Sort.ACCEPTED
        assert call(client, timeout_ms=50)[0].failure is Failure.LOST
        release.set()
