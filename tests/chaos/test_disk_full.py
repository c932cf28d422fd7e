"""Disks on which there is no room: refused clearly, drained all the same, and taken up again by itself."""

import contextlib
import ctypes
import errno
import json
import re
import tempfile
from pathlib import Path

import apsw
import pytest
from boxes import NOW, ack, event, fill, make_box, put, release, roomy, seqs, state_in, take
from disk_mount import on_small_disk, remount_read_only
from other_user import by_another, home_of_another
from processes import DaemonProcess, numbers, outbox_command, status_of, wait_for

from outbox import Outbox
from outbox.errors import StoreFull
from outbox.event import Limits
from outbox.store.file import open_outbox
from outbox.store.rules import encode_rules
from outbox.store.sending import settle
from outbox.store.verify import verify_counters, verify_pages
from relay_client.reference.process import RelayProcess

MIB = 1024 * 1024
LINE = b'{"kind":"session-message","payload":{"body":"x"}}\n'
BUILDER = ("enqueue", "--agent", "builder")
NO_LEAST_DISK = {"bounds.min_free_disk_bytes": "0"}
_AS_ANOTHER = """
import os, sys, outbox.cli
del os.environ["OUTBOX_SOCKET"]
state = os.environ["OUTBOX_STATE_DIR"]
def enqueue(agent):
    words = ["enqueue", "--agent", agent, "--kind", "session-message", "--payload", "{}"]
    print(outbox.cli.main(words))
enqueue("builder")
for folder, mode in ((state, 0), (state + "/agents", 0), (state + "/agents", 0o555)):
    os.chmod(folder, mode)
    enqueue("builder")  # to a file that is there one can write in a folder where none can be made
    enqueue("reviewer")
    os.chmod(folder, 0o700)
enqueue("builder")
"""


def enqueue_for_ever(enqueue):
    """Until it raises."""
    while True:
        enqueue()


def ballast(folder):
    """Take every byte that is left; returns the file that does."""
    path = folder / "ballast"
    with path.open("ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


def settle_all(box):
    """Deliver what is there, in pieces."""
    while seqs(box):
        taken = take(box, 50)
        settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)


class Commands:
    """`outbox enqueue` of one agent, on a disk that may be full; the numbers of the events it took."""

    def __init__(self, state, agent):
        self._state, self._agent, self._number = state, agent, 0
        self.taken = []

    def enqueue(self):
        """Whether it took an event; each answer is 0 with a receipt, or 4 and words."""
        self._number += 1
        payload = {"from": self._agent, "body": "x", "n": self._number}
        line = json.dumps({"kind": "session-message", "payload": payload}).encode()
        done = outbox_command(self._state, "enqueue", "--agent", self._agent, "--json", stdin=line)
        if done.returncode == 0:
            assert len(done.stdout.splitlines()) == 1, done
            self.taken.append(self._number)
            return True
        assert (done.returncode, done.stdout) == (4, b""), done
        assert re.search(rb"disk is full.*Nothing was stored.*Make space", done.stderr, re.DOTALL), done
        assert b"Traceback" not in done.stderr
        return False


def test_a_daemon_drains_a_full_disk_and_takes_events_again(tmp_path):
    """Producers are refused in words; what waits goes out; with room again nobody has to do anything.

    What the daemon gives up or drains between two commands is room for the second, so each may be taken; but
    while the relay is away there is an end of that. What a command took arrives; what it refused does not.
    """

    def full(folder):
        state, taken = folder / "state", []

        def enqueue(out):
            taken.append(out.enqueue("session-message", {"body": "x" * 2_000, "n": len(taken)}))

        with contextlib.ExitStack() as stack:
            relay = stack.enter_context(RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]))
            daemon = stack.enter_context(DaemonProcess(state, relay.url, NO_LEAST_DISK))
            relay.kill()
            out = stack.enter_context(Outbox.open("builder", state_dir=state))
            for _ in range(200):
                enqueue(out)
            there, new = Commands(state, "tester"), Commands(state, "reviewer")
            assert there.enqueue()
            filler = ballast(folder)
            with pytest.raises(StoreFull, match=r"disk is full.*Nothing was stored.*kept.*Make space"):
                enqueue_for_ever(lambda: enqueue(out))
            for commands in (there, new):
                wait_for(lambda commands=commands: ballast(folder) and not commands.enqueue(), 60)
            relay.start()
            for commands in (there, new):
                commands.enqueue()
            wait_for(lambda: not status_of(state, "builder").waiting, 60)
            filler.unlink()
            enqueue(out)
            assert there.enqueue()
            assert new.enqueue()
            wait_for(lambda: status_of(state, "builder").delivered == len(taken), 60)
            assert daemon.stop(60) == 0
            assert numbers(relay, "builder") == list(range(len(taken)))
            for commands, agent in ((there, "tester"), (new, "reviewer")):
                assert numbers(relay, agent) == commands.taken
        assert [receipt.seq for receipt in taken] == list(range(1, len(taken) + 1))

    on_small_disk(tmp_path / "disk", "size=48m", full)


def test_a_disk_without_a_free_page_keeps_every_accepted_event(tmp_path):
    """With no reserve: nothing more goes in, nothing is lost, and a little room is enough to drain it all."""

    def full(folder):
        box = make_box(state_in(folder / "state"))
        room = folder / "room"
        room.write_bytes(bytes(MIB))
        with pytest.raises(StoreFull):
            enqueue_for_ever(lambda: put(box, event({"body": "x" * 5_000})))
        accepted = seqs(box)
        ballast(folder)
        for _ in range(3):
            with pytest.raises(StoreFull, match="Nothing was stored"):
                put(box, event({"body": "x" * 5_000}))
        room.unlink()
        assert seqs(box) == accepted
        settle_all(box)
        box.give_space_back()
        assert put(box, event()) == [accepted[-1] + 1]
        assert verify_counters(box) == verify_pages(box) == []
        box.close()

    on_small_disk(tmp_path / "disk", "size=5m", full)


def test_without_a_free_inode_the_agents_that_are_there_go_on(tmp_path):
    """A new agent needs a file: it is refused as on a full disk, until one is free."""

    def full(folder):
        state = state_in(folder / "state")
        box, idle = make_box(state, "builder"), make_box(state, "reviewer")
        fill(idle, 2)
        idle.close(checkpoint=True)  # its log is gone: to open it takes two more files
        holders = [folder / f"holder-{number}" for number in range(100)]
        with contextlib.suppress(OSError):
            for holder in holders:
                holder.touch()
        with pytest.raises(StoreFull, match=r"No space left.*Nothing was stored.*Make space"):
            make_box(state, "tester")
        with pytest.raises(StoreFull, match=r"disk is full.*Nothing was stored"):
            open_outbox(state, idle.path)
        assert not [path for path in state.agents.iterdir() if path.name.startswith(".")]
        put(box, event())
        settle_all(box)
        box.close()
        for holder in holders:
            holder.unlink(missing_ok=True)
        make_box(state, "tester").close()
        with contextlib.closing(open_outbox(state, idle.path)) as again:
            assert seqs(again) == [1, 2]

    on_small_disk(tmp_path / "disk", "size=8m,nr_inodes=64", full)


# No leave to write ------------------------------------------------------------------------------------------


def test_a_disk_that_turns_read_only_loses_nothing(tmp_path):
    """As Linux does it after errors: refused in words, whoever comes."""

    def turned(folder):
        state = state_in(folder / "state").path
        (state / "rules.json").write_text(encode_rules(Limits(), roomy()))
        assert outbox_command(state, *BUILDER, stdin=LINE).returncode == 0
        remount_read_only(folder)
        for agent in ("builder", "reviewer"):
            refused = outbox_command(state, "enqueue", "--agent", agent, stdin=LINE)
            assert refused.returncode == 4, refused.stderr
            assert b"Nothing was stored" in refused.stderr
            assert b"Traceback" not in refused.stderr

    on_small_disk(tmp_path / "disk", "size=8m", turned)


def test_without_leave_to_write_nothing_is_stored(tmp_path):
    """Another user's command says so, in three parts, and changes nothing; with leave again it goes on."""
    with tempfile.TemporaryDirectory(prefix="shared-") as shared:
        Path(shared).chmod(0o755)
        home = home_of_another(Path(shared) / "home")
        done = by_another(home, "", "--python", _AS_ANOTHER, OUTBOX_STATE_DIR=str(home / "state"))
        assert done.returncode == 0, done.stderr
        statuses = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
        assert statuses == [0, 4, 4, 4, 4, 0, 4, 0], done.stderr
        said = done.stderr.decode()
        assert said.count("Nothing was stored") == 5, said
        assert "Traceback" not in said
        state = state_in(home / "state")
        with contextlib.closing(open_outbox(state, state.outbox_path("builder"))) as box:
            assert seqs(box) == [1, 2, 3]


# Quota ------------------------------------------------------------------------------------------------------

_PWRITE = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


@pytest.fixture
def quota():
    """From `quota.spent = True` on every write of SQLite's is answered as a spent quota is."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.pwrite64.restype = ctypes.c_ssize_t
    libc.pwrite64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)

    class Quota:
        spent = False

    @_PWRITE
    def pwrite(fd, data, size, offset):
        if Quota.spent:
            ctypes.set_errno(errno.EDQUOT)
            return -1
        return libc.pwrite64(fd, data, size, offset)

    vfs = apsw.VFS("quota", "unix")
    real = vfs.xGetSystemCall("pwrite64")
    vfs.xSetSystemCall("pwrite64", ctypes.cast(pwrite, ctypes.c_void_p).value)
    yield Quota
    vfs.xSetSystemCall("pwrite64", real)
    vfs.unregister()


def test_a_spent_quota_is_a_full_disk(tmp_path, quota):
    """SQLite takes it for an I/O error, which nobody could do anything about."""
    box = make_box(state_in(tmp_path / "state"))
    fill(box, 2)
    quota.spent = True
    with pytest.raises(StoreFull, match=r"disk is full.*Make space"):
        put(box, event())
    with pytest.raises(StoreFull, match="Make space"):
        take(box)
    quota.spent = False
    assert put(box, event()) == [3]
    taken = take(box, 3)
    settle(box, taken, [release(row) for row in taken.rows], now_ms=NOW)
    assert seqs(box) == [1, 2, 3]
    box.close()
