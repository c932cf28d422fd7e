"""An MCP endpoint in both eras: how it is found out, sessions, what is mended, and that threads share it."""

import json
import math
import threading
import time

import httpx
import pytest

from relay_client import (
    Failure,
    McpEndpoint,
    Origin,
    RelayClient,
    Sort,
    mcp_endpoint,
    read_preparation,
    read_tool_call,
)

ORIGIN = Origin("builder", "5f0c9a52-6c1e-7b1a-8a53-0d2f4b6c8e10", seq=7, attempt=1)
PARAMS = b'{"name":"move","arguments":{"n":0,"where":"here"}}'
DONE = {"content": [], "isError": False}
MARKED = {"properties": {"where": {"type": "string", "x-mcp-header": "Where"}}}


def rpc(message, *, status=200, result=None, error=None, **headers):
    """A JSON-RPC answer to a request."""
    said = {"result": result} if error is None else {"error": {"code": error[0], "message": "no", **error[1]}}
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"jsonrpc": "2.0", "id": message.get("id"), **said}
    return httpx.Response(status, json=body, headers=fields)


class Server:
    """An endpoint in this process. `overrides` maps a method to what answers in place of the usual."""

    def __init__(self, era="stateless", tools=()):
        self.era, self.tools = era, list(tools)
        self.overrides, self.asked, self.sessions = {}, [], {}
        self._mutex = threading.Lock()

    def __call__(self, request):
        """Answer one request."""
        message = json.loads(request.content)
        with self._mutex:
            self.asked.append((message, request.headers))
        if (override := self.overrides.get(message["method"])) is not None:
            answer = override(message) if callable(override) else override
            if answer is not None:
                return answer
        stateless = request.headers.get("mcp-protocol-version") == "2026-07-28"
        if self.era == "stateless":
            return self._stateless(message) if stateless else rpc(message, status=400, error=(-32022, {}))
        if stateless:
            return rpc(message, status=400, error=(-32600, {}))
        return self._in_session(message, request)

    def _stateless(self, message):
        if message["method"] == "tools/list":
            return rpc(message, result={"tools": self.tools})
        return rpc(message, result=DONE)

    def _in_session(self, message, request):
        token = request.headers.get("authorization")
        if message["method"] == "initialize":
            with self._mutex:
                name = f"s-{len(self.sessions)}"
                self.sessions[name] = token
            return rpc(message, result={"protocolVersion": "2025-06-18"}, mcp_session_id=name)
        if self.sessions.get(request.headers.get("mcp-session-id")) != token:
            return rpc(message, status=404, error=(-32001, {}))
        return rpc(message, result=DONE) if "id" in message else httpx.Response(202)

    def methods(self):
        """What was asked for, in order."""
        return [message["method"] for message, _ in self.asked]

    def calls(self):
        """The calls, with their header fields."""
        return [(m, headers) for m, headers in self.asked if m["method"] == "tools/call"]


def endpoint_of(server):
    """An endpoint that this server is."""
    return McpEndpoint(RelayClient("http://relay.example", transport=httpx.MockTransport(server)))


def call(endpoint, *, tool="move", token="tok-0123456789", key="k-1", **options):
    """Call a tool: the reading, and the answer."""
    answer = endpoint.call(PARAMS, tool=tool, token=token, key=key, origin=ORIGIN, **options)
    read = read_preparation if answer.is_preparation else by_its_id
    return read(answer, now_ms=0, max_retry_after_ms=60_000), answer


def by_its_id(answer, **options):
    """The reading of a call's answer."""
    return read_tool_call(answer, answer.request_id, **options)


SESSION = ["tools/list", "initialize", "notifications/initialized"]


@pytest.mark.parametrize(("era", "first"), [("stateless", ["tools/list"]), ("sessions", SESSION)])
def test_the_era_is_found_out_once(era, first):
    """By a request that repeats nothing; remembered for all calls after it."""
    server = Server(era)
    endpoint = endpoint_of(server)
    assert endpoint.prepare("move", token="tok-0123456789") is None
    assert server.methods() == first
    assert [call(endpoint)[0].sort for _ in range(2)] == [Sort.ACCEPTED] * 2
    assert endpoint.prepare("other", token="tok-0123456789") is None
    assert server.methods() == [*first, "tools/call", "tools/call"]


def test_a_call_in_a_session_carries_the_key_and_the_stored_text():
    """The text of the call stays byte for byte; the JSON-RPC id is new each time."""
    server = Server("sessions")
    endpoint = endpoint_of(server)
    call(endpoint)
    call(endpoint)
    (first, headers), (second, _) = server.calls()
    assert first["params"] == {**json.loads(PARAMS), "_meta": {"relay-outbox/idempotencyKey": "k-1"}}
    assert first["params"] == second["params"]
    assert first["id"] != second["id"]
    assert headers["idempotency-key"] == '"k-1"'
    assert headers["mcp-protocol-version"] == "2025-06-18"


@pytest.mark.parametrize("status", [400, 404])
def test_a_session_that_is_gone_is_opened_anew_and_the_call_goes_again(status):
    """404, or 400 where it worked: once, with the same key."""
    server = Server("sessions")
    endpoint = endpoint_of(server)
    call(endpoint)
    server.sessions.clear()
    gone = []

    def end_once(message):
        gone.append(message)
        return rpc(message, status=status, error=(-32000, {})) if len(gone) == 1 else None

    server.overrides["tools/call"] = end_once
    reading, _ = call(endpoint)
    assert reading.sort is Sort.ACCEPTED
    assert server.methods()[4:] == ["tools/call", *SESSION[1:], "tools/call"]
    assert server.calls()[1][0]["params"] == server.calls()[2][0]["params"]


def test_a_session_that_ends_again_at_once_lets_the_call_wait():
    """A server that knows none of its sessions is asked twice, and no more."""
    server = Server("sessions")
    server.overrides["tools/call"] = lambda message: rpc(message, status=404, error=(-32001, {}))
    reading, _ = call(endpoint_of(server))
    assert reading.sort is Sort.NO_ENDPOINT
    assert len(server.calls()) == 2


def test_a_400_that_tells_of_the_tool_ends_no_session():
    """-32603 may have had an effect: it is not repeated, and the session stays."""
    server = Server("sessions")
    endpoint = endpoint_of(server)
    call(endpoint)
    server.overrides["tools/call"] = lambda message: rpc(message, status=400, error=(-32603, {}))
    reading, _ = call(endpoint)
    assert (reading.sort, reading.not_run) == (Sort.FAILED, False)
    assert server.methods().count("initialize") == 1


@pytest.mark.parametrize("status", [500, 502, 503, 401, 403, 429])
def test_trouble_on_the_way_to_a_new_session_is_about_no_call(status):
    """The session was gone and no other is to be had: the call certainly did not run, and waits."""
    server = Server("sessions")
    endpoint = endpoint_of(server)
    call(endpoint)
    server.sessions.clear()
    server.overrides["initialize"] = httpx.Response(status)
    reading, answer = call(endpoint)
    assert answer.status == status
    assert reading.not_run
    assert len(server.calls()) == 2


def test_a_session_belongs_to_its_token():
    """Each token has its own, also where nobody checks it; a token that comes back finds it again."""
    server = Server("sessions")
    endpoint = endpoint_of(server)
    for token in ("tok-aaaaaaaaaa", "tok-bbbbbbbbbb", "tok-aaaaaaaaaa", None):
        assert call(endpoint, token=token)[0].sort is Sort.ACCEPTED
    used = [(headers.get("authorization"), headers["mcp-session-id"]) for _, headers in server.calls()]
    assert used == [
        ("Bearer tok-aaaaaaaaaa", "s-0"),
        ("Bearer tok-bbbbbbbbbb", "s-1"),
        ("Bearer tok-aaaaaaaaaa", "s-0"),
        (None, "s-2"),
    ]


def test_a_server_that_gives_no_session_id_is_called_without():
    """The id is the server's choice."""
    server = Server("sessions")
    server.overrides["initialize"] = lambda message: rpc(message, result={"protocolVersion": "2025-03-26"})
    server.sessions[None] = "Bearer tok-0123456789"
    assert call(endpoint_of(server))[0].sort is Sort.ACCEPTED
    assert "mcp-session-id" not in server.calls()[0][1]
    assert server.calls()[0][1]["mcp-protocol-version"] == "2025-03-26"


@pytest.mark.parametrize(
    "hello",
    [
        {"result": {"protocolVersion": "1999-01-01"}},
        {"result": {"protocolVersion": "2025-06-18"}, "mcp_session_id": "two words"},
        {"result": {}},
        {"result": None},
    ],
)
def test_a_session_that_cannot_be_used_is_no_endpoint(hello):
    """An unknown revision, or an id that is none: the path waits, no call is sent."""
    server = Server("sessions")
    server.overrides["initialize"] = lambda message: rpc(message, **hello)
    reading, _ = call(endpoint_of(server))
    assert (reading.sort, reading.not_run) == (Sort.NO_ENDPOINT, True)
    assert server.calls() == []


def page(status=200, content="text/html"):
    """A page of something in between."""
    return httpx.Response(status, text="<html>Sign in", headers={"content-type": content})


@pytest.mark.parametrize(
    ("answer", "sort"),
    [
        (httpx.Response(401), Sort.UNAUTHORIZED),
        (httpx.Response(403), Sort.FORBIDDEN),
        (httpx.Response(429, headers={"retry-after": "7"}), Sort.BUSY),
        (httpx.Response(400, headers={"retry-after": "7"}), Sort.BUSY),
        (httpx.Response(503), Sort.BUSY),
        (httpx.Response(500), Sort.FAILED),
        (httpx.Response(502), Sort.GATEWAY),
        (httpx.Response(302), Sort.REDIRECTED),
        (page(), Sort.NOT_A_RELAY),
    ],
)
def test_trouble_says_nothing_of_the_era(answer, sort):
    """No session is asked for, no call is sent; what it means is the table's."""
    server = Server()
    server.overrides["tools/list"] = answer
    reading, _ = call(endpoint_of(server))
    assert (reading.sort, reading.not_run) == (sort, True)
    assert server.methods() == ["tools/list"]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404),
        httpx.Response(405),
        page(422),
        httpx.Response(200, json={"ok": True}),
        httpx.Response(202),
    ],
)
def test_what_speaks_neither_era_is_no_endpoint(answer):
    """Both are tried; the path waits, no event is refused for it."""
    server = Server()
    server.overrides |= {"tools/list": answer, "initialize": answer}
    reading, _ = call(endpoint_of(server))
    assert (reading.sort, reading.not_run) == (Sort.NO_ENDPOINT, True)
    assert server.methods() == ["tools/list", "initialize"]


def test_a_stateless_server_that_lists_nothing_is_called():
    """It understands the request and knows no `tools/list`; `initialize` it knows neither."""
    server = Server()
    server.overrides["tools/list"] = lambda message: rpc(message, status=404, error=(-32601, {}))
    assert call(endpoint_of(server))[0].sort is Sort.ACCEPTED


def test_the_revisions_in_an_answer_are_heeded():
    """-32022 stays stateless, unless those with sessions are all we share."""
    server = Server("sessions")
    data = {"data": {"supported": ["2025-11-25", "2027-01-01"], "requested": "2026-07-28"}}
    server.overrides["tools/list"] = lambda message: rpc(message, status=400, error=(-32022, data))
    assert call(endpoint_of(server))[0].sort is Sort.ACCEPTED
    modern = Server()
    later = {"data": {"supported": ["2027-01-01"], "requested": "2026-07-28"}}
    modern.overrides["tools/list"] = lambda message: rpc(message, status=400, error=(-32022, later))
    reading, _ = call(endpoint_of(modern))
    assert (reading.sort, reading.not_run) == (Sort.FAILED, True)
    assert modern.methods() == ["tools/list"]


@pytest.mark.parametrize(("before", "after"), [("stateless", "sessions"), ("sessions", "stateless")])
def test_a_server_that_changes_its_era_is_found_out_again(before, after):
    """The same call goes again in the other era, with its key."""
    server = Server(before)
    endpoint = endpoint_of(server)
    call(endpoint)
    server.era = after
    server.sessions.clear()
    reading, _ = call(endpoint)
    assert reading.sort is Sort.ACCEPTED
    keys = [message["params"]["_meta"]["relay-outbox/idempotencyKey"] for message, _ in server.calls()]
    assert keys == ["k-1"] * 3
    assert call(endpoint)[0].sort is Sort.ACCEPTED
    assert len(server.calls()) == 4


@pytest.mark.parametrize(
    ("status", "sort"), [(400, Sort.REFUSED), (413, Sort.TOO_LARGE), (404, Sort.NO_ENDPOINT)]
)
def test_a_4xx_where_the_era_holds_is_about_the_call(status, sort):
    """The endpoint is asked again and speaks as before: the call is not sent twice, and the table decides."""
    server = Server()
    server.overrides["tools/call"] = httpx.Response(status)
    reading, _ = call(endpoint_of(server))
    assert reading.sort is sort
    assert server.methods() == ["tools/list", "tools/call", "tools/list"]


def test_a_400_in_a_new_session_refuses_no_call():
    """It may be about the session, where several servers share none: the path waits, the call went once."""
    server = Server("sessions")
    server.overrides["tools/call"] = lambda message: rpc(message, status=400, error=(-32000, {}))
    reading, _ = call(endpoint_of(server))
    assert reading.sort is Sort.NO_ENDPOINT
    assert len(server.calls()) == 1


def test_arguments_are_mirrored():
    """What the tool's schema names, in the stateless era; no list is asked for twice."""
    server = Server(tools=[{"name": "move", "inputSchema": MARKED}, {"name": "plain"}])
    endpoint = endpoint_of(server)
    call(endpoint)
    call(endpoint, tool="plain", token="tok-bbbbbbbbbb")
    (_, first), (_, second) = server.calls()
    assert first["mcp-param-where"] == "here"
    assert "mcp-param-where" not in second
    assert server.methods().count("tools/list") == 1


def test_a_mismatch_of_header_fields_is_mended():
    """-32020 asks for the tools again: the call goes again where they want something else, and fails else."""
    server = Server(tools=[{"name": "move"}])
    endpoint = endpoint_of(server)
    call(endpoint)
    server.tools = [{"name": "move", "inputSchema": MARKED}]

    def checked(message):
        _, headers = server.asked[-1]
        return None if "mcp-param-where" in headers else rpc(message, status=400, error=(-32020, {}))

    server.overrides["tools/call"] = checked
    assert call(endpoint)[0].sort is Sort.ACCEPTED
    server.overrides["tools/call"] = lambda message: rpc(message, status=400, error=(-32020, {}))
    reading, _ = call(endpoint)
    assert (reading.sort, reading.not_run) == (Sort.FAILED, True)
    assert len(server.calls()) == 4


def test_tools_on_a_further_page_are_known_too():
    """All pages are asked for; one that does not come ends it without harm."""

    def paged(message):
        cursor = message["params"].get("cursor")
        if cursor == "2":
            return rpc(
                message, result={"tools": [{"name": "move", "inputSchema": MARKED}], "nextCursor": "3"}
            )
        if cursor == "3":
            return httpx.Response(500)
        return rpc(message, result={"tools": [{"name": "a"}], "nextCursor": "2"})

    server = Server()
    server.overrides["tools/list"] = paged
    assert call(endpoint_of(server))[0].sort is Sort.ACCEPTED
    assert server.calls()[0][1]["mcp-param-where"] == "here"


@pytest.mark.parametrize(("cursors", "asked"), [(["again"] * 9, 2), ([str(n) for n in range(1_000)], 100)])
def test_pages_without_an_end(cursors, asked):
    """A cursor that comes again ends the list, and so do new ones for ever; the call goes out."""
    server, following = Server(), iter(cursors)
    server.overrides["tools/list"] = lambda message: rpc(
        message, result={"tools": [{"name": "move"}], "nextCursor": next(following)}
    )
    assert call(endpoint_of(server))[0].sort is Sort.ACCEPTED
    assert server.methods() == ["tools/list"] * asked + ["tools/call"]


def test_a_list_without_an_end_takes_no_endless_room():
    """Whatever names a server makes up, and however often it is asked, so many are remembered."""
    server, numbers = Server(), iter(range(10**9))

    def more(message):
        tools = [{"name": f"tool-{next(numbers)}"} for _ in range(3_000)]
        return rpc(message, result={"tools": tools, "nextCursor": str(next(numbers))})

    server.overrides["tools/list"] = more
    endpoint = endpoint_of(server)
    for token in ("tok-aaaaaaaaaa", "tok-bbbbbbbbbb", "tok-cccccccccc"):
        assert call(endpoint, token=token)[0].sort is Sort.ACCEPTED
    assert server.methods().count("tools/list") == 12
    assert len(endpoint._mirrors) <= 12_000


def test_further_pages_have_an_end_in_time(monkeypatch):
    """Each of them late, and another one after it: the turn that asks has to end some time."""
    monkeypatch.setattr(mcp_endpoint, "_LONGEST_LIST_S", 0.2)
    server, numbers = Server(), iter(range(10**9))

    def slow(message):
        time.sleep(0.05)
        return rpc(message, result={"tools": [], "nextCursor": str(next(numbers))})

    server.overrides["tools/list"] = slow
    assert call(endpoint_of(server))[0].sort is Sort.ACCEPTED
    assert server.methods().count("tools/list") < 20


@pytest.mark.parametrize("status", [200, 405, 500])
def test_sessions_are_ended(status):
    """One `DELETE` each, with its own token, whatever the server says; the next call opens a new one."""
    server = Server("sessions")
    ended = []

    def answer(request):
        if request.method == "DELETE":
            ended.append((request.headers["authorization"], request.headers["mcp-session-id"]))
            return httpx.Response(status)
        return server(request)

    client = RelayClient("http://relay.example", transport=httpx.MockTransport(answer))
    endpoint = McpEndpoint(client)
    endpoint.close()
    for token in ("tok-aaaaaaaaaa", "tok-bbbbbbbbbb"):
        call(endpoint, token=token)
    endpoint.close()
    endpoint.close()
    assert ended == [("Bearer tok-aaaaaaaaaa", "s-0"), ("Bearer tok-bbbbbbbbbb", "s-1")]
    assert call(endpoint)[0].sort is Sort.ACCEPTED
    assert server.methods().count("initialize") == 3


def test_nobody_waits_for_the_end_of_a_session():
    """A server that is gone is asked once; after the deadline none is asked at all."""
    server, asked = Server("sessions"), []

    def answer(request):
        if request.method == "DELETE":
            asked.append(request)
            raise httpx.ConnectError("refused")
        return server(request)

    endpoint = McpEndpoint(RelayClient("http://relay.example", transport=httpx.MockTransport(answer)))
    for _ in range(2):
        for token in ("tok-aaaaaaaaaa", "tok-bbbbbbbbbb"):
            call(endpoint, token=token)
        endpoint.close(deadline=time.monotonic() if asked else None)
    assert len(asked) == 1


def test_threads_find_out_once_and_share_a_session():
    """Twenty at once: one session for each token, every call is answered."""
    server = Server("sessions")
    server.overrides["initialize"] = lambda _message: time.sleep(0.05)
    endpoint = endpoint_of(server)
    found, tokens = [], ["tok-aaaaaaaaaa", "tok-bbbbbbbbbb"]
    threads = [
        threading.Thread(target=lambda at=at: found.append(call(endpoint, token=tokens[at % 2])[0].sort))
        for at in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [Sort.ACCEPTED] * 20
    assert server.methods().count("initialize") == 2


class Waited(threading.Event):
    """Lets the test see who waits for it."""

    def __init__(self):
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout=None):
        """Wait, and say so."""
        self.waiting.release()
        return super().wait(timeout)


def test_trouble_while_finding_out_is_shared():
    """Who waited for it gets the same answer and does not ask again, or stops at its own deadline."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(_message):
        asked.set()
        go_on.wait(60)
        return httpx.Response(503)

    server = Server()
    server.overrides["tools/list"] = slow
    endpoint = endpoint_of(server)
    found = []
    threads = [threading.Thread(target=lambda: found.append(call(endpoint)[0].sort)) for _ in range(5)]
    threads[0].start()
    assert asked.wait(60)
    done = endpoint._under_way["tok-0123456789"].done = Waited()
    for thread in threads[1:]:
        thread.start()
    for _ in threads[1:]:
        assert done.waiting.acquire(timeout=60)
    endless = threading.Thread(target=lambda: found.append(call(endpoint, deadline=math.inf)[0].sort))
    endless.start()
    threads.append(endless)
    assert done.waiting.acquire(timeout=60)
    late = endpoint.prepare("move", token="tok-0123456789", deadline=time.monotonic() + 0.05)
    assert (late.failure, late.sent, late.is_preparation) == (Failure.STOPPED, False, True)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert found == [Sort.BUSY] * 6
    assert server.methods() == ["tools/list"]


def test_nobody_there_is_no_era():
    """Nothing was sent; the next one tries again."""

    def refuse(_request):
        raise httpx.ConnectError("refused")

    client = RelayClient("http://relay.example", transport=httpx.MockTransport(refuse))
    reading, answer = call(McpEndpoint(client))
    assert (reading.sort, reading.not_run, answer.sent) == (Sort.UNREACHABLE, True, False)
