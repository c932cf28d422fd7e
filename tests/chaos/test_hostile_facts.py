"""What the state directory knows besides events, as another release or a bad disk left it."""

import contextlib
import json
import random

import apsw
import pytest
from command_line import command, in_process
from mutations import hostile, is_safe, odd_json
from world import HOUR_MS, URL, World

from outbox.bounds import Bounds
from outbox.event import Limits
from outbox.store.damage import Damage, decode
from outbox.store.directory import StateDirectory
from outbox.store.place import leave_place, take_place
from outbox.store.relay_state import RelayState
from outbox.store.rules import decode_rules, encode_rules

WHEN_MS = 1_790_000_000_000
VALVE = {"reason": "unreachable", "detail": "refused", "since": WHEN_MS, "failures": 3, "nextTryAt": WHEN_MS}
PATH = {
    **VALVE, "reason": "no_endpoint", "accepted": True, "inARow": 4, "lastDeadAt": WHEN_MS, "deadEnd": True,
    "deadEndUntil": WHEN_MS, "learnedBytes": 70_000, "learnedUntil": WHEN_MS, "offUntil": WHEN_MS,
}  # fmt: skip
TOKEN = {
    "source": "a program", "state": "stopped", "detail": "exit 1", "since": WHEN_MS, "failures": 2,
    "nextTryAt": WHEN_MS, "inputs": "a", "expiresAt": WHEN_MS, "recoveredAt": WHEN_MS,
}  # fmt: skip
FACTS = {
    "gate": {"url": URL, **VALVE}, "auth": TOKEN, "token:builder": TOKEN, "accepts": {"f95d": [WHEN_MS]},
    "instance": "0b0e7d3c", "path:/api/messages": PATH, "path:/api/insights": PATH,
}  # fmt: skip
SOCKET = {"pid": 4242, "version": "0.1.0", "startedAtMs": WHEN_MS, "socket": "/nowhere/outbox.sock"}
RULES = {
    "maxPayloadBytes": 10_000, "maxNesting": 20, "messageBodyMaxChars": 100, "customKinds": ["a"],
    "keyScope": "none", "bounds": {"maxEvents": 50, "maxBytes": 50_000, "maxAgeMs": None, "maxDead": 9,
    "minFreeDiskBytes": 0, "overflow": "refuse", "receiptWindowMs": 1, "receiptMaxBytes": 1},
}  # fmt: skip
ASKED = [
    ("status",), ("status", "--json"), ("why", "builder"), ("auth", "status"),
    ("auth", "status", "--json"), ("resume",), ("auth", "retry"), ("doctor",),
]  # fmt: skip


@pytest.fixture
def chance(seed):
    """Which fields are odd, and how."""
    return random.Random(seed)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where commands look; the state of the world lies there too."""
    in_process(monkeypatch, tmp_path)
    monkeypatch.setenv("OUTBOX_RELAY_URL", URL)
    return tmp_path


def write_odd(chance, path):
    """Put them into the file as texts, past whoever writes them in a regular way."""
    RelayState(path).close()
    with contextlib.closing(apsw.Connection(str(path))) as db:
        for name, fact in FACTS.items():
            text = odd_json(chance, fact) if chance.random() < 0.7 else json.dumps(fact).encode()
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, text))


def test_events_arrive_whatever_is_known(chance, tmp_path, rounds):
    """What cannot be believed is not known; what can be is at most a wait."""
    for number in range(rounds(15)):
        folder = tmp_path / str(number)
        with World(folder) as world:
            world.enqueue("builder", 3)
        write_odd(chance, folder / "relay.sqlite")
        with World(folder) as world:
            world.enqueue("builder", 2, first=3)
            world.wake()
            world.run(2 * HOUR_MS)
            assert world.numbers("builder") == [0, 1, 2, 3, 4]


def test_commands_tell_what_can_be_believed(chance, home, capsys, rounds):
    """No traceback, nothing that steers a terminal; JSON stays JSON."""
    with World(home / "state") as world:
        world.enqueue("builder", 1)
    for _ in range(rounds(15)):
        write_odd(chance, home / "state" / "relay.sqlite")
        for words in chance.sample(ASKED, 4):
            status, out, err = command(capsys, *words)
            assert status in {0, 5, 69}, (words, err)
            assert "Traceback" not in err
            assert all(is_safe(line) for line in (out + err).splitlines()), (words, out, err)
            if "--json" in words:
                json.loads(out)


def test_who_finds_an_odd_file_of_the_daemon_goes_on(chance, home, capsys, rounds):
    """Its lock says that it runs; where it is asked is the usual place then."""
    with World(home / "state") as world:
        world.enqueue("builder", 1)
    state = StateDirectory(home / "state")
    take_place(state, "0.1.0", home / "state" / "outbox.sock", WHEN_MS)
    try:
        for _ in range(rounds(10)):
            state.daemon_file.write_bytes(hostile(chance, SOCKET))
            for words in (("status",), ("status", "--json"), ("why", "builder")):
                status, out, err = command(capsys, *words)
                assert status == 0, (words, err)
                assert is_safe((out + err).replace("\n", "")), (words, out, err)
    finally:
        leave_place(state)


def test_producers_go_by_the_rules_that_are_some(chance, rounds):
    """Whatever stands in their place, a producer gets limits and bounds of the right types."""
    limits, bounds = decode_rules(json.dumps(RULES))
    assert decode_rules(encode_rules(limits, bounds)) == (limits, bounds) != (Limits(), Bounds())
    for _ in range(rounds(30) * 20):
        text = hostile(chance, RULES).decode("utf-8", "replace")
        for found, usual in zip(decode_rules(text), (Limits(), Bounds()), strict=True):
            for value, default in zip(found, usual, strict=True):
                assert type(value) is type(default) or {type(value), type(default)} == {int, type(None)}, text


def test_reports_of_damaged_files_are_whole_or_none(chance, rounds):
    """A report that cannot be believed is no reason to end."""
    report = Damage(
        "builder", "builder-1.sqlite", "damaged/builder-1.sqlite", "it is empty", WHEN_MS, queued=3
    )
    assert decode(report.encode()) == report
    for _ in range(rounds(30) * 20):
        with contextlib.suppress(ValueError):
            text = hostile(chance, json.loads(report.encode())).decode("utf-8", "replace")
            assert "events" in decode(text).sentence()
