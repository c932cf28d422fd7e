"""`outbox auth` from the files alone: what it tells, and what a retry forgets."""

import json

import pytest
from command_line import command, in_process

from outbox.cli.auth import cleared, token_lines
from outbox.store.directory import StateDirectory
from outbox.store.relay_state import RelayState, read_facts

NOW_MS = 1_790_000_000_000
LATER_MS = NOW_MS + 9_000
STOPPED = {
    "source": "OAuth, http://login.test/token", "state": "stopped", "detail": "answers 400: invalid_grant",
    "since": NOW_MS, "failures": 3, "inputs": "1f0c", "nextTryAt": None, "expiresAt": None,
    "recoveredAt": NOW_MS - 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)


@pytest.fixture
def facts(tmp_path):
    """Writes facts of a relay into the state directory."""
    state = StateDirectory(tmp_path / "state").create(allow_network_fs=True)

    def write(**named):
        relay_state = RelayState(state.relay_state)
        relay_state.write({"gate": {"url": "http://relay.test"}} | named)
        relay_state.close()
        return state

    return write


def test_nothing_is_known_yet(capsys, monkeypatch):
    """The configured source is told, and nothing is made."""
    status, out, err = command(capsys, "auth", "status")
    assert (status, out, err) == (0, "token   no token, not tried yet\n", "")
    monkeypatch.setenv("OUTBOX_RELAY_OAUTH_TOKEN_URL", "http://login.test/token")
    monkeypatch.setenv("OUTBOX_RELAY_OAUTH_CLIENT_ID", "outbox")
    told = json.loads(command(capsys, "auth", "status", "--json")[1])
    assert told["source"] == "OAuth, http://login.test/token"
    assert told["state"] is None
    assert told["agents"] == []


def test_what_was_given_up(capsys, facts):
    """Why, and what to do; the data has no name of the inputs."""
    facts(auth=STOPPED)
    out = command(capsys, "auth", "status")[1]
    assert out.startswith("token   OAuth, http://login.test/token, stopped, since ")
    assert "invalid_grant" in out
    assert "outbox auth retry" in out
    told = json.loads(command(capsys, "auth", "status", "--json")[1])
    assert told == {
        "source": STOPPED["source"], "state": "stopped", "detail": STOPPED["detail"], "since": NOW_MS,
        "failures": 3, "expiresAt": None, "recoveredAt": NOW_MS - 5, "nextTryAt": None, "agents": [],
    }  # fmt: skip


def test_each_agent_with_a_token_of_its_own_has_a_line(capsys, facts):
    """Sorted, and made safe to print."""
    ok = {"state": "ok", "detail": "", "expiresAt": NOW_MS, "recoveredAt": NOW_MS}
    failing = {"state": "failing", "detail": "answers 422", "nextTryAt": 1}
    facts(**{"auth": {"source": "runtime", "state": "ok"}, "token:b\x1b": failing, "token:a:1": ok})
    lines = command(capsys, "auth", "status")[1].splitlines()
    assert lines[1].split()[:3] == ["agent", "state", "good"]
    assert lines[2].startswith("a:1 ")
    assert lines[3].startswith("b\\x1b ")
    assert "answers 422" in lines[3]
    told = json.loads(command(capsys, "auth", "status", "--json")[1])
    assert [(agent["agent"], agent["state"]) for agent in told["agents"]] == [
        ("a:1", "ok"),
        ("b\x1b", "failing"),
    ]


def test_what_is_known_of_another_relay_does_not_count(capsys, monkeypatch, facts):
    """Without a daemon the configured relay is meant."""
    facts(auth=STOPPED)
    monkeypatch.setenv("OUTBOX_RELAY_URL", "http://other.test")
    assert json.loads(command(capsys, "auth", "status", "--json")[1])["state"] is None


def test_retry_without_a_daemon_forgets_what_was_given_up(capsys, facts):
    """And nothing else; who sends next asks anew."""
    state = facts(**{"auth": STOPPED, "token:a": {"state": "ok"}})
    status, out, _ = command(capsys, "auth", "retry")
    assert (status, "outbox serve" in out) == (0, True)
    after = read_facts(state.relay_state)
    assert (after["auth"]["state"], after["auth"]["source"]) == ("", STOPPED["source"])
    assert after["token:a"] == {"state": "ok"}
    assert json.loads(command(capsys, "auth", "retry", "--json")[1]) == {"retried": True, "daemon": False}


def test_retry_where_nothing_ever_was_makes_nothing(capsys, tmp_path):
    """No folder, no file."""
    assert command(capsys, "auth", "retry")[0] == 0
    assert not (tmp_path / "state").exists()


def test_only_trouble_is_cleared():
    """Tokens that are good keep what is known of them."""
    ok = {"state": "ok", "expiresAt": 7}
    assert cleared({"auth": ok, "gate": {"state": "stopped"}, "token:a": None}) == {}
    assert set(cleared({"auth": STOPPED, "token:a": {"state": "failing"}})) == {"auth", "token:a"}


@pytest.mark.parametrize(
    ("auth", "line"),
    [
        (
            {"state": "missing", "source": "file /t", "detail": "is empty"},
            "token   file /t, missing: is empty",
        ),
        ({"state": "recovering", "source": "s"}, "token   s, being renewed"),
        (
            {"state": "failing", "source": "s", "nextTryAt": NOW_MS + 9_000},
            "token   s, failing, next try in 9 s",
        ),
        ({"state": "failing", "source": "s", "nextTryAt": NOW_MS}, "token   s, failing, next try now"),
        ({}, "token   unknown, not tried yet"),
    ],
)
def test_one_line_about_the_token(auth, line):
    """Each state in a word, with what belongs to it."""
    assert list(token_lines(auth, NOW_MS)) == [line]
