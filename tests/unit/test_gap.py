"""The gap: it adds up what was lost, and says it in a sentence and in numbers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.gap import Gap, Lost, decode, widen

LOST = st.builds(
    Lost,
    seq=st.integers(1, 10**9),
    kind=st.sampled_from(["session-message", "insight", "é"]),
    size_bytes=st.integers(1, 10**9),
    occurred_at_ms=st.integers(0, 2**53),
)


def gap_of(*lost, reason="max_events"):
    """The gap of these events."""
    gap = None
    for one in lost:
        gap = widen(gap, one, reason)
    return gap


@given(st.lists(LOST, min_size=1, max_size=8))
def test_a_gap_is_the_sum_of_what_it_stands_for(lost):
    """In whatever order they were lost; nothing is forgotten on the way to disk and back."""
    gap = gap_of(*lost)
    assert (gap.first_seq, gap.last_seq) == (min(one.seq for one in lost), max(one.seq for one in lost))
    assert (gap.count, gap.size_bytes) == (len(lost), sum(one.size_bytes for one in lost))
    assert dict(gap.kinds) == {one.kind: sum(other.kind == one.kind for other in lost) for one in lost}
    assert (gap.from_ms, gap.to_ms) == (
        min(one.occurred_at_ms for one in lost), max(one.occurred_at_ms for one in lost),
    )  # fmt: skip
    assert decode(gap.encode()) == gap


def test_the_newest_reason_stands():
    """A gap that a bound opened and age widened names age."""
    gap = widen(gap_of(Lost(1, "insight", 5, 10)), Lost(2, "insight", 5, 10), "max_age")
    assert gap.reason == "max_age"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("max_events", "bound of events"),
        ("max_bytes", "bound of bytes"),
        ("max_age", "longer than the outbox keeps events"),
        ("damaged", "file was damaged"),
        ("something newer", "something newer"),
    ],
)
def test_the_message_says_what_happened(reason, words):
    """A person who reads it at the relay knows how many, which, and why."""
    lost = [Lost(n, "insight", 5, 10) for n in range(1_000, 2_500)]
    message = json.loads(gap_of(*lost, reason=reason).message("bui\u00eflder"))
    assert message["from"] == "bui\u00eflder"
    assert message["kind"] == "outbox-gap"
    assert message["body"].startswith("1,500 events were not delivered (seq 1,000 to 2,499): ")
    assert words in message["body"]
    assert message["payload"] == {
        "firstSeq": 1_000, "lastSeq": 2_499, "count": 1_500, "bytes": 7_500, "kinds": {"insight": 1_500},
        "reason": reason, "fromAt": 10, "toAt": 10,
    }  # fmt: skip


def test_one_event_is_one_event():
    """The sentence is in the singular."""
    gap = Gap(4, 4, 1, 5, (("insight", 1),), "max_age", 1, 1)
    assert json.loads(gap.message("a"))["body"].startswith("1 event was not delivered (seq 4 to 4): ")
