"""Draws a simulated run as SVG: one row for the trainer, one for each replica, time to the right.

The trainer's row shows its phases; white is waiting. A replica's row is the darker, the more
sequences its steps hold, relative to the fullest step of the run: the tail of a step is pale.
Left out: rows of more than `MOST_ROWS` replicas, which look like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanorl.inspection.simulate.simulation_result import SimulationResult
from nanorl.observability.report.markup import element, tenth
from nanorl.observability.report.svg import Scale, box, key, label, sheet

COLOURS = {"train": "rgb(118,184,120)", "other": "rgb(226,178,92)", "sync": "rgb(200,80,80)"}
WIDTH, ROW, LEFT, TOP = 900, 18, 90, 64
MOST_ROWS, NUM_COLUMNS = 16, 300


def draw(result: SimulationResult) -> str:
    """The picture, with SIMULATED in its title."""
    rows = result.replica_spans[:MOST_ROWS]
    fullest = max((n for spans in rows for _, _, n in spans), default=1)
    height = TOP + ROW * (len(rows) + 1) + 34
    layout = result.config.cluster
    title = f"SIMULATED: {result.config.name}, {layout.num_gpus} GPUs, step {result.step_s:.1f} s"
    parts = [*_legend(), _row_label(0, "trainer"), *_trainer(result)]
    for number, spans in enumerate(rows, start=1):
        parts.append(_row_label(number, f"replica {number - 1}"))
        parts += _replica(spans, number, result.end_s, fullest)
    parts += _axis(result, height - 20)
    return sheet(parts, LEFT + WIDTH + 16, height, title=title)


def occupancy(
    spans: Sequence[tuple[float, float, int]], end_s: float, num_columns: int
) -> list[float]:
    """The mean number of sequences in each of `num_columns` equal parts of the time from 0."""
    width = end_s / num_columns
    columns = [0.0] * num_columns
    for start, stop, count in spans:
        at, stop = start, min(stop, end_s)
        while at < stop:
            column = min(int(at / width), num_columns - 1)
            until = stop if column == num_columns - 1 else min(stop, (column + 1) * width)
            columns[column] += count * (until - at) / width
            at = until if until > at else stop
    return columns


def _legend() -> list[str]:
    said = {**COLOURS, "replica, darker with more sequences": "rgb(60,110,190)"}
    return [key(LEFT + 90 * i, 44, *one) for i, one in enumerate(said.items())]


def _trainer(result: SimulationResult) -> list[str]:
    scale = WIDTH / result.end_s
    spans = [span for span in result.phase_spans if span.end_s <= result.end_s]
    return [
        _box(span.start_s * scale, (span.end_s - span.start_s) * scale, 0, COLOURS[span.phase])
        for span in spans
    ]


def _replica(
    spans: Sequence[tuple[float, float, int]], row: int, end_s: float, fullest: int
) -> list[str]:
    width, parts = WIDTH / NUM_COLUMNS, []
    for column, count in enumerate(occupancy(spans, end_s, NUM_COLUMNS)):
        if count > 0:
            share = 0.12 + 0.88 * min(1.0, count / fullest)
            parts.append(_box(column * width, width, row, _shade(share)))
    return parts


def _shade(share: float) -> str:
    """Blue, the darker the nearer `share` is to 1."""
    rgb = (255 - 195 * share, 255 - 145 * share, 255 - 65 * share)
    return f"rgb({','.join(f'{one:.0f}' for one in rgb)})"


def _box(x: float, width: float, row: int, colour: str) -> str:
    return box(LEFT + x, TOP + ROW * row, width, ROW - 3, fill=colour)


def _row_label(row: int, said: str) -> str:
    return label(8, TOP + ROW * row + 12, said)


def _axis(result: SimulationResult, y: int) -> list[str]:
    marks = [(0.0, "0 s"), (result.start_s, "measured from here"), (result.end_s, "")]
    across, parts = Scale(0.0, result.end_s, LEFT, LEFT + WIDTH), []
    for at, said in marks:
        line = f"M{tenth(across(at))} {TOP - 6}V{y - 8}"
        parts.append(element("path", d=line, stroke="gray", stroke_dasharray="3 3"))
        parts += [label(across(at), y + 8, said)] if said else []
    end = f"{result.end_s:.0f} s"
    return [*parts, label(LEFT + WIDTH - 8 * len(end), y + 8, end)]
