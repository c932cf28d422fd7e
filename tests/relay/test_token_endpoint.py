"""A token endpoint over the network: TLS and proxies as for the relay itself, limits, and a clean end."""

import ssl
import threading
import time
from pathlib import Path

import pytest
from peers import http_response, read_http_request, thread_server, tunnelling_proxy
from processes import wait_for
from token_peer import token_peer

from relay_client import Grant, OAuthClient, OAuthTokens, TokenEndpoint, TokenUnavailable

FILES = Path(__file__).parents[1] / "cases" / "tls"
CA, SERVER = str(FILES / "ca.pem"), str(FILES / "server.pem")
TOKEN = b'{"access_token": "tok-1"}'


@pytest.fixture
def minted():
    """Asks an endpoint for a token, and closes it."""

    def ask(url, deadline=None, **options):
        tokens = OAuthTokens(TokenEndpoint(url, **options), OAuthClient("c"))
        try:
            return tokens.mint("", deadline=deadline)
        finally:
            tokens.close()

    return ask


def give(connection):
    """A token to whoever asks."""
    while read_http_request(connection):
        connection.sendall(http_response(200, TOKEN))


def test_in_the_clear(minted):
    """As a process would ask."""
    with token_peer("tok-1") as peer:
        assert minted(peer.url, trust_env=False).token == "tok-1"
        assert peer.forms == [{"grant_type": "client_credentials", "client_id": "c"}]


def test_over_tls_and_through_a_proxy(minted, monkeypatch):
    """The relay's own authority is trusted; nothing is sent to a server that cannot show who it is."""
    tls, asked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), []
    tls.load_cert_chain(SERVER)
    for name in ("HTTP_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with thread_server(give, tls=tls) as server, thread_server(tunnelling_proxy(asked)) as proxy:
        url = f"https://localhost:{server.port}/token?key=s3cret"
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        assert minted(url, ca_file=CA) == Grant("tok-1")
        assert asked[0].startswith(f"CONNECT localhost:{server.port} ")
        with pytest.raises(TokenUnavailable, match="the certificate is not trusted") as unavailable:
            minted(url, trust_env=False)
        assert "s3cret" not in str(unavailable.value)


def test_a_redirect_is_not_followed(minted):
    """The client's secret goes nowhere else."""

    def redirect(connection):
        while read_http_request(connection):
            connection.sendall(http_response(307, b"", "location: http://127.0.0.1:9/"))

    with thread_server(redirect) as server, pytest.raises(TokenUnavailable, match="answers 307"):
        minted(f"http://127.0.0.1:{server.port}/token", trust_env=False)


def test_an_endless_answer_is_cut(minted):
    """More than 64 KiB are read by nobody, and hold no token."""

    def endless(connection):
        read_http_request(connection)
        connection.sendall(http_response(200, TOKEN[:-1] + b" " * 100_000 + b"}"))

    with thread_server(endless) as server, pytest.raises(TokenUnavailable, match="no token in it"):
        minted(f"http://127.0.0.1:{server.port}/token", trust_env=False)


def test_one_that_hangs_is_left_at_the_deadline_or_by_abort(minted):
    """A flush that is over, or a daemon that stops, waits for nobody."""
    hung, over = threading.Event(), threading.Event()

    def hang(connection):
        read_http_request(connection)
        hung.set()
        over.wait(60)

    with thread_server(hang) as server:
        url = f"http://127.0.0.1:{server.port}/token"
        try:
            with pytest.raises(TokenUnavailable, match="does not answer"):
                minted(url, deadline=time.monotonic() + 0.2, trust_env=False)
            hung.clear()
            endpoint, said = TokenEndpoint(url, trust_env=False), []

            def ask():
                try:
                    endpoint.run(OAuthTokens(endpoint, OAuthClient("c")).exchange())
                except TokenUnavailable as unavailable:
                    said.append(str(unavailable))

            asking = threading.Thread(target=ask)
            asking.start()
            wait_for(hung.is_set)
            endpoint.abort()
            asking.join(30)
            assert len(said) == 1
            endpoint.close()
        finally:
            over.set()


def test_an_address_that_cannot_be_used():
    """One line that says why, without its query."""
    with pytest.raises(ValueError, match="is no address of a token endpoint") as refused:
        TokenEndpoint("http://login.test/token?key=s3cret\n")
    assert "s3cret" not in str(refused.value)
