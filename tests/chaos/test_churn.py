"""Many agents, many hours, many events: descriptors, memory, logs and files stay as they are."""

import gc
import json
import resource
import tracemalloc
from pathlib import Path

from processes import DaemonProcess, put, wait_for
from world import HOUR_MS, World, answer

from relay_client.reference.process import RelayProcess

SLACK_BYTES = 1_500_000  # what Python keeps for itself, and what a turn holds
AGENTS = [f"agent-{n}" for n in range(20)]


class Forgetful:
    """A relay that accepts all and remembers only how many; the world beside it remembers nothing either."""

    def __init__(self):
        self.accepted, self.world = 0, None

    def __call__(self, request):
        """Accept what came."""
        self.world.relay.requests.clear()
        self.world.events.clear()
        self.accepted += len(request.messages)
        if request.path.endswith("/batch"):
            return answer(207, {"results": [{"status": 201} for _ in request.messages]})
        return answer(201, {"id": "x"})


class Roomy(World):
    """A world in which a million events may wait."""

    bounds = {"max_events": 2_000_000, "max_bytes": 10**11}  # noqa: RUF012 - as above it


def forgetful_world(folder):
    """A world that does not grow by itself, and has written its bounds where producers find them."""
    relay = Forgetful()
    world = Roomy(folder, behave=relay)
    relay.world = world
    for agent in AGENTS:
        world.enqueue(agent, 1)
    world.run(1_000)
    relay.accepted = 0
    return world, relay


def in_use(folder):
    """Descriptors of this process, bytes of Python, files of the state, bytes of their logs."""
    gc.collect()
    logs = [path.stat().st_size for path in (folder / "agents").glob("*-wal")]
    return (
        len(list(Path("/proc/self/fd").iterdir())),
        tracemalloc.get_traced_memory()[0],
        sum(1 for path in folder.rglob("*") if path.is_file()),
        sum(logs),
    )


def test_hours_of_churn_leave_nothing_behind(tmp_path, rounds):
    """Agents come and go idle, the relay does its work, an hour passes: the last is like the third."""
    folder = tmp_path / "state"
    tracemalloc.start()
    world, relay = forgetful_world(folder)
    try:
        given = 0
        for hour in range(hours := max(8, rounds(8))):
            for agent in AGENTS[hour % 5 :: 5]:
                given += len(world.enqueue(agent, 30))
            world.run(HOUR_MS)
            if hour == 5:
                before = in_use(folder)
        after = in_use(folder)
        assert relay.accepted == given
        assert after[0] <= before[0]
        assert after[1] <= before[1] + SLACK_BYTES
        assert after[2] <= before[2]
        assert after[3] <= before[3] + 1024 * 1024 * len(AGENTS)
        print(hours, "hours:", before, after)
    finally:
        world.close()
        tracemalloc.stop()


def drained(folder, many):
    """The most memory in use while so many waiting events leave, beyond what was there before."""
    world, relay = forgetful_world(folder)
    try:
        for first in range(0, many, 1_000):
            world.enqueue(AGENTS[0], 1_000, first=first)
        gc.collect()
        tracemalloc.start()
        world.run(until=lambda: relay.accepted >= many)
        assert relay.accepted == many
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        world.close()


def test_a_backlog_of_any_length_takes_the_same_memory(tmp_path, rounds):
    """1,000 events or 20,000 (a million in the long run): the sender holds one group of them."""
    few, many = (
        drained(tmp_path / "few", 1_000),
        drained(tmp_path / "many", 20_000 * min(50, rounds(1))),
    )
    print("bytes at most:", few, many)
    assert many <= 1.3 * few + SLACK_BYTES


def test_a_thousand_agents_with_256_descriptors(tmp_path, rounds):
    """A real daemon under `ulimit -n 256`: each agent's events arrive once, and no descriptor was wanting."""
    agents = [f"agent-{n}" for n in range(min(1_000, 60 * rounds(1)))]
    for agent in agents:
        put(tmp_path / "state", agent, 0, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        daemon = DaemonProcess(tmp_path / "state", relay.url, {"daemon.poll_interval_s": "0.2"})
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            try:
                daemon.start()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            wait_for(lambda: sum(one["count"] for one in relay.summary().values()) == 2 * len(agents), 300)
            wait_for(lambda: len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir())) < 30, 60)
            assert daemon.stop() == 0
            assert [line for line in daemon.lines() if "file_trouble" in line or "event=fault" in line] == []
            bodies = [(event["agent"], json.loads(event["body"])["n"]) for event in relay.events()]
        finally:
            daemon.end()
    assert sorted(bodies) == sorted((agent, n) for agent in agents for n in (0, 1))
    assert all(bodies.index((agent, 0)) < bodies.index((agent, 1)) for agent in agents[:50])
