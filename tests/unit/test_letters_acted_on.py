"""Dead letters of several agents acted on at once, where one agent's file cannot be used."""

import pytest

from outbox import Outbox
from outbox.api.letters import discarding, do_each, picked
from outbox.api.report import opened
from outbox.errors import StoreError
from outbox.store.dead import Choice
from outbox.store.directory import StateDirectory
from outbox.store.people import skip

NOW_MS = 1_790_000_000_000


@pytest.fixture
def state(tmp_path):
    """Two agents with a dead letter each."""
    state = StateDirectory(tmp_path).create()
    for agent in ("a", "b"):
        with Outbox.open(agent, state_dir=tmp_path) as outbox:
            outbox.enqueue("insight", {})
        with opened(state, state.outbox_path(agent)) as box:
            skip(box, 1, NOW_MS)
    return state


def test_what_was_done_is_told_though_another_file_fails(state):
    """The letters of that file are told with the error, and those behind it are acted on."""
    meant, _ = picked(state, None, Choice())
    meant[-1].path.write_bytes(b"damage" * 4_096)
    done = [one for some in do_each(state, meant, discarding(NOW_MS)) for one in some]
    assert [(one.agent, one.error and one.error.code) for one in done] == [
        (meant[0].agent, None),
        (meant[1].agent, "damaged"),
    ]


def test_where_nothing_was_done_it_is_an_error(state):
    """Then nothing was changed, and that is all there is to tell."""
    meant, _ = picked(state, "a", Choice())
    meant[0].path.write_bytes(b"damage" * 4_096)
    with pytest.raises(StoreError):
        list(do_each(state, meant, discarding(NOW_MS)))
