"""The messages to systemd, the sockets that it hands over, and when the engine counts as hung."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest
from processes import wait_for

from outbox.daemon.activation import path_of, take_sockets
from outbox.daemon.heartbeat import longest_turn_ms
from outbox.daemon.sd_notify import (
    WATCHDOG,
    ServiceLink,
    extend,
    ready,
    reloading,
    status_line,
    stopping,
    take_link,
)
from outbox.delivery.engine import Engine, _Seat
from outbox.delivery.shared import Sleep
from outbox.errors import ConfigError
from outbox.settings import load

OTHERS = {"HOME": "/home/alice"}


# Messages --------------------------------------------------------------------------------------------------


def test_messages_are_those_of_the_protocol():
    """As sd_notify(3) writes them, one assignment a line."""
    assert ready("fine") == "READY=1\nSTATUS=fine"
    assert reloading(1_234_567) == "RELOADING=1\nMONOTONIC_USEC=1234567"
    assert stopping("flushes", 30) == "STOPPING=1\nSTATUS=flushes\nEXTEND_TIMEOUT_USEC=30000000"
    assert extend(0.5) == "EXTEND_TIMEOUT_USEC=500000"


def test_a_status_cannot_forge_another_message():
    """What a relay answered stays in its line, and a very long text is cut."""
    assert "\n" not in status_line("it says: no\nMAINPID=1")
    assert len(status_line("x" * 10_000)) < 500


@pytest.mark.parametrize("is_abstract", [False, True])
def test_messages_arrive(tmp_path, is_abstract):
    """At a path, and in the abstract name space."""
    address = f"@outbox-test-{os.getpid()}-{tmp_path.name}" if is_abstract else str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:] if is_abstract else address)
        assert ServiceLink(address).tell(WATCHDOG, "STATUS=é")
        assert systemd.recv(4_096) == "WATCHDOG=1\nSTATUS=é".encode()


def test_nobody_listening_is_no_trouble(tmp_path):
    """Without systemd, and with one that is gone, nothing is raised."""
    assert not ServiceLink().tell(WATCHDOG)
    assert not ServiceLink(str(tmp_path / "gone")).tell(WATCHDOG)


@pytest.mark.parametrize(
    ("variables", "link"),
    [
        ({}, ServiceLink()),
        ({"NOTIFY_SOCKET": "/run/n"}, ServiceLink("/run/n")),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000"}, ServiceLink("@n", 3.0)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"}, ServiceLink("/n", 0.5)),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"}, ServiceLink("/n")),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}, ServiceLink("/n")),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "0"}, ServiceLink("/n")),
        ({"NOTIFY_SOCKET": "vsock:2:1", "WATCHDOG_USEC": "5"}, ServiceLink()),
    ],
)
def test_the_link_is_what_systemd_set_up_for_us(variables, link):
    """A watchdog of another process is none of ours; and no variable is left for children."""
    environ = {**OTHERS, **variables}
    assert take_link(environ, 7) == link
    assert environ == OTHERS


# Sockets ---------------------------------------------------------------------------------------------------


@pytest.fixture
def handed(monkeypatch, tmp_path):
    """Stand a socket at the descriptor from which systemd counts, as far as this process is concerned."""

    def stand(made):
        monkeypatch.setattr("outbox.daemon.activation._FIRST_FD", made.detach())
        return {**OTHERS, "LISTEN_PID": "7", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "local-http"}

    return stand


def test_a_listening_socket_is_taken(handed, tmp_path):
    """It is the one that was bound; no variable and no descriptor is left for children."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(tmp_path / "s"))
    made.listen()
    environ = handed(made)
    (taken,) = take_sockets(environ, 7)
    with taken:
        assert path_of(taken) == tmp_path / "s"
        assert not taken.get_inheritable()
    assert environ == OTHERS


@pytest.mark.parametrize("listens_to", ["datagrams", "tcp", "nobody"])
def test_another_socket_is_refused(handed, tmp_path, listens_to):
    """With its name, and what the socket unit should say."""
    family = socket.AF_INET if listens_to == "tcp" else socket.AF_UNIX
    made = socket.socket(family, socket.SOCK_DGRAM if listens_to == "datagrams" else socket.SOCK_STREAM)
    if listens_to == "tcp":
        made.bind(("127.0.0.1", 0))
        made.listen()
    fd = made.fileno()
    with pytest.raises(ConfigError, match=r"local-http.*ListenStream="):
        take_sockets(handed(made), 7)
    os.close(fd)


@pytest.mark.parametrize("variables", [{}, {"LISTEN_PID": "8", "LISTEN_FDS": "1"}, {"LISTEN_PID": "7"}])
def test_what_is_meant_for_another_process_is_left(variables):
    """LISTEN_PID says whose they are."""
    assert take_sockets({**OTHERS, **variables}, 7) == []


# The engine's pulse ----------------------------------------------------------------------------------------


class _Clock:
    """A clock that stands where it is put."""

    now_ms = 1_000

    def monotonic_ms(self):
        """Now."""
        return self.now_ms


class _Delivery:
    """As much of a delivery as the scheduler itself looks at."""

    def __init__(self):
        self.clock = _Clock()

    def let_in(self, *_):
        """Nobody waits at the gate here."""
        return 0


@pytest.fixture
def engine():
    """An engine whose pumps do nothing."""
    engine = Engine(_Delivery())
    yield engine
    assert engine.stop(20)


def seat(engine, path, turn):
    """Have a pump in the engine that does this in its turn."""
    engine._seats[path] = _Seat(SimpleNamespace(path=path, agent="builder", turn=turn))
    engine.wake(path)


def test_an_engine_at_rest_is_alive(engine):
    """With threads that have nothing to do, and with turns that end."""
    engine.start(2)
    assert engine.stuck(500) == ""


def test_a_turn_that_does_not_end_is_noticed(engine, tmp_path):
    """Only once it takes longer than a turn can, and no longer when it has ended after all."""
    began, end = threading.Event(), threading.Event()

    def turn():
        began.set()
        assert end.wait(60)
        return Sleep(None)

    seat(engine, tmp_path / "a.sqlite", turn)
    engine.start(2)
    assert began.wait(20)
    engine.delivery.clock.now_ms += 500
    assert engine.stuck(500) == ""
    engine.delivery.clock.now_ms += 1
    assert engine.stuck(500) == "a turn of agent 'builder' does not end"
    end.set()
    wait_for(lambda: engine.stuck(500) == "")


def test_a_lock_that_is_not_let_go_is_noticed(engine, monkeypatch):
    """A scheduler that nobody can enter does not go on."""
    monkeypatch.setattr("outbox.delivery.engine._LOCK_WITHIN_S", 0.05)
    taken, end = threading.Event(), threading.Event()

    def hold():
        with engine._cond:
            taken.set()
            assert end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(20)
    assert "lock" in engine.stuck(500)
    end.set()
    holder.join(20)
    assert engine.stuck(500) == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_ended_is_noticed(engine, monkeypatch):
    """A fault of ours in the scheduler itself ends a thread; the daemon is started anew."""

    def fault():
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(engine, "_collect", fault)
    engine.start(1)
    wait_for(lambda: "worker" in engine.stuck(500))


def test_a_turn_may_take_all_timeouts_together():
    """A slow relay that keeps within the timeouts is never taken for a hung engine."""
    settings = load({"relay.request_timeout_s": 300, "mcp.timeout_s": 100}, environ={"HOME": "/nowhere"})
    assert longest_turn_ms(settings) > 4 * 300_000
