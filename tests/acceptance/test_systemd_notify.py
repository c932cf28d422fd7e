"""What systemd hears of a real daemon, at a socket of these tests; and the sockets that it hands over."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest
from processes import ROOT, DaemonProcess, ask, environment, numbers, put, wait_for
from systemd_host import HANGING

from relay_client.reference.process import RelayProcess

TOKEN = "tok-daemon"


class Systemd:
    """The socket at which systemd listens; `told` is what came so far, one mapping a message."""

    def __init__(self, address):
        self.address = address
        self.told = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def hear(self):
        """Read what lies there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self._socket.recv(4_096, socket.MSG_DONTWAIT).decode().splitlines()
                self.told.append(dict(line.split("=", 1) for line in lines))
        return self.told

    def wait_for(self, name, after=0):
        """The first message with this name behind the first `after` ones."""
        return wait_for(lambda: [told for told in self.hear()[after:] if name in told], 60)[0]

    def count(self, name):
        """How many messages had this name so far."""
        return sum(name in told for told in self.hear())


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    """A systemd that listens, at a path or at an abstract name."""
    where = str(tmp_path / "notify") if request.param == "path" else f"@outbox-{os.getpid()}-{tmp_path.name}"
    with Systemd(where) as systemd:
        yield systemd


@pytest.fixture
def one(tmp_path):
    """A systemd that listens at a path."""
    with Systemd(str(tmp_path / "notify")) as systemd:
        yield systemd


@pytest.fixture
def state(tmp_path):
    """A place for the events, not made yet."""
    return tmp_path / "state"


@pytest.fixture
def nobody():
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_the_life_of_a_daemon_as_systemd_hears_it(systemd, state, nobody):
    """Ready once it accepts, a status that tells of the relay, a reload with its moment, and the end."""
    with DaemonProcess(state, nobody, environ={"NOTIFY_SOCKET": systemd.address}) as daemon:
        began = systemd.wait_for("READY")
        assert began["STATUS"] == f"delivers to {nobody}, 0 agents"
        assert daemon.ask("GET", "/v1/status")[0] == 200
        assert systemd.count("WATCHDOG") == systemd.count("RELOADING") == 0

        put(state, "builder", 0)
        wait_for(lambda: daemon.said("gate_closed"))
        heard, before_us = len(systemd.told), time.monotonic_ns() // 1_000
        daemon.send(signal.SIGHUP)
        reload = systemd.wait_for("RELOADING", after=heard)
        assert before_us <= int(reload["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1_000
        again = systemd.wait_for("READY", after=systemd.told.index(reload))
        assert again["STATUS"].endswith(f"{nobody}, 1 agent; events stay on disk")

        assert daemon.stop() == 0
        end = systemd.wait_for("STOPPING")
        assert int(end["EXTEND_TIMEOUT_USEC"]) > 0
        assert systemd.hear()[-1]["STATUS"] == "stopped: 1 left on disk"


def test_a_refused_reload_ends_too(one, state, nobody, tmp_path):
    """Or systemctl would wait for it for ever."""
    config = tmp_path / "outbox.toml"
    config.write_text("", "utf-8")
    flags = ["--config", str(config)]
    with DaemonProcess(state, nobody, flags=flags, environ={"NOTIFY_SOCKET": one.address}) as daemon:
        one.wait_for("READY")
        config.write_text("[daemon]\npoll_interval_s = -1\n", "utf-8")
        heard = len(one.told)
        daemon.send(signal.SIGHUP)
        one.wait_for("RELOADING", after=heard)
        one.wait_for("READY", after=heard)
        assert daemon.said("reload_refused")


def test_a_flush_at_the_end_asks_for_time(one, state, nobody):
    """As long as it goes on, and the watchdog hears of it too; a second signal ends it."""
    variables = {"NOTIFY_SOCKET": one.address, "WATCHDOG_USEC": "400000"}
    with DaemonProcess(state, nobody, {"daemon.flush_timeout_s": "3600"}, environ=variables) as daemon:
        put(state, "builder", 0, 1)
        daemon.send(signal.SIGTERM)
        one.wait_for("STOPPING")
        heard = len(one.told)
        wait_for(
            lambda: sum({"EXTEND_TIMEOUT_USEC", "WATCHDOG"} <= {*told} for told in one.hear()[heard:]) > 3, 60
        )
        daemon.send(signal.SIGTERM)
        assert daemon.ended() == 0
        assert one.hear()[-1]["STATUS"] == "stopped: 2 left on disk"


def test_the_watchdog_hears_a_daemon_that_works(one, state, nobody):
    """Also an idle one, however long its poll interval is."""
    variables = {"NOTIFY_SOCKET": one.address, "WATCHDOG_USEC": "400000"}
    with DaemonProcess(state, nobody, {"daemon.poll_interval_s": "3600"}, environ=variables):
        wait_for(lambda: one.count("WATCHDOG") > 5, 60)


def test_the_watchdog_hears_nothing_of_a_hung_engine(one, state, nobody, tmp_path):
    """The main thread goes on, but whoever delivers does not: it is logged, and no pulse comes any more."""
    hang, log = tmp_path / "hang", tmp_path / "log"
    variables = {"NOTIFY_SOCKET": one.address, "WATCHDOG_USEC": "400000"}
    words = [str(hang), "serve", "--state-dir", str(state), "--relay", nobody]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGING, *words],
            env=environment(tmp_path, {"daemon.poll_interval_s": "3600"}, **variables),
            stderr=stderr,
            cwd=ROOT,
        )
    with process:
        try:
            wait_for(lambda: one.count("WATCHDOG") > 2, 60)
            hang.touch()
            wait_for(lambda: "event=engine_stuck" in log.read_text("utf-8"), 60)
            heard = one.count("WATCHDOG")
            silent_until = time.monotonic() + 1.0  # ten pulses
            wait_for(lambda: time.monotonic() > silent_until)
            assert one.count("WATCHDOG") == heard
        finally:
            process.kill()
    assert "its watchdog will restart it" in log.read_text("utf-8")


def test_children_do_not_inherit_what_systemd_gave(one, state, nobody, tmp_path):
    """Neither the variables nor the sockets: nobody else speaks in the daemon's name."""
    seen = tmp_path / "seen"
    script = f"import os; open({str(seen)!r} + '.draft', 'w').write(repr(sorted(os.environ)));"
    script += f" os.rename({str(seen)!r} + '.draft', {str(seen)!r})"
    command = shlex.join([sys.executable, "-c", script])
    settings = {"notify.command": command, "notify.alert_after_s": "0.1"}
    with DaemonProcess(
        state, nobody, settings, environ={"NOTIFY_SOCKET": one.address, "WATCHDOG_USEC": "9000000"}
    ):
        put(state, "builder", 0)
        wait_for(seen.exists, 60)
    names = seen.read_text("utf-8")
    assert "'PATH'" in names
    assert not any(name in names for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"))


# Socket activation -----------------------------------------------------------------------------------------


def test_a_socket_of_systemd_is_served(state, tmp_path):
    """`systemd-socket-activate` starts the daemon at the first connection; the name stays when it stops."""
    path, home = tmp_path / "activated.sock", tmp_path / "home"
    settings = {"relay.token": TOKEN, "daemon.flush_timeout_s": "5"}
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        daemon = [sys.executable, "-m", "outbox", "serve", "--state-dir", str(state), "--relay", relay.url]
        env = environment(home, settings)
        carried = [word for name in env for word in ("-E", name)]
        with subprocess.Popen(
            ["systemd-socket-activate", f"--listen={path}", "--fdname=local-http", *carried, *daemon],
            env=env,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                wait_for(path.exists)
                event = {"kind": "session-message", "payload": {"from": "builder", "body": "0", "n": 0}}
                assert ask(path, "POST", "/v1/agents/builder/events", event)[0] == 200
                wait_for(lambda: numbers(relay) == [0], 60)
                assert not (state / "outbox.sock").exists()
                assert '"socket": ' + f'"{path}"' in (state / "daemon.json").read_text("utf-8")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            finally:
                process.kill()
    assert path.exists()
