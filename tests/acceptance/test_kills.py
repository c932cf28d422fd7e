"""kill -9, again and again, of relay and daemon: what was accepted arrives, once, in order."""

import contextlib
import json
import random
import time
from collections import defaultdict

import pytest
from processes import DaemonProcess, dead_of, program, put, status_of, wait_for

from relay_client.reference.process import RelayProcess

TOKEN = "tok-daemon"
PRODUCE = """
import json, sys
from outbox import Outbox
for line in sys.stdin:
    agent, first, last, damaged = json.loads(line)
    with Outbox.open(agent) as outbox:
        for n in range(first, last):
            text = "damaged" if n in damaged else f"message {n}"
            receipt = outbox.enqueue("session-message", {"from": agent, "body": text, "n": n})
            print(json.dumps([agent, n, receipt.seq, receipt.idempotency_key]), flush=True)
"""
REFUSED = {"error": {"code": "validation_failed", "message": "body: is damaged"}}
DAMAGED = {"bodyContains": '"damaged"'}
# In a batch the relay refuses a damaged item alone; a damaged message that comes by itself is a 422.
REFUSE_DAMAGED = (
    {
        "match": {**DAMAGED, "path": "/api/messages/batch"},
        "action": {"perItem": {"match": DAMAGED, "status": 422, "body": REFUSED}},
    },
    {"match": {**DAMAGED, "path": "/api/messages"}, "action": {"status": 422, "body": REFUSED}},
)
REFUSE_WHOLE_BATCH = (
    {"match": {**DAMAGED, "path": "/api/messages/batch"}, "action": {"status": 422, "body": REFUSED}},
    REFUSE_DAMAGED[1],
)


class World:
    """A relay and a daemon that can be killed, and producers that enqueue meanwhile."""

    def __init__(self, tmp_path, seed, faults=()):
        print("seed", seed)
        self.random = random.Random(seed)
        self.state = tmp_path / "state"
        self.faults = faults
        self.relay = RelayProcess(tmp_path / "relay.sqlite", [TOKEN])
        self.daemon = DaemonProcess(self.state, None, {"delivery.batch_max_items": "8"})
        self.accepted = []  # [agent, n, seq, key] of each receipt

    @contextlib.contextmanager
    def running(self):
        """Both run; whatever happens, none is left."""
        with self.relay:
            self.relay.add_faults(*self.faults)
            self.daemon.url = self.relay.url
            with self.daemon:
                yield self

    def kill_relay(self):
        """The relay dies and comes again; the daemon meets nothing but a dead or a whole one."""
        self.relay.kill()
        time.sleep(self.random.uniform(0, 0.2))
        with self.daemon.frozen():
            self.relay.start()
            if self.faults:
                self.relay.add_faults(*self.faults)

    def kill_daemon(self):
        """The daemon dies and comes again."""
        self.daemon.kill()
        time.sleep(self.random.uniform(0, 0.2))
        self.daemon.start()

    def kill_as_it_goes_on(self, total):
        """Three times each, in any order, spread over the first three quarters of what is to arrive."""
        kills = [self.kill_relay, self.kill_daemon] * 3
        self.random.shuffle(kills)
        for number, kill in enumerate(kills):
            wait_for(lambda: self.held() >= total * number / 8, 30)  # noqa: B023 - asked at once
            time.sleep(self.random.uniform(0, 0.03))
            kill()

    def held(self):
        """How many events the relay holds."""
        return sum(agent["count"] for agent in self.relay.summary().values())

    @contextlib.contextmanager
    def producers(self, *works):
        """One process for each list of (agent, first, last, damaged); their receipts are read at the end."""
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(program(self.state, PRODUCE)) for _ in works]
            for process, work in zip(processes, works, strict=True):
                process.stdin.write("".join(json.dumps(part) + "\n" for part in work))
                process.stdin.close()
                process.stdin = None
            yield
            for process in processes:
                said, trouble = process.communicate(timeout=60)
                assert (process.returncode, trouble) == (0, "")
                self.accepted += map(json.loads, said.splitlines())

    def arrived(self):
        """For each agent the (seq, key) of its events, in the order in which the relay got them."""
        found = defaultdict(list)
        for event in self.relay.events():
            found[event["agent"]].append((json.loads(event["body"])["n"], event["key"]))
        return found


@pytest.mark.slow
def test_a_thousand_events_through_six_kills(tmp_path):
    """One agent, relay and daemon killed -9 three times each: each key once, in the order of seq."""
    world = World(tmp_path, random.randrange(2**32))
    with world.running():
        with world.producers([("builder", 0, 1_000, [])]):
            world.kill_as_it_goes_on(1_000)
        wait_for(lambda: world.held() == 1_000, 30)
        expected = [(n, key) for _, n, _, key in sorted(world.accepted, key=lambda receipt: receipt[2])]
        assert [n for n, _ in expected] == list(range(1_000))
        assert world.arrived() == {"builder": expected}
        wait_for(lambda: not status_of(world.state, "builder").waiting)
        assert dead_of(world.state, "builder") == []


@pytest.mark.slow
@pytest.mark.parametrize("faults", [REFUSE_DAMAGED, REFUSE_WHOLE_BATCH], ids=["per item", "whole batch"])
def test_twenty_agents_and_damaged_events_through_six_kills(tmp_path, faults):
    """20 agents: what the relay refuses is dead with its reason; all else arrives, once, in order."""
    world = World(tmp_path, random.randrange(2**32), faults)
    agents = [f"agent-{number}" for number in range(20)]
    damaged = {agent: sorted(world.random.sample(range(200), 10)) for agent in world.random.sample(agents, 2)}
    works = [[(agent, 0, 200, damaged.get(agent, [])) for agent in agents[start::4]] for start in range(4)]
    total = 20 * 200 - 2 * 10
    with world.running():
        with world.producers(*works):
            world.kill_as_it_goes_on(total)
        wait_for(lambda: world.held() == total, 40)
        wait_for(lambda: not any(status_of(world.state, agent).waiting for agent in agents), 20)
        arrived = world.arrived()
    for agent in agents:
        own = sorted((receipt for receipt in world.accepted if receipt[0] == agent), key=lambda each: each[2])
        assert [n for _, n, _, _ in own] == list(range(200))
        bad = damaged.get(agent, [])
        assert arrived[agent] == [(n, key) for _, n, _, key in own if n not in bad], agent
        dead = dead_of(world.state, agent)
        assert [letter.key for letter in dead] == [key for _, n, _, key in own if n in bad]
        assert all((letter.reason, letter.status) == ("rejected", 422) for letter in dead)
        assert all("is damaged" in letter.detail for letter in dead)


def test_killed_between_the_answer_and_the_removal(tmp_path):
    """P03: stored by the relay, not yet settled here: the same text goes again; the relay keeps one."""
    never = {"delivery.backoff_initial_s": "3600", "delivery.backoff_max_s": "3600"}
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        relay.add_faults({"times": 1, "match": {"path": "/api/messages"}, "action": {"delayS": 60}})
        with DaemonProcess(tmp_path / "state", relay.url, never) as daemon:
            (receipt,) = put(tmp_path / "state", "builder", 0)
            wait_for(relay.events)
            daemon.kill()
            daemon.start()
            wait_for(lambda: not status_of(tmp_path / "state", "builder").waiting)
        (event,) = relay.events()
        assert (event["key"], event["timesSeen"]) == (receipt.idempotency_key, 2)
        sent = [request for request in relay.requests() if request["path"] == "/api/messages"]
        assert [request["attempt"] for request in sent] == ["1", "2"]
        assert len({request["bodySha256"] for request in sent}) == 1


def test_a_producer_that_is_killed(tmp_path):
    """P1: each event whose receipt a producer saw before kill -9 arrives, and at most one more."""
    seed = random.randrange(2**32)
    print("seed", seed)
    many = random.Random(seed).randrange(1, 200)
    world = World(tmp_path, seed)
    with world.running():
        with program(world.state, PRODUCE) as producer:
            producer.stdin.write(json.dumps(["builder", 0, 100_000, []]) + "\n")
            producer.stdin.flush()
            seen = [json.loads(producer.stdout.readline()) for _ in range(many)]
            producer.kill()
            seen += map(json.loads, whole_lines(producer.stdout.read()))
        wait_for(lambda: not status_of(world.state, "builder").waiting)
        arrived = world.arrived()["builder"]
    assert arrived[: len(seen)] == [(n, key) for _, n, _, key in seen]
    assert len(arrived) <= len(seen) + 1


def whole_lines(text):
    """The lines that were written to their end."""
    return text[: text.rfind("\n") + 1].splitlines()
