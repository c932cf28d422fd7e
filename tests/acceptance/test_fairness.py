"""Many agents share the relay fairly: nobody waits for another one's backlog."""

from __future__ import annotations

from world import MINUTE_MS, Refuse, World


def test_a_backlog_does_not_keep_others_waiting(tmp_path):
    """After an outage every one of 40 agents has its first event through before the largest backlog is."""

    def refuse(_request):
        raise Refuse

    with World(tmp_path, behave=refuse, health=lambda: 0, delivery__batch_max_items=1) as world:
        world.enqueue("big", 400)
        for n in range(40):
            world.enqueue(f"small-{n}", 1)
        world.run(MINUTE_MS)
        world.relay.behave, world.relay.health = lambda request: None, lambda: 200
        world.run(5 * MINUTE_MS)
        order = [request.agent for request in world.relay.requests]
        last_small = max(index for index, agent in enumerate(order) if agent != "big")
        assert order[:last_small].count("big") < 100
        assert len(world.relay.keys) == 440


def test_300_agents_with_64_open_files(tmp_path):
    """300 agents, each with an event, are all delivered though only 64 files are open at once."""
    with World(tmp_path) as world:
        for n in range(300):
            receipts = world.enqueue(f"agent-{n}", 1)
            assert receipts[0].state == "waiting"
            world.boxes.pop(f"agent-{n}").close()
        world.run(5 * MINUTE_MS)
        assert len(world.relay.keys) == 300
