"""Which fields the facts of a relay have, by type: another release may have written what is read. Pure."""

from __future__ import annotations

LAST_MOMENT_MS = 253_402_300_799_999  # of the year 9999: later ones are no dates
_TEXTS = {"url", "source", "state", "reason", "detail", "inputs"}
_FLAGS = {"accepted", "deadEnd"}
_WHOLE = {
    *("since", "nextTryAt", "expiresAt", "recoveredAt", "lastDeadAt"),  # epoch milliseconds
    *("deadEndUntil", "offUntil", "learnedUntil"),
    *("failures", "inARow", "learnedBytes"),
}


def sound_fact(name: str, fact: object) -> dict[str, object] | str | None:
    """The fact without the fields that have another type than here, or a number beyond all use.

    Facts are objects, and "instance" is a text; None for anything else.
    """
    if name == "instance":
        return fact if isinstance(fact, str) else None
    if not isinstance(fact, dict):
        return None
    return {field: value for field, value in fact.items() if _is_sound(field, value)}


def _is_sound(field: str, value: object) -> bool:
    if field in _TEXTS:
        return isinstance(value, str)
    if field in _FLAGS:
        return isinstance(value, bool)
    if field in _WHOLE:
        return value is None or (type(value) is int and 0 <= value <= LAST_MOMENT_MS)
    return True
