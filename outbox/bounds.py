"""How much one agent's outbox may hold, and whether one more event goes in.

Who makes way for one that does not is decided in policy.py.

Standard library only: every producer reads it from the outbox file.
"""

from __future__ import annotations

from collections.abc import Mapping

from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIB = 1024 * 1024
_DAY_MS = 24 * 60 * 60 * 1000

DROP_OLDEST = "drop-oldest"
REFUSE = "refuse"


class Bounds(NamedTuple):
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
        return {_camel(name): value for name, value in self._asdict().items()}

    @classmethod
    def from_json(cls, rules: Mapping[str, Any]) -> Bounds:
        """The opposite of `to_json`.

        Another release may have written them: unknown names are passed over; what is missing, or no bound,
        has its default.
        """
        names = {_camel(name): name for name in cls._fields}
        return cls(
            **{
                names[name]: value
                for name, value in rules.items()
                if name in names and _is_bound(names[name], value)
            }
        )


def fits(events: int, held_bytes: int, size_bytes: int, bounds: Bounds) -> bool:
    """Whether one more event of `size_bytes` goes in beside what is there, as things are."""
    return events < bounds.max_events and held_bytes + size_bytes <= bounds.max_bytes


def _is_bound(name: str, value: object) -> bool:
    if name == "overflow":
        return isinstance(value, str) and value in {DROP_OLDEST, REFUSE}
    return (type(value) is int and value >= 0) or (name == "max_age_ms" and value is None)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
