"""`NamedTuple` for what every hook and every enqueue loads: `typing` alone would take them milliseconds.

Only for modules with `from __future__ import annotations`.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NamedTuple
else:

    class _Maker(type):
        """Makes a tuple with names of every class below NamedTuple, as `typing.NamedTuple` does."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = tuple(body["__annotations__"])
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])  # noqa: PYI024 - it is what makes the typed ones
            for attribute, value in body.items():
                setattr(made, attribute, value)
            return made

    class NamedTuple(metaclass=_Maker):
        """A tuple whose places have names; fields, defaults and methods stand in the class below it."""


__all__ = ["NamedTuple"]
