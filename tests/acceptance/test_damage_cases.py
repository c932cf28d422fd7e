"""The database cases D01 to D17 with their right values: real commands, a damaged file, a relay that answers.

In every case the other agent's events arrive in order, the daemon serves on without a restart, and nothing
damaged is deleted or overwritten.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import apsw
import pytest
from processes import ROOT, DaemonProcess, dead_of, environment, outbox_command, put, wait_for

from outbox.store.damage import damaged_files, damages
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess

CASES = Path(__file__).parent.parent / "cases" / "database"
TOLD = {case["case"]: case for case in json.loads((CASES / "damage.json").read_text("utf-8"))["cases"]}
TEXT = "x" * 300
NOBODY = "http://127.0.0.1:9"
ALL = list(range(40))


class Case:
    """One case under way: the order of work of damage.json."""

    def __init__(self, name, home):
        self.told = TOLD[name]
        self.state = StateDirectory(home / "state")
        self.relay = RelayProcess(home / "relay.sqlite", ["tok-daemon"])
        self.daemon = DaemonProcess(self.state.path, NOBODY, {"daemon.poll_interval_s": "0.2"})
        self.path = self.state.outbox_path("a")
        self.digests = {}

    def __enter__(self):
        self.relay.start()
        return self

    def __exit__(self, *_):
        self.daemon.end()
        self.relay.stop()

    def prepare(self):
        """Steps 1 and 2: hand over, and stop as the case says."""
        self.daemon.start()
        assert self.hand_over("b", 0, 1, 2).returncode == 0
        if self.told["stop"] == "kill":
            put(self.state.path, "a", *range(self.told["events"]))  # a commit each, as a log is cut between
            self.daemon.kill()
        else:
            assert self.hand_over("a", *range(self.told["events"])).returncode == 0
            assert self.daemon.stop() == 0
            assert not self.side("-wal").exists() or not self.side("-wal").stat().st_size
        return self

    def damage(self, *words, to=None):
        """Step 3: break the file of a, and remember what it is then."""
        name, *rest = words or self.told["damage"]
        done = subprocess.run(
            [sys.executable, str(CASES / "damage.py"), name, str(to or self.path), *map(str, rest)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if self.path.is_file():
            self.digests = {"damaged": digest(self.path)}
        return self

    def go_on(self):
        """Step 4: a relay that answers, and one more event for b."""
        self.daemon.url = self.relay.url
        self.daemon.start()
        assert self.hand_over("b", 3).returncode == 0
        return self

    def hand_over(self, agent, *numbers):
        """`outbox enqueue` with these numbers."""
        events = [{"kind": "session-message", "payload": message(agent, n)} for n in numbers]
        lines = "".join(json.dumps(event) + "\n" for event in events)
        return self.command("enqueue", "--agent", agent, stdin=lines.encode())

    def command(self, *words, stdin=b""):
        """A command of a user of this state directory."""
        return outbox_command(self.state.path, *words, stdin=stdin)

    def arrived(self, agent):
        """The numbers that arrived, in order; gaps are not numbers."""
        bodies = [json.loads(event["body"]) for event in self.relay.events(agent)]
        return [body["n"] for body in bodies if "n" in body]

    def lost(self):
        """How many lost events the relay was told of."""
        bodies = [json.loads(event["body"]) for event in self.relay.events("a")]
        return sum(body["payload"]["count"] for body in bodies if body.get("kind") == "outbox-gap")

    def ends_well(self, last=100):
        """The new event of a arrives last, all of b arrives, and the log is quiet; what arrived of a."""
        wait_for(lambda: last in self.arrived("a"))
        self.b_is_not_affected()
        return self.arrived("a")

    def b_is_not_affected(self):
        """All of b in order, the daemon is the one that was started, and no fault is told twice."""
        wait_for(lambda: self.arrived("b") == [0, 1, 2, 3])
        assert self.daemon.process.poll() is None
        troubles = self.troubles()
        assert len(troubles) == len({json.dumps(each, sort_keys=True) for each in troubles}), troubles
        assert not [line for line in self.daemon.lines() if "Traceback" in line or "event=fault" in line]

    def troubles(self):
        """What the daemon said of damaged files, without the moment."""
        return [*self.daemon.said("damaged_file"), *self.daemon.said("file_trouble")]

    def was_set_aside(self):
        """One file, as it was when it was damaged, with its report and one log line about it."""
        (kept,) = damaged_files(self.state)
        assert digest(kept) == self.digests["damaged"]
        (damage,) = damages(self.state)
        assert (self.state.path / damage.moved_to, damage.agent) == (kept, "a")
        wait_for(lambda: self.daemon.said("damaged_file"))
        (told,) = self.daemon.said("damaged_file")
        assert (told["agent"], told["file"], told["moved_to"]) == ("a", self.path.name, damage.moved_to)
        assert self.path.name.removesuffix(".sqlite") in told["detail"]
        assert (self.state.damaged.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
        return damage

    def side(self, ending):
        """A side file of a."""
        return self.path.with_name(self.path.name + ending)


def message(agent, number):
    """The payload of the cases."""
    return {"from": agent, "body": TEXT, "n": number}


def digest(path):
    """What tells whether a file changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_prefix(numbers, length=40):
    """0..k and then 100."""
    *first, last = numbers
    return last == 100 and first == list(range(len(first))) and len(first) <= length


@pytest.fixture
def case(request, tmp_path):
    """The case of the test's parameter, prepared and damaged."""
    with Case(request.param, tmp_path) as case:
        yield case


def of(name):
    """A test about this case."""
    return pytest.mark.parametrize("case", [name], indirect=True, ids=[name])


@of("D01")
def test_an_empty_file_does_not_pass_unnoticed(case):
    """One error line says that the file was empty; the next event arrives from a new one."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [100]
    damage = case.was_set_aside()
    assert damage.fault == "it is empty"
    assert not damage.counted
    assert "how many it held is not known" in damage.sentence()


@of("D02")
def test_of_a_file_cut_in_half_the_rest_is_told_in_a_gap(case):
    """What arrives is in order, and with the lost ones of the gap it is all that was accepted."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    *old, _ = case.ends_well()
    assert old == sorted(old)
    case.was_set_aside()
    assert (len(old) + case.lost(), case.lost() > 0) == (40, True)


@of("D03")
def test_damage_beside_the_rows_loses_none(case):
    """The fault shows only when the file is worked with; every row can be read and arrives."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL, 100]
    assert case.lost() == 0


@of("D04")
def test_a_text_file_in_its_place_is_kept(case):
    """It is moved away as it is, and the agent works on."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [100]
    case.was_set_aside()


@of("D13")
def test_a_file_of_its_header_only_is_set_aside(case):
    """As an empty one."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [100]
    case.was_set_aside()


@of("D14")
def test_a_block_of_nothing_beside_the_rows_loses_none(case):
    """It hits no row: all 40 arrive, and the daemon alone sees to that."""
    case.prepare().damage().go_on()
    wait_for(lambda: case.arrived("a") == ALL)
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL, 100]
    assert case.lost() == 0


@of("D05")
def test_without_its_log_a_prefix_arrives(case):
    """What had reached the main file, without gaps before it."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert is_prefix(case.ends_well())


@of("D15")
def test_with_a_cut_log_a_prefix_arrives(case):
    """The torn transaction is none, as after any crash."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert is_prefix(case.ends_well(), 39)


@of("D06")
def test_a_foreign_index_of_the_log_is_rebuilt(case):
    """The -shm of b beside the file of a: nothing is lost, and nothing of b comes from a."""
    case.prepare()
    case.damage("foreign_shm", "--other", case.state.outbox_path("b"))
    case.go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL, 100]


@of("D16")
def test_a_garbled_index_of_the_log_is_rebuilt(case):
    """Nothing is lost."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL, 100]


@of("D06")
def test_the_log_of_another_agent_is_never_applied(case):
    """The -wal of b beside the file of a: it is kept as evidence, and no event of b comes from a."""
    case.prepare()
    case.side("-wal").write_bytes(case.state.outbox_path("b").with_suffix(".sqlite-wal").read_bytes())
    case.go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert is_prefix(case.ends_well())
    (damage,) = damages(case.state)
    assert damage.fault == "the log beside it belongs to another agent"
    assert (case.state.path / f"{damage.moved_to}-wal").exists()


@of("D07")
def test_a_folder_in_its_place_is_left_alone(case):
    """Hand-over fails at once with a clear error, and the daemon goes on with the others."""
    case.prepare().damage().go_on()
    refused = case.hand_over("a", 100)
    assert (refused.returncode, refused.stdout) == (4, b"")
    assert f"{case.path.name} is no regular file. It was left alone" in refused.stderr.decode()
    case.b_is_not_affected()
    assert case.arrived("a") == []
    assert case.path.is_dir()
    assert case.path.with_name(case.path.name + ".moved").is_file()


@of("D09")
def test_a_newer_file_is_not_touched(case):
    """Hand-over and delivery fail with both versions named; not a byte of the file changes."""
    case.prepare().damage().go_on()
    refused = case.hand_over("a", 100)
    assert refused.returncode == 5
    assert "format 999; this one knows 1" in refused.stderr.decode()
    case.b_is_not_affected()
    wait_for(lambda: case.daemon.said("file_trouble"))
    assert [told["code"] for told in case.daemon.said("file_trouble")] == ["too_new"]
    assert case.arrived("a") == []
    assert digest(case.path) == case.digests["damaged"]


@of("D10")
def test_a_damaged_row_is_set_aside_alone(case):
    """Event 0 is a dead letter with its reason; the other 39 arrive."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL[1:], 100]
    (letter,) = dead_of(case.state.path, "a")
    assert (letter.seq, letter.reason) == (1, "damaged")


@of("D11")
def test_no_row_waits_for_centuries(case):
    """A due time in the year 2600 is no reason to wait."""
    case.prepare().damage().go_on()
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL, 100]


@of("D12")
def test_a_failing_insert_is_an_open_refusal(case):
    """Hand-over fails with an error, the 40 are delivered meanwhile; mended, it works without a restart."""
    case.prepare().damage().go_on()
    refused = case.hand_over("a", 100)
    assert refused.returncode == 4
    assert "disk I/O error" in refused.stderr.decode()
    wait_for(lambda: case.arrived("a") == ALL)
    case.damage("repair")
    assert case.hand_over("a", 100).returncode == 0
    assert case.ends_well() == [*ALL, 100]
    assert damaged_files(case.state) == []


@of("D17")
def test_far_too_many_attempts_are_only_a_number(case):
    """Event 0, tried 2^40 times, is set aside or tried once more; the others arrive."""
    case.prepare()
    db = apsw.Connection(str(case.path))
    db.execute("INSERT OR REPLACE INTO tries (seq, first_try_at_ms) VALUES (1, 1)")
    db.close()
    case.damage("huge_attempts", "--table", "tries")
    case.go_on()
    assert case.hand_over("a", 100).returncode == 0
    arrived = case.ends_well()
    assert arrived[-40:] == [*ALL[1:], 100]
    assert arrived[:-40] in ([], [0])


# Another user: permissions do not bind root ----------------------------------------------------------------

AS_NOBODY = """
import importlib, os, pkgutil, runpy, sys
import outbox
for module in pkgutil.walk_packages(outbox.__path__, "outbox."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)  # what is not loaded by now may not be readable any more
damages = runpy.run_path(sys.argv[1], run_name="damages")
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
if sys.argv[2] == "damage":
    damages[sys.argv[3]](type("Arguments", (), {"file": sys.argv[4]}))
else:
    from outbox.cli import main
    sys.exit(main(sys.argv[2:]))
"""


def as_nobody(state, *words, stdin=b""):
    """A command, or `damage NAME FILE`, of a user that permissions bind."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(CASES / "damage.py"), *map(str, words)],
            input=stdin, capture_output=True, cwd=ROOT, check=False, timeout=60,
            env=environment(home, {"daemon.state_dir": str(state)}),
        )  # fmt: skip


def events_of(agent, *numbers):
    """Lines for `outbox enqueue`."""
    lines = [json.dumps({"kind": "session-message", "payload": message(agent, n)}) + "\n" for n in numbers]
    return "".join(lines).encode()


def test_a_file_that_can_only_be_read_is_kept():
    """D08: hand-over fails at once with a clear error, status works; with the mode put right all arrive."""
    told = TOLD["D08"]
    with tempfile.TemporaryDirectory() as folder, Case("D08", Path(folder)) as case:
        case.state.path.mkdir()
        if os.getuid() == 0:
            Path(folder).chmod(0o755)
            os.chown(case.state.path, 65534, 65534)
        for agent, count in (("a", told["events"]), ("b", 3)):
            lines = events_of(agent, *range(count))
            done = as_nobody(case.state.path, "enqueue", "--agent", agent, stdin=lines)
            assert done.returncode == 0, done.stderr
        done = as_nobody(case.state.path, "damage", *told["damage"], case.path)
        assert (done.returncode, case.path.stat().st_mode & 0o777) == (0, 0o444), done.stderr
        refused = as_nobody(case.state.path, "enqueue", "--agent", "a", stdin=events_of("a", 100))
        assert refused.returncode == 4
        assert f"The file {case.path.name} can only be read. Nothing was stored" in refused.stderr.decode()
        status = as_nobody(case.state.path, "status", "--json")
        assert (status.returncode, b'"waiting":40' in status.stdout.replace(b" ", b"")) == (0, True)
        case.path.chmod(0o600)
        case.go_on()
        wait_for(lambda: case.arrived("a") == ALL)
        case.b_is_not_affected()
        assert damaged_files(case.state) == []
