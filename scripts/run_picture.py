"""The README's picture as SVG: one task before and after RL, and what every seed learned.

It follows the reader's light or dark colours, and needs no font of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nanorl.observability.report.markup import element
from nanorl.observability.report.svg import box, label
from nanorl.observability.report.svg import picture as drawn

WIDTH, LINE, MARGIN = 920, 20, 24
HALF = (WIDTH - 3 * MARGIN) // 2
CHARS = 50
"""As many as fit into a line of half the picture."""
WHO = {"assistant": "model", "user": "tool", "tool": "tool"}
STYLE = """
    text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
    .page { fill: #ffffff; stroke: #d1d9e0 } .box { fill: #f6f8fa; stroke: #d1d9e0 }
    .title { font-weight: bold } .faint { fill: #59636e } .bar { fill: #d1d9e0 }
    .right { fill: #1a7f37 } .wrong { fill: #cf222e } .model { fill: #0969da }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .page { fill: #0d1117; stroke: #3d444d }
      .box { fill: #151b23; stroke: #3d444d } .faint { fill: #9198a1 } .bar { fill: #3d444d }
      .right { fill: #3fb950 } .wrong { fill: #f85149 } .model { fill: #4493f8 }
    }"""


class Learned(NamedTuple):
    """One seed's success on held-out tasks, in percent."""

    untrained: float
    before: float
    after: float


def picture(rollouts: Sequence[dict[str, Any]], seeds: Sequence[Learned]) -> str:
    """The whole picture; `rollouts` are the two rows of shown_rollout.py."""
    asked = textwrap.wrap(rollouts[0]["asked"].splitlines()[0], 2 * CHARS)
    top = MARGIN + LINE * (len(asked) + 1)
    transcripts = [list(_transcript(one)) for one in rollouts]
    height = LINE * (max(map(len, transcripts)) + 2)
    parts = [_text(MARGIN, MARGIN + LINE // 2, "A task that it never trained on:", "title")]
    parts += [_text(MARGIN, MARGIN + LINE * (i + 1.5), line) for i, line in enumerate(asked)]
    for i, (title, lines) in enumerate(zip(("before RL", "after RL"), transcripts, strict=True)):
        parts += _transcript_box(MARGIN + i * (HALF + MARGIN), top + LINE, height, title, lines)
    bars = list(_bars(seeds, top + height + 3 * LINE))
    bottom = top + height + LINE * 3 + LINE * (len(seeds) * 3 + 2)
    return _page(bottom, _described(rollouts, seeds), [*parts, *bars])


def _transcript(rollout: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Lines of who, what, and the class of its colour."""
    for role, text in rollout["turns"]:
        who = WHO[role]
        for i, line in enumerate(text.splitlines() or [""]):
            for j, part in enumerate(textwrap.wrap(line, CHARS - 8) or [""]):
                yield who if i == j == 0 else "", part, who
    is_right = rollout["value"] >= 1
    yield "", f"reward {rollout['value']:g}", "right" if is_right else "wrong"


def _transcript_box(
    x: int, y: int, height: int, title: str, lines: Sequence[tuple[str, str, str]]
) -> Iterator[str]:
    yield box(x, y, HALF, height, class_="box", rx=8)
    yield _text(x + 12, y + LINE + 2, title, "title")
    for i, (who, line, kind) in enumerate(lines):
        place = y + LINE * (i + 2) + 4
        yield _text(x + 12, place, who, "faint")
        yield _text(x + 68, place, line, kind)


def _bars(seeds: Sequence[Learned], y: float) -> Iterator[str]:
    """A group of three bars for each seed."""
    yield _text(MARGIN, y, "Held-out tasks solved", "title")
    left, width = 300, WIDTH - MARGIN - 300 - 80
    for i, seed in enumerate(seeds):
        for j, (name, value) in enumerate(
            zip(("untrained", "the warm start", "RL"), seed, strict=True)
        ):
            place = y + LINE * (3 * i + j + 1.2 + 0.4 * i)
            yield _text(MARGIN, place, f"seed {i}" if j == 0 else "", "faint")
            yield _text(110, place, ("" if j == 0 else "after ") + name, "faint")
            kind, length = "right" if j == 2 else "bar", max(2, width * value / 100)
            yield box(left, place - 11, round(length), 12, class_=kind, rx=3)
            yield _text(left + length + 8, place, f"{value:.1f} %")


def _described(rollouts: Sequence[dict[str, Any]], seeds: Sequence[Learned]) -> str:
    """The same in words, for who does not see it."""
    before, after = (one["turns"][-1][1] for one in rollouts)
    rises = ", ".join(f"{one.before:.1f} to {one.after:.1f} %" for one in seeds)
    return (
        f"Asked {rollouts[0]['asked'].splitlines()[0]!r}, the model answers {before!r} before RL "
        f"and {after!r} after it. RL raises success on held-out tasks from {rises}."
    )


def _text(x: float, y: float, said: str, kind: str = "") -> str:
    """Empty for nothing said."""
    return label(x, y, said, class_=kind or None, **{"xml:space": "preserve"}) if said else ""


def _page(height: float, described: str, parts: Sequence[str]) -> str:
    page = box(0, 0, WIDTH, height, class_="page", rx=10)
    body = [element("style", STYLE), page, *(part for part in parts if part)]
    return drawn(body, (WIDTH, height), said=described, width=WIDTH, height=height)
