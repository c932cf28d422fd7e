"""Types of arguments that several commands take, for argparse."""

from __future__ import annotations

import argparse

_MOST_S = 3_600.0


def seconds(text: str) -> float:
    """A number of seconds from 0 to an hour, as on the local socket."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to {_MOST_S:,.0f}")
    return value
