"""What an answer with a token means, and how the exchanges that ask for one go: without a network."""

import json
import os
import threading
from urllib.parse import parse_qs

import httpx
import pytest
from token_peer import basic_of

from relay_client import (
    Grant,
    OAuthClient,
    OAuthTokens,
    RefreshTokenFile,
    RuntimeTokens,
    StaticToken,
    TokenEndpoint,
    TokenFile,
    TokenUnavailable,
)
from relay_client.token_answer import masked, read_oauth, read_printed, read_runtime

NOW_MS = 1_790_000_000_000
PLACE = "http://login.test/token"
NOBODY = httpx.MockTransport(lambda _request: pytest.fail("nobody is asked"))


def oauth(status, value, *secrets, **headers):
    """An answer of a token endpoint, read."""
    return read_oauth(httpx.Response(status, json=value, headers=headers), PLACE, secrets, now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("more", "expires_at_ms"),
    [
        ({}, None),
        ({"expires_in": 60}, NOW_MS + 60_000),
        ({"expires_in": "60"}, NOW_MS + 60_000),
        ({"expires_in": 0.5}, NOW_MS + 500),
        ({"expires_in": 0}, None),
        ({"expires_in": -1}, None),
        ({"expires_in": True}, None),
        ({"expires_in": "soon"}, None),
        ({"expires_in": 1e300}, None),
    ],
)
def test_a_grant_and_its_end(more, expires_at_ms):
    """`expires_in` is in seconds from now; what cannot be read is as good as absent."""
    grant = oauth(200, {"access_token": "tok-1", "token_type": "bearer", **more})
    assert grant == Grant("tok-1", expires_at_ms)


@pytest.mark.parametrize(
    ("status", "value", "stops"),
    [
        (400, {"error": "invalid_grant"}, True),
        (401, {"error": "invalid_client"}, True),
        (400, {"error": "invalid_scope"}, True),
        (400, {"error": "temporarily_unavailable"}, False),
        (400, {"error": "slow_down"}, False),
        (400, {}, False),
        (429, {"error": "invalid_grant"}, False),
        (500, {"error": "invalid_client"}, False),
        (503, "down", False),
        (200, {}, False),
        (200, ["access_token"], False),
        (302, {}, False),
    ],
)
def test_which_refusals_are_for_good(status, value, stops):
    """The error codes of RFC 6749 in a 400, 401 or 403; nothing that may pass."""
    with pytest.raises(TokenUnavailable, match=str(status)) as unavailable:
        oauth(status, value)
    assert unavailable.value.stops is stops


@pytest.mark.parametrize("token", ["", " ", "tok 1", "tok\n1", "tok-é", None, 7])
def test_what_no_header_can_carry_is_no_token(token):
    """It is refused without being shown."""
    with pytest.raises(TokenUnavailable) as unavailable:
        oauth(200, {"access_token": token})
    assert "tok" not in str(unavailable.value).replace(PLACE, "")


def test_a_token_of_another_type_is_not_used():
    """Nobody here can use a DPoP token, however often it is given out."""
    with pytest.raises(TokenUnavailable, match="no bearer tokens") as unavailable:
        oauth(200, {"access_token": "tok-1", "token_type": "DPoP"})
    assert unavailable.value.stops


def test_a_wait_that_is_asked_for():
    """Retry-After is kept to, up to an hour."""
    for asked, wait_ms in (("7", 7_000), ("86400", 3_600_000), ("soon", None)):
        with pytest.raises(TokenUnavailable) as unavailable:
            oauth(429, {}, **{"retry-after": asked})
        assert unavailable.value.retry_after_ms == wait_ms


def test_a_secret_that_is_thrown_back_is_masked():
    """Whatever the endpoint repeats of what it was sent."""
    with pytest.raises(TokenUnavailable) as unavailable:
        oauth(400, {"error": "invalid_client", "error_description": "no s3cret-1"}, "s3cret-1", "x")
    assert str(unavailable.value) == f"{PLACE} answers 400: invalid_client, no [secret]"
    assert masked("abcdef abcd", ["abcd", "abcdef"]) == "[secret] [secret]"


@pytest.mark.parametrize(
    ("status", "of_agent"), [(401, False), (403, True), (404, False), (422, True), (500, False), (503, False)]
)
def test_whom_a_refused_re_mint_concerns(status, of_agent):
    """A refusal of what was asked for is the agent's; the rest is the relay's, or the bootstrap token's."""
    response = httpx.Response(status, json={"error": {"code": "some_code", "message": "No."}})
    with pytest.raises(TokenUnavailable, match=f"{status}: some_code No") as unavailable:
        read_runtime(response, PLACE, (), now_ms=NOW_MS)
    assert unavailable.value.of_agent is of_agent
    assert not unavailable.value.stops


@pytest.mark.parametrize(
    ("output", "grant"),
    [
        (b"tok-1\n", Grant("tok-1")),
        (b"\xef\xbb\xbftok-1\r\n", Grant("tok-1")),
        (b'{"token": "tok-1", "expiresAt": 1790000000000}\n', Grant("tok-1", NOW_MS)),
        (b'\xef\xbb\xbf{"token": "tok-1"}', Grant("tok-1")),
        (b'{"token": "tok-1", "expiresAt": null}', Grant("tok-1")),
    ],
)
def test_what_a_command_may_print(output, grant):
    """A token, or an object with it."""
    assert read_printed(output, "command x") == grant


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (b"", "is empty"),
        (b"tok 1", "white space"),
        (b"{tok-1", "neither a token nor JSON"),
        (b'{"token": 1}', 'without a text "token"'),
        (b'{"token":' * 5_000, "neither a token nor JSON"),
        (b'{"token": "tok-1", "expiresAt": "tomorrow"}', "expiresAt"),
        (b'{"token": "tok-1", "expiresAt": true}', "expiresAt"),
    ],
)
def test_what_a_command_may_not_print(output, reason):
    """The reason names the command, and shows nothing of what it printed."""
    with pytest.raises(TokenUnavailable, match=reason) as unavailable:
        read_printed(output, "command x")
    assert str(unavailable.value).startswith("command x: ")
    assert "tok-1" not in str(unavailable.value)


# Exchanges -------------------------------------------------------------------------------------------------


def asked_by(exchange):
    """The first request of an exchange, its form and its head."""
    request = next(exchange)
    head = "\n".join(f"{name}: {value}" for name, value in request.headers.items())
    return request, {name: values[0] for name, values in parse_qs(request.content.decode()).items()}, head


def ended(exchange, response):
    """What an exchange gives after its last response."""
    with pytest.raises(StopIteration) as end:
        exchange.send(response)
    return end.value.value


def test_client_credentials_in_a_header():
    """Each half form-encoded before base64 (RFC 6749 2.3.1); nothing secret in the address or the form."""
    endpoint = TokenEndpoint(f"{PLACE}?tenant=1", transport=NOBODY)
    told = []
    client = OAuthClient("out:box", lambda: "s3cret +%", "a b", "https://relay.test/")
    exchange = OAuthTokens(endpoint, client, wall_ms=lambda: NOW_MS, tell=told.append).exchange()
    request, form, head = asked_by(exchange)
    assert basic_of(head) == ("out:box", "s3cret +%")
    assert form == {"grant_type": "client_credentials", "scope": "a b", "resource": "https://relay.test/"}
    assert str(request.url) == f"{PLACE}?tenant=1"
    assert told == ["s3cret +%"]
    response = httpx.Response(200, json={"access_token": "tok-1", "expires_in": 9})
    assert ended(exchange, response) == Grant("tok-1", NOW_MS + 9_000)


def test_client_credentials_in_the_form():
    """For endpoints that know no other way, and for public clients."""
    endpoint = TokenEndpoint(PLACE, transport=NOBODY)
    _, form, head = asked_by(OAuthTokens(endpoint, OAuthClient("c", lambda: "s", style="post")).exchange())
    assert (form["client_id"], form["client_secret"]) == ("c", "s")
    assert "authorization" not in head
    _, form, head = asked_by(OAuthTokens(endpoint, OAuthClient("c")).exchange())
    assert form == {"grant_type": "client_credentials", "client_id": "c"}


def test_a_rotated_refresh_token_is_on_disk_before_the_grant(tmp_path):
    """When the exchange gives its grant, the new refresh token has taken the place of the old one."""
    file = tmp_path / "refresh"
    file.write_text("old\n")
    refresh = RefreshTokenFile(file, tmp_path / "beside.json")
    tokens = OAuthTokens(TokenEndpoint(PLACE, transport=NOBODY), OAuthClient("c"), refresh)
    for before, after in (("old", "new-1"), ("new-1", "new-2")):
        exchange = tokens.exchange()
        _, form, _ = asked_by(exchange)
        assert (form["grant_type"], form["refresh_token"]) == ("refresh_token", before)
        response = httpx.Response(200, json={"access_token": "tok-1", "refresh_token": after})
        assert ended(exchange, response) == Grant("tok-1")
        assert file.read_text() == f"{after}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["refresh"]


def test_a_refresh_token_that_cannot_be_saved_keeps_the_grant_back(tmp_path, monkeypatch):
    """Neither place takes it: no token is used; as soon as one does, the saved one goes on."""
    file, folder = tmp_path / ("r" * 255), tmp_path / "no-folder"
    file.write_text("old")
    folder.write_text("a file, where a folder should be")
    refresh = RefreshTokenFile(file, folder / "beside.json")
    tokens = OAuthTokens(TokenEndpoint(PLACE, transport=NOBODY), OAuthClient("c"), refresh)
    exchange = tokens.exchange()
    next(exchange)
    with pytest.raises(TokenUnavailable, match="can be saved neither in") as unavailable:
        exchange.send(httpx.Response(200, json={"access_token": "tok-1", "refresh_token": "new-9"}))
    assert "new-9" not in str(unavailable.value)
    folder.unlink()
    _, form, _ = asked_by(tokens.exchange())
    assert form["refresh_token"] == "new-9"
    assert json.loads((folder / "beside.json").read_text())["refreshToken"] == "new-9"


def test_a_refresh_token_is_saved_once_whoever_asks_for_it_meanwhile(tmp_path, monkeypatch):
    """Whoever looks whether it changed while it is being saved waits for that, and does not save it too."""
    file, beside = tmp_path / "refresh", tmp_path / "beside.json"
    file.write_text("old\n")
    refresh, read = RefreshTokenFile(file, beside), []
    other = threading.Thread(target=lambda: read.append(refresh.token()))
    sync = os.fsync

    def sync_while_another_asks(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        other.start()
        other.join(0.5)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_while_another_asks)
    refresh.keep("new")
    other.join(60)
    assert read == ["new"]
    assert file.read_text() == "new\n"
    assert not beside.exists()


@pytest.mark.parametrize(
    "unusable", [{"access_token": "tok 1"}, {"access_token": "tok-1", "token_type": "mac"}, {}]
)
def test_a_rotated_refresh_token_is_kept_also_where_nothing_else_can_be_used(tmp_path, unusable):
    """The old one may be of no use any more, whatever came beside the new one."""
    file = tmp_path / "refresh"
    file.write_text("old\n")
    refresh = RefreshTokenFile(file, tmp_path / "beside.json")
    exchange = OAuthTokens(TokenEndpoint(PLACE, transport=NOBODY), OAuthClient("c"), refresh).exchange()
    next(exchange)
    with pytest.raises(TokenUnavailable):
        exchange.send(httpx.Response(200, json={**unusable, "refresh_token": "new-1"}))
    assert file.read_text() == "new-1\n"


@pytest.mark.parametrize("rotated", ["", " ", "two words", "two\nlines", "\u00e4", 5, None, ["new"]])
def test_a_refresh_token_that_could_not_be_read_back_takes_no_place(tmp_path, rotated):
    """The one that works stays, and the access token that came with it is used."""
    file = tmp_path / "refresh"
    file.write_text("old\n")
    refresh = RefreshTokenFile(file, tmp_path / "beside.json")
    exchange = OAuthTokens(TokenEndpoint(PLACE, transport=NOBODY), OAuthClient("c"), refresh).exchange()
    next(exchange)
    response = httpx.Response(200, json={"access_token": "tok-1", "refresh_token": rotated})
    assert ended(exchange, response) == Grant("tok-1")
    assert file.read_text() == "old\n"


@pytest.mark.parametrize("style", ["basic", "post"])
def test_what_was_sent_is_masked_in_whichever_form_it_comes_back(tmp_path, style):
    """A server that shows the request shows header and form: encoded, they are secret too."""
    (tmp_path / "refresh").write_text("r/e+f=9913")
    refresh = RefreshTokenFile(tmp_path / "refresh", tmp_path / "beside.json")
    client = OAuthClient("outbox", lambda: "s3cret/+%5512", style=style)
    exchange = OAuthTokens(TokenEndpoint(PLACE, transport=NOBODY), client, refresh).exchange()
    request = next(exchange)
    sent = f"{request.headers.get('authorization', '')} {request.content.decode()} s3cret/+%5512 r/e+f=9913"
    with pytest.raises(TokenUnavailable, match="invalid_request") as unavailable:
        exchange.send(httpx.Response(400, json={"error": "invalid_request", "error_description": sent}))
    told = str(unavailable.value)
    forms = ["s3cret/+%5512", "s3cret%2F%2B%255512", "r/e+f=9913", "r%2Fe%2Bf%3D9913"]
    forms += [request.headers.get("authorization", "Basic none").removeprefix("Basic ")]
    assert [form for form in forms if form in told] == []
    assert told.count("[secret]") >= 3


def test_a_new_token_in_the_file_is_stronger_than_a_rotated_one_beside_it(tmp_path):
    """What an operator puts there counts; what is beside belongs to the one that was there before."""
    file, beside = tmp_path / ("r" * 255), tmp_path / "beside.json"
    file.write_text("seed-1")
    RefreshTokenFile(file, beside).keep("rotated-1")
    assert RefreshTokenFile(file, beside).token() == "rotated-1"
    file.write_text("seed-2")
    assert RefreshTokenFile(file, beside).token() == "seed-2"
    for damage in ("", "[]", "{", '{"after": "x"}', "[" * 5_000):
        beside.write_text(damage)
        assert RefreshTokenFile(file, beside).token() == "seed-2"


def test_a_linked_file_is_rewritten_where_it_lies(tmp_path):
    """The link stays a link."""
    file, link = tmp_path / "real", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    RefreshTokenFile(link, tmp_path / "beside.json").keep("new")
    assert link.is_symlink()
    assert file.read_text() == "new\n"


def test_a_runtime_token_is_asked_for_with_the_bootstrap_token():
    """The agent in any language, this outbox, and the bootstrap token in the header alone."""
    endpoint = TokenEndpoint("http://relay.test/api/runtime-tokens", transport=NOBODY)
    exchange = RuntimeTokens(endpoint, StaticToken("tok-boot"), "host-1").exchange("bäcker")
    request = next(exchange)
    assert request.headers["authorization"] == "Bearer tok-boot"
    assert json.loads(request.content) == {"agentId": "bäcker", "instanceId": "host-1"}
    response = httpx.Response(201, json={"token": "tok-1", "expiresAt": NOW_MS})
    assert ended(exchange, response) == Grant("tok-1", NOW_MS)


def test_a_bootstrap_token_that_was_renewed_in_its_file_is_tried_at_once(tmp_path, monkeypatch):
    """After a 401 the file is read again, and asked once more with what is found there."""
    monkeypatch.setattr("relay_client.auth._identity", lambda _status: (0,))
    file = tmp_path / "boot"
    file.write_text("tok-1")
    endpoint = TokenEndpoint("http://relay.test/mint", transport=NOBODY)
    exchange = RuntimeTokens(endpoint, TokenFile(file), "host-1").exchange("builder")
    assert next(exchange).headers["authorization"] == "Bearer tok-1"
    file.write_text("tok-2")
    assert exchange.send(httpx.Response(401)).headers["authorization"] == "Bearer tok-2"
    with pytest.raises(TokenUnavailable, match="401"):
        exchange.send(httpx.Response(401))


def test_inputs_change_with_what_was_told_and_tell_nothing(tmp_path):
    """Settings and files; never the secret itself."""
    file = tmp_path / "refresh"
    endpoint, refresh = TokenEndpoint(PLACE, transport=NOBODY), RefreshTokenFile(file, tmp_path / "b.json")
    names = []
    for text, scope in ((None, None), ("r-1", None), ("r-2", None), ("r-2", "more")):
        if text:
            file.write_text(text)
        tokens = OAuthTokens(endpoint, OAuthClient("c", lambda: "s3cret", scope), refresh)
        names.append(tokens.inputs())
        assert tokens.inputs() == names[-1]
    assert len(set(names)) == 4
    assert all(len(name) == 8 for name in names)


def test_an_endpoint_that_does_not_answer():
    """Named without its query, and why; the exchange is ended."""
    exchange = OAuthTokens(TokenEndpoint(PLACE, transport=NOBODY), OAuthClient("c")).exchange()

    def refuse(_request):
        raise httpx.ConnectError("connection refused")

    endpoint = TokenEndpoint(f"{PLACE}?key=s3cret", transport=httpx.MockTransport(refuse))
    with pytest.raises(TokenUnavailable) as unavailable:
        endpoint.run(exchange)
    assert str(unavailable.value) == f"{PLACE} does not answer: connection refused"
    assert list(exchange) == []
