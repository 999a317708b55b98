"""The parts that every picture is drawn of, as SVG: scales, round ticks, curves, boxes, keys.

A picture lays itself out (charts.py, inspection/simulate/picture.py, and those in scripts/) and
draws with these. They take pixels; a `Scale` turns values into them. Left out: scales that are not
straight (who wants powers of two gives logarithms) and colours, which are each picture's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanorl.observability.report.markup import element, tenth, text

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` become pixels from `begin` to `end`, which may be the smaller.

    Where the values have no extent, all lie in the middle.
    """

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        if self.low == self.high:
            return self.begin + (self.end - self.begin) / 2
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)


def round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers, of which the first is at most `low` and the last at least `high`,
    the larger."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    tick = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / tick + 1e-9), math.ceil(high / tick - 1e-9)
    return [round(i * tick, 12 - math.floor(math.log10(tick))) for i in range(first, last + 1)]


def outline(points: Sequence[Point | None]) -> str:
    """A path's `d` through the points; None lifts the pen."""
    parts, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{tenth(point[0])} {tenth(point[1])}")
        pen = "L"
    return "".join(parts)


def curve(points: Sequence[Point | None], **attributes: object) -> str:
    return element("path", **attributes, d=outline(points))


def box(
    x: float, y: float, width: float, height: float, tip: str = "", **attributes: object
) -> str:
    """A rectangle; `tip` is what a browser says of it."""
    inside = [element("title", text(tip))] if tip else []
    return element("rect", *inside, **attributes, x=x, y=y, width=width, height=height)


def label(x: float, y: float, said: object, **attributes: object) -> str:
    return element("text", text(said), **attributes, x=x, y=y)


def key(x: float, y: float, said: str, fill: str) -> str:
    """A line of the legend: a square of the colour, and what it stands for."""
    return box(x, y - 10, 12, 12, fill=fill) + label(x + 17, y, said)


def picture(
    parts: Sequence[str], size: tuple[float, float], *, said: str, **attributes: object
) -> str:
    """A whole file; `said` is what it shows, for those who do not see it.

    It is as wide as the page allows, unless `width` and `height` are among the attributes.
    """
    width, height = size
    whole = element(
        "svg",
        "\n".join(["", element("title", text(said)), *parts, ""]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {tenth(width)} {tenth(height)}",
        role="img",
        **attributes,
    )
    return whole + "\n"


def sheet(
    parts: Sequence[str], width: float, height: float, *, title: str, font_size: int = 12
) -> str:
    """A whole file of that size in pixels, on white under its title, which takes 24 of them."""
    return picture(
        [
            box(0, 0, width, height, fill="white"),
            label(8, 20, title, font_size=font_size + 2),
            *parts,
        ],
        (width, height),
        said=title,
        width=tenth(width),
        height=tenth(height),
        font_family="sans-serif",
        font_size=font_size,
    )
