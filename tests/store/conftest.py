"""Outboxes for the tests of the store: made anew for each, closed after it, and their counters verified."""

import boxes
import pytest

from outbox.store.verify import verify_counters


@pytest.fixture
def state(tmp_path):
    """An empty state directory."""
    return boxes.state_in(tmp_path / "state")


@pytest.fixture
def make(state):
    """Makes outboxes, of the bounds given; whatever a test does, the counters are true in the end."""
    made = []

    def new(agent="builder", **options):
        box = boxes.make_box(state, agent, **options)
        made.append(box)
        return box

    yield new
    for box in made:
        if not box.closed:
            faults = verify_counters(box)
            box.close()
            assert faults == []


@pytest.fixture
def box(make):
    """An outbox with plenty of room."""
    return make()
