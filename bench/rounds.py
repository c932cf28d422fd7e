"""Rounds in which every contestant has its turn, so that a machine whose speed drifts slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Found = dict[str, list[float]]


def interleaved(contestants: Mapping[str, Callable[[], float]], rounds: int) -> Found:
    """What each contestant measures, round by round; who goes first changes from round to round."""
    found: Found = {name: [] for name in contestants}
    for number in range(rounds):
        for name in _turned(list(contestants), number):
            found[name].append(contestants[name]())
    return found


def alternated(
    contestants: Mapping[str, Callable[[], object]], *, blocks: int, acts: int, first: int
) -> dict[str, float]:
    """Seconds that one act of each takes, within one round: blocks of `acts` of them, in turn.

    A block of each is done beforehand and does not count: files grow, caches fill.
    """
    spent = dict.fromkeys(contestants, 0.0)
    for block in range(-1, blocks):
        for name in _turned(list(contestants), first + block):
            act = contestants[name]
            begun = time.perf_counter()
            for _ in range(acts):
                act()
            spent[name] += (time.perf_counter() - begun) * (block >= 0)
    return {name: seconds / (blocks * acts) for name, seconds in spent.items()}


def _turned(names: list[str], by: int) -> list[str]:
    start = by % len(names)
    return names[start:] + names[:start]
