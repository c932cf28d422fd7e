"""Four producers write without pause while their agent's file is damaged and set aside, ten times."""

import contextlib
import json
import random
import threading

import pytest
from processes import DaemonProcess, dead_of, program, status_of, wait_for

from outbox.errors import StoreBusy, StoreDamaged
from outbox.library import mend
from outbox.store.damage import damaged_files, damages
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess

AGENT = "builder"
ROUNDS = 10
PAGE = 4096
PRODUCE = """
import logging, sys
from outbox import Outbox, StoreError
logging.getLogger("outbox").setLevel(logging.ERROR)
name, n, refused = sys.argv[1], 0, 0
with Outbox.open("builder") as outbox:
    while True:
        n += 1
        try:
            receipt = outbox.enqueue("session-message", {"from": name, "body": "x" * 200, "n": n})
            print(n, receipt.idempotency_key, flush=True)
        except StoreError as error:  # nothing was acknowledged
            refused += 1
            print("refused", error.code, flush=True)
"""


def flip_pages(path, chance):
    """Invert the heads of some pages of tables and indexes, whoever is using them."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        pages = file.seek(0, 2) // PAGE
        for page in chance.sample(range(3, pages), max(1, pages // 20)):
            file.seek(page * PAGE)
            head = file.read(64)
            if any(head):
                file.seek(page * PAGE)
                file.write(bytes(byte ^ 0xFF for byte in head))


class Producer:
    """A producer process, and what it was told."""

    def __init__(self, process):
        self.process = process
        self.keys = {}  # by number
        self.refused = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            if not line.endswith("\n"):  # cut off by the kill; with PYTHONUNBUFFERED a line is many writes
                break
            first, second = line.split()
            if first == "refused":
                self.refused.append(second)
            else:
                self.keys[int(first)] = second

    def end(self):
        """Kill it; what it was told before counts."""
        self.process.kill()
        self._reader.join(20)


def dead_letters(state):
    """Those of the agent; the last flip may have hit the new file, and nobody has looked at it since."""
    try:
        return dead_of(state.path, AGENT)
    except StoreDamaged:
        mend(state, AGENT)
        return dead_of(state.path, AGENT)


@pytest.mark.slow
def test_each_acknowledged_event_arrives_or_is_told_of(tmp_path):
    """With the relay away for half of the time; no event is in neither place, and the daemon never ends."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    state = StateDirectory(tmp_path / "state")
    path = state.outbox_path(AGENT)
    relay = RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"])
    with relay, contextlib.ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(state.path, relay.url, {"daemon.poll_interval_s": "0.2"}))
        relay.kill()
        names = [f"producer-{number}" for number in range(4)]
        processes = [stack.enter_context(program(state.path, PRODUCE, name)) for name in names]
        producers = dict(zip(names, map(Producer, processes), strict=True))
        for round_number in range(ROUNDS):
            if round_number == ROUNDS // 2:
                relay.start()
            seen = sum(len(producer.keys) for producer in producers.values())
            wait_for(lambda: sum(len(each.keys) for each in producers.values()) > seen + 50, 60)  # noqa: B023

            def is_set_aside(number=round_number):
                flip_pages(path, chance)
                return len(damaged_files(state)) > number

            wait_for(is_set_aside, 60)
        for producer in producers.values():
            producer.end()

        def is_drained():
            with contextlib.suppress(StoreDamaged, StoreBusy):  # it is replaced; the next look tells
                status = path.exists() and status_of(state.path, AGENT)
                return status and not status.waiting and status.head is None  # the gap has left, too

        wait_for(is_drained, 60)
        assert daemon.process.poll() is None
        assert not daemon.said("fault")
        bodies = [json.loads(event["body"]) for event in relay.events(AGENT)]
        told = {damage.moved_to for damage in damages(state)}
        wait_for(lambda: len(daemon.said("damaged_file")) == len(told))

    arrived = {name: [body["n"] for body in bodies if body["from"] == name] for name in names}
    lost = sum(body["payload"]["count"] for body in bodies if body.get("kind") == "outbox-gap")
    missing = sum(len(set(producers[name].keys) - set(arrived[name])) for name in names)
    print(
        "accepted", sum(map(len, arrived.values())), "missing", missing, "told", lost, "set aside", len(told)
    )
    assert len(told) >= ROUNDS
    assert missing <= lost
    assert dead_letters(state) == []
    for name in names:
        assert arrived[name] == sorted(set(arrived[name])), name
        assert not producers[name].refused or set(producers[name].refused) <= {"damaged", "busy"}
