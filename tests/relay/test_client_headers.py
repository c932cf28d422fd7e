"""What a delivery carries: the contract's table, looked at as the transport gets it."""

import re
import string

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_client import Origin, RelayClient, decode_agent, encode_agent
from relay_client.headers import encode_key, next_traceparent

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder(httpx.MockTransport):
    """Keeps the requests and answers each with 201."""

    def __init__(self, response=None):
        super().__init__(self._answer)
        self.requests = []
        self._response = response

    def _answer(self, request):
        self.requests.append(request)
        return self._response or httpx.Response(201, json={"ok": True})

    @property
    def only(self):
        """The one request that was made."""
        [request] = self.requests
        return request


def client(transport, **options):
    """A client over `transport` whose random bytes are all the same."""
    return RelayClient(
        "http://relay.example/base",
        transport=transport,
        **{"random_bytes": lambda size: b"\xab" * size, "user_agent": "relay-outbox/1.2.3", **options},
    )


def test_an_event_carries_the_whole_table(post):
    """Every row of the contract's table, and nothing that names a cookie or packs the answer."""
    recorder = Recorder()
    origin = Origin("b\u00fcro 7%", "0198-uuid", seq=41, attempt=3, traceparent=TRACE, tracestate="a=1,b=2")
    answer = post(client(recorder), b'{"n": 1}', origin=origin, key="k-1")
    assert (answer.status, answer.body, answer.failure, answer.sent) == (201, b'{"ok":true}', None, True)
    assert (recorder.only.method, str(recorder.only.url)) == (
        "POST",
        "http://relay.example/base/api/messages",
    )
    assert recorder.only.content == b'{"n": 1}'
    assert dict(recorder.only.headers) == {
        "host": "relay.example",
        "user-agent": "relay-outbox/1.2.3",
        "accept-encoding": "identity",
        "accept": "application/json",
        "content-type": "application/json",
        "content-length": "8",
        "authorization": "Bearer tok-abc12345",
        "idempotency-key": '"k-1"',
        "outbox-agent": "b%C3%BCro%207%25",
        "outbox-stream": "0198-uuid",
        "outbox-seq": "41",
        "outbox-attempt": "3",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-abababababababab-01",
        "tracestate": "a=1,b=2",
    }


def test_no_key_no_token_no_trace(post):
    """A request of several events has no key header; without a token there is no Authorization."""
    recorder = Recorder()
    post(client(recorder), token=None, key=None)
    absent = {"idempotency-key", "authorization", "traceparent", "tracestate", "cookie"}
    assert not absent & set(recorder.only.headers)


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("quoted", "k-1", '"k-1"'),
        ("quoted", 'a"b\\c', r'"a\"b\\c"'),
        ("bare", 'a"b', 'a"b'),
        ("off", "k-1", None),
        ("quoted", "k\u00e9", None),
        ("bare", "a\r\nb: c", None),
    ],
)
def test_the_key_as_a_header(form, key, value):
    """A structured-field string with its escapes, as it is, or not at all; never a broken header."""
    assert encode_key(key, form) == value


def test_the_form_of_the_key_header_is_a_setting(post):
    """`idempotency_header` decides, and another word is refused."""
    recorder = Recorder()
    post(client(recorder, idempotency_header="bare"))
    assert recorder.only.headers["idempotency-key"] == "k-1"
    with pytest.raises(ValueError, match="'Quoted'"):
        client(recorder, idempotency_header="Quoted")


@given(st.text(min_size=1, max_size=200))
def test_an_agents_id_can_be_read_back(agent):
    """Any id travels as visible ASCII and comes out as it went in."""
    value = encode_agent(agent)
    assert re.fullmatch(r"[\x21-\x7e]+", value)
    assert decode_agent(value) == agent


@pytest.mark.parametrize(
    ("agent", "value"),
    [
        ("a b", "a%20b"),
        ("50%", "50%25"),
        ("%41", "%2541"),
        ("\u00e9\x00\n", "%C3%A9%00%0A"),
        ("~a+b&c=d/", "~a+b&c=d/"),
    ],
)
def test_only_what_must_be_is_encoded(agent, value):
    """Visible ASCII stays as it is, but for the percent sign."""
    assert encode_agent(agent) == value


@pytest.mark.parametrize(
    ("given_parent", "sent"),
    [
        (TRACE, "00-0af7651916cd43dd8448eb211c80319c-0102030405060708-01"),
        (TRACE[:-2] + "03", "00-0af7651916cd43dd8448eb211c80319c-0102030405060708-03"),
        ("cc" + TRACE[2:] + "-later", "00-0af7651916cd43dd8448eb211c80319c-0102030405060708-01"),
        ("cc" + TRACE[2:-2] + "ff", "00-0af7651916cd43dd8448eb211c80319c-0102030405060708-01"),
        (TRACE + "-more", None),
        ("ff" + TRACE[2:], None),
        (TRACE.upper(), None),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", None),
        ("", None),
        ("x\r\ny", None),
    ],
)
def test_the_trace_goes_on_with_a_new_span(given_parent, sent):
    """W3C Trace Context: same trace, new span; what cannot be read starts no trace."""
    assert next_traceparent(given_parent, bytes(range(1, 9))) == sent


@pytest.mark.parametrize(
    ("parent", "state"), [(TRACE, "a=1\r\nx: y"), (TRACE, "\u00e9=1"), ("nonsense", "a=1"), (None, "a=1")]
)
def test_a_tracestate_goes_only_with_a_trace_and_in_ascii(post, parent, state):
    """A producer's text never breaks the header, and means nothing without its trace."""
    recorder = Recorder()
    post(client(recorder), origin=Origin("a", "s", 1, 1, traceparent=parent, tracestate=state))
    assert "tracestate" not in recorder.only.headers
    assert "x" not in recorder.only.headers


def test_each_attempt_has_a_span_of_its_own(post, origin):
    """Span ids come from the random source, eight bytes at a time."""
    recorder = Recorder()
    spans = iter([b"\x01" * 8, b"\x02" * 8])
    relay = client(recorder, random_bytes=lambda size: next(spans)[:size])
    for attempt in (1, 2):
        post(relay, origin=Origin("a", "s", 1, attempt, traceparent=TRACE))
    parents = [request.headers["traceparent"].split("-")[2] for request in recorder.requests]
    assert parents == ["01" * 8, "02" * 8]


def test_health_asks_without_a_token():
    """Health is for anybody; the base path is kept."""
    recorder = Recorder()
    client(recorder).health()
    assert (recorder.only.method, recorder.only.url.path) == ("GET", "/base/api/health")
    assert "authorization" not in recorder.only.headers


def test_paths_are_settings():
    """Health, the spec and MCP are asked where the settings say."""
    recorder = Recorder()
    relay = client(
        recorder, paths={"health": "/up", "spec": "/openapi.json", "mcp": "/mcp", "messages": "/m"}
    )
    relay.health()
    relay.spec(token="tok-abc12345")
    relay.discover_tools(token="tok-abc12345")
    assert [request.url.path for request in recorder.requests] == [
        "/base/up",
        "/base/openapi.json",
        "/base/mcp",
    ]
    assert recorder.requests[1].headers["authorization"] == "Bearer tok-abc12345"


def test_repeated_fields_of_an_answer_are_joined(post):
    """Names are lower-case; a repeated field is one, joined by a comma."""
    response = httpx.Response(
        429, headers=[("Retry-After", "5"), ("retry-after", "60"), ("X-Y", "\u00e9".encode())]
    )
    answer = post(client(Recorder(response)))
    assert answer.headers["retry-after"] == "5, 60"
    assert answer.headers["x-y"] == "\u00c3\u00a9"


def test_an_echoed_token_is_masked(post):
    """A relay that shows what it was sent brings no token into a dead letter."""
    response = httpx.Response(400, text="you sent Bearer tok-abc12345 to me")
    assert post(client(Recorder(response))).body == b"you sent Bearer [token] to me"


def test_a_token_too_short_to_tell_from_other_text_is_not_masked(post):
    """Masking "t" would only spoil the answer."""
    response = httpx.Response(400, text="not this time")
    assert post(client(Recorder(response)), token="t").body == b"not this time"


@pytest.mark.parametrize(
    ("error", "failure", "sent"),
    [
        (httpx.ConnectError("connection refused"), "unreachable", False),
        (httpx.ConnectTimeout("slow"), "unreachable", False),
        (httpx.ProxyError("the proxy answered 403"), "unreachable", False),
        (httpx.PoolTimeout("none free"), "stopped", False),
        (httpx.ReadTimeout("slow"), "lost", True),
        (httpx.ReadError("reset"), "lost", True),
        (httpx.WriteError("reset"), "lost", True),
        (httpx.RemoteProtocolError("no HTTP"), "lost", True),
    ],
)
def test_the_networks_errors_become_answers(post, error, failure, sent):
    """Nothing raises; the error's type says whether anything was sent."""

    def fail(_request):
        raise error

    answer = post(client(httpx.MockTransport(fail)))
    assert (answer.status, answer.failure, answer.sent) == (None, failure, sent)
    assert answer.detail == str(error)


def test_the_default_user_agent_names_the_version(post):
    """`relay-outbox/VERSION`, as it is installed."""
    recorder = Recorder()
    relay = RelayClient("http://relay.example", transport=recorder)
    post(relay)
    name, _, number = recorder.only.headers["user-agent"].partition("/")
    assert name == "relay-outbox"
    assert number[0] in string.digits
