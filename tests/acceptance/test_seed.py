"""A seed runner's file is adopted: in order, with keys and times, once its runner has stopped."""

import contextlib
import json

import pytest
from command_line import command, in_process, process
from processes import DaemonProcess
from runs import TOKEN, serve_environment, serve_running, until
from seeds import FIRST_MS, contents_of, make_seed, runner_at_work, seed_row

from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.verify import verify_counters
from relay_client.reference.process import RelayProcess

POISONED = {3, 71, 72, 200, 344, 499, 500}


@pytest.fixture
def seed(tmp_path):
    """A file with 500 rows, 7 of them poisoned, whose runner has stopped."""
    folder = tmp_path / "runner"
    folder.mkdir()
    rows = [
        seed_row(
            n, poisoned=int(n in POISONED), attempts=12 if n in POISONED else n % 3, next_attempt_at=FIRST_MS
        )
        for n in range(1, 501)
    ]
    return make_seed(folder / "builder.sqlite", rows)


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory for commands in this process."""
    in_process(monkeypatch, tmp_path)
    return StateDirectory(tmp_path / "state")


def test_a_seed_file_is_adopted(tmp_path, seed, state):
    """493 are delivered in order with their keys and times; 7 are dead letters, and can be replayed."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        env = serve_environment(tmp_path, relay.url)
        before = contents_of(seed.parent)
        done = process(env, "import", "--agent", "builder", str(seed), "--json")
        assert (done.returncode, done.stderr) == (0, b"")
        assert json.loads(done.stdout) | {"gaps": 0, "receipts": 0} == {
            "events": 493, "dead": 7, "gaps": 0, "receipts": 0, "known": 0, "refused": 0,
        }  # fmt: skip
        assert contents_of(seed.parent) == before
        with serve_running(tmp_path, relay.url):
            assert until(lambda: waiting(state) == 0)
            arrived = [json.loads(event["body"]) for event in relay.events("builder")]
            expected = [n for n in range(1, 501) if n not in POISONED]
            assert [body["n"] for body in arrived] == expected
            assert [body["idempotencyKey"] for body in arrived] == [f"seed-key-{n}" for n in expected]
            assert [body["occurredAt"] for body in arrived] == [FIRST_MS + 1_000 * n for n in expected]
            letters = [
                json.loads(line) for line in process(env, "dead", "list", "--json").stdout.splitlines()
            ]
            assert [(one["seq"], one["reason"], one["attempts"]) for one in letters] == [
                (n, "exhausted", 12) for n in sorted(POISONED)
            ]
            assert process(env, "dead", "replay", "--all").returncode == 0
            assert until(lambda: waiting(state) == 0)
            assert [json.loads(event["body"])["n"] for event in relay.events("builder")][493:] == sorted(
                POISONED
            )
            again = process(env, "import", "--agent", "builder", str(seed), "--json")
            assert json.loads(again.stdout)["known"] == 500
        assert relay.summary()["builder"]["duplicates"] == 0
        assert relay.summary()["builder"]["inOrder"]
    with contextlib.closing(open_outbox(state, state.outbox_path("builder"))) as box:
        assert verify_counters(box) == []


def waiting(state):
    """How many of the builder's events wait."""
    with contextlib.closing(open_outbox(state, state.outbox_path("builder"))) as box:
        return read_status(box).waiting


def test_rows_that_are_no_events_stay_where_they_are(capsys, tmp_path, state):
    """Each is named by its row, exit 4; the others are taken, in order."""
    rows = [seed_row(1), seed_row(2, kind="sesion-message"), seed_row(7, payload="{"), seed_row(9)]
    path = make_seed(tmp_path / "seed.sqlite", rows)
    status, told, errors = command(capsys, "import", "--agent", "builder", str(path))
    assert status == 4
    assert told.splitlines()[0] == (
        "2 events and 0 dead letters taken. 2 not taken; what was not stays where it was."
    )
    assert [line.split(":")[0] for line in errors.splitlines()] == ["row 2", "row 7"]
    assert 'did you mean "session-message"' in errors
    lines = command(capsys, "list", "--json")[1].splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 9]


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_runner_that_is_at_work_is_not_robbed(capsys, seed, tmp_path, state, mode):
    """Exit 6, with the process that has the file open; after its end the import goes through."""
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(1)], mode=mode)
    with runner_at_work(path, mode) as pid:
        status, told, errors = command(capsys, "import", "--agent", "builder", str(path))
        assert (status, told) == (6, "")
        assert f"process {pid}" in errors
        assert list(state.outbox_files()) == []
    assert command(capsys, "import", "--agent", "builder", str(path))[0] == 0


def test_whose_events_they_are_has_to_be_said(capsys, seed, state):
    """The file does not know; nothing is guessed from its name."""
    status, told, errors = command(capsys, "import", str(seed))
    assert (status, told, "--agent" in errors) == (2, "", True)
    status, _, errors = command(capsys, "import", str(seed.parent))
    assert (status, "one by one: builder.sqlite" in errors) == (2, True)


def test_a_file_that_cannot_be_read_to_its_end(capsys, tmp_path, state):
    """What comes before the damage is taken, exit 5, and the file is left alone."""
    path = make_seed(tmp_path / "seed.sqlite", [seed_row(n) for n in range(1, 201)], mode="delete")
    data = bytearray(path.read_bytes())
    data[5 * 4096 : 6 * 4096] = b"\xff" * 4096
    path.write_bytes(data)
    status, told, errors = command(capsys, "import", "--agent", "builder", str(path), "--json")
    assert (status, json.loads(errors)["error"]["code"]) == (5, "damaged")
    assert 0 < json.loads(told)["events"] < 200
    assert path.read_bytes() == bytes(data)


def test_the_status_names_files_of_seed_runners(capsys, seed, state, monkeypatch):
    """Where their variable points, also when that is our own state directory; it says what to do."""
    assert "seed" not in command(capsys, "status")[1]
    monkeypatch.setenv("AGENT_RELAY_RUNNER_OUTBOX_DIR", str(seed.parent))
    told = command(capsys, "status")[1]
    assert f"outbox import --agent AGENT {seed}" in told
    assert json.loads(command(capsys, "status", "--json")[1])["seedFiles"] == [str(seed)]
    monkeypatch.delenv("OUTBOX_STATE_DIR")
    command(capsys, "import", "--agent", "builder", str(seed))
    assert json.loads(command(capsys, "status", "--json")[1])["seedFiles"] == [str(seed)]
    assert (seed.parent / "agents").is_dir()


def test_the_daemon_names_them_when_it_starts(tmp_path, seed):
    """A line each, and it serves; nothing is adopted by itself."""
    before = contents_of(seed.parent)
    environ = {"AGENT_RELAY_RUNNER_OUTBOX_DIR": str(seed.parent)}
    with DaemonProcess(tmp_path / "state", "http://127.0.0.1:9", environ=environ) as daemon:
        (line,) = daemon.said("seed_outbox")
        assert line["file"] == str(seed)
        assert "outbox import" in line["detail"]
        daemon.stop()
    assert contents_of(seed.parent) == before
