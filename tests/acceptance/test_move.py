"""A host is moved: exported there, imported here, and the relay notices nothing; what goes wrong is said."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest
from command_line import command, in_process, process
from runs import serve_environment, serve_running, until
from seeds import contents_of

from outbox import Outbox
from outbox.cli.import_workplace import workplace
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.verify import verify_counters
from relay_client.reference.process import RelayProcess

TOKEN = "tok-test-0123456789"
NO = {"error": {"code": "validation_failed", "message": "the word is not allowed"}}


class Host:
    """A host of its own: a HOME, a state directory, the commands."""

    def __init__(self, home, relay):
        home.mkdir()
        self.home = home
        self.state = StateDirectory(home / "state")
        self.relay = relay

    def put(self, agent, *payloads, **fields):
        """Enqueue events whose keys are named after agent and number."""
        with Outbox.open(agent, state_dir=self.state.path) as outbox:
            return [
                outbox.enqueue(
                    "insight", one, idempotency_key=f"{agent}-{one['n']}", occurred_at_ms=one["n"], **fields
                )
                for one in payloads
            ]

    def run(self, *words, exits=0, **options):
        """A command as a process; what it says on stdout."""
        done = process(serve_environment(self.home, self.relay.url), *words, **options)
        assert done.returncode == exits, done
        return done.stdout.decode()

    def data(self, *words):
        """The lines of a command's JSON."""
        return [json.loads(line) for line in self.run(*words, "--json").splitlines()]

    def counters(self):
        """What is wrong with the counters of its outboxes."""
        faults = []
        for path in self.state.outbox_files():
            with contextlib.closing(open_outbox(self.state, path)) as box:
                faults += verify_counters(box)
        return faults

    def left(self):
        """How many events wait."""
        total = 0
        for path in self.state.outbox_files():
            with contextlib.closing(open_outbox(self.state, path)) as box:
                total += read_status(box).waiting
        return total


@pytest.fixture
def relay(tmp_path):
    """The reference relay, which remembers keys for ever."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        yield relay


@pytest.fixture
def old(tmp_path, relay):
    """The host that is moved."""
    return Host(tmp_path / "old", relay)


@pytest.fixture
def new(tmp_path, relay):
    """The host that it is moved to."""
    return Host(tmp_path / "new", relay)


def lived_in(host):
    """Two agents with events delivered, refused, lost on their way back, and waiting."""
    relay = host.relay
    relay.add_faults({"match": {"bodyContains": '"bad"'}, "action": {"status": 422, "body": NO}})
    for agent in ("builder", "reviewer"):
        words = ["bad" if n % 5 == 2 else "good" for n in range(12)]
        host.put(agent, *({"n": n, "word": word} for n, word in enumerate(words)))
    host.run("flush", "--timeout", "30")
    relay.clear_faults()
    relay.add_faults({"match": {"bodyContains": '"n":12,'}, "action": {"storeThenClose": True}})
    for agent in ("builder", "reviewer"):
        host.put(agent, *({"n": n, "word": "late"} for n in range(12, 40)))
    host.run("flush", "--timeout", "1", exits=3)
    relay.clear_faults()


@pytest.mark.parametrize("way", ["export", "directory"])
def test_a_move(old, new, relay, tmp_path, way):
    """Waiting, dead and delivered: all arrive, nothing twice, in order; keys and dead letters live on."""
    lived_in(old)
    if way == "export":
        old.run("export", str(tmp_path / "moved.jsonl"))
        source = tmp_path / "moved.jsonl"
        assert stat.S_IMODE(source.stat().st_mode) == 0o600
    else:
        source = old.state.path
    before = contents_of(old.state.path)
    (told,) = new.data("import", str(source))
    assert (told["events"], told["dead"], told["known"], told["refused"]) == (56, 4, 0, 0)
    assert told["receipts"] == 20
    assert contents_of(old.state.path) == before
    with serve_running(new.home, relay.url):
        assert until(lambda: new.left() == 0)
        letters = new.data("dead", "list")
        assert [(one["agent"], one["idempotencyKey"][-2:].strip("-")) for one in letters] == [
            ("builder", "2"), ("builder", "7"), ("reviewer", "2"), ("reviewer", "7"),
        ]  # fmt: skip
        new.run("dead", "replay", "--all")
        assert until(lambda: new.left() == 0)
    for agent in ("builder", "reviewer"):
        arrived = [json.loads(event["body"])["n"] for event in relay.events(agent)]
        assert arrived == [*(n for n in range(40) if n not in {2, 7}), 2, 7]
        assert [event["key"] for event in relay.events(agent)] == [f"{agent}-{n}" for n in arrived]
        assert [event["occurredAt"] for event in relay.events(agent)] == arrived
    repeats = sum(one["duplicates"] for one in relay.summary().values())
    assert repeats >= 1, "an answer was lost before the move, and the same text went again after it"
    again = new.put("builder", *({"n": n, "word": "bad" if n == 2 else "good"} for n in (0, 2)))
    assert [(one.duplicate, one.state) for one in again] == [(True, "delivered")] * 2
    assert (old.counters(), new.counters()) == ([], [])


def test_an_import_can_be_repeated(old, new, tmp_path):
    """Nothing changes, before and after its events were delivered."""
    lived_in(old)
    old.run("export", str(tmp_path / "moved.jsonl"))
    new.run("import", str(tmp_path / "moved.jsonl"))
    (told,) = new.data("import", str(tmp_path / "moved.jsonl"))
    assert (told["events"], told["dead"], told["known"]) == (0, 0, 80)
    new.run("flush", "--timeout", "30")
    (told,) = new.data("import", str(tmp_path / "moved.jsonl"))
    assert (told["events"], told["dead"], told["known"]) == (0, 0, 80)
    assert new.left() == 0


def test_a_paused_agent_stays_paused(old, new, tmp_path):
    """A person had a reason for it, and the move does not take it away; one that is at work here goes on."""
    for agent in ("builder", "reviewer"):
        old.put(agent, {"n": 1})
    old.run("pause", "builder")
    old.run("export", str(tmp_path / "moved.jsonl"))
    new.run("import", str(tmp_path / "moved.jsonl"))
    assert new.data("why", "builder")[0]["reason"] == "paused"
    assert new.data("why", "reviewer")[0]["reason"] == "no_daemon"
    new.run("resume", "builder")
    old.put("builder", {"n": 2})
    old.run("export", str(tmp_path / "again.jsonl"))
    new.run("import", str(tmp_path / "again.jsonl"))
    assert new.data("why", "builder")[0]["reason"] == "no_daemon"


def test_where_a_daemon_delivers_nothing_is_taken(old, new, relay, tmp_path):
    """Exit 6, with who it is; an export of it is possible, and says what it means."""
    old.put("builder", {"n": 1})
    with serve_running(old.home, relay.url) as served:
        for source in (old.state.path, old.state.outbox_path("builder")):
            done = process(serve_environment(new.home, relay.url), "import", str(source))
            assert (done.returncode, str(served.process.pid) in done.stderr.decode()) == (6, True)
        done = process(serve_environment(old.home, relay.url), "export", str(tmp_path / "copy.jsonl"))
        assert (done.returncode, b"stop it first" in done.stderr) == (0, True)
    assert list(new.state.outbox_files()) == []
    assert new.data("import", str(old.state.path))[0]["refused"] == 0


# One command at a time --------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A state directory for commands in this process."""
    in_process(monkeypatch, tmp_path)
    return StateDirectory(tmp_path / "state")


@pytest.fixture
def export(here, capsys, tmp_path):
    """The lines of an export of two agents, whose outbox is gone since."""
    for agent in ("builder", "reviewer"):
        with Outbox.open(agent, state_dir=here.path) as outbox:
            outbox.enqueue_many([{"kind": "insight", "payload": {"n": n}} for n in range(3)])
    lines = command(capsys, "export")[1].splitlines()
    shutil.rmtree(here.path)
    return lines


def taken_in(capsys, tmp_path, lines, *words):
    """The import of a file with these lines: exit status, counts, what stands on stderr."""
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    status, told, errors = command(capsys, "import", str(file), *words, "--json")
    return status, json.loads(told) if told else None, [json.loads(line) for line in errors.splitlines()]


def test_what_an_export_looks_like(export):
    """A header, each agent and its records in order, and how many they were."""
    lines = [json.loads(line) for line in export]
    assert [line["type"] for line in lines] == [
        "outbox-export", *["agent", "event", "event", "event"] * 2, "end",
    ]  # fmt: skip
    assert (lines[0]["version"], lines[-1]["records"]) == (1, 6)
    assert [line.get("payload") for line in lines[2:5]] == [{"n": n} for n in range(3)]


def test_a_line_that_cannot_be_taken_is_named(capsys, tmp_path, export):
    """The others are taken, exit 4; once it is mended, the same file brings what was missing."""
    broken = [*export[:3], export[3].replace("insight", "insigt"), "{", *export[5:]]
    status, counts, errors = taken_in(capsys, tmp_path, broken)
    assert (status, counts["events"], counts["refused"]) == (4, 4, 2)
    assert [one["place"] for one in errors] == ["line 4", "line 5", "line 10"]
    assert errors[0]["error"]["code"] == "unknown_kind"
    assert "6 records were exported, and 5 stand here" in errors[2]["error"]["message"]
    status, counts, errors = taken_in(capsys, tmp_path, export)
    assert (status, counts["events"], counts["known"], errors) == (0, 2, 4, [])


def test_an_export_that_was_cut_off_says_so(capsys, tmp_path, export):
    """A disk was full, a copy broke: what is in it is taken, and that it is not all is not kept quiet."""
    status, counts, errors = taken_in(capsys, tmp_path, export[:-2])
    assert (status, counts["events"]) == (4, 5)
    assert "cut off" in errors[-1]["error"]["message"]


def test_exports_can_be_joined_and_parted(capsys, tmp_path, export):
    """Two in one file, lines of one without its header, one agent of several."""
    status, counts, _ = taken_in(capsys, tmp_path, [line for line in export if '"builder"' in line][1:])
    assert (status, counts["events"]) == (0, 3)
    status, counts, _ = taken_in(capsys, tmp_path, export + export, "--agent", "reviewer")
    assert (status, counts["events"], counts["known"]) == (0, 3, 3)
    file = tmp_path / "lines.jsonl"
    status, _, errors = command(capsys, "import", str(file), "--agent", "nobody")
    assert (status, "Nothing of 'nobody'" in errors) == (2, True)


def test_a_newer_format_is_left_alone(capsys, tmp_path, export, here):
    """Exit 2, and nothing is taken of what might mean something else by now."""
    newer = [export[0].replace('"version":1', '"version":2'), *export[1:]]
    file = tmp_path / "newer.jsonl"
    file.write_text("\n".join(newer), "utf-8")
    status, told, errors = command(capsys, "import", str(file))
    assert (status, told, list(here.outbox_files())) == (2, "", [])
    assert "format 2" in errors


def test_a_full_outbox_takes_the_rest_later(capsys, tmp_path, export, monkeypatch, here):
    """It drops nothing; the first that has no room is named, and the other agent is not concerned."""
    monkeypatch.setenv("OUTBOX_BOUNDS_MAX_EVENTS", "2")
    status, counts, errors = taken_in(capsys, tmp_path, [line for line in export if '"builder"' in line])
    assert (status, counts["events"], counts["refused"]) == (4, 2, 1)
    assert errors[0]["agent"] == "builder"
    monkeypatch.setenv("OUTBOX_BOUNDS_MAX_EVENTS", "9")
    status, counts, _ = taken_in(capsys, tmp_path, export)
    assert (status, counts["events"], counts["known"], counts["refused"]) == (4, 3, 2, 1)
    with contextlib.closing(open_outbox(here, here.outbox_path("builder"))) as box:
        assert read_status(box).dropped == 0


def test_a_damaged_file_stops_none_of_the_others(capsys, tmp_path, export, here):
    """Of another state directory, and of an export: it is named, exit 5, the others go."""
    taken_in(capsys, tmp_path, export)
    here.outbox_path("builder").write_bytes(b"SQLite format 3\0" + b"\xff" * 8_000)
    status, _, errors = command(capsys, "export", str(tmp_path / "rest.jsonl"))
    assert (status, here.outbox_path("builder").name in errors) == (5, True)
    moved = tmp_path / "moved"
    shutil.move(here.path, moved)
    status, told, errors = command(capsys, "import", str(moved), "--json")
    assert (status, json.loads(told)["events"]) == (5, 3)
    assert json.loads(errors)["place"] == here.outbox_path("builder").name


def test_one_outbox_file_of_another_host(capsys, tmp_path, export, here):
    """It knows whose it is; another name is refused."""
    taken_in(capsys, tmp_path, export)
    moved = shutil.copy(here.outbox_path("builder"), tmp_path / "a-backup.db")
    shutil.rmtree(here.path)
    status, _, errors = command(capsys, "import", str(moved), "--agent", "reviewer")
    assert (status, "of 'builder', not of 'reviewer'" in errors) == (2, True)
    status, told, errors = command(capsys, "import", str(moved))
    assert (status, errors) == (0, "")
    assert told.startswith("3 events and 0 dead letters taken.")


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_plain_events_are_taken_as_enqueue_takes_them(tmp_path, here, source):
    """With --agent; a bad line is refused by its number."""
    lines = (
        b'{"kind":"insight","payload":1}\n\n{"kind":"insigt","payload":2}\n{"kind":"insight","payload":3}\n'
    )
    (tmp_path / "events.jsonl").write_bytes(lines)
    env = serve_environment(tmp_path, "http://127.0.0.1:9")
    place, given = ("-", lines) if source == "stdin" else (str(tmp_path / "events.jsonl"), b"")
    assert process(env, "import", place, stdin=given).returncode == 2
    done = process(env, "import", place, "--agent", "builder", "--json", stdin=given)
    assert done.returncode == 4
    assert [json.loads(line)["line"] for line in done.stdout.splitlines()] == [1, 4]
    assert json.loads(done.stderr)["line"] == 3


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.jsonl", "There is no"),
        ("state", "belongs to the state directory"),
        ("state/agents/x.sqlite", "belongs to the state directory"),
        ("folder", "is no state directory"),
    ],
)
def test_what_cannot_be_a_source(capsys, tmp_path, here, source, said):
    """Exit 2, and nothing is taken."""
    here.create()
    (here.agents / "x.sqlite").touch()
    (tmp_path / "folder").mkdir()
    status, told, errors = command(capsys, "import", str(tmp_path / source))
    assert (status, told, said in errors) == (2, "", True)


def test_an_empty_file_has_nothing(capsys, tmp_path, here):
    """And is no error."""
    assert taken_in(capsys, tmp_path, [])[:2] == (
        0, {"events": 0, "dead": 0, "gaps": 0, "receipts": 0, "known": 0, "refused": 0},
    )  # fmt: skip


def test_an_export_overwrites_nothing(capsys, tmp_path, export, here):
    """What is there may be the only copy; and one that fails leaves no half of itself."""
    taken_in(capsys, tmp_path, export)
    file = tmp_path / "kept.jsonl"
    file.write_text("kept", "utf-8")
    status, _, errors = command(capsys, "export", str(file))
    assert (status, "is there already" in errors, file.read_text("utf-8")) == (2, True, "kept")
    status, told, errors = command(capsys, "export", str(tmp_path / "new.jsonl"), "--json")
    assert (status, json.loads(told)["events"]) == (0, 6)
    status, told, errors = command(capsys, "export", "--json")
    assert (json.loads(errors)["agents"], len(told.splitlines())) == (2, 10)
    assert command(capsys, "export", "--agent", "nobody", str(tmp_path / "none.jsonl"))[0] == 2
    assert sorted(path.name for path in tmp_path.glob("*none*")) == []


def test_nothing_is_left_of_the_copies(capsys, tmp_path, export, here):
    """They lie in the state directory while they are read, and only then."""
    taken_in(capsys, tmp_path, export)
    moved = tmp_path / "moved"
    shutil.move(here.path, moved)
    command(capsys, "import", str(moved))
    assert sorted(path.name for path in here.path.iterdir()) == ["agents", "owners.lock"]


DIES = """
import os, signal, sys
from outbox.cli import main
from outbox.store import at_rest, foreign

def dies(path, to):
    at_rest.copy_at_rest(path, to)
    os.kill(os.getpid(), signal.SIGKILL)

foreign.copy_at_rest = dies
main(["import", sys.argv[1]])
"""


def test_an_import_that_was_killed_leaves_no_copies_for_good(old, new):
    """The next import removes them, but not those of an import that is at work."""
    old.put("builder", {"n": 0})
    died = subprocess.run(
        [sys.executable, "-c", DIES, old.state.path],
        env=serve_environment(new.home, new.relay.url),
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    (left,) = new.state.path.glob(".import-*")
    assert list(left.rglob("*.sqlite"))
    young = new.state.path / ".import-young"
    with workplace(new.state) as at_work:
        young.mkdir()
        for folder in (left, at_work):
            os.utime(folder, (1, 1))
        new.run("import", str(old.state.path))
        assert not left.exists()
        assert at_work.exists()
        assert young.exists()
    assert new.left() == 1
    assert list(new.state.path.glob(".import-*")) == [young]
