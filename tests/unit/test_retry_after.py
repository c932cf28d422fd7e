"""How long an answer asks to wait: the cases of retry_after.json, and what they leave open."""

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_client import parse_retry_after

CASES = json.loads((Path(__file__).parents[1] / "cases/relay/retry_after.json").read_text("utf-8"))["cases"]
NOW_MS = int(datetime(2026, 11, 30, 12, 0, tzinfo=UTC).timestamp() * 1000)
HOUR_MS = 3_600_000


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_cases(case):
    """Each case is read in one of the ways it allows."""
    wait_ms = parse_retry_after(", ".join(case["headers"]), NOW_MS, HOUR_MS)
    wanted = case["want"] if isinstance(case["want"], list) else [case["want"]]
    allowed = {
        None if want == "ignored" else HOUR_MS if want == "capped" else want["wait_s"] * 1000
        for want in wanted
    }
    assert wait_ms in allowed


@pytest.mark.parametrize(
    ("value", "wait_ms"),
    [
        ("0", 0),
        ("3600", HOUR_MS),
        ("3601", HOUR_MS),
        ("000000000000000000007", 7_000),
        ("\u0663", None),
        ("Mon, 30 Nov 2026 12:00:00 GMT", None),
        ("Mon, 30 Nov 2026 12:00:60 GMT", 60_000),
        ("Mon, 30 Nov 2026 24:00:00 GMT", None),
        ("Tue, 31 Nov 2026 12:00:00 GMT", None),
        ("Mon, 30 Nov 2026 12:00:05 UTC", None),
        ("mon, 30 nov 2026 12:00:05 gmt", None),
        ("Tue Dec  1 12:00:05 2026", HOUR_MS),
        ("Sunday, 06-Nov-94 08:49:37 GMT", None),
        ("Saturday, 30-Nov-75 12:00:05 GMT", HOUR_MS),
        ("5, 60", None),
    ],
)
def test_edges(value, wait_ms):
    """Zero is a wait, the ceiling holds, and a date is read strictly in one of its three forms."""
    assert parse_retry_after(value, NOW_MS, HOUR_MS) == wait_ms


def test_a_two_digit_year_is_never_more_than_fifty_years_ahead():
    """RFC 9110, 5.6.7: 77 is 1977 in 2026, and so has passed."""
    assert parse_retry_after("Tuesday, 30-Nov-77 12:00:05 GMT", NOW_MS, HOUR_MS) is None


@given(st.text(max_size=60), st.integers(0, 2**43))
def test_any_text_is_none_or_a_wait_within_the_ceiling(value, now_ms):
    """No text makes it raise, nor wait longer than the ceiling or less than nothing."""
    wait_ms = parse_retry_after(value, now_ms, HOUR_MS)
    assert wait_ms is None or 0 <= wait_ms <= HOUR_MS


def test_broken_dates():
    """A date with one character changed never raises, and is a wait only if it is still a date."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    forms = ["Mon, 30 Nov 2026 12:00:05 GMT", "Monday, 30-Nov-26 12:00:05 GMT", "Mon Nov 30 12:00:05 2026"]
    for _ in range(2_000):
        text = chance.choice(forms)
        at = chance.randrange(len(text))
        changed = text[:at] + chance.choice("0123456789 ,:-xGN\u00e9") + text[at + 1 :]
        wait_ms = parse_retry_after(changed, NOW_MS, HOUR_MS)
        assert wait_ms is None or 0 < wait_ms <= HOUR_MS
