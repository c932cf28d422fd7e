"""Over TLS and through proxies, and every layer of the two together."""

import ssl
import threading
from pathlib import Path

import pytest
from peers import http_response, read_http_request, thread_server, tunnelling_proxy

from relay_client import Failure, RelayClient

FILES = Path(__file__).parents[1] / "cases" / "tls"
CA, SERVER = str(FILES / "ca.pem"), str(FILES / "server.pem")


@pytest.fixture
def tls():
    """The server's end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(SERVER)
    return context


@pytest.fixture
def proxied(monkeypatch):
    """Makes clients that take their proxy from the environment, and closes them."""
    clients = []

    def make(url, variable, proxy):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.setenv(variable, proxy)
        clients.append(RelayClient(url, ca_file=CA))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def echo(connection):
    """A relay that answers with what it got."""
    while request := read_http_request(connection):
        connection.sendall(http_response(200, request[1]))


def test_https(connect, post, tls):
    """A certificate of our own authority is trusted, by name and by address; the connection is kept."""
    with thread_server(echo, tls=tls) as server:
        for host in ("localhost", "127.0.0.1"):
            client = connect(f"https://{host}:{server.port}", ca_file=CA)
            for body in (b'"first"', b'"' + b"x" * 300_000 + b'"'):
                answer = post(client, body)
                assert (answer.status, answer.body, answer.detail) == (200, body, "")
            client.close()
            assert not client._transport._sockets._live
        assert server.connections == 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_new_connection_goes_on_with_the_session_of_the_last(connect, post, tls, version):
    """After a pause there is a new connection, and no new proof of who the relay is."""
    reused = []

    def noting(connection):
        reused.append(connection.session_reused)
        echo(connection)

    tls.maximum_version = version
    with thread_server(noting, tls=tls) as server:
        client = connect(f"https://localhost:{server.port}", ca_file=CA)
        for _ in range(3):
            assert post(client).status == 200
            client.close_idle()
    assert reused == [False, True, True]


def test_an_untrusted_certificate_is_unreachable(connect, post, tls):
    """Nothing is sent to a server that cannot show who it is; the words say why."""
    with thread_server(echo, tls=tls) as server:
        answer = post(connect(f"https://localhost:{server.port}"))
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert answer.detail.startswith("the certificate is not trusted: ")


def test_a_certificate_for_another_name_is_unreachable(connect, post, tls):
    """The right authority is not enough."""
    with thread_server(echo, tls=tls, host="127.0.0.2") as server:
        answer = post(connect(f"https://127.0.0.2:{server.port}", ca_file=CA))
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert "127.0.0.2" in answer.detail


def test_a_relay_without_tls_is_unreachable_over_https(connect, post):
    """A handshake that meets something else: not a byte of the request left."""
    with thread_server(lambda connection: connection.sendall(b"SSH-2.0-x\r\n")) as server:
        answer = post(connect(f"https://127.0.0.1:{server.port}", ca_file=CA))
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert answer.detail.startswith("TLS: ")


def test_a_handshake_that_hangs_is_bounded(connect, post):
    """The one limit holds for the handshake too, and nothing was sent."""
    done = threading.Event()
    with thread_server(lambda _connection: done.wait(30)) as server:
        answer = post(connect(f"https://127.0.0.1:{server.port}", ca_file=CA), timeout_ms=100)
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        done.set()


def test_a_connection_cut_under_tls_is_lost(connect, post, tls):
    """Without an end of the body nobody can tell, TLS or not."""

    def cut(connection):
        read_http_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

    with thread_server(cut, tls=tls) as server:
        answer = post(connect(f"https://127.0.0.1:{server.port}", ca_file=CA))
        assert (answer.failure, answer.sent) == (Failure.LOST, True)


def test_a_write_that_fails_under_tls_may_have_sent(connect, post, tls, monkeypatch):
    """A record may be on its way although an error is reported: only silence before it is certain."""

    def fail(_socket, _data):
        raise BrokenPipeError(32, "Broken pipe")

    done = threading.Event()
    with thread_server(lambda _connection: done.wait(0.2), tls=tls) as server:
        monkeypatch.setattr(ssl.SSLSocket, "send", fail)
        answer = post(connect(f"https://127.0.0.1:{server.port}", ca_file=CA))
        assert (answer.failure, answer.sent) == (Failure.LOST, True)


@pytest.mark.parametrize("stage", ["handshake", "answer"])
def test_abort_under_tls(connect, post, tls, stage):
    """A read blocked in the middle of TLS ends at once."""
    blocked, done = threading.Event(), threading.Event()

    def hang(connection):
        if stage == "answer":
            read_http_request(connection)
        blocked.set()
        done.wait(30)

    with thread_server(hang, tls=tls if stage == "answer" else None) as server:
        client = connect(f"https://127.0.0.1:{server.port}", ca_file=CA)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(client)))
        thread.start()
        assert blocked.wait(10)
        client.abort()
        thread.join(10)
        assert [(answer.failure, answer.sent) for answer in answers] == [(Failure.STOPPED, stage == "answer")]
        done.set()


def test_a_client_certificate(connect, post, tls):
    """A relay that asks who we are gets an answer."""
    tls.load_verify_locations(CA)
    tls.verify_mode = ssl.CERT_REQUIRED
    with thread_server(echo, tls=tls) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert post(connect(url, ca_file=CA, client_cert=SERVER)).status == 200
        assert post(connect(url, ca_file=CA)).status is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ca_file": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
        ({"ca_file": __file__}, "test_client_tls.py"),
        ({"ca_file": CA, "client_cert": "/nowhere/cert.pem"}, "/nowhere/cert.pem"),
        ({"ca_file": CA, "client_cert": CA}, "ca.pem"),
        ({"ca_file": CA, "client_cert": SERVER, "client_key": CA}, "ca.pem"),
    ],
)
def test_unusable_files_are_refused_in_one_line(options, named):
    """At once, with the file's name."""
    with pytest.raises(ValueError, match=named) as refused:
        RelayClient("https://relay.example", trust_env=False, **options)
    assert "\n" not in str(refused.value)


def test_an_http_relay_through_a_proxy(proxied, post):
    """The proxy gets the whole URL and its own credentials; the relay's token goes along."""
    heads = []

    def proxy(connection):
        while request := read_http_request(connection):
            heads.append(request[0].decode())
            connection.sendall(http_response())

    with thread_server(proxy) as server:
        client = proxied(
            "http://relay.invalid:4850/base", "HTTP_PROXY", f"http://us%40r:p@127.0.0.1:{server.port}"
        )
        assert post(client).status == 200
        assert post(client).status == 200
        assert server.connections == 1
    assert heads[0].startswith("POST http://relay.invalid:4850/base/api/messages HTTP/1.1\r\n")
    assert "\r\nHost: relay.invalid:4850\r\n" in heads[0]
    assert "\r\nProxy-Authorization: Basic dXNAcjpw\r\n" in heads[0]


@pytest.mark.parametrize("proxy_scheme", ["http", "https"])
def test_an_https_relay_through_a_proxy(proxied, post, tls, proxy_scheme):
    """A tunnel, in the clear or under TLS itself: the proxy sees neither the token nor the event."""
    asked = []
    proxy_tls = tls if proxy_scheme == "https" else None
    with (
        thread_server(echo, tls=tls) as relay,
        thread_server(tunnelling_proxy(asked), tls=proxy_tls) as proxy,
    ):
        client = proxied(
            f"https://localhost:{relay.port}", "HTTPS_PROXY", f"{proxy_scheme}://us:er@localhost:{proxy.port}"
        )
        for body in (b'"first"', b'"' + b"x" * 300_000 + b'"'):
            answer = post(client, body)
            assert (answer.status, answer.body, answer.detail) == (200, body, "")
        assert (relay.connections, proxy.connections) == (1, 1)
    [head] = asked
    assert head.startswith(f"CONNECT localhost:{relay.port} HTTP/1.1\r\n")
    assert "Proxy-Authorization: Basic dXM6ZXI=" in head
    assert "tok-" not in head


def test_an_http_relay_through_a_proxy_under_tls(proxied, post, tls):
    """The first layer is the proxy's: a byte on it is a byte of the request."""
    with thread_server(echo, tls=tls) as proxy:
        client = proxied("http://relay.invalid:4850", "HTTP_PROXY", f"https://localhost:{proxy.port}")
        assert post(client, b'"x"').body == b'"x"'


@pytest.mark.parametrize("proxy_scheme", ["http", "https"])
def test_a_refused_tunnel_sent_nothing(proxied, post, tls, proxy_scheme):
    """What the proxy got was no byte of the request."""
    refusing = tunnelling_proxy([], refuse_with=b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
    with thread_server(refusing, tls=tls if proxy_scheme == "https" else None) as proxy:
        client = proxied("https://relay.invalid", "HTTPS_PROXY", f"{proxy_scheme}://localhost:{proxy.port}")
        answer = post(client)
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert answer.detail == f"the proxy localhost:{proxy.port} answered 403"


def test_a_tunnel_to_an_untrusted_relay_sent_nothing(proxied, post, tls):
    """The relay's certificate is looked at inside the tunnel too, for the relay's name."""
    with (
        thread_server(echo, tls=tls, host="127.0.0.2") as relay,
        thread_server(tunnelling_proxy([])) as proxy,
    ):
        client = proxied(f"https://127.0.0.2:{relay.port}", "HTTPS_PROXY", f"http://localhost:{proxy.port}")
        answer = post(client)
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)
        assert "certificate" in answer.detail


def test_a_proxy_that_answers_with_noise(proxied, post):
    """No tunnel, nothing sent."""
    with thread_server(lambda connection: connection.sendall(b"SSH-2.0-x\r\n")) as proxy:
        answer = post(proxied("https://relay.invalid", "HTTPS_PROXY", f"http://localhost:{proxy.port}"))
        assert (answer.failure, answer.sent) == (Failure.UNREACHABLE, False)


def test_a_cut_inside_nested_tls_is_lost(proxied, post, tls):
    """The relay's end of the inner layer is the end of the answer."""

    def cut(connection):
        read_http_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

    with thread_server(cut, tls=tls) as relay, thread_server(tunnelling_proxy([]), tls=tls) as proxy:
        client = proxied(f"https://localhost:{relay.port}", "HTTPS_PROXY", f"https://localhost:{proxy.port}")
        answer = post(client)
        assert (answer.failure, answer.sent) == (Failure.LOST, True)
