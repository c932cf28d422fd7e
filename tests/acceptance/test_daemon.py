"""The daemon as a process: stopping, a second one, reload, wake-ups, tokens, modes, its log."""

import contextlib
import json
import re
import signal
import socket
import stat

import pytest
from peers import fake_relay
from processes import (
    LINE,
    DaemonProcess,
    dead_of,
    deliveries,
    numbers,
    outbox_command,
    program,
    put,
    status_of,
    wait_for,
)

from outbox import Outbox
from outbox.daemon.compose import build_engine
from outbox.daemon.flush import dismiss
from outbox.daemon.supervisor import Daemon
from outbox.errors import StoreDamaged
from outbox.settings import load
from outbox.store.directory import StateDirectory
from outbox.store.people import is_paused
from outbox.store.place import running_daemon
from outbox.store.relay_state import read_facts
from relay_client.reference.process import RelayProcess

TOKEN = "tok-daemon"
NEVER_S = "3600"
BY_HAND_ONLY = {"delivery.backoff_initial_s": NEVER_S, "delivery.backoff_max_s": NEVER_S}
HANGS = {"steps": [{"action": "hang", "repeat": "forever"}]}


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


@pytest.fixture
def relay(tmp_path):
    """The reference relay."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        yield relay


@pytest.fixture
def nobody():
    """An address at which nobody listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def is_in_flight(state, agent):
    """Whether a request with an event of this agent is under way."""
    return status_of(state, agent).in_flight


# Stopping --------------------------------------------------------------------------------------------------


def test_stop_while_the_relay_is_down(state, nobody):
    """P01: SIGTERM with nobody listening ends with 0 in time; the last line says what is left, unblamed."""
    with DaemonProcess(state, nobody, {"daemon.flush_timeout_s": "1"}) as daemon:
        put(state, "builder", 0, 1, 2)
        wait_for(lambda: daemon.said("gate_closed"))
        assert daemon.stop(timeout_s=10) == 0
        last = daemon.said("stopped")[-1]
        counts = (last["delivered_at_the_end"], last["left"], last["agents_with_events_left"])
        assert counts == ("0", "3", "1")
        assert "event=stopped" in daemon.lines()[-1]
    status = status_of(state, "builder")
    assert (status.waiting, status.in_flight, status.head.attempts) == (3, 0, 0)


def test_a_stop_leaves_nothing_behind(state, relay):
    """After a stop no lock, no socket and no note of the daemon is left; what was delivered is gone."""
    with DaemonProcess(state, relay.url) as daemon:
        put(state, "builder", *range(20))
        assert daemon.stop() == 0
        assert daemon.said("stopped")[-1]["left"] == "0"
        assert daemon.said("stopped")[-1]["detail"] == "all delivered"
    directory = StateDirectory(state)
    assert running_daemon(directory) is None
    assert not any(path.exists() for path in (directory.wake_socket, directory.daemon_file))
    assert not (state / "outbox.sock").exists()
    assert numbers(relay) == list(range(20))


def test_the_last_line_counts_what_rests(state, relay):
    """Events of a paused agent are left too, though nothing of them was to be flushed."""
    with DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "60"}) as daemon:
        put(state, "other", 0)
        put(state, "builder")
        daemon.ask("POST", "/v1/pause", {"agent": "builder"})
        put(state, "builder", 1, 2)
        wait_for(lambda: numbers(relay) == [0])
        assert daemon.stop(timeout_s=10) == 0
        assert daemon.said("stopped")[-1]["left"] == "2"


def test_stop_during_a_request_waits_for_the_answer(state, relay):
    """P02: an answer that comes before the deadline counts; a SIGHUP meanwhile is no second signal."""
    relay.add_faults({"times": 1, "match": {"path": "/api/messages"}, "action": {"delayS": 1.5}})
    with DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "30"}) as daemon:
        (receipt,) = put(state, "builder", 0)
        wait_for(lambda: is_in_flight(state, "builder"))
        daemon.send(signal.SIGTERM)
        wait_for(lambda: daemon.said("stopping"))
        daemon.send(signal.SIGHUP)
        assert daemon.ended() == 0
        assert daemon.said("stopped")[-1]["left"] == "0"
        assert daemon.said("reloaded") == []
    assert [(event["key"], event["timesSeen"]) for event in relay.events()] == [(receipt.idempotency_key, 1)]
    assert status_of(state, "builder").waiting == 0


def test_stop_during_a_request_that_never_ends(state):
    """At the deadline the request is cut off; the event waits as it was, and goes out with the same text."""
    with fake_relay({"steps": [{"action": "hang"}]}) as relay:
        with DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "0.3"}) as daemon:
            put(state, "builder", 0)
            wait_for(lambda: deliveries(relay))
            assert daemon.stop(timeout_s=10) == 0
            assert daemon.said("stopped")[-1]["left"] == "1"
            status = status_of(state, "builder")
            assert (status.in_flight, status.head.attempts, status.head.sends) == (0, 0, 1)
            daemon.start()
            wait_for(lambda: not status_of(state, "builder").waiting)
        first, second = deliveries(relay)
        assert first["body"] == second["body"]


def test_stop_while_a_retry_after_runs(state):
    """P05: nothing could be sent before the deadline, so the stop does not wait for it."""
    busy = {"status": 503, "headers": [["Retry-After", "600"]], "repeat": "forever"}
    with (
        fake_relay({"steps": [busy]}) as relay,
        DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "60"}) as daemon,
    ):
        put(state, "builder", 0)
        wait_for(lambda: (blocked := status_of(state, "builder").blocked) and blocked.reason == "retry_after")
        assert daemon.stop(timeout_s=5) == 0
        assert len(deliveries(relay)) == 1
    status = status_of(state, "builder")
    assert (status.waiting, status.head.attempts) == (1, 0)


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_waiting(state, again):
    """P14: the second signal stops at once; what was in flight is kept as it was."""
    with (
        fake_relay(HANGS) as relay,
        DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "60"}) as daemon,
    ):
        put(state, "builder", 0)
        wait_for(lambda: deliveries(relay))
        daemon.send(signal.SIGTERM)
        wait_for(lambda: daemon.said("stopping"))
        daemon.send(again)
        assert daemon.ended(timeout_s=3) == 0
        assert daemon.said("stopped")[-1]["left"] == "1"
    status = status_of(state, "builder")
    assert (status.waiting, status.in_flight, status.head.attempts) == (1, 0, 0)


def test_a_stop_begins_nothing_that_its_deadline_cuts_off(state, relay):
    """P9: a tool call that is unsafe to repeat is not begun when the time left does not cover it."""
    no_spec = {"match": {"path": "/api/spec"}, "action": {"status": 404}}
    relay.add_faults(no_spec, {"action": {"status": 503}})
    with DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "2"}) as daemon:
        with Outbox.open("builder", state_dir=state) as outbox:
            outbox.enqueue("mcp-tool-call", {"tool": "note_add", "arguments": {}})
        wait_for(lambda: daemon.said("gate_closed"))
        daemon.send(signal.SIGTERM)
        wait_for(lambda: daemon.said("stopping"))
        relay.clear_faults()
        relay.add_faults(no_spec, {"match": {"bodyContains": '"tools/call"'}, "action": {"hang": 60}})
        assert daemon.ended() == 0
        assert [request for request in relay.requests() if "hang" in request["fault"]] == []
    assert dead_of(state, "builder") == []
    assert status_of(state, "builder").waiting == 1


# One daemon ------------------------------------------------------------------------------------------------


def test_a_second_daemon_ends_at_once(state, relay, nobody):
    """P07: exit 6, naming the pid, and nothing changed; after kill -9 of the first a new start works."""
    second = DaemonProcess(state, nobody)
    with DaemonProcess(state, relay.url) as first, contextlib.ExitStack() as stack:
        stack.callback(second.__exit__)
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])
        wait_for(lambda: read_facts(StateDirectory(state).relay_state).get("gate"))
        before = read_facts(StateDirectory(state).relay_state)
        assert second.launch().ended() == 6
        (line,) = second.lines()
        assert f"pid {first.process.pid}" in line
        assert "outbox stop" in line
        assert read_facts(StateDirectory(state).relay_state) == before
        put(state, "builder", 1)
        wait_for(lambda: numbers(relay) == [0, 1])
        first.kill()
        put(state, "builder", 2)
        first.start()
        wait_for(lambda: numbers(relay) == [0, 1, 2])
    assert all(event["timesSeen"] == 1 for event in relay.events())


def test_a_file_that_is_damaged_keeps_no_other_agent_from_being_paused(state):
    """To pause all reaches all that it can reach, and says what it could not."""
    for agent in ("a", "b", "c"):
        put(state, agent, 0)
    directory = StateDirectory(state)
    damaged, *others = directory.outbox_files()
    damaged.write_bytes(b"no database" * 1_000)
    settings = load({"relay.url": "http://127.0.0.1:9"}, environ={}, config_path=None)
    daemon = Daemon(settings, directory, lambda: settings, "0", lambda _event, _fields: None)
    daemon.engine = build_engine(settings, directory)
    try:
        with pytest.raises(StoreDamaged):
            daemon.pause(None)
        for path in others:
            with daemon.engine.delivery.files.borrow(path) as box:
                assert is_paused(box)
    finally:
        dismiss(daemon.engine, 0)


# Reload ----------------------------------------------------------------------------------------------------


def configured(path, **values):
    """Write a file of configuration."""
    path.write_text(
        "[relay]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    )
    path.chmod(0o600)


def test_reload(state, relay, tmp_path):
    """SIGHUP: another relay and token are taken over, and said without the token; a wrong file is refused."""
    file = tmp_path / "outbox.toml"
    configured(file, url=relay.url, token=TOKEN)
    daemon = DaemonProcess(state, None, {"relay.token": ""}, flags=["--config", str(file)])
    with RelayProcess(tmp_path / "other.sqlite", ["tok-other-1"]) as other, daemon:
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])

        file.write_text("[relay]\nurl = 17\n")
        daemon.send(signal.SIGHUP)
        wait_for(lambda: daemon.said("reload_refused"))
        assert "relay.url" in daemon.said("reload_refused")[0]["detail"]
        put(state, "builder", 1)
        wait_for(lambda: numbers(relay) == [0, 1])

        configured(file, url=other.url, token="tok-other-1")
        daemon.send(signal.SIGHUP)
        wait_for(lambda: daemon.said("reloaded"))
        changes = daemon.said("reloaded")[0]["changes"]
        assert other.url in changes
        assert "relay.token" in changes
        put(state, "builder", 2)
        wait_for(lambda: numbers(other) == [2])
        assert numbers(relay) == [0, 1]
        assert daemon.stop() == 0
        assert TOKEN not in daemon.log.read_text()
        assert "tok-other-1" not in daemon.log.read_text()


def test_reload_with_a_token_endpoint_that_cannot_be_used(state, relay, tmp_path):
    """What only the way to the tokens needs is looked at too, before anything of the old is ended."""
    file = tmp_path / "outbox.toml"
    configured(file, url=relay.url, token=TOKEN)
    with DaemonProcess(state, None, {"relay.token": ""}, flags=["--config", str(file)]) as daemon:
        authorities = tmp_path / "authorities.pem"
        authorities.write_text("no certificate")
        configured(file, url=relay.url, ca_file=str(authorities))
        with file.open("a") as more:
            more.write('[relay.oauth]\ntoken_url = "https://127.0.0.1:9/token"\nclient_id = "outbox"\n')
        daemon.send(signal.SIGHUP)
        wait_for(
            lambda: (
                daemon.said("reload_refused") or daemon.said("reloaded") or daemon.process.poll() is not None
            )
        )
        assert "authorities.pem" in daemon.said("reload_refused")[0]["detail"]
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])


def test_reload_while_a_request_hangs(state, relay, tmp_path):
    """A reload cuts off what does not come to its end; it goes to the new relay with its key."""
    file = tmp_path / "outbox.toml"
    with fake_relay(HANGS) as silent:
        configured(file, url=silent.url, token=TOKEN)
        with DaemonProcess(state, None, {"relay.token": ""}, flags=["--config", str(file)]) as daemon:
            (receipt,) = put(state, "builder", 0)
            wait_for(lambda: deliveries(silent))
            configured(file, url=relay.url, token=TOKEN)
            daemon.send(signal.SIGHUP)
            wait_for(lambda: numbers(relay) == [0])
        (event,) = relay.events()
        assert event["key"] == receipt.idempotency_key
        assert deliveries(silent)[0]["body"] == event["body"]


def test_a_custom_kind_is_known_after_a_reload(state, relay, tmp_path):
    """What producers and the local socket may take follows the configuration of now."""
    file = tmp_path / "outbox.toml"
    configured(file, url=relay.url, token=TOKEN)
    with DaemonProcess(state, None, {"relay.token": ""}, flags=["--config", str(file)]) as daemon:
        event = {"kind": "page", "payload": {"n": 1}}
        assert daemon.ask("POST", "/v1/agents/builder/events", event)[0] == 422
        file.write_text(file.read_text() + '[kinds.page]\npath = "/api/messages"\n')
        daemon.send(signal.SIGHUP)
        wait_for(lambda: daemon.said("reloaded"))
        assert daemon.ask("POST", "/v1/agents/builder/events", event)[0] == 200
        wait_for(lambda: numbers(relay) == [1])


# Waking up -------------------------------------------------------------------------------------------------


def test_a_datagram_wakes_the_daemon(state, relay):
    """An event of another process is delivered long before the next poll, the first one of an agent too."""
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": NEVER_S}):
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])
        put(state, "builder", 1)
        wait_for(lambda: numbers(relay) == [0, 1])


def test_the_poll_is_the_backstop(state, relay):
    """Without the wake socket an event is found by the poll."""
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "0.2"}):
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])
        StateDirectory(state).wake_socket.unlink()
        put(state, "builder", 1)
        put(state, "another", 2)
        wait_for(lambda: sorted(numbers(relay)) == [0, 1, 2])


def test_nonsense_on_the_wake_socket_does_no_harm(state, relay):
    """A hint is only a hint: whatever it says, the next good one counts."""
    with (
        DaemonProcess(state, relay.url, {"daemon.poll_interval_s": NEVER_S}),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        for hint in (b"", b"\xff\xfe", b"../../etc/passwd", b"no-such.sqlite", b"a\0b.sqlite", b"x" * 8_000):
            sender.sendto(hint, str(StateDirectory(state).wake_socket))
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])


# Tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_first", [None, "", " \n"], ids=["missing", "empty", "blank"])
def test_a_token_file_that_comes_later(state, relay, tmp_path, at_first):
    """E12, E13: events wait, one warning says why, and the poll finds the token, whatever the backoff."""
    file = tmp_path / "token"
    if at_first is not None:
        file.write_text(at_first)
    settings = {**BY_HAND_ONLY, "relay.token": "", "daemon.poll_interval_s": "0.2"}
    with DaemonProcess(state, relay.url, settings, flags=["--token-file", str(file)]) as daemon:
        put(state, "builder", 0, 1)
        (line,) = wait_for(lambda: daemon.said("gate_closed"))
        assert line["reason"] == "no_token"
        assert str(file) in line["detail"]
        assert status_of(state, "builder").waiting == 2
        file.write_text(f"{TOKEN}\n")
        wait_for(lambda: numbers(relay) == [0, 1])
        assert len(daemon.said("gate_closed")) == 1


def test_a_token_file_that_is_put_right(state, relay, tmp_path):
    """A wrong token costs nothing: with the right one in the file the event goes out within a poll or two."""
    file = tmp_path / "token"
    file.write_text("tok-of-yesterday")
    settings = {**BY_HAND_ONLY, "relay.token": "", "daemon.poll_interval_s": "0.2"}
    with DaemonProcess(state, relay.url, settings, flags=["--token-file", str(file)]) as daemon:
        put(state, "builder", 0)
        wait_for(lambda: daemon.said("gate_closed"))
        assert daemon.said("gate_closed")[0]["reason"] == "unauthorized"
        assert status_of(state, "builder").head.attempts == 0
        file.write_text(TOKEN)
        wait_for(lambda: numbers(relay) == [0])
        assert "tok-of-yesterday" not in daemon.log.read_text()


def test_a_token_that_somebody_else_read_first(state, relay, tmp_path):
    """A turn of another agent reads the new token before the poll does: the poll notices all the same."""
    file = tmp_path / "token"
    file.write_text("tok-of-yesterday")
    settings = {**BY_HAND_ONLY, "relay.token": "", "daemon.poll_interval_s": "1"}
    with DaemonProcess(state, relay.url, settings, flags=["--token-file", str(file)]) as daemon:
        put(state, "builder", 0)
        wait_for(lambda: daemon.said("gate_closed"))
        file.write_text(TOKEN)
        put(state, "second", 1)
        wait_for(lambda: sorted(numbers(relay)) == [0, 1])


# Privacy ---------------------------------------------------------------------------------------------------


def test_everything_is_private(state, relay):
    """E14, P12: folders 0700, files and sockets 0600, also under umask 000, while it runs and afterwards."""
    with DaemonProcess(state, relay.url, umask=0) as daemon:
        with program(state, "import os; os.umask(0); from outbox import Outbox; Outbox.open('a')") as made:
            assert made.wait(20) == 0
        daemon.ask("POST", "/v1/agents/builder/events", {"kind": "session-message", "payload": {"n": 0}})
        put(state, "builder", 1)
        wait_for(lambda: numbers(relay) == [0, 1])
        found = modes(state)
        assert {path.name for path in found} >= {"wake.sock", "outbox.sock", "daemon.json", "relay.sqlite"}
        assert set(found.values()) == {"drwx------", "-rw-------", "srw-------"}
        assert daemon.stop() == 0
    assert set(modes(state).values()) == {"drwx------", "-rw-------"}


def modes(folder):
    """The mode of a folder and of everything in it."""
    paths = [folder, *folder.rglob("*")]
    return {path: stat.filemode(path.lstat().st_mode) for path in paths}


# The log ---------------------------------------------------------------------------------------------------


def test_each_line_of_the_log_is_one_clean_line(state):
    """H23, P12: neither a relay's answer nor an agent's name forges a line, and the token is in none."""
    said = f"no\nevent=stopped left=0\r\x1b[2J\x00 {TOKEN} \u2028 end"
    bad = {"status": 422, "body": json.dumps({"error": {"code": "bad\nthing", "message": said}})}
    late = {"status": 503, "body": said, "repeat": 2}
    with (
        fake_relay({"steps": [bad, late]}) as relay,
        DaemonProcess(state, relay.url, {"daemon.log_level": "debug"}) as daemon,
    ):
        agent = "eve\nevent=stopped \x1b[31m"
        put(state, agent, 0, 1)
        wait_for(lambda: not status_of(state, agent).waiting)
        assert len(dead_of(state, agent)) == 1
        assert daemon.stop() == 0
        lines = daemon.lines()
        assert [line for line in lines if not LINE.fullmatch(line)] == []
        events = {re.search("event=([a-z_]+)", line)[1] for line in lines}
        assert events >= {"serving", "dead_letter", "gate_closed", "gate_opened", "delivered", "stopped"}
        assert len(daemon.said("stopped")) == 1
        assert TOKEN not in daemon.log.read_text()


def test_the_log_as_json(state, relay):
    """Under systemd each line is one JSON object with the event's name first."""
    with DaemonProcess(state, relay.url, {"daemon.log_format": "json"}) as daemon:
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.lines()]
    assert [line["event"] for line in lines] == ["serving", "stopping", "stopped"]
    assert lines[0]["relay"] == relay.url


# Many at once ----------------------------------------------------------------------------------------------


def test_two_equal_events_are_two(state, relay):
    """P06: who says the same twice in one millisecond, without a key, has said it twice."""
    line = b'{"kind":"session-message","payload":{"text":"ok"},"occurredAt":1790000000000}\n'
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": "0.2"}):
        assert outbox_command(state, "enqueue", "--agent", "builder", stdin=line * 2).returncode == 0
        wait_for(lambda: len(relay.events()) == 2)
    assert len({event["key"] for event in relay.events()}) == 2
    assert {json.loads(event["body"])["text"] for event in relay.events()} == {"ok"}


PRODUCE = """
import sys
from outbox import Outbox
with Outbox.open("builder") as outbox:
    print("ready", flush=True)
    sys.stdin.read()
    for i in range(100):
        outbox.enqueue("session-message", {"n": i, "p": int(sys.argv[1])})
"""


def test_four_processes_enqueue_for_one_agent(state, relay):
    """P12: 4 x 100 events at once, drained meanwhile: all arrive, each producer's in order."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(DaemonProcess(state, relay.url))
        producers = [stack.enter_context(program(state, PRODUCE, str(p))) for p in range(4)]
        for producer in producers:
            assert producer.stdout.readline() == "ready\n"
        for producer in producers:
            producer.stdin.close()
            producer.stdin = None
        for producer in producers:
            assert producer.communicate(timeout=60) == ("", "")
        wait_for(lambda: relay.summary()["builder"]["count"] == 400)
    bodies = [json.loads(event["body"]) for event in relay.events("builder")]
    for p in range(4):
        assert [body["n"] for body in bodies if body["p"] == p] == list(range(100))
    assert relay.summary()["builder"]["inOrder"]


def test_an_agent_that_hangs_does_not_stop_another(state, relay):
    """P13: while the relay is silent about one agent's event, those of another arrive."""
    relay.add_faults({"match": {"agent": "slow"}, "action": {"hang": 600}})
    with DaemonProcess(state, relay.url, {"daemon.flush_timeout_s": "0"}):
        put(state, "slow", 0)
        wait_for(lambda: is_in_flight(state, "slow"))
        for n in range(5):
            put(state, "quick", n)
            wait_for(lambda: numbers(relay) == list(range(n + 1)), 5)  # noqa: B023 - asked at once
        assert is_in_flight(state, "slow")


def test_a_state_directory_with_a_long_path(tmp_path, relay):
    """A path longer than sockaddr_un's 108 bytes: both sockets are there, and both are heard."""
    state = tmp_path / ("deep-" * 20) / ("folder-" * 10)
    with DaemonProcess(state, relay.url, {"daemon.poll_interval_s": NEVER_S}) as daemon:
        put(state, "builder", 0)
        wait_for(lambda: numbers(relay) == [0])
        event = {"kind": "session-message", "payload": {"n": 1}}
        assert daemon.ask("POST", "/v1/agents/builder/events", event)[0] == 200
        wait_for(lambda: numbers(relay) == [0, 1])
        flushed = outbox_command(state, "flush", "--json", "--timeout", "10")
        assert json.loads(flushed.stdout) == {"delivered": 0, "left": 0, "dead": 0}
        assert outbox_command(state, "stop").returncode == 0
        assert daemon.ended() == 0
        assert [path.name for path in (state / "agents").glob("*.sqlite")]
