"""The local HTTP by TCP: only when asked for, on loopback, with a token, and for no web page."""

import http.client
import json
import stat

import pytest
from processes import DaemonProcess, outbox_command, put, wait_for

from relay_client.reference.process import RelayProcess

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there
ON_LOOPBACK = ["--http", "127.0.0.1:0"]


def asked(address, method="GET", path="/v1/status", body=None, **fields):
    """The status, the headers and the body of one answer."""
    connection = http.client.HTTPConnection(address, timeout=30)
    named = {name.replace("_", "-"): text for name, text in fields.items()}
    try:
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon that made its own token."""
    state = tmp_path_factory.mktemp("tcp") / "state"
    with DaemonProcess(state, NOBODY, {"daemon.flush_timeout_s": "0.1"}, flags=ON_LOOPBACK) as daemon:
        yield daemon


@pytest.fixture
def address(daemon):
    """Where it listens."""
    return daemon.said("serving")[-1]["http"]


@pytest.fixture
def bearer(daemon):
    """The header with its token."""
    return f"Bearer {(daemon.state.path / 'http-token').read_text().strip()}"


def test_nobody_asked_for_it(tmp_path):
    """Without the flag or the setting nothing listens, and no token is made."""
    with DaemonProcess(tmp_path / "state", NOBODY) as daemon:
        assert "http" not in daemon.said("serving")[-1]
        assert not (tmp_path / "state" / "http-token").exists()


def test_the_token_that_is_made(daemon, address, bearer):
    """0600, long, the same after a restart, in no log line; with it everything is served."""
    file = daemon.state.path / "http-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text().strip()) >= 32
    assert asked(address, Authorization=bearer)[0] == 200
    assert file.read_text().strip() not in daemon.log.read_text("utf-8")


@pytest.mark.parametrize("given", [None, "Bearer ", "Bearer other", "Basic dTpw", "bearer", "Bearer \xe4"])
def test_without_the_token(address, given):
    """401 for everything but /livez, with what is missing; nothing is said of the agents."""
    fields = {} if given is None else {"Authorization": given}
    for path in ("/v1/status", "/readyz", "/metrics", "/v1/nothing"):
        status, headers, body = asked(address, path=path, **fields)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(body)["code"] == "no_token"
    assert asked(address, path="/livez", **fields)[0] == 200


@pytest.mark.parametrize(
    "host", ["relay.example", "relay.example:80", "127.0.0.1.example", "localhost.x", ""]
)
def test_a_name_that_was_pointed_here(address, bearer, host):
    """DNS rebinding: the page's own name in Host is refused, with the token too."""
    status, _, body = asked(address, Host=host, Authorization=bearer)
    assert (status, json.loads(body)["code"]) == (403, "foreign_host")


@pytest.mark.parametrize("host", ["localhost:7", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_names_of_loopback(address, bearer, host):
    """Whatever this host may be called."""
    assert asked(address, Host=host, Authorization=bearer)[0] == 200


PAGES = [
    {"Origin": "http://page.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Sec_Fetch_Site": "same-site"},
]


@pytest.mark.parametrize("fields", PAGES)
def test_a_web_page_of_somebody_else(address, bearer, fields):
    """CSRF: refused with the token too, on /livez too, and no answer allows it to be read."""
    for path in ("/v1/status", "/livez"):
        status, headers, body = asked(address, path=path, Authorization=bearer, **fields)
        assert (status, json.loads(body)["code"]) == (403, "foreign_origin")
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_preflight_gets_no_leave(address, bearer):
    """OPTIONS is no method here."""
    status, headers, _ = asked(address, "OPTIONS", Authorization=bearer)
    assert status == 405
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_events_by_tcp(daemon, address, bearer):
    """The same calls as on the socket."""
    body = json.dumps({"kind": "insight", "payload": {}})
    fields = {"Authorization": bearer, "Content_Type": "application/json"}
    status, _, answer = asked(address, "POST", "/v1/agents/tcp/events", body, **fields)
    assert (status, json.loads(answer)["seq"]) == (200, 1)


NOT_ADMITTED = [
    ({"Authorization": "Bearer other"}, 401),
    ({"Authorization": ""}, 401),
    ({"Host": "relay.example"}, 403),
    *((fields, 403) for fields in PAGES),
]


@pytest.mark.parametrize(("fields", "refused"), NOT_ADMITTED)
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
def test_an_event_that_is_not_admitted(daemon, address, bearer, content_type, fields, refused):
    """Refused before anything is stored, however quickly a plain event is served to others."""
    body = json.dumps({"kind": "insight", "payload": {}})
    given = {"Authorization": bearer, "Content_Type": content_type, **fields}
    assert asked(address, "POST", "/v1/agents/nobody/events", body, **given)[0] == refused
    assert daemon.ask("GET", "/v1/agents/nobody/events")[0] == 404


def test_a_token_file_is_read_again(tmp_path):
    """A rotated token counts at once, the old one no more."""
    file = tmp_path / "token"
    file.write_text("first\n")
    given = {"daemon.http_token_file": str(file)}
    with DaemonProcess(tmp_path / "state", NOBODY, given, flags=ON_LOOPBACK) as daemon:
        address = daemon.said("serving")[-1]["http"]
        assert asked(address, Authorization="Bearer first")[0] == 200
        file.write_text("second\n")
        assert asked(address, Authorization="Bearer first")[0] == 401
        assert asked(address, Authorization="Bearer second")[0] == 200


REFUSED = [
    (["--http", "0.0.0.0:0"], {}, "http_allow_remote"),
    (["--http", "[::]:0"], {}, "http_allow_remote"),
    (["--http", "4860"], {}, "HOST:PORT"),
    (["--http", "::1:4860"], {}, "HOST:PORT"),
    (["--http", "no-such-host.invalid:1"], {}, "not known"),
    (ON_LOOPBACK, {"daemon.http_token_file": "/no/such/file"}, "http_token_file"),
]


@pytest.mark.parametrize(("flags", "given", "word"), REFUSED)
def test_what_cannot_be_served(tmp_path, flags, given, word):
    """The start fails with one line that names the setting; no lock is left behind."""
    daemon = DaemonProcess(tmp_path / "state", NOBODY, given, flags=flags)
    try:
        assert daemon.launch().ended() == 2
        assert word in daemon.lines()[-1]
    finally:
        daemon.end()
    assert not (tmp_path / "state" / "daemon.json").exists()


def test_a_host_that_others_reach_when_a_setting_says_so(tmp_path):
    """By its addresses, never by a name that is not its own."""
    given = {"daemon.http_allow_remote": "true", "daemon.http_token": "t"}
    with DaemonProcess(tmp_path / "state", NOBODY, given, flags=["--http", "0.0.0.0:0"]) as daemon:
        address = daemon.said("serving")[-1]["http"].replace("0.0.0.0", "127.0.0.1")
        assert asked(address, Authorization="Bearer t")[0] == 200
        assert asked(address, Host="relay.example", Authorization="Bearer t")[0] == 403


# How it is --------------------------------------------------------------------------------------------------


def values(text):
    """The samples of a scrape by their names with labels."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


NAMES = {
    *("outbox_events", "outbox_bytes", "outbox_oldest_age_seconds", "outbox_head_blocked_seconds"),
    *("outbox_accepted_total", "outbox_refused_total", "outbox_dropped_total", "outbox_dead_total"),
    *("outbox_delivery_attempts_total", "outbox_delivery_seconds", "outbox_replayed_total"),
    *("outbox_gate_state", "outbox_auth_state", "outbox_wal_bytes", "outbox_disk_free_bytes"),
    "outbox_damaged_files",
}


def test_metrics_and_readiness(tmp_path):
    """From the files, named as documented; counters survive a restart; readiness says who waits."""
    state = tmp_path / "state"
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        with DaemonProcess(state, relay.url, flags=ON_LOOPBACK) as daemon:
            daemon.ask("POST", "/v1/agents/builder/events", {"kind": "session-message", "payload": {"n": 1}})
            daemon.ask("POST", "/v1/agents/builder/events", {"kind": "no", "payload": 1})
            assert daemon.ask("POST", "/v1/flush", {"timeoutS": 20})[1]["left"] == 0
            seen = values(scrape(daemon))
            assert seen["outbox_accepted_total"] == 1
            assert seen['outbox_delivery_attempts_total{outcome="accepted"}'] == 1
            assert seen["outbox_delivery_seconds_count"] == 1
            assert seen['outbox_refused_total{reason="unknown_kind"}'] == 1
            assert seen['outbox_gate_state{state="open"}'] == 1
            status, ready = daemon.ask("GET", "/readyz")
            assert (status, ready["agents"][0]["leaves"]) == (200, True)
            text = scrape(daemon)
        named = {line.split()[2].removesuffix("_total") for line in text.splitlines() if "# TYPE" in line}
        assert named == {name.removesuffix("_total") for name in NAMES}
    put(state, "builder", 2)
    outbox_command(state, "pause", "builder")
    with DaemonProcess(state, NOBODY, flags=ON_LOOPBACK) as daemon:
        status, ready = daemon.ask("GET", "/readyz")
        (agent,) = ready["agents"]
        assert (status, ready["ready"], agent["leaves"], agent["reason"]) == (200, True, False, "paused")
        seen = values(scrape(daemon))
        assert seen["outbox_accepted_total"] == 2
        assert seen['outbox_events{state="waiting"}'] == 1
        assert seen['outbox_head_blocked_seconds{reason="paused"}'] >= 0
        outbox_command(state, "resume", "builder")
        outbox_command(state, "skip", "builder", "2")
        wait_for(lambda: values(scrape(daemon)).get('outbox_dead_total{reason="skipped"}') == 1)
        assert values(scrape(daemon))['outbox_events{state="dead"}'] == 1


def scrape(daemon):
    """What Prometheus reads."""
    token = (daemon.state.path / "http-token").read_text().strip()
    address = daemon.said("serving")[-1]["http"]
    status, headers, body = asked(address, path="/metrics", Authorization=f"Bearer {token}")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return body.decode()
