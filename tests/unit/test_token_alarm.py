"""What a person is told of tokens that are asked for: the alarm, and the doctor."""

import pytest
from peers import http_response, read_http_request, thread_server

from outbox.cli.doctor_relay import the_relay
from outbox.daemon.alarms import token_stopped
from outbox.settings import load

STOPPED = {"state": "stopped", "source": "OAuth, http://l", "detail": "http://l answers 400: invalid_grant"}


@pytest.mark.parametrize("before", ["", "ok", "failing", "recovering", "None"])
def test_the_alarm_when_asking_was_given_up(before):
    """Why, what it means, and what to do; for all agents."""
    (alarm,) = token_stopped(before, STOPPED)
    assert (alarm.alarm, alarm.agent, alarm.reason) == ("auth_stopped", None, "token_stopped")
    assert "invalid_grant" in alarm.text
    assert "none is lost" in alarm.text
    assert "outbox auth retry" in alarm.text


def test_no_alarm_without_news():
    """What was given up before is known; what is only tried again is no alarm."""
    assert token_stopped("stopped", STOPPED) == []
    for state in ("ok", "failing", "recovering", "", None):
        assert token_stopped("ok", {"state": state}) == []


@pytest.mark.parametrize(
    ("state", "todo"), [("stopped", "outbox auth retry"), ("failing", "tried again by itself")]
)
def test_the_doctor_asks_for_no_token_and_tells_what_is_known(state, todo):
    """Asking would take a refresh token away from the daemon; why none can be had stands on disk."""
    asked = []

    def handle(connection):
        while request := read_http_request(connection):
            asked.append(request[0].decode().split()[1])
            connection.sendall(http_response(200, b'{"status": "ok"}', "content-type: application/json"))

    with thread_server(handle) as server:
        url = f"http://127.0.0.1:{server.port}"
        named = {
            "relay.url": url, "relay.oauth.token_url": f"{url}/token", "relay.oauth.client_id": "c",
            "relay.trust_env": False,
        }  # fmt: skip
        facts = {"gate": {"url": url}, "auth": STOPPED | {"state": state}}
        findings = list(the_relay(load(named, environ={}), facts))
    (token,) = [finding for finding in findings if finding.check == "token"]
    assert "invalid_grant" in token.said
    assert todo in token.todo
    assert "/token" not in asked
