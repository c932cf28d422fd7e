"""A line chart as SVG text, both axes logarithmic. Pure: from points to text, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 190, 48, 60
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#b08900")


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows, and what stands at its marks; a `zero` is drawn in the place of that value."""

    title: str
    marks: Mapping[float, str]
    zero: float = 0

    def place(self, value: float, begin: float, end: float) -> float:
        """Where a value lies between two pixels."""
        low, high = math.log10(min(self.marks)), math.log10(max(self.marks))
        return begin + (end - begin) * (math.log10(value or self.zero) - low) / (high - low)


def decades(least: float, most: float) -> dict[float, str]:
    """The powers of ten around these values, as marks."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return {10.0**power: f"{10.0**power:,.10g}" for power in range(first, max(last, first + 1) + 1)}


def chart(title: str, across: Axis, up: Axis, lines: Mapping[str, Points]) -> str:
    """The chart as a document of its own."""
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
        *_grid(across, up),
    ]
    for number, (name, points) in enumerate(lines.items()):
        parts += _line(number, name, [(_x(across, x), _y(up, y)) for x, y in points])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(axis: Axis, value: float) -> float:
    return axis.place(value, _LEFT, _WIDTH - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return axis.place(value, _HEIGHT - _BOTTOM, _TOP)


def _grid(across: Axis, up: Axis) -> Iterator[str]:
    top, bottom, left, right = _TOP, _HEIGHT - _BOTTOM, _LEFT, _WIDTH - _RIGHT
    for value, name in across.marks.items():
        x = _x(across, value)
        yield f'<path d="M{x:.1f} {top}V{bottom}" stroke="#e4e4e4"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(name)}</text>'
    for value, name in up.marks.items():
        y = _y(up, value)
        yield f'<path d="M{left} {y:.1f}H{right}" stroke="#e4e4e4"/>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
    yield f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="black"/>'
    middle = f'x="{(left + right) / 2:.0f}" y="{bottom + 44}"'
    yield f'<text {middle} text-anchor="middle">{escape(across.title)}</text>'
    turned = f'transform="translate(18 {(top + bottom) / 2:.0f}) rotate(-90)"'
    yield f'<text {turned} text-anchor="middle">{escape(up.title)}</text>'


def _line(number: int, name: str, points: Points) -> Iterator[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    yield f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    x, y = _WIDTH - _RIGHT + 18, _TOP + 12 + 22 * number
    yield f'<path d="M{x} {y}h20" stroke="{colour}" stroke-width="2"/>'
    yield f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>'
