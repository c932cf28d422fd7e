"""The units under the real systemd, as PID 1 of namespaces that these tests make.

They need root, and the packages systemd and util-linux; .ci/run installs what is missing.
"""

import contextlib
import json
import socket

import pytest
from processes import wait_for
from systemd_host import LOG, SystemdHost

from relay_client.reference.process import RelayProcess

TOKEN = "tok-systemd"
OUTBOX = "/opt/relay-outbox/bin/outbox"
SOCKET = "/run/relay-outbox/outbox.sock"
SERVICE = "outbox.service"
CONFIG = '[relay]\ntoken_file = "relay-token"\n[daemon]\npoll_interval_s = 0.5\n'
LIKE_ALICE = ("65534", "relay-outbox")  # another user, who is in the group

_ASK = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as one:
    one.settimeout(60)
    one.connect(sys.argv[1])
    body = sys.argv[4].encode()
    head = f"{sys.argv[2]} {sys.argv[3]} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
    head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    one.sendall(head.encode() + body)
    answer = b"".join(iter(lambda: one.recv(65536), b""))
    print(answer.split(b"\\r\\n\\r\\n", 1)[1].decode())
"""


@pytest.fixture
def host():
    """A systemd with our units installed, its user made, its token in place, and nothing started."""
    with SystemdHost() as host:
        host.run(OUTBOX, "install", "--system", "--command", OUTBOX)
        host.run("systemd-sysusers", "/etc/sysusers.d/relay-outbox.conf")
        host.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/relay-outbox.conf")
        host.write("/etc/relay-outbox/token", TOKEN, "600")
        host.write("/etc/relay-outbox/outbox.toml", CONFIG)
        host.drop_in(SERVICE, f"[Service]\nStandardError=append:{LOG}\nStandardOutput=append:{LOG}\n")
        yield host


@pytest.fixture
def relay(tmp_path):
    """The reference relay."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        yield relay


@contextlib.contextmanager
def nobody():
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def points_to(host, url, **variables):
    """Let the service deliver to this relay."""
    lines = [f"OUTBOX_RELAY_URL={url}", *(f"{name}={text}" for name, text in variables.items())]
    host.drop_in(SERVICE, "[Service]\n" + "".join(f"Environment={line}\n" for line in lines))


def ask(host, method, path, body=None, user=LIKE_ALICE):
    """One request to the local socket as another user."""
    text = "" if body is None else json.dumps(body)
    return json.loads(host.run("/opt/python/bin/python3", "-c", _ASK, SOCKET, method, path, text, user=user))


def enqueue(host, *numbers, agent="builder"):
    """Hand over messages as another user, through the socket."""
    for n in numbers:
        message = {"kind": "session-message", "payload": {"from": agent, "to": "lead", "body": f"{n}"}}
        assert ask(host, "POST", f"/v1/agents/{agent}/events", message)["state"] == "waiting"


def bodies(relay):
    """The texts that the relay holds."""
    return [json.loads(event["body"])["body"] for event in relay.events()]


def test_the_life_of_a_service(host, relay):
    """Hardened: started by a client, delivering with the credential, reloaded, restarted, stopped."""
    points_to(host, relay.url)
    host.systemctl("start", "outbox.socket")
    enqueue(host, 0)  # may be answered before systemd has read that the service is ready
    wait_for(lambda: host.show(SERVICE, "ActiveState") == "active", 60)
    wait_for(lambda: bodies(relay) == ["0"], 60)
    wait_for(lambda: host.show(SERVICE, "StatusText") == f"delivers to {relay.url}, 1 agent", 60)

    host.write("/etc/relay-outbox/outbox.toml", CONFIG.replace("0.5", "0.25"))
    host.systemctl("reload", SERVICE)
    wait_for(lambda: "daemon.poll_interval_s: 0.5 -> 0.25" in host.log(), 60)
    wait_for(lambda: host.show(SERVICE, "ActiveState") == "active", 60)

    before = host.show(SERVICE, "MainPID")
    host.systemctl("restart", SERVICE)
    assert host.show(SERVICE, "MainPID") not in {before, "0"}
    enqueue(host, 1)
    wait_for(lambda: bodies(relay) == ["0", "1"], 60)

    host.systemctl("stop", "outbox.socket", SERVICE)
    assert (host.show(SERVICE, "Result"), host.show(SERVICE, "ExecMainStatus")) == ("success", "0")
    assert "event=stopped" in host.log().splitlines()[-1]
    hidden = host.run("sh", "-c", "ls /var/lib/relay-outbox 2>&1 || true", user=LIKE_ALICE)
    assert "Permission denied" in hidden


def test_a_missing_token_only_lets_events_wait(host, relay):
    """Without its file the service starts, accepts, and says what it waits for."""
    host.run("rm", "/etc/relay-outbox/token")
    points_to(host, relay.url, OUTBOX_DAEMON_FLUSH_TIMEOUT_S="0.5")
    host.systemctl("start", SERVICE)
    enqueue(host, 0)
    wait_for(lambda: "no_token" in host.show(SERVICE, "StatusText"), 60)
    host.write("/etc/relay-outbox/token", TOKEN, "600")
    host.systemctl("restart", SERVICE)
    wait_for(lambda: bodies(relay) == ["0"], 60)


def test_a_hung_engine_is_killed_and_started_again(host, relay):
    """The watchdog hears nothing of a daemon whose engine hangs; where its threads were is in the log."""
    points_to(host, relay.url)
    command = "ExecStart=\nExecStart=/opt/relay-outbox/bin/hanging serve\n"
    host.drop_in(SERVICE, f"[Service]\n{command}WatchdogSec=6s\nRestartSec=0\n")
    host.systemctl("start", SERVICE)
    before = host.show(SERVICE, "MainPID")
    host.run("touch", "/run/hang")
    wait_for(lambda: "Fatal Python error: Aborted" in host.log(), 60)
    host.run("rm", "/run/hang")
    wait_for(lambda: host.show(SERVICE, "MainPID") not in {before, "0"}, 60)
    assert int(host.show(SERVICE, "NRestarts")) >= 1
    wait_for(lambda: host.show(SERVICE, "ActiveState") == "active", 60)
    enqueue(host, 0)
    wait_for(lambda: bodies(relay) == ["0"], 60)


def test_a_last_flush_is_given_its_time(host):
    """The flush lasts longer than TimeoutStopSec=: the daemon is not killed, and says what is left."""
    with nobody() as url:
        points_to(host, url, OUTBOX_DAEMON_FLUSH_TIMEOUT_S="5")
        host.drop_in(SERVICE, "[Service]\nTimeoutStopSec=1s\n")
        host.systemctl("start", SERVICE)
        enqueue(host, 0, 1, 2)
        host.systemctl("stop", "outbox.socket", SERVICE)
    assert (host.show(SERVICE, "Result"), host.show(SERVICE, "ExecMainStatus")) == ("success", "0")
    assert "left=3" in host.log().splitlines()[-1]


def test_an_agents_events_go_out_when_its_unit_stops(host, relay):
    """The flush unit on an agent's own unit: after the agent's end the daemon waits for no next try."""
    relay.stop()
    points_to(host, relay.url, OUTBOX_DELIVERY_BACKOFF_INITIAL_S="3600", OUTBOX_DELIVERY_BACKOFF_MAX_S="3600")
    host.drop_in("outbox-flush@.service", f"[Service]\nStandardOutput=append:{LOG}\n")
    host.write("/etc/systemd/system/agent.service", "[Service]\nExecStart=/bin/sleep infinity\n")
    example = "/opt/source/systemd/examples/agent-flush.conf"
    host.run("install", "-D", example, "/etc/systemd/system/agent.service.d/agent-flush.conf")
    host.systemctl("daemon-reload")
    host.systemctl("start", "agent.service")
    assert host.show(SERVICE, "ActiveState") == host.show("outbox-flush@builder", "ActiveState") == "active"
    enqueue(host, 0, 1)
    wait_for(lambda: "event=gate_closed" in host.log(), 60)
    relay.start()
    host.systemctl("stop", "agent.service")
    wait_for(lambda: host.show("outbox-flush@builder", "ActiveState") == "inactive", 60)
    assert bodies(relay) == ["0", "1"]
    assert "2 delivered, nothing left." in host.log()


def test_what_was_installed_is_removed(host):
    """Uninstalled, nothing of ours is left but settings and events, also no link of `enable`."""
    host.systemctl("enable", "outbox.service")
    host.run(
        OUTBOX,
        "install",
        "--system",
        "--uninstall",
        "--command",
        OUTBOX,
    )
    host.systemctl("daemon-reload")
    left = host.run(
        "find", "/etc/systemd/system", "/etc/sysusers.d", "/etc/tmpfiles.d", "-name", "*outbox*.*"
    )
    assert [line for line in left.splitlines() if ".service.d" not in line] == []
    assert host.run("cat", "/etc/relay-outbox/token") == TOKEN


def test_a_user_has_a_service_too(host, relay):
    """Run by the systemd of that user, and looking for events where the user's commands put them."""
    alice, home, runtime = ("65534", "65534"), "/run/alice", "/run/alice/run"
    host.run("install", "-d", "-o", alice[0], home, runtime)
    manager = (
        "[Service]\nType=notify\nUser=65534\nDelegate=pids memory\nExecStart=/lib/systemd/systemd --user\n"
    )
    manager += f"Environment=HOME={home} XDG_RUNTIME_DIR={runtime} PATH=/usr/bin:/bin \n"
    host.write("/etc/systemd/system/alice.service", manager)
    host.systemctl("daemon-reload")

    def as_alice(*words):
        return host.run("env", f"HOME={home}", f"XDG_RUNTIME_DIR={runtime}", *words, user=alice)

    host.systemctl("start", "alice.service")
    as_alice(OUTBOX, "install", "--user", "--command", OUTBOX)
    config = f'[relay]\nurl = "{relay.url}"\ntoken_file = "token"\n'
    for name, text in {"outbox.toml": config, "token": TOKEN}.items():
        host.write(f"{home}/.config/relay-outbox/{name}", text)
    as_alice("systemctl", "--user", "daemon-reload")
    as_alice("systemctl", "--user", "enable", "--now", SERVICE)
    payload = json.dumps({"from": "builder", "to": "lead", "body": "0"})
    as_alice(OUTBOX, "enqueue", "--agent", "builder", "--kind", "session-message", "--payload", payload)
    wait_for(lambda: bodies(relay) == ["0"], 60)
    status = as_alice("systemctl", "--user", "show", "--value", "-p", "StatusText", SERVICE)
    assert status.startswith(f"delivers to {relay.url}")
    as_alice("systemctl", "--user", "stop", SERVICE)
    assert as_alice("systemctl", "--user", "show", "--value", "-p", "Result", SERVICE) == "success"
