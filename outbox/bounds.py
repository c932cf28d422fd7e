"""How much one agent's outbox may hold: the value only. Who is dropped or refused is decided in policy.py.

Standard library only: every producer reads it from the outbox file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_MIB = 1024 * 1024
_DAY_MS = 24 * 60 * 60 * 1000

DROP_OLDEST = "drop-oldest"
REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one agent's outbox; `max_age_ms` is None when nothing grows too old.

    `min_free_disk_bytes` is the host's: with less free disk nothing more is accepted; 0 means: never look.
    """

    max_events: int = 100_000
    max_bytes: int = 512 * _MIB
    max_age_ms: int | None = None
    max_dead: int = 10_000
    min_free_disk_bytes: int = 256 * _MIB
    overflow: str = DROP_OLDEST
    receipt_window_ms: int = 7 * _DAY_MS
    receipt_max_bytes: int = 64 * _MIB

    def to_json(self) -> dict[str, Any]:
        """The bounds as they stand among the rules of an outbox file."""
        return {_camel(field.name): getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, rules: Mapping[str, Any]) -> Bounds:
        """The opposite of `to_json`.

        Another release may have written them: unknown names are passed over, missing ones have their default.
        """
        names = {_camel(field.name): field.name for field in fields(cls)}
        return cls(**{names[name]: value for name, value in rules.items() if name in names})


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
