"""What lies beside the outboxes: the directory, the relay's facts, the daemon's place, the hint to it."""

import json
import os
import random
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest
from boxes import NOW, fill, make_box, python

from outbox.errors import StoreError, StoreFull, StoreHeld
from outbox.store import directory, place
from outbox.store.directory import StateDirectory, file_name, network_file_system
from outbox.store.locks import DAEMON_BYTE, OwnersLock
from outbox.store.place import default_socket, leave_place, running_daemon, take_place, write_private
from outbox.store.relay_state import RelayState, read_facts
from outbox.store.wake import Waker, bind_wake_socket, wake_daemon

# The directory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "A"),
        ("a/b", "a_b"),
        ("é", "e\u0301"),
        ("a", "a "),
        ("x" * 300, "x" * 301),
        ("..", "../.."),
        ("-", "--"),
    ],
)
def test_two_agents_never_share_a_file(one, other):
    """Names are compared exactly, also on file systems that fold case, and stay short and harmless."""
    names = [file_name(agent) for agent in (one, other)]
    assert names[0].lower() != names[1].lower()
    for name in names:
        assert len(name) < 100
        assert name.isascii()
        assert "/" not in name
        assert not name.startswith(".")


def test_looking_makes_nothing(tmp_path):
    """Who only wants to know finds no outboxes, and leaves no folder."""
    state = StateDirectory(tmp_path / "none")
    assert list(state.outbox_files()) == []
    assert running_daemon(state) is None
    assert read_facts(state.relay_state) == {}
    assert list(tmp_path.iterdir()) == []


def test_only_outboxes_are_found(state):
    """Side files, drafts and folders of other names are passed over; the order is that of the names."""
    paths = []
    for agent in ("b", "a"):
        box = make_box(state, agent)
        paths.append(box.path)
        box.close()
    (state.agents / ".new-1.sqlite").touch()
    (state.agents / "notes.txt").touch()
    assert list(state.outbox_files()) == sorted(paths)


def test_a_state_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    """A file is in the way."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be made"):
        StateDirectory(tmp_path / "file" / "state").create()
    with pytest.raises(StoreError, match="cannot be made"):
        StateDirectory(tmp_path / "file").create()


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    """It is the operator's; only what we make is ours."""
    (tmp_path / "state").mkdir(mode=0o750)
    StateDirectory(tmp_path / "state").create()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "state" / "agents").stat().st_mode & 0o777 == 0o700


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /srv/home\\040dir nfs4 rw 0 0
tmpfs /srv/home\\040dir/local tmpfs rw 0 0
share /mnt/c 9p rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", None),
        ("/srv/home dir/agent", "nfs4"),
        ("/srv/home dir", "nfs4"),
        ("/srv/home dirs", None),
        ("/srv/home dir/local/x", None),
        ("/mnt/c/state", "9p"),
    ],
)
def test_network_file_systems_are_known_by_their_mounts(monkeypatch, path, kind):
    """The longest mount point that the path lies below decides."""
    monkeypatch.setattr(directory, "_mounts", lambda: MOUNTS)
    monkeypatch.setattr(directory.os.path, "realpath", str)
    assert network_file_system(Path(path)) == kind


def test_a_network_file_system_is_refused_unless_allowed(tmp_path, monkeypatch):
    """Its locks and write-ahead logs cannot be trusted."""
    monkeypatch.setattr(directory, "network_file_system", lambda path: "nfs4")
    with pytest.raises(StoreError, match=r"network file system \(nfs4\)"):
        StateDirectory(tmp_path / "state").create()
    StateDirectory(tmp_path / "state").create(allow_network_fs=True)


# The relay's facts ------------------------------------------------------------------------------------------


GATE = {"reason": "unreachable", "since": 1_790_000_000_000}


def test_facts_are_kept(state):
    """Over a new opening, and for who only looks; None removes one."""
    facts = RelayState(state.relay_state)
    facts.write({"gate": {"reason": ""}, "path:/api/x": {"inARow": 1}})
    facts.write({"path:/api/x": None, "auth": {"state": "ok"}})
    facts.close()
    assert read_facts(state.relay_state) == {"gate": {"reason": ""}, "auth": {"state": "ok"}}
    again = RelayState(state.relay_state)
    assert again.read() == {"gate": {"reason": ""}, "auth": {"state": "ok"}}
    again.close()


def test_an_unreadable_file_of_facts_is_put_aside(state):
    """Knowledge starts afresh; nothing is thrown away or written over, the second time neither."""
    for _ in range(2):
        state.relay_state.write_text("no database " * 500, encoding="utf-8")
        facts = RelayState(state.relay_state)
        assert facts.read() == {}
        facts.write({"gate": GATE})
        facts.close()
    asides = sorted(path.name for path in state.damaged.glob("relay.sqlite.*"))
    assert asides == ["relay.sqlite.1", "relay.sqlite.2"]
    assert read_facts(state.relay_state) == {"gate": GATE}


def test_a_damaged_page_of_facts_is_found_at_opening(state):
    """Not first in the middle of sending."""
    facts = RelayState(state.relay_state)
    facts.write({f"path:{n}": "x" * 500 for n in range(50)})
    facts.close()
    data = bytearray(state.relay_state.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    state.relay_state.write_bytes(data)
    facts = RelayState(state.relay_state)
    assert facts.read() == {}
    facts.close()


def test_facts_that_are_damaged_while_they_are_open_are_none(state):
    """Whoever asks goes on without them, and the file is put aside at the next opening."""
    facts = RelayState(state.relay_state)
    facts.write({f"path:{n}": {"reason": "x" * 200} for n in range(100)})
    facts._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    with state.relay_state.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (state.relay_state.stat().st_size - 4096))
    facts._db.release_memory()
    assert facts.read() == {}
    facts.write({"gate": {"state": "closed"}})
    facts.close()
    assert RelayState(state.relay_state).read() == {}
    assert len(list(state.damaged.iterdir())) >= 1


def test_a_fact_that_cannot_be_read_is_left_out(state):
    """The others count."""
    facts = RelayState(state.relay_state)
    facts.write({"gate": GATE, "auth": {"state": "ok"}})
    facts._db.execute("UPDATE facts SET value = '{' WHERE name = 'auth'")
    assert facts.read() == {"gate": GATE}
    facts.close()
    assert read_facts(state.relay_state) == {"gate": GATE}


def test_fields_of_another_type_are_left_out(state):
    """Another release may have written them: whoever reads a moment gets a moment, or nothing."""
    facts = RelayState(state.relay_state)
    facts.write({"gate": {**GATE, "since": "yesterday", "failures": -1, "nextTryAt": 10**40, "url": ["x"]}})
    facts.write({"auth": [1], "path:/api/x": {"accepted": 1, "deadEnd": True, "inARow": 2.0}, "token:a": 7})
    facts._db.execute("INSERT INTO facts VALUES ('deep', ?)", ("[" * 100_000,))
    assert facts.read() == {"gate": {"reason": "unreachable"}, "path:/api/x": {"deadEnd": True}}
    facts.close()


def test_any_byte_of_the_facts_may_be_wrong(state):
    """They are read as far as they can be, or put aside; what is learned from then on is kept."""
    facts = RelayState(state.relay_state)
    facts.write(
        {"gate": GATE, "auth": {"state": "ok"}, "instance": "one", "path:/api/messages": {"inARow": 3}}
    )
    facts._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    facts.close()
    sound, rng = state.relay_state.read_bytes(), random.Random(5)
    for at in (at for at, byte in enumerate(sound) if byte or at < 100):
        mask = rng.choice([0x01, 0x20, 0x80, 0x55, sound[at] or 0xFF])
        state.relay_state.write_bytes(sound[:at] + bytes([sound[at] ^ mask]) + sound[at + 1 :])
        facts = RelayState(state.relay_state)
        assert isinstance(facts.read(), dict)
        facts.write({"gate": {"reason": "closed"}})
        facts.close()
        assert read_facts(state.relay_state)["gate"] == {"reason": "closed"}, (at, mask)
        for side in ("-wal", "-shm"):
            state.relay_state.with_name(f"relay.sqlite{side}").unlink(missing_ok=True)


def test_facts_of_no_file_live_in_memory(state):
    """A folder in its place, and a full disk as well: sending goes on."""
    state.relay_state.mkdir()
    facts = RelayState(state.relay_state)
    facts.write({"gate": GATE})
    assert facts.read() == {"gate": GATE}
    facts.close()
    assert state.relay_state.is_dir()


def test_a_locked_file_of_facts_is_not_put_aside(state, monkeypatch):
    """Somebody else is at work with it: it must stay where it is."""
    RelayState(state.relay_state).close()
    monkeypatch.setattr("outbox.store.relay_state._BUSY_TIMEOUT_MS", 0)
    other = apsw.Connection(str(state.relay_state))
    other.execute("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE; CREATE TABLE t (a)").fetchall()
    facts = RelayState(state.relay_state)
    facts.write({"gate": GATE})
    facts.close()
    other.close()
    assert not state.damaged.exists()


def test_trouble_with_the_facts_stops_nothing(state):
    """A disk that is full, or a file that was damaged meanwhile."""
    facts = RelayState(state.relay_state)
    facts._db.execute("CREATE TRIGGER t BEFORE INSERT ON facts BEGIN SELECT RAISE(ABORT, 'no'); END")
    facts.write({"gate": GATE})
    assert facts.read() == {}
    facts.close()


# The daemon's place -----------------------------------------------------------------------------------------


def test_a_state_directory_has_one_daemon(state):
    """Taken is taken, until it is left; what it tells of itself can be read."""
    assert running_daemon(state) is None
    take_place(state, "1.2", Path("/run/x.sock"), NOW)
    found = running_daemon(state)
    assert (found.pid, found.version, found.started_at_ms, found.socket) == (
        os.getpid(), "1.2", NOW, Path("/run/x.sock"),
    )  # fmt: skip
    with pytest.raises(StoreHeld, match=f"Another daemon serves this state directory: pid {os.getpid()}"):
        take_place(state, "1.2", Path("/run/x.sock"), NOW)
    leave_place(state)
    assert running_daemon(state) is None
    assert not state.daemon_file.exists()


def test_the_file_of_a_dead_daemon_proves_nothing(state):
    """Only the lock does, and the next daemon starts without a clean-up."""
    python(
        "import os, sys\nfrom pathlib import Path\n"
        "from outbox.store.directory import StateDirectory\nfrom outbox.store.place import take_place\n"
        "take_place(StateDirectory(Path(sys.argv[1])), '1', Path('/x'), 1)\n",
        state.path,
    )
    assert json.loads(state.daemon_file.read_text())["version"] == "1"
    assert running_daemon(state) is None
    take_place(state, "2", Path("/x"), NOW)
    leave_place(state)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"pid": 1}', "\xff"])
def test_a_daemon_without_a_readable_file_is_there_all_the_same(state, text):
    """The lock says so; it is asked at its usual socket."""
    other = OwnersLock(state.path / "owners.lock")
    assert other.try_exclusive(DAEMON_BYTE)
    if text is not None:
        state.daemon_file.write_bytes(text.encode("latin-1"))
    found = running_daemon(state)
    assert (found.pid, found.socket) == (0, default_socket(state))
    other.release(DAEMON_BYTE)
    other.close()


def test_a_small_file_is_replaced_as_a_whole(state, monkeypatch):
    """When it cannot be written the old one stays, no draft is left, and the reason is told."""
    target = state.rules_file
    write_private(target, "old")

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place.os, "fdopen", lambda fd, *args, **options: (os.close(fd), full()))
    with pytest.raises(StoreFull, match=r"rules.json cannot be written: No space left"):
        write_private(target, "new")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert [path.name for path in state.path.iterdir() if "rules" in path.name] == ["rules.json"]
    target.unlink()
    target.mkdir()
    with pytest.raises(StoreError, match="Is a directory"):
        write_private(target, "new")


def test_a_daemon_starts_on_a_full_disk(state, monkeypatch):
    """Its file may be missing; its place is its own."""

    def full(path, text):
        raise StoreFull

    monkeypatch.setattr(place, "write_private", full)
    take_place(state, "1", Path("/x"), NOW)
    assert running_daemon(state).pid == 0
    leave_place(state)


# The hint ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 3])
def test_a_hint_arrives_however_deep_the_socket_lies(tmp_path, depth):
    """sockaddr_un has room for 108 bytes; state directories may be deeper."""
    folder = tmp_path.joinpath(*["x" * 60] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "wake.sock"
    receiver = bind_wake_socket(path)
    waker = Waker(path)
    assert waker.wake("a.sqlite")
    assert waker.wake("b.sqlite")
    assert [receiver.recv(100), receiver.recv(100)] == [b"a.sqlite", b"b.sqlite"]
    waker.close()
    assert wake_daemon(path, "c.sqlite")
    receiver.close()


def test_a_hint_that_nobody_hears_is_no_trouble(tmp_path):
    """No socket, a dead one, or one that is full: the producer never waits and never fails."""
    path = tmp_path / "wake.sock"
    waker = Waker(path)
    assert not waker.wake("a.sqlite")
    receiver = bind_wake_socket(path)
    assert any(not waker.wake("a.sqlite") for _ in range(100_000))
    receiver.close()
    assert not waker.wake("a.sqlite")
    with bind_wake_socket(path) as again:
        assert waker.wake("b.sqlite")
        assert again.recv(100) == b"b.sqlite"
        waker.close()
        waker.close()
        assert not waker.wake("c.sqlite")


def test_threads_that_give_the_first_hint_together_open_one_socket(tmp_path, monkeypatch):
    """One that is forgotten would stay open for as long as the program runs."""
    made, together = [], threading.Barrier(4)
    real = socket.socket

    def counted(*args):
        made.append(real(*args))
        return made[-1]

    (tmp_path / "wake.sock").touch()
    waker = Waker(tmp_path / "wake.sock")
    monkeypatch.setattr("socket.socket", counted)
    threads = [threading.Thread(target=lambda: (together.wait(10), waker.wake("a"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waker.close()
    assert len(made) == 1
    assert made[0].fileno() == -1


def test_a_leftover_of_a_dead_daemon_is_replaced(tmp_path):
    """Binding always works, and a plain file in the way is no obstacle either."""
    path = tmp_path / "wake.sock"
    path.touch()
    bind_wake_socket(path).close()
    receiver = bind_wake_socket(path)
    assert receiver.type == socket.SOCK_DGRAM
    receiver.close()


def test_free_space_is_that_of_the_folder_of_outboxes(state, monkeypatch):
    """Not of some other file system."""
    asked = []
    box = make_box(state, min_free_disk_bytes=1)
    monkeypatch.setattr(
        os, "statvfs", lambda path: (asked.append(path), SimpleNamespace(f_bavail=9, f_frsize=9))[1]
    )
    fill(box, 1)
    monkeypatch.undo()
    box.close()
    assert asked == [str(state.agents)]
