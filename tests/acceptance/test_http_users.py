"""Another user: by the socket with the group, and while that is away by an outbox of its own."""

import json
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest
from other_user import GROUP, IS_ROOT, by_another, home_of_another
from processes import DaemonProcess, dead_of, numbers, outbox_command, status_of, wait_for

from relay_client.reference.process import RelayProcess

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there


@contextmanager
def open_folder():
    """A folder that everybody can enter; those of pytest are its user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="users-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        rmtree(folder)


@pytest.fixture
def place():
    """Where the socket lies, and the home of the other user."""
    with open_folder() as folder:
        yield folder


def serving(place, url=NOBODY, **settings):
    """A daemon whose socket a group may use; its files stay private."""
    given = {"daemon.socket_group": GROUP, "daemon.flush_timeout_s": "0.1", **settings}
    return DaemonProcess(place / "state", url, given, flags=["--socket", str(place / "outbox.sock")])


def lines(*ns):
    """Events as lines, without keys."""
    return b"".join(
        json.dumps({"kind": "session-message", "payload": {"from": "b", "body": f"{n}", "n": n}}).encode()
        + b"\n"
        for n in ns
    )


def put(place, *ns, **more):
    """`outbox enqueue` by the other user; the receipts."""
    home = home_of_another(place / "home")
    done = by_another(
        home, place / "outbox.sock", "enqueue", "--agent", "builder", "--json", stdin=lines(*ns), **more
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr.decode()


def run(place, *words, **more):
    """Another command by the other user."""
    return by_another(home_of_another(place / "home"), place / "outbox.sock", *words, **more)


def test_the_group_enqueues_and_cannot_read_the_files(place):
    """The socket is 0660 of the group; what it takes is on the daemon's disk, where the group cannot look."""
    with serving(place):
        mode = (place / "outbox.sock").stat()
        assert stat.filemode(mode.st_mode) == "srw-rw----"
        assert mode.st_gid == int(GROUP)
        receipts, errors = put(place, 1, 2, 3)
        assert ([one["seq"] for one in receipts], errors) == ([1, 2, 3], "")
        assert status_of(place / "state", "builder").waiting == 3
        assert not (place / "home" / ".local").exists()
        assert stat.S_IMODE((place / "state").stat().st_mode) == 0o700
        if IS_ROOT:
            (file,) = (place / "state" / "agents").glob("*.sqlite")
            done = run(place, "--python", f"open({str(file)!r})")
            assert b"PermissionError" in done.stderr


def test_who_is_not_in_the_group_keeps_events_on_its_own_disk(place):
    """No right to the socket is no reason to lose an event; the person is told where it waits."""
    with serving(place):
        receipts, errors = put(place, 1, in_group=False)
        if IS_ROOT:  # elsewhere there is no other user to be
            assert receipts[0]["state"] == "waiting"
            assert "outbox flush" in errors
            assert status_of(own(place), "builder").waiting == 1


def own(place):
    """The other user's own state directory."""
    return place / "home" / ".local" / "state" / "relay-outbox"


def test_events_of_an_outage_of_the_daemon_come_before_the_next(place, tmp_path):
    """Kept in order on the user's own disk, handed over before anything newer, delivered once, in order."""
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        daemon = serving(place, relay.url)
        try:
            daemon.start()
            put(place, 0)
            daemon.kill()
            _, errors = put(place, 1, 2)
            assert "2 events wait" in errors
            put(place, 3)
            assert status_of(own(place), "builder").waiting == 3
            daemon.start()
            receipts, errors = put(place, 4)
            assert errors == ""
            assert receipts[0]["seq"] == status_of(place / "state", "builder").accepted
            wait_for(lambda: numbers(relay) == [0, 1, 2, 3, 4], timeout_s=30)
            assert status_of(own(place), "builder").waiting == 0
        finally:
            daemon.end()


def test_a_flush_hands_over_first(place, tmp_path):
    """`outbox flush` of the other user: what waits on its own disk, then the daemon's flush."""
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        put(place, 1, 2)
        assert run(place, "flush", "--timeout", "1").returncode == 69
        with serving(place, relay.url):
            done = run(place, "flush", "--timeout", "20", "--json")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["left"] == 0
            assert numbers(relay) == [1, 2]


def test_a_repeat_across_the_ways_is_recognised(place):
    """The same key by the own outbox and by the socket is one event."""
    event = json.dumps({"kind": "insight", "payload": {"n": 1}, "idempotencyKey": "k-1"}).encode()
    home = home_of_another(place / "home")
    words = ("enqueue", "--agent", "builder", "--json")
    first = by_another(home, place / "outbox.sock", *words, stdin=event)
    with serving(place):
        again = by_another(home, place / "outbox.sock", *words, stdin=event)
        assert json.loads(first.stdout)["duplicate"] is False
        assert json.loads(again.stdout)["seq"] == 1
        assert status_of(place / "state", "builder").accepted == 1
        third = json.loads(by_another(home, place / "outbox.sock", *words, stdin=event).stdout)
        assert third["duplicate"] is True


def test_what_the_daemon_refuses_is_kept_as_a_dead_letter(place):
    """It does not stand in the way of what is behind it, and can be looked at."""
    with serving(place) as daemon:
        event = {"kind": "insight", "payload": {"n": 0}, "idempotencyKey": "same"}
        home = home_of_another(place / "home")
        words = ("enqueue", "--agent", "builder", "--json")
        by_another(home, place / "outbox.sock", *words, stdin=json.dumps(event).encode())
        daemon.kill()
        other = json.dumps(event | {"payload": {"n": 7}}).encode() + b"\n" + lines(1)
        by_another(home, place / "outbox.sock", *words, stdin=other)
        daemon.start()
        done = by_another(home, place / "outbox.sock", *words, stdin=lines(2))
        assert json.loads(done.stdout)["seq"] == 3
        (letter,) = dead_of(own(place), "builder")
        assert (letter.key, letter.reason) == ("same", "rejected")


def test_looking_by_the_socket(place):
    """status, list and show, as data and for a person."""
    with serving(place):
        put(place, 1, 2)
        assert json.loads(run(place, "status", "--json").stdout)["agents"][0]["waiting"] == 2
        assert b"builder" in run(place, "status").stdout
        listed = [json.loads(line) for line in run(place, "list", "builder", "--json").stdout.splitlines()]
        assert [event["seq"] for event in listed] == [1, 2]
        assert len(run(place, "list").stdout.splitlines()) == 3
        assert json.loads(run(place, "show", "builder", "2", "--json").stdout)["payload"]["n"] == 2
        assert b'"n": 2' in run(place, "show", "builder", "2").stdout
        assert run(place, "show", "builder", "9").returncode == 2


def test_dead_letters_by_the_socket(place):
    """Listed, shown, replayed and discarded; what needs the files is refused."""
    with serving(place):
        put(place, 1, 2)
        for seq in ("1", "2"):
            assert outbox_command(place / "state", "skip", "builder", seq).returncode == 0
        listed = [json.loads(line) for line in run(place, "dead", "list", "--json").stdout.splitlines()]
        assert [(one["seq"], one["reason"]) for one in listed] == [(1, "skipped"), (2, "skipped")]
        assert json.loads(run(place, "dead", "show", "builder", "1", "--json").stdout)["reason"] == "skipped"
        assert run(place, "dead", "export").returncode == 2
        assert run(place, "dead", "replay", "builder", "1", "--edit", "x").returncode == 2
        assert json.loads(run(place, "dead", "replay", "builder", "1", "--json").stdout)["newSeq"] == 3
        assert run(place, "dead", "discard", "--all").returncode == 0
        assert (status_of(place / "state", "builder").dead, run(place, "dead", "list").stdout) == (
            0,
            b"No dead letters.\n",
        )


def test_a_group_needs_a_place_it_can_enter(tmp_path):
    """The state directory is private: a socket in it with a group is a mistake, told at the start."""
    daemon = DaemonProcess(tmp_path / "state", NOBODY, {"daemon.socket_group": GROUP})
    try:
        assert daemon.launch().ended() == 2
        assert "daemon.socket" in daemon.lines()[-1]
    finally:
        daemon.end()


def test_beside_a_state_directory_that_can_be_used_the_socket_is_not_needed(place):
    """A sidecar names both: its command's events go straight to the files."""
    home = home_of_another(place / "home")
    mine = home / "mine"
    done = by_another(
        home, place / "none.sock", "enqueue", "--agent", "builder", stdin=lines(1), OUTBOX_STATE_DIR=str(mine)
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert (mine / "agents").is_dir()


def hook(place, n, **variables):
    """One call of a hook by the other user."""
    call = {"session_id": "s-1", "hook_event_name": "UserPromptSubmit", "prompt": f"number {n}", "cwd": "/"}
    done = run(
        place, "hook", "claude-code", "--agent", "builder", stdin=json.dumps(call).encode(), **variables
    )
    assert (done.returncode, done.stdout) == (0, b"")
    return done.stderr.decode()


def test_a_hook_of_another_user(place):
    """Onto its own disk while the daemon is away; with it there, everything is handed over in order."""
    daemon = serving(place)
    try:
        assert hook(place, 0) == ""
        assert status_of(own(place), "builder").waiting == 1
        daemon.start()
        assert hook(place, 1) == ""
        assert status_of(own(place), "builder").waiting == 0
        shown = [json.loads(run(place, "show", "builder", str(seq), "--json").stdout) for seq in (1, 2)]
        assert ["number 0" in json.dumps(shown[0]), "number 1" in json.dumps(shown[1])] == [True, True]
    finally:
        daemon.end()


def test_a_hook_of_a_user_without_a_home(place):
    """With no place of its own the daemon's answer is what counts; without the daemon the loss is told."""
    nowhere = {"HOME": "/nonexistent"}
    with serving(place):
        assert hook(place, 1, **nowhere) == ""
        assert status_of(place / "state", "builder").waiting == 1
        if not IS_ROOT:  # whoever may write everywhere has a place everywhere
            return
    assert "not recorded" in hook(place, 2, **nowhere)
