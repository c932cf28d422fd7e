"""How a credential stands, and how long a recovery that failed waits: values only."""

import pytest

from outbox.delivery.token_state import Trouble, after_failure, at_once, held, stopped_before
from outbox.policy import Schedule

WALL_MS, NOW_MS = 1_790_000_000_000, 50_000
SCHEDULE = Schedule(1_000, 60_000)


def token(lifetime_ms):
    """A token that lives so long."""
    until = None if lifetime_ms is None else WALL_MS + lifetime_ms
    return held("tok-1", "name", until, wall_ms=WALL_MS, now_ms=NOW_MS, proven=False)


@pytest.mark.parametrize(
    ("lifetime_ms", "margin_ms"), [(3_600_000, 60_000), (300_000, 60_000), (100_000, 20_000), (5_000, 1_000)]
)
def test_a_token_is_renewed_in_time(lifetime_ms, margin_ms):
    """A minute before its end, or a fifth of a short life."""
    have, end_ms = token(lifetime_ms), NOW_MS + lifetime_ms
    assert not have.is_due(end_ms - margin_ms - 1)
    assert have.is_due(end_ms - margin_ms)
    assert have.is_good(end_ms - 1)
    assert not have.is_good(end_ms)


@pytest.mark.parametrize("lifetime_ms", [None, 0, 999, -3_600_000])
def test_a_token_without_a_readable_end_is_good_until_it_is_refused(lifetime_ms):
    """Also one that is over at once: whoever gave it out has another clock than we."""
    have = token(lifetime_ms)
    assert have.is_good(10**15)
    assert not have.is_due(10**15)


def test_nothing_shows_a_token():
    """Not even its repr."""
    assert "tok-1" not in repr(token(None))


def test_a_refusal_says_more_of_a_new_token():
    """For a minute, unless the relay took something with it."""
    assert token(None).is_new(NOW_MS + 59_999)
    assert not token(None).is_new(NOW_MS + 60_000)
    assert not held("t", "n", None, wall_ms=0, now_ms=NOW_MS, proven=True).is_new(NOW_MS)


def failed(before, chance=0.0, **more):
    """One failure more."""
    return after_failure(
        before, "no", schedule=SCHEDULE, chance=chance, now_ms=NOW_MS, wall_ms=WALL_MS + 7, **more
    )


def test_failures_wait_from_a_second_to_a_minute():
    """Doubling, with jitter between half and all of it; the first one's moment is kept."""
    trouble, waits = None, []
    for _ in range(8):
        trouble = failed(trouble)
        waits.append(trouble.next_ms - NOW_MS)
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
    assert failed(trouble, chance=0.999).next_ms - NOW_MS == 30_030
    assert (trouble.failures, trouble.since_ms, trouble.state) == (8, WALL_MS + 7, "failing")


def test_a_wait_that_was_asked_for_is_kept_to():
    """It lengthens the wait and never shortens it; a flush respects it."""
    asked = failed(None, retry_after_ms=90_000)
    assert asked.next_ms - NOW_MS == 90_000
    assert at_once(asked, NOW_MS) == asked
    short = failed(None, retry_after_ms=10)
    assert short.next_ms - NOW_MS == 1_000
    assert at_once(short, NOW_MS).next_ms == NOW_MS


def test_what_stopped_stays_so_over_a_restart():
    """As long as source and inputs are the same; a flush does not change it."""
    fact = {"source": "OAuth", "state": "stopped", "inputs": "1f", "detail": "no", "since": 5, "failures": 2}
    found = stopped_before(fact, "OAuth", "1f", NOW_MS)
    assert found == Trouble("no", 5, 2, NOW_MS, stopped=True, inputs="1f")
    assert (found.state, found.reason) == ("stopped", "token_stopped")
    assert at_once(found, NOW_MS) == found
    for other in ({"source": "command"}, {"state": "failing"}, {"inputs": "2f"}, {"inputs": None}):
        assert stopped_before(fact | other, "OAuth", "1f", NOW_MS) is None
    damaged = {"source": "OAuth", "state": "stopped", "inputs": "1f", "since": "x", "failures": None}
    assert stopped_before(damaged, "OAuth", "1f", NOW_MS).failures == 1
