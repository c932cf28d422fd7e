"""Decisions about bounds, retry and blame: each is a function of its arguments alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.bounds import Bounds
from outbox.outcome import Reason
from outbox.policy import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    Budget,
    Fill,
    Room,
    Schedule,
    backoff_ms,
    expiry_horizon_ms,
    is_stuck,
    room_for,
    schedule_of,
    spend,
    verdict_wait_ms,
)

NOW = 1_790_000_000_000
TIGHT = Bounds(max_events=3, max_bytes=100)
REFUSING = Bounds(max_events=3, max_bytes=100, overflow="refuse")


# Bounds


@pytest.mark.parametrize(
    ("fill", "size", "room"),
    [
        (Fill(0, 0, 0, 0), 100, Room.THERE),
        (Fill(2, 50, 0, 0), 50, Room.THERE),
        (Fill(2, 50, 0, 0), 51, Room.BY_DROPPING),
        (Fill(3, 3, 0, 0), 1, Room.BY_DROPPING),
        (Fill(1, 1, 2, 2), 1, Room.BY_DROPPING),
        (Fill(1, 10, 1, 90), 1, Room.BY_DROPPING),
        (Fill(0, 0, 0, 0), 101, Room.REFUSED),
        (Fill(2, 20, 0, 0), 101, Room.REFUSED),
    ],
)
def test_an_event_fits_or_others_make_room_for_it(fill, size, room):
    """Waiting events and dead letters count; only what could never fit is refused."""
    assert room_for(fill, size, TIGHT) is room
    if room is not Room.THERE:
        assert room_for(fill, size, REFUSING) is Room.REFUSED


@pytest.mark.parametrize(
    ("in_flight", "room"),
    [
        (Fill(2, 50, 0, 0), Room.BY_DROPPING),
        (Fill(3, 50, 0, 0), Room.REFUSED),
        (Fill(1, 61, 0, 0), Room.REFUSED),
    ],
)
def test_what_is_in_flight_makes_no_room(in_flight, room):
    """An event that cannot stand beside it is refused before anything is dropped."""
    assert room_for(Fill(3, 99, 0, 0), 40, TIGHT, in_flight=in_flight) is room


def test_a_bound_of_nothing_takes_nothing():
    """max_events = 0 does not drop for ever."""
    assert room_for(Fill(0, 0, 0, 0), 1, Bounds(max_events=0)) is Room.REFUSED
    assert room_for(Fill(5, 5, 0, 0), 1, Bounds(max_events=0)) is Room.REFUSED


def test_nothing_expires_without_a_bound_or_in_the_quiet_time():
    """An hour after a start, or after a step of the clock, everything stays."""
    aged = Bounds(max_age_ms=DAY_MS)
    assert expiry_horizon_ms(Bounds(), NOW, steady=True) is None
    assert expiry_horizon_ms(aged, NOW, steady=False) is None
    assert expiry_horizon_ms(aged, NOW, steady=True) == NOW - DAY_MS


# Retry


def test_the_wait_doubles_up_to_its_most():
    """1 s, 2 s, 4 s … 60 s without jitter, however many failures there were."""
    waits = [backoff_ms(Schedule(), failures, 0.0) for failures in (0, 1, 2, 3, 6, 7, 40, 10**9)]
    assert waits == [1_000, 1_000, 2_000, 4_000, 32_000, 60_000, 60_000, 60_000]


def test_a_fixed_wait_stays():
    """A producer may ask for it."""
    fixed = Schedule(initial_ms=700, exponential=False)
    assert [backoff_ms(fixed, failures, 0.0) for failures in (1, 5, 50)] == [700, 700, 700]


@given(st.integers(1, 200), st.floats(0, 1, exclude_max=True))
def test_jitter_lies_between_half_and_all_of_the_wait(failures, chance):
    """No two agents come back in step, and none too early."""
    whole = backoff_ms(Schedule(), failures, 0.0)
    assert whole / 2 <= backoff_ms(Schedule(), failures, chance) <= whole


def test_an_event_may_bring_its_own_schedule():
    """What it does not say is as usual; nothing, or something unreadable, is as usual altogether."""
    usual = Schedule(max_attempts=5)
    own = {"maxAttempts": 2, "backoff": "fixed", "initialDelayMs": 7, "maxDelayMs": 9, "jitter": 0}
    assert schedule_of(usual, own) == Schedule(7, 9, 2, exponential=False, jitter=0)
    assert schedule_of(usual, {"initialDelayMs": 7}) == Schedule(initial_ms=7, max_attempts=5)
    assert schedule_of(usual, {"backoff": "exponential"}) == usual
    slow = schedule_of(usual, {"initialDelayMs": 300_000, "backoff": "fixed"})
    assert backoff_ms(slow, 1, 0.0) == 300_000  # what it asks for is not cut at the usual most
    for nothing in (None, {}, [], "fixed", 3):
        assert schedule_of(usual, nothing) == usual


# Blame


def waits(reason, number):
    """How long each of so many dead letters in a row has to wait, when each is made as soon as it may."""
    budget, now, found = Budget(), NOW, []
    for _ in range(number):
        wait = verdict_wait_ms(budget, reason, now)
        found.append(wait)
        now += wait
        budget = spend(budget, now)
    return found


def test_three_dead_letters_in_a_row_are_free():
    """After them each waits: refusals from 1 s to 10 min, all others from 10 min to a day."""
    assert waits(Reason.REJECTED, 15) == [0, 0, 0, *(1_000 << n for n in range(10)), 600_000, 600_000]
    minutes = [wait // MINUTE_MS for wait in waits(Reason.EXHAUSTED, 13)]
    assert minutes == [0, 0, 0, 10, 20, 40, 80, 160, 320, 640, 1_280, 1_440, 1_440]


@pytest.mark.parametrize("reason", [Reason.OUTCOME_UNKNOWN, Reason.NO_ENDPOINT, Reason.EXHAUSTED])
def test_what_is_no_clear_refusal_waits_longer(reason):
    """The relay may be broken."""
    assert verdict_wait_ms(Budget(3, NOW), reason, NOW) == 10 * MINUTE_MS


def test_time_that_passed_counts():
    """Only what is left of the interval is waited for; a clock that went back makes no wait longer."""
    spent = Budget(4, NOW)
    assert verdict_wait_ms(spent, Reason.REJECTED, NOW + 500) == 1_500
    assert verdict_wait_ms(spent, Reason.REJECTED, NOW + 2_000) == 0
    assert verdict_wait_ms(spent, Reason.REJECTED, NOW - DAY_MS) == 2_000


EVERY_HOUR = [NOW - hour * HOUR_MS for hour in range(1, 25)]


@pytest.mark.parametrize(
    ("first_try", "accepted", "stuck"),
    [
        (NOW - DAY_MS, EVERY_HOUR, True),
        (NOW - DAY_MS + 1, EVERY_HOUR, False),
        (None, EVERY_HOUR, False),
        (NOW - 2 * DAY_MS, [], False),
        (NOW - 2 * DAY_MS, EVERY_HOUR[:18], False),  # nothing in the first quarter of the day
        (NOW - 2 * DAY_MS, EVERY_HOUR[:6] + EVERY_HOUR[12:], False),  # nothing in one in the middle
        (NOW - 2 * DAY_MS, EVERY_HOUR[::6], True),
    ],
)
def test_a_head_is_stuck_when_others_went_all_along(first_try, accepted, stuck):
    """A day since its own first try, and others accepted in each quarter of it: no outage."""
    assert is_stuck(first_try, NOW, DAY_MS, accepted) is stuck
