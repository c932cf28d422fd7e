"""What the doctor finds: one line each, with what to do. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1  # works, and may surprise
    FAILURE = 2  # something does not work

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """`check`: what was looked at; `said`: how it is; `todo`: what to do; `damage`: a file is damaged."""

    check: str
    level: Level
    said: str
    todo: str = ""
    damage: bool = False


def ok(check: str, said: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, said)


def warning(check: str, said: str, todo: str = "") -> Finding:
    """It works, and may surprise."""
    return Finding(check, Level.WARNING, said, todo)


def failure(check: str, said: str, todo: str = "", *, damage: bool = False) -> Finding:
    """It does not work."""
    return Finding(check, Level.FAILURE, said, todo, damage)
