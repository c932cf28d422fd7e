"""The table of states: complete, and drawn as it is."""

import subprocess
import sys

import pytest

from outbox.outcome import TRANSITIONS, Act, State, move, picture


def reached(start):
    """Every state that acts lead to from this one."""
    found, left = set(), [start]
    while left:
        state = left.pop()
        if state not in found:
            found.add(state)
            left += [after for (before, _), after in TRANSITIONS.items() if before is state]
    return found


def test_every_state_can_be_reached_and_every_act_is_used():
    """No word stands in the table for nothing."""
    assert reached(State.NEW) == set(State)
    assert {act for _, act in TRANSITIONS} == set(Act)


def test_nothing_comes_back_from_an_end():
    """Delivered, replaced, dropped and discarded events are gone; a dead letter is not."""
    final = {State.DELIVERED, State.TOOL_ERROR, State.REPLACED, State.DROPPED, State.DISCARDED}
    assert {state for state in State if not any(before is state for before, _ in TRANSITIONS)} == final


def test_nothing_is_lost_while_it_waits():
    """From waiting or in flight an event leaves only by an act with a name that people are told of."""
    leaving = {
        act for (before, act), after in TRANSITIONS.items()
        if before in {State.WAITING, State.IN_FLIGHT} and after not in {State.WAITING, State.IN_FLIGHT}
    }  # fmt: skip
    assert leaving == {Act.ACK, Act.TOOL_SAID_NO, Act.BURY, Act.SKIP, Act.COALESCE, Act.DROP}


def test_what_is_in_flight_is_neither_dropped_nor_replaced_nor_skipped():
    """Only its sender ends it."""
    assert {act for before, act in TRANSITIONS if before is State.IN_FLIGHT} == {
        Act.ACK, Act.TOOL_SAID_NO, Act.RELEASE, Act.BURY,
    }  # fmt: skip


@pytest.mark.parametrize(("before", "act"), TRANSITIONS)
def test_the_picture_shows_every_row(before, act):
    """Each as an arrow with its act on it; the ends as ends."""
    start = "[*]" if before is State.NEW else before
    assert f"    {start} --> {move(before, act)}: {act}" in picture().splitlines()


def test_the_picture_can_be_printed():
    """`python -m outbox.outcome` is what the docs are made with."""
    done = subprocess.run(
        [sys.executable, "-m", "outbox.outcome"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.rstrip("\n") == picture()
    assert picture().startswith("stateDiagram-v2\n")
    assert "    delivered --> [*]" in picture()
    assert "    dead --> [*]" not in picture()
