"""Everything about the states of an event, in one place: the states, the acts, and the table that joins them.

How to read the machine: an event is in exactly one state. An act moves it along one row of TRANSITIONS; an
act with no row for that state raises IllegalTransition and changes nothing. The picture in
docs/architecture.md is made from this table (`python -m outbox.outcome`), and tests hold the store to it.

The second half of the file holds the values that a settlement consists of: what became of each claimed event.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from outbox.value import NamedTuple


class State(enum.StrEnum):
    """Where an event is."""

    NEW = "new"  # not accepted yet
    WAITING = "waiting"  # on disk, to be sent
    IN_FLIGHT = "in_flight"  # claimed by the sender
    DELIVERED = "delivered"  # gone; its receipt remembers the key
    TOOL_ERROR = "tool_error"  # gone; the tool ran and said no
    DEAD = "dead"  # a dead letter: kept, out of the way
    REPLACED = "replaced"  # a newer coalesce event took its place
    DROPPED = "dropped"  # a bound removed it; the gap tells
    DISCARDED = "discarded"  # a person removed a dead letter


class Act(enum.StrEnum):
    """What happens to an event."""

    ENQUEUE = "enqueue"
    CLAIM = "claim"
    ACK = "ack"  # the relay has it
    TOOL_SAID_NO = "tool said no"
    RELEASE = "release"  # it waits again: the relay's trouble, or a stop
    BURY = "bury"  # becomes a dead letter
    COALESCE = "coalesce"
    DROP = "drop"
    SKIP = "skip"  # a person sets the waiting event aside
    REPLAY = "replay"  # a dead letter goes to the tail, under a new seq
    DISCARD = "discard"


TRANSITIONS: Mapping[tuple[State, Act], State] = {
    (State.NEW, Act.ENQUEUE): State.WAITING,
    (State.WAITING, Act.CLAIM): State.IN_FLIGHT,
    (State.WAITING, Act.COALESCE): State.REPLACED,
    (State.WAITING, Act.DROP): State.DROPPED,
    (State.WAITING, Act.SKIP): State.DEAD,
    (State.IN_FLIGHT, Act.ACK): State.DELIVERED,
    (State.IN_FLIGHT, Act.TOOL_SAID_NO): State.TOOL_ERROR,
    (State.IN_FLIGHT, Act.RELEASE): State.WAITING,
    (State.IN_FLIGHT, Act.BURY): State.DEAD,
    (State.DEAD, Act.REPLAY): State.WAITING,
    (State.DEAD, Act.DISCARD): State.DISCARDED,
    (State.DEAD, Act.DROP): State.DROPPED,
}


class IllegalTransition(Exception):
    """An act that the state does not know: a fault of this program, never of the event."""


def move(state: State, act: Act) -> State:
    """The state after `act`; raises IllegalTransition where the table has no row."""
    try:
        return TRANSITIONS[state, act]
    except KeyError:
        raise IllegalTransition(f"{act} does not apply to an event that is {state}") from None


class Reason(enum.StrEnum):
    """Why an event is a dead letter."""

    REJECTED = "rejected"
    EXHAUSTED = "exhausted"
    NO_ENDPOINT = "no_endpoint"
    OUTCOME_UNKNOWN = "outcome_unknown"
    UNKNOWN_KIND = "unknown_kind"
    STUCK = "stuck"
    DAMAGED = "damaged"
    SKIPPED = "skipped"


class Trouble(NamedTuple):
    """What went wrong at one send, as it is kept in an event's history."""

    at_ms: int
    reason: str
    status: int | None = None
    code: str = ""
    detail: str = ""
    excerpt: str = ""
    path: str = ""


class Ack(NamedTuple):
    """The relay has it. `result` is the JSON text of an MCP result."""

    seq: int
    result: str | None = None
    tool_error: bool = False


class Release(NamedTuple):
    """It waits again. `sent` says whether a send is counted, `attempts` how many attempts it now has."""

    seq: int
    sent: bool
    attempts: int
    trouble: Trouble | None = None
    progress: str | None = None


class Bury(NamedTuple):
    """It becomes a dead letter. `sent` says whether a send is counted."""

    seq: int
    reason: Reason
    attempts: int
    trouble: Trouble
    progress: str | None = None
    sent: bool = True


Settlement = Ack | Release | Bury


class Blocked(NamedTuple):
    """Why the head of an outbox waits, as `status` and `why` tell it. Times are epoch milliseconds."""

    reason: str
    since_ms: int
    next_try_at_ms: int | None = None
    detail: str = ""


def picture() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    direction LR", "    [*] --> waiting: enqueue"]
    lines += [
        f"    {before} --> {after}: {act}"
        for (before, act), after in TRANSITIONS.items()
        if before is not State.NEW
    ]
    final = set(TRANSITIONS.values()) - {before for before, _ in TRANSITIONS}
    lines += [f"    {state} --> [*]" for state in State if state in final]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())  # noqa: T201 - the picture for docs/architecture.md
