"""NamedTuple without typing is what typing.NamedTuple is to those who use it."""

from __future__ import annotations

import copy
import pickle
from typing import get_type_hints

import pytest

from outbox.event import Limits
from outbox.value import NamedTuple


class Point(NamedTuple):
    """Where something is."""

    x: int
    y: int = 2
    name: str = "here"

    @property
    def total(self) -> int:
        """Both added up."""
        return self.x + self.y

    def moved(self, by: int) -> Point:
        """Another place."""
        return self._replace(x=self.x + by)


def test_places_have_names_and_defaults():
    """It is a tuple whose fields are given by place or by name."""
    point = Point(1, name="there")
    assert point == (1, 2, "there")
    assert (point.x, point.y, point.name, point._fields) == (1, 2, "there", ("x", "y", "name"))
    with pytest.raises(TypeError, match="missing"):
        Point()
    with pytest.raises(AttributeError):
        point.x = 3


def test_methods_properties_and_words_are_kept():
    """What stands in the class beside its fields belongs to it."""
    assert (Point(1).total, Point(1).moved(4), Point.__doc__) == (3, Point(5), "Where something is.")
    assert repr(Point(1)) == "Point(x=1, y=2, name='here')"
    assert get_type_hints(Point) == {"x": int, "y": int, "name": str}


def test_it_matches_and_is_copied_by_name():
    """Patterns, pickles and copies find its names and its home."""
    match Point(7):
        case Point(x=7, name=name):
            assert name == "here"
    for other in (pickle.loads(pickle.dumps(Limits(max_nesting=3))), copy.copy(Limits(max_nesting=3))):
        assert (type(other), other.max_nesting) == (Limits, 3)
