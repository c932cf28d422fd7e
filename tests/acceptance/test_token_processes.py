"""Tokens of real processes: revoked, rotated, killed in between, shared, written nowhere ([P7], [P12])."""

from __future__ import annotations

import contextlib
import json
import stat
import sys
from pathlib import Path

import pytest
from processes import (
    DaemonProcess,
    dead_of,
    numbers,
    outbox_command,
    program,
    put,
    status_of,
    wait_for,
)
from token_peer import token_peer

from outbox.store.relay_state import read_facts
from relay_client.reference.process import RelayProcess

AGENTS = [f"agent-{n}" for n in range(20)]
SECRET = "client-s3cret-5512"
REFRESH = "refresh-seed-9913"


def oauth(peer, **more):
    """The settings of a client of this peer."""
    named = {f"relay.oauth.{name}": str(value) for name, value in more.items()}
    return {"relay.token": "", "relay.oauth.token_url": peer.url, "relay.oauth.client_id": "outbox"} | named


@pytest.fixture
def state(tmp_path):
    """A place for the events."""
    return tmp_path / "state"


def test_a_token_revoked_in_the_middle_of_500_events(state, tmp_path):
    """20 agents, one shared token: exactly one recovery request, no attempt spent, all arrive in order."""
    tokens = ["tok-look", "tok-first", "tok-second", "tok-third"]
    with RelayProcess(tmp_path / "r.sqlite", tokens) as relay, token_peer(*tokens[1:]) as peer:
        settings = oauth(peer, client_secret=SECRET) | {"delivery.batch_max_items": "1"}
        for agent in AGENTS:
            put(state, agent, *range(25))
        relay.add_faults({"match": {"bodyContains": '"n":12'}, "times": 1, "action": {"revoke": "tok-first"}})
        with DaemonProcess(state, relay.url, settings) as daemon:
            wait_for(lambda: len(relay.events()) == 500, 60)
            wait_for(lambda: all(status_of(state, agent).waiting == 0 for agent in AGENTS))
            assert daemon.stop() == 0
        refused = [request for request in relay.requests() if request["status"] == 401]
        assert refused
        assert len(peer.forms) == 2  # the first token, and the one recovery
        for agent in AGENTS:
            assert numbers(relay, agent) == list(range(25))
            assert dead_of(state, agent) == []


def test_the_relay_mints_a_token_for_each_agent(state, tmp_path):
    """Runtime tokens of the reference relay, which end after two seconds and are renewed in time."""
    options = ["--runtime-token-ttl-s", "2"]
    with RelayProcess(tmp_path / "r.sqlite", ["tok-boot"], options=options) as relay:
        settings = {"relay.token": "tok-boot", "relay.runtime_token.path": "/api/runtime-tokens"}
        with DaemonProcess(state, relay.url, settings):
            put(state, "builder", 0)
            put(state, "reviewer", 0)
            wait_for(lambda: len(relay.events()) == 2)

            def mints():
                return [r for r in relay.requests() if r["path"] == "/api/runtime-tokens"]

            for n in range(1, 400):
                put(state, "builder", n)
                wait_for(lambda n=n: len(relay.events("builder")) == n + 1)
                if len(mints()) >= 3:
                    break
        assert all(request["status"] == 201 for request in mints())
        posts = [request for request in relay.requests() if request["path"] == "/api/messages"]
        assert {request["status"] for request in posts} <= {201, 401}
        assert "tok-boot" not in json.dumps([request["headers"] for request in posts])
        assert len({request["token"] for request in posts}) >= 3


KILLED_BEFORE_USE = """
import os, signal, sys
from pathlib import Path
from relay_client import OAuthClient, OAuthTokens, RefreshTokenFile, TokenEndpoint

class Killed(RefreshTokenFile):
    def keep(self, token):
        super().keep(token)
        os.kill(os.getpid(), signal.SIGKILL)

refresh = Killed(sys.argv[2], Path(sys.argv[3]))
OAuthTokens(TokenEndpoint(sys.argv[1]), OAuthClient("outbox"), refresh).mint("", deadline=None)
"""


@pytest.mark.parametrize("where", ["in its file", "beside a file that cannot be written"])
def test_a_rotated_refresh_token_survives_kill_9_before_its_use(state, tmp_path, where):
    """Killed the moment it has arrived and is saved: the next process uses it, and nothing is lost."""
    # Beside a name of the greatest length no draft can be made, not even by root.
    file = tmp_path / ("refresh" if where == "in its file" else "r" * 255)
    file.write_text(REFRESH + "\r\n")
    beside = state / "tokens" / "refresh.json"
    put(state, "builder", 0, 1)
    with (
        RelayProcess(tmp_path / "r.sqlite", ["tok-look", "tok-a", "tok-b"]) as relay,
        token_peer("tok-a", "tok-b", refresh_token=REFRESH) as peer,
    ):
        words = (KILLED_BEFORE_USE, peer.url, str(file), str(beside))
        with program(state, *words) as process:
            assert process.wait(30) == -9
        rotated = peer.refresh_token
        assert rotated != REFRESH
        settings = oauth(peer, refresh_token_file=file)
        with DaemonProcess(state, relay.url, settings):
            wait_for(lambda: numbers(relay, "builder") == [0, 1], 40)
        assert [form["refresh_token"] for form in peer.forms] == [REFRESH, rotated]
        kept = file if where == "in its file" else beside
        assert peer.refresh_token in kept.read_text("utf-8")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_two_processes_share_one_token(state, tmp_path):
    """A flush without a daemon uses the token of the flush before it, and asks for none."""
    with RelayProcess(tmp_path / "r.sqlite", ["tok-look", "tok-a"]) as relay, token_peer("tok-a") as peer:
        for n in range(2):
            put(state, "builder", n)
            flushed = outbox_command(state, "flush", settings=oauth(peer) | {"relay.url": relay.url})
            assert flushed.returncode == 0, flushed.stderr
        assert numbers(relay, "builder") == [0, 1]
        assert len(peer.forms) == 1


def test_flushes_at_the_same_time_ask_once(state, tmp_path):
    """Four processes of four agents begin without a token: one of them asks, the others take what it got."""
    flush = "import sys; from outbox.cli import main; sys.exit(main(['flush', '--agent', sys.argv[1]]))"
    with RelayProcess(tmp_path / "r.sqlite", ["tok-look", "tok-a"]) as relay, token_peer("tok-a") as peer:
        settings = oauth(peer) | {"relay.url": relay.url, "daemon.flush_timeout_s": "40"}
        for agent in AGENTS[:4]:
            put(state, agent, 0)
        with contextlib.ExitStack() as stack:
            flushes = [
                stack.enter_context(program(state, flush, agent, settings=settings)) for agent in AGENTS[:4]
            ]
            assert [process.wait(60) for process in flushes] == [0, 0, 0, 0]
        assert len(relay.events()) == 4
        assert len(peer.forms) == 1


def test_given_up_until_a_person_says_retry(state, tmp_path):
    """`invalid_grant`: one request, told by status, why, doctor and auth status; `auth retry` mends it."""
    file = tmp_path / "refresh"
    file.write_text(REFRESH)
    with (
        RelayProcess(tmp_path / "r.sqlite", ["tok-look", "tok-a"]) as relay,
        token_peer("tok-a", refresh_token=REFRESH) as peer,
    ):
        peer.say = lambda form: (400, {"error": "invalid_grant", "error_description": "revoked"})
        settings = oauth(peer, refresh_token_file=file)
        with DaemonProcess(state, relay.url, settings) as daemon:
            put(state, "builder", 0)
            (line,) = wait_for(lambda: daemon.said("token_stopped"))
            assert line["detail"] == f"{peer.url} answers 400: invalid_grant, revoked"
            wait_for(lambda: daemon.said("gate_closed"))
            told = json.loads(outbox_command(state, "why", "builder", "--json").stdout)
            assert told["reason"] == "token_stopped"
            assert "outbox auth retry" in told["lines"][-1]
            auth = json.loads(outbox_command(state, "auth", "status", "--json").stdout)
            assert (auth["state"], auth["source"]) == ("stopped", f"OAuth, {peer.url}")
            shown = outbox_command(state, "status").stdout.decode()
            assert "stopped" in shown
            assert "outbox auth retry" in shown
            status = json.loads(outbox_command(state, "status", "--json").stdout)
            assert status["relay"]["auth"] == "stopped"
            assert len(peer.forms) == 1
            peer.say = lambda form: None
            assert outbox_command(state, "auth", "retry").returncode == 0
            wait_for(lambda: numbers(relay, "builder") == [0])
            auth = json.loads(outbox_command(state, "auth", "status", "--json").stdout)
            assert auth["state"] == "ok"
            assert auth["expiresAt"] > auth["recoveredAt"]


def test_given_up_until_the_file_changes(state, tmp_path):
    """A new refresh token in its file is noticed by itself; without a daemon a flush does not ask."""
    file = tmp_path / "refresh"
    file.write_text("refresh-wrong-1")
    with (
        RelayProcess(tmp_path / "r.sqlite", ["tok-look", "tok-a"]) as relay,
        token_peer("tok-a", refresh_token=REFRESH) as peer,
    ):
        settings = oauth(peer, refresh_token_file=file) | {"relay.url": relay.url}
        put(state, "builder", 0)
        for _ in range(2):
            assert outbox_command(state, "flush", "--timeout", "1", settings=settings).returncode == 3
        assert len(peer.forms) == 1
        assert outbox_command(state, "auth", "retry").returncode == 0
        assert read_facts(state / "relay.sqlite")["auth"]["state"] == ""
        with DaemonProcess(state, relay.url, settings | {"daemon.poll_interval_s": "0.05"}):
            file.write_text(REFRESH)
            wait_for(lambda: numbers(relay, "builder") == [0])
        assert [form["refresh_token"] for form in peer.forms[-2:]] != ["refresh-wrong-1"] * 2


def test_a_person_is_told_when_it_was_given_up(state, tmp_path):
    """`notify.command` gets `auth_stopped`, once."""
    told = tmp_path / "told"
    note = "import pathlib,sys;pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read())"
    file = tmp_path / "note.py"
    file.write_text(note)
    with RelayProcess(tmp_path / "r.sqlite", ["tok-look"]) as relay, token_peer("tok-a") as peer:
        peer.say = lambda form: (401, {"error": "invalid_client"})
        settings = oauth(peer, client_secret=SECRET) | {
            "notify.command": f"{sys.executable} {file} {told}", "notify.min_interval_s": "0.1",
        }  # fmt: skip
        with DaemonProcess(state, relay.url, settings) as daemon:
            put(state, "builder", 0)
            wait_for(lambda: daemon.said("notified"))
        assert told.read_text("utf-8").count("auth_stopped") == 1
        assert "invalid_client" in told.read_text("utf-8")


# Written nowhere -------------------------------------------------------------------------------------------


def secrets_found(secrets, *texts):
    """Which of the secrets stand in the texts."""
    return sorted({secret for secret in secrets for text in texts if secret.encode() in text})


def everything_in(folder, *, but=()):
    """The bytes of every file below a folder."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path not in but]


def command_lines():
    """The command lines and environments of all processes that can be seen."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((process / "cmdline").read_bytes())
    return found


def test_no_secret_is_written(state, tmp_path):
    """Tokens, client secret, refresh token: in no log, answer, file, command line or dead letter.

    Excepted are the files of mode 0600 that hold tokens for other processes. The token endpoint and the relay
    throw back what they were sent.
    """
    seed, client = tmp_path / "refresh", tmp_path / "client"
    seed.write_text(REFRESH)
    client.write_text(SECRET + "\n")
    with (
        RelayProcess(tmp_path / "r.sqlite", ["tok-look-17", "tok-first-17", "tok-second-17"]) as relay,
        token_peer("tok-first-17", "tok-second-17", refresh_token=REFRESH) as peer,
    ):
        echo = f'{{"error": {{"code": "validation_failed", "message": "tok-first-17 {SECRET}"}}}}'
        relay.add_faults({
            "match": {"bodyContains": '"n":7'},
            "action": {"status": 422, "body": json.loads(echo.replace(SECRET, "x"))},
        })  # fmt: skip
        settings = oauth(peer, client_secret_file=client, refresh_token_file=seed)
        with DaemonProcess(state, relay.url, settings | {"daemon.log_level": "debug"}) as daemon:
            put(state, "builder", 0, 7)
            wait_for(lambda: status_of(state, "builder").dead == 1)
            first = peer.refresh_token
            relay.revoke("tok-first-17")
            peer.say = lambda form: (503, {"error": f"{form} {SECRET} {first}"})
            put(state, "builder", 1)
            wait_for(lambda: daemon.said("token_recovery_failed"))
            texts = command_lines()
            for words in (["status"], ["why", "builder"], ["auth", "status"], ["dead", "list"], ["doctor"]):
                told = outbox_command(state, *words, "--json", settings=settings | {"relay.url": relay.url})
                texts += [told.stdout, told.stderr]
            peer.say = lambda form: None
            wait_for(lambda: numbers(relay, "builder") == [0, 1], 40)
            texts += command_lines()
            texts.append(daemon.log.read_bytes())
        secrets = ["tok-first-17", "tok-second-17", SECRET, REFRESH, first, peer.refresh_token]
        kept = list((state / "tokens").iterdir())
        assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
        assert stat.S_IMODE((state / "tokens").stat().st_mode) == 0o700
        assert secrets_found(secrets, *texts, *everything_in(state, but=kept)) == []
        assert b"validation_failed" in b"".join(texts)


def test_a_token_command_shows_nothing(state, tmp_path):
    """Its token is used, and stands in no log, no command line and no file of the state directory."""
    script = tmp_path / "print_token.py"
    script.write_text("print('tok-from-' + 'command-88')")
    settings = {"relay.token": "", "relay.token_command": f"{sys.executable} {script}"}
    with RelayProcess(tmp_path / "r.sqlite", ["tok-look", "tok-from-command-88"]) as relay:
        with DaemonProcess(state, relay.url, settings | {"daemon.log_level": "debug"}) as daemon:
            put(state, "builder", 0)
            wait_for(lambda: numbers(relay, "builder") == [0])
            texts = [daemon.log.read_bytes(), *command_lines(), *everything_in(state)]
            auth = json.loads(outbox_command(state, "auth", "status", "--json").stdout)
        assert secrets_found(["tok-from-command-88"], *texts) == []
        assert auth["source"] == f"command {sys.executable}"
