"""What a relay says of itself in /api/spec is kept to; without it the contract's defaults stand."""

from __future__ import annotations

from world import DAY_MS, HOUR_MS, Lose, World, answer


def test_batches_are_as_small_as_the_relay_says(tmp_path):
    """A relay that takes 7 messages at a time never gets more."""
    with World(tmp_path) as world:
        world.relay.spec = {"batch": {"maxItems": 7, "maxBytes": 100_000}}
        world.enqueue("builder", 50)
        world.run(HOUR_MS)
        assert world.numbers("builder") == list(range(50))
        assert max(len(request.messages) for request in world.relay.requests) == 7


def test_a_relay_that_honours_keys_makes_tool_calls_safe(tmp_path):
    """With mcpIdempotency a call whose answer was lost goes again, with its key."""
    lost = []

    def behave(request):
        if not lost and b"tools/call" in request.body:
            lost.append(request)
            world.relay.accept(request)
            raise Lose

    with World(tmp_path) as world:
        world.relay.spec = {"mcpIdempotency": True}
        world.relay.behave = behave
        world.enqueue("builder", 1, kind="mcp-tool-call")
        world.run(DAY_MS)
        assert world.dead() == []
        assert len(world.relay.effects) == 2
        assert len(set(world.relay.effects)) == 1


def test_a_413_teaches_how_large_a_body_may_be(tmp_path):
    """A relay that refuses bodies above 4,000 bytes gets smaller groups from then on, and loses nothing."""

    def behave(request):
        return answer(413) if len(request.body) > 4_000 else None

    with World(tmp_path, behave=behave) as world:
        world.enqueue("builder", 200, text="x" * 200)
        world.run(HOUR_MS)
        assert world.numbers("builder") == list(range(200))
        assert world.dead() == []
        too_large = [request for request in world.relay.requests if len(request.body) > 4_000]
        assert len(too_large) < 8
