"""The relay's address, and the proxy before it: E01 to E17 of settings.json as far as a client goes."""

import httpx
import pytest
from peers import fake_relay

from relay_client import RelayClient, parse_base_url
from relay_client.proxy import Proxy, choose_proxy

DEAD_PROXY = "http://127.0.0.1:9"
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUEST_METHOD")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:4850", "http://127.0.0.1:4850/api/messages"),
        ("http://127.0.0.1:4850/", "http://127.0.0.1:4850/api/messages"),
        ("http://127.0.0.1:4850/base/path", "http://127.0.0.1:4850/base/path/api/messages"),
        ("http://127.0.0.1:4850/base//path//", "http://127.0.0.1:4850/base/path/api/messages"),
        ("HTTP://Relay.Example", "http://relay.example/api/messages"),
        (" https://relay.example:443 ", "https://relay.example/api/messages"),
        ("https://relay.example:80", "https://relay.example:80/api/messages"),
        ("http://[::1]:4850", "http://[::1]:4850/api/messages"),
        ("http://b\u00fcro.example", "http://xn--bro-hoa.example/api/messages"),
    ],
)
def test_an_address_joins_with_paths(text, url):
    """Any case of the scheme, a prefix, IPv6, and never two slashes in a row."""
    assert parse_base_url(text).url("/api/messages") == url
    assert httpx.URL(url)


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:4850",
        "localhost:4850",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1:http",
        "",
        "  ",
        "ftp://127.0.0.1:4850",
        "http:127.0.0.1",
        "http://",
        "http:///base",
        "http://[::1",
        "http://relay.example?x=1",
        "http://relay.example/#a",
        "http://relay example",
        "http://a\nb",
    ],
)
def test_what_is_no_address_is_refused_in_one_line(text):
    """The message shows the value."""
    with pytest.raises(ValueError, match="address") as refused:
        parse_base_url(text)
    message = str(refused.value)
    assert "\n" not in message
    assert repr(text.strip()) in message or not text.strip()


def test_credentials_in_an_address_are_refused_and_not_shown():
    """The token belongs into its own setting, and a message is no place for it either."""
    with pytest.raises(ValueError, match=r"//\*\*\*@relay.example") as refused:
        parse_base_url("http://user:hunter2@relay.example")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"NO_PROXY": "localhost,127.0.0.1,::1,[::1]"},
        {"NO_PROXY": "127.0.0.1,fd00:aaaa::/32"},
        {
            "HTTP_PROXY": DEAD_PROXY,
            "http_proxy": DEAD_PROXY,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        },
        {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"},
        {"HTTP_PROXY": DEAD_PROXY, "NO_PROXY": "127.0.0.0/8"},
        {"HTTPS_PROXY": DEAD_PROXY},
        {"HTTP_PROXY": ""},
    ],
    ids=["E01", "E02", "E03", "E04", "network", "other scheme", "empty"],
)
def test_proxy_variables_that_except_the_relay_do_no_harm(monkeypatch, post, environment):
    """E01 to E04: the relay is reached directly, whatever the list looks like or the proxy is."""
    _set_environment(monkeypatch, environment)
    with fake_relay(case="H21") as relay:
        client = RelayClient(relay.url)
        assert post(client).status == 202
        client.close()


def test_a_proxy_variable_is_honoured_unless_told_otherwise(monkeypatch, post):
    """A dead proxy in the way makes the relay unreachable; `trust_env = false` goes around it."""
    _set_environment(monkeypatch, {"HTTP_PROXY": DEAD_PROXY})
    with fake_relay(case="H21") as relay:
        for trust_env, status in ((True, None), (False, 202)):
            client = RelayClient(relay.url, trust_env=trust_env)
            assert post(client).status == status
            client.close()


@pytest.mark.parametrize(
    "proxies",
    [
        {"all": "socks5://user:hunter2@proxy.example:1080"},
        {"http": "socks5h://user:hunter2@proxy.example:1080"},
        {"http": "ftp://hunter2@proxy.example:1080"},
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_in_one_line(proxies):
    """It names the proxy without its password, and what to do."""
    with pytest.raises(ValueError, match=r"proxy\.example:1080.*NO_PROXY.*trust_env") as refused:
        choose_proxy(parse_base_url("http://relay.example"), proxies)
    assert "hunter2" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("named", ["http://", "http://proxy.example:99999", "http://[::1"])
def test_a_proxy_without_an_address_is_refused(named):
    """A value that cannot be read is no reason for a traceback, nor to go around the proxy."""
    with pytest.raises(ValueError, match="is no address"):
        choose_proxy(parse_base_url("http://relay.example"), {"http": named})


@pytest.mark.parametrize(
    ("named", "proxy"),
    [
        ("http://proxy.example:3128", Proxy("http", "proxy.example", 3128)),
        ("proxy.example:3128", Proxy("http", "proxy.example", 3128)),
        ("https://proxy.example", Proxy("https", "proxy.example", 443)),
        ("http://us%40r:p%3Aw@[::1]:8080", Proxy("http", "::1", 8080, ("us@r", "p:w"))),
    ],
)
def test_a_proxys_address(named, proxy):
    """With or without scheme, port and credentials."""
    assert choose_proxy(parse_base_url("http://relay.example"), {"http": named}) == proxy


@pytest.mark.parametrize(
    ("url", "no_proxy", "excepted"),
    [
        ("http://relay.example", "", False),
        ("http://relay.example", "*", True),
        ("http://relay.example", "example", True),
        ("http://relay.example", ".example", True),
        ("http://relay.example", "xample", False),
        ("http://relay.example:8080", "relay.example:8080", True),
        ("http://relay.example:8080", "relay.example:9090", False),
        ("http://10.1.2.3", "10.1.0.0/16", True),
        ("http://10.2.2.3", "10.1.0.0/16", False),
        ("http://10.2.2.3", "10.1.0.0/99, nonsense/8", False),
        ("http://[fd00::1]:80", "fd00::/8", True),
        ("http://[::1]:4850", "::1", True),
        ("http://[::1]:4850", "[::1]", True),
        ("http://[::1]:4850", "127.0.0.0/8", False),
    ],
)
def test_exceptions_from_the_proxy(url, no_proxy, excepted):
    """Names, their endings, ports, addresses and networks of both families."""
    proxy = choose_proxy(parse_base_url(url), {"http": DEAD_PROXY, "no": no_proxy})
    assert (proxy is None) is excepted


def test_localhost_may_have_an_address_where_nothing_listens(connect, post):
    """E05: the IPv6 address comes first and refuses; the next one is tried within the same attempt."""
    with fake_relay(case="H21") as relay:
        assert post(connect(f"http://localhost:{relay.port}")).status == 202


def test_ipv6(connect, post):
    """E17: an address in brackets."""
    with fake_relay(case="H21", host="::1") as relay:
        assert post(connect(relay.url)).status == 202


def _set_environment(monkeypatch, environment):
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
