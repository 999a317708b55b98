"""What pictures are drawn of: scales and ticks by hand, escaping, and one whole file."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from nanorl.observability.report.markup import element, text
from nanorl.observability.report.svg import (
    Scale,
    box,
    curve,
    key,
    label,
    outline,
    picture,
    round_ticks,
    sheet,
)


def test_a_scale_is_a_straight_line_either_way() -> None:
    down = Scale(0.0, 4.0, 100, 20)  # pixels count from above
    assert [down(value) for value in (0.0, 1.0, 4.0)] == [100, 80, 20]
    assert Scale(3, 3, 0, 10)(3) == 5, "without extent all lie in the middle"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]),
        (0.0, 7.0, [0, 2, 4, 6, 8]),
        (-3.0, 11.0, [-5, 0, 5, 10, 15]),
        (0.012, 0.0312, [0.01, 0.015, 0.02, 0.025, 0.03, 0.035]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(
    low: float, high: float, ticks: list[float]
) -> None:
    assert round_ticks(low, high) == ticks


def test_a_gap_lifts_the_pen() -> None:
    points = [(0.0, 1.0), (1.04, 2.0), None, (3.0, 4.06), None]
    assert outline(points) == "M0 1L1 2M3 4.1"
    assert curve(points[:2], class_="line") == '<path class="line" d="M0 1L1 2"/>'


def test_text_and_attributes_are_escaped_and_what_is_invisible_shows() -> None:
    evil = "</text><script>\u202e\"'&"
    assert text(evil) == "&lt;/text&gt;&lt;script&gt;\\u202e&quot;&#x27;&amp;"
    for drawn in (
        label(1, 2, evil, fill=evil),
        box(1, 2, 3, 4, evil, class_=evil),
        key(1, 2, evil, evil),
        sheet([], 10, 10, title=evil),
    ):
        assert "<script" not in drawn and "\u202e" not in drawn
        ElementTree.fromstring(f"<g>{drawn}</g>")


def test_attributes_are_named_as_svg_names_them() -> None:
    drawn = element("a", class_="x", stroke_width=0.25, fill=None, viewBox="0 0 1 1")
    assert drawn == '<a class="x" stroke-width="0.2" viewBox="0 0 1 1"/>'


def test_a_picture_says_what_it_shows_and_how_large_it_is() -> None:
    wide = ElementTree.fromstring(picture([box(0, 0, 1, 1)], (20, 10.5), said="a & b"))
    assert wide.get("viewBox") == "0 0 20 10.5" and wide.get("width") is None
    title = wide.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text == "a & b"
    page = ElementTree.fromstring(sheet([], 20, 10, title="t"))
    assert (page.get("width"), page.get("height")) == ("20", "10")
