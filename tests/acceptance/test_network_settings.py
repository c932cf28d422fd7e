"""Timeouts, certificates and proxies of the configuration reach the relay's client by way of `serve`."""

from __future__ import annotations

import re
import ssl
import threading
from pathlib import Path

import pytest
from peers import http_response, read_http_request, thread_server, tunnelling_proxy
from processes import DaemonProcess, outbox_command, status_of, wait_for

from outbox import Outbox

TLS = Path(__file__).parents[1] / "cases" / "tls"
CA, SERVER = str(TLS / "ca.pem"), str(TLS / "server.pem")
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_proxy_of_this_machine(monkeypatch):
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def state(tmp_path):
    """An outbox with one event in it."""
    with Outbox.open("builder", state_dir=tmp_path / "state") as outbox:
        outbox.enqueue("session-message", {"from": "builder", "body": "x"})
    return tmp_path / "state"


class Taker:
    """A relay that takes everything, and remembers how each request began and who asked."""

    def __init__(self):
        self.heads, self.peers = [], []

    def __call__(self, connection):
        """Serve one connection."""
        while request := read_http_request(connection):
            self.heads.append(request[0].decode())
            self.peers.append(isinstance(connection, ssl.SSLSocket) and connection.getpeercert())
            connection.sendall(http_response(200, b"{}"))

    def posts(self):
        """The deliveries."""
        return [head for head in self.heads if head.startswith("POST ")]


def server_tls(*, asks_for_certificate=False):
    """The relay's end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(SERVER)
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(CA)
    return context


def waits(state):
    """Whether the event still waits."""
    return bool(status_of(state, "builder").waiting)


def why(state, settings=()):
    """What `outbox why` says."""
    return outbox_command(state, "why", "builder", settings=settings).stdout.decode()


def split_pem(folder):
    """The certificate and its key in files of their own."""
    text = Path(SERVER).read_text("ascii")
    parts = re.findall(r"-----BEGIN .*?-----END [^\n]*\n", text, re.DOTALL)
    files = folder / "cert.pem", folder / "key.pem"
    for file, part in zip(files, parts, strict=True):
        file.write_text(part, "ascii")
    return map(str, files)


@pytest.mark.parametrize("apart", [False, True])
def test_a_certificate_authority_and_a_client_certificate(state, tmp_path, apart):
    """`relay.ca_file`, `client_cert`, `client_key`: the relay sees the certificate that it asks for."""
    relay = Taker()
    settings = {"relay.ca_file": CA, "relay.client_cert": SERVER}
    if apart:
        settings["relay.client_cert"], settings["relay.client_key"] = split_pem(tmp_path)
    with (
        thread_server(relay, tls=server_tls(asks_for_certificate=True)) as server,
        DaemonProcess(state, f"https://localhost:{server.port}", settings),
    ):
        wait_for(lambda: not waits(state))
    assert len(relay.posts()) == 1
    assert relay.peers[-1]["subject"] == ((("commonName", "localhost"),),)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the certificate is not trusted"),
        ({"relay.ca_file": CA}, "The relay does not answer|no whole answer"),
    ],
    ids=["untrusted", "no client certificate"],
)
def test_without_them_the_event_waits_and_why_says_so(state, settings, said):
    """Nothing is sent to a relay that is not trusted, or that does not trust us."""
    relay = Taker()
    with (
        thread_server(relay, tls=server_tls(asks_for_certificate=True)) as server,
        DaemonProcess(state, f"https://localhost:{server.port}", settings) as daemon,
    ):
        wait_for(lambda: daemon.said("gate_closed"))
        assert re.search(said, why(state))
    assert waits(state)
    assert relay.heads == []


def test_the_proxy_of_the_environment(state):
    """HTTPS_PROXY: a tunnel to the relay, the token inside it only; NO_PROXY and `trust_env` go past it."""
    relay, asked = Taker(), []
    with (
        thread_server(relay, tls=server_tls()) as server,
        thread_server(tunnelling_proxy(asked)) as proxy,
    ):
        url, way = f"https://localhost:{server.port}", {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.port}"}
        with DaemonProcess(state, url, {"relay.ca_file": CA}, environ=way):
            wait_for(lambda: not waits(state))
        assert asked[0].startswith(f"CONNECT localhost:{server.port} HTTP/1.1\r\n")
        assert "authorization" not in asked[0].lower()
        assert "authorization: bearer tok-daemon" in relay.posts()[0].lower()
        tunnels = len(asked)
        for settings, environ in (
            ({"relay.trust_env": "false"}, way),
            ({}, {**way, "NO_PROXY": "localhost"}),
        ):
            with Outbox.open("builder", state_dir=state) as outbox:
                outbox.enqueue("session-message", {"from": "builder", "body": "y"})
            with DaemonProcess(state, url, {"relay.ca_file": CA, **settings}, environ=environ):
                wait_for(lambda: not waits(state))
            assert len(asked) == tunnels
    assert len(relay.posts()) == 3


def test_a_proxy_for_plain_http(state):
    """HTTP_PROXY: the request names the whole address of the relay."""
    proxy = Taker()
    with thread_server(proxy) as server:
        environ = {"HTTP_PROXY": f"http://user:pass@127.0.0.1:{server.port}"}
        with DaemonProcess(state, "http://relay.example:4850/base", environ=environ):
            wait_for(lambda: not waits(state))
    (post,) = proxy.posts()
    assert post.startswith("POST http://relay.example:4850/base/api/messages HTTP/1.1\r\n")
    assert "proxy-authorization: basic dxnlcjpwyxnz" in post.lower()


def silent(over):
    """A relay that reads and never answers a delivery; it says that it is there."""

    def handle(connection):
        while request := read_http_request(connection):
            if request[0].startswith(b"POST "):
                over.wait(20)
                return
            connection.sendall(http_response(200, b"{}"))

    return handle


def test_how_long_a_request_may_take(state):
    """`relay.request_timeout_s`: a relay that says nothing is given up long before the default of 30 s."""
    over = threading.Event()
    with (
        thread_server(silent(over)) as server,
        DaemonProcess(state, f"http://127.0.0.1:{server.port}", {"relay.request_timeout_s": "0.3"}),
    ):
        blocked = wait_for(lambda: status_of(state, "builder").blocked)
        over.set()
    assert (blocked.reason, blocked.detail) == ("lost", "no answer in time")


def test_how_long_a_tool_call_may_take(tmp_path):
    """`mcp.timeout_s` is a time of its own: a tool that says nothing is given up before a request's 30 s."""
    over, state = threading.Event(), tmp_path / "state"
    with Outbox.open("builder", state_dir=state) as outbox:
        outbox.enqueue("mcp-tool-call", {"tool": "note", "arguments": {}})

    def handle(connection):
        while request := read_http_request(connection):
            if b"tools/call" in request[1]:
                over.wait(20)
                return
            result = b'{"jsonrpc": "2.0", "id": %b, "result": {"tools": []}}'
            found = re.search(rb'"id": ?("[^"]*")', request[1])
            connection.sendall(http_response(200, result % found[1] if found else b"{}"))

    settings = {"mcp.timeout_s": "0.3", "mcp.idempotent": "true"}
    with (
        thread_server(handle) as server,
        DaemonProcess(state, f"http://127.0.0.1:{server.port}", settings),
    ):
        blocked = wait_for(lambda: status_of(state, "builder").blocked)
        over.set()
    assert (blocked.reason, blocked.detail) == ("lost", "no answer in time")


def test_how_long_a_connection_may_take(state):
    """`relay.connect_timeout_s`: a handshake that hangs is given up; the event waits, unblamed."""
    over = threading.Event()
    with (
        thread_server(lambda _connection: over.wait(20)) as server,
        DaemonProcess(
            state,
            f"https://127.0.0.1:{server.port}",
            {"relay.ca_file": CA, "relay.connect_timeout_s": "0.3"},
        ) as daemon,
    ):
        (closed, *_) = wait_for(lambda: daemon.said("gate_closed"))
        where = f"127.0.0.1:{server.port}"
        over.set()
    assert (closed["reason"], closed["detail"]) == ("unreachable", f"no connection to {where} in time")
    assert status_of(state, "builder").head.attempts == 0
