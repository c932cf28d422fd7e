"""What is known of the relay, as another release or a bad disk may have left it: nobody stumbles over it."""

import contextlib
import json
import random

import apsw
import pytest
from command_line import command, in_process
from mutations import is_safe, odd_json
from world import HOUR_MS, URL, World

from outbox.store.relay_state import RelayState

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
