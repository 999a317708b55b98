"""Curves and bars of the report as inline SVG: no script, colours from the page's style sheet.

In this file: `RULES`, which metrics share a chart (one that no rule names gets a chart of its own,
so none is lost; nested values are named by their path, `time/generate`); how a chart is laid out
(svg.py draws its parts); numbers for people.
Each mark carries a <title> (the browser's tooltip) and each chart a text that says what it shows,
for those who cannot see it. Left out: zooming and log axes; the numbers are in metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanorl.observability.report.markup import element, tenth, text
from nanorl.observability.report.metrics import flatten_numbers
from nanorl.observability.report.svg import Scale, box, curve, label, round_ticks

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 30  # the labels of a phone need the room
NUM_COLOURS = 8
SMOOTH_FROM = 40  # points; shorter curves are shown as they are
MAX_MARKS = 150

SHARED_TITLE = "Success, which is the reward"


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve: one value a step, where None leaves a gap."""

    label: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """All series share `steps`. `is_fraction` shows percent; from 0 to 100 % once above half."""

    title: str
    steps: tuple[int, ...]
    series: tuple[Series, ...]
    unit: str = ""
    is_fraction: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The metrics that share one chart, by their names in metrics.jsonl, in this order.

    A metric that a run does not write is left out, and so is a chart without any.
    """

    title: str
    names: tuple[str, ...]
    unit: str = ""
    is_fraction: bool = False
    is_stacked: bool = False


RULES = (
    Rule(title="Success", names=("success",), is_fraction=True),
    Rule(title="Reward", names=("reward",)),
    Rule(title="Groups with signal", names=("groups_with_signal",), unit="of a batch"),
    Rule(
        title="Log-prob gap, engine against trainer",
        names=("logp_gap_max", "logp_gap_mean", "logp_gap_kl"),
        unit="nats",
    ),
    Rule(title="Entropy", names=("entropy",), unit="nats a token"),
    Rule(
        title="Tokens of a batch",
        names=("action_tokens", "total_tokens", "trained_tokens"),
        unit="tokens",
    ),
    Rule(title="Turns", names=("turns",), unit="a rollout"),
    Rule(
        title="Cut off",
        names=("truncated_turn_fraction", "truncated_context_fraction"),
        unit="of rollouts",
        is_fraction=True,
    ),
    Rule(title="Time of a step", names=("wait_s", "train_s", "sync_s"), unit="s", is_stacked=True),
    Rule(title="CPU time of a step", names=("cpu_s",), unit="s"),
    Rule(title="Rollout speed", names=("rollout_tokens_per_s",), unit="tokens/s"),
    Rule(title="Replicas", names=("num_replicas",)),
    Rule(
        title="Idle",
        names=("idle_trainer", "idle_replicas", "idle_collector"),
        unit="of the time",
        is_fraction=True,
    ),
    Rule(title="Loss", names=("loss",)),
    Rule(title="Gradient norm", names=("grad_norm",)),
    Rule(title="Learning rate", names=("lr",)),
    Rule(
        title="Clipped and rejected",
        names=("clip_fraction", "rejected_fraction"),
        unit="of tokens",
        is_fraction=True,
    ),
    Rule(title="KL to the reference", names=("ref_kl",), unit="nats a token"),
    Rule(title="Critic", names=("value_loss", "explained_variance")),
    Rule(title="Groups trained on again", names=("replayed_groups", "replay_kept"), unit="groups"),
    Rule(title="Staleness", names=("staleness_max", "staleness_mean"), unit="policy versions"),
    Rule(
        title="Drift of the policy since sampling",
        names=("drift_max", "drift_mean", "drift_kl"),
        unit="nats",
    ),
)


def build_charts(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[Rule, Chart]], list[tuple[Rule, Chart]]]:
    """(charts of the rules, charts of all other numeric metrics by name). A reward that is the
    success, step for step, shares its chart."""
    flat = [flatten_numbers(row) for row in rows]
    steps = tuple(int(row["step"]) for row in rows)
    names = sorted({name for row in flat for name in row} - {"step"})
    is_one = all(row.get("reward") == row.get("success") for row in flat)
    main = []
    for rule in RULES:
        written = [name for name in rule.names if name in names]
        if is_one and written == ["reward"]:
            continue
        if written:
            main.append((rule, _chart(rule, written, flat, steps)))
    if is_one and main and main[0][0].names == ("success",):
        main[0] = (main[0][0], replace(main[0][1], title=SHARED_TITLE))
    used = {name for rule in RULES for name in rule.names}
    others = [Rule(title=name, names=(name,)) for name in names if name not in used]
    return main, [(rule, _chart(rule, rule.names, flat, steps)) for rule in others]


def is_flat(chart: Chart) -> bool:
    """True if everything was 0 in every step: a sentence says that better than a picture. What was
    not measured in every step is drawn."""
    return all(value == 0 for series in chart.series for value in series.values)


def _chart(
    rule: Rule,
    names: Sequence[str],
    flat: Sequence[Mapping[str, float]],
    steps: tuple[int, ...],
) -> Chart:
    series = tuple(
        Series(label=_label(name, rule), values=tuple(row.get(name) for row in flat))
        for name in names
    )
    present = [value for s in series for value in s.values if value is not None]
    return Chart(
        title=rule.title,
        steps=steps,
        series=series,
        unit=rule.unit,
        is_fraction=rule.is_fraction and all(0 <= value <= 1 for value in present),
    )


def _label(name: str, rule: Rule) -> str:
    """The metric's name without the unit, which the chart's title has."""
    return (name.removesuffix("_s") if rule.unit == "s" else name).replace("_", " ")


def line_chart(chart: Chart) -> str:
    """A card: title, last value, curves, legend. Long curves get a moving average on top."""
    values = [value for series in chart.series for value in series.values if value is not None]
    across, up = _steps_scale(chart), _ticks_scale(ticks := _ticks(values, chart.is_fraction))
    body = [_grid(chart, ticks, [across(step) for step in chart.steps])]
    for index, series in enumerate(chart.series):
        points = [
            None if value is None else (across(step), up(value))
            for step, value in zip(chart.steps, series.values, strict=True)
        ]
        colour = f"c{index % NUM_COLOURS}"
        is_long = len(points) >= SMOOTH_FROM
        body.append(curve(points, class_=f"line {colour}{' faint' if is_long else ''}"))
        if is_long:
            body.append(curve(_smooth(points), class_=f"line {colour}"))
        body.append(_marks(chart, series, points, colour))
    return _card(chart, "".join(body))


def stacked_bars(chart: Chart) -> str:
    """A card with one bar a step, the series stacked; long runs are averaged in bins."""
    chart = _binned(chart, 60)
    totals = [
        sum(series.values[i] or 0.0 for series in chart.series) for i in range(len(chart.steps))
    ]
    up = _ticks_scale(ticks := _ticks([0.0, *totals], False))
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(chart.steps))
    width = min(slot * 0.78, 40.0)
    middles = [LEFT + slot * (i + 0.5) for i in range(len(chart.steps))]
    body = [_grid(chart, ticks, middles)]
    for i, step in enumerate(chart.steps):
        base = 0.0
        for index, series in enumerate(chart.series):
            value = series.values[i] or 0.0
            if value <= 0:
                continue
            top = up(base + value)
            height = max(0.5, up(base) - top - 0.6)
            tip = f"step {step}, {series.label}: {number(value)} {chart.unit}"
            colour = f"bar c{index % NUM_COLOURS}"
            body.append(box(middles[i] - width / 2, top, width, height, tip, class_=colour))
            base += value
    return _card(chart, "".join(body))


def success_bars(rows: Sequence[tuple[str, float | None, int]]) -> str:
    """A bar for each (label, success rate, number of tasks), with its 95 % Wilson interval.

    A rate of None is "not measured". The text stands beside the drawings, so that it is as large on
    a phone.
    """
    parts = []
    for i, (name, rate, num_tasks) in enumerate(rows):
        value, marks = "not measured", ""
        said = f"{name}: not measured"
        if rate is not None:
            low, high = (100 * bound for bound in wilson_interval(rate, num_tasks))
            said = (
                f"{name}: {rate:.1%} of {num_tasks} tasks, 95 % interval {low:.1f}% to {high:.1f}%"
            )
            value = f"{rate:.1%} <small>of {num_tasks}</small>"
            left, right = tenth(low), tenth(high)
            whisker = f"M{left} 5H{right}M{left} 3v4M{right} 3v4"
            marks = box(0, 0, max(0.2, 100 * rate), 10, class_=f"bar h{i}")
            marks += element("path", class_="whisker", d=whisker)
        drawn = element(
            "svg",
            element("title", text(said)),
            box(0, 0, 100, 10, class_="track"),
            marks,
            viewBox="0 0 100 10",
            preserveAspectRatio="none",
            role="img",
            aria_label=said,
        )
        parts.append(
            f'<div class="rate"><span class="name">{text(name)}</span>'
            f'<span class="value">{value}</span>{drawn}</div>'
        )
    return "".join(parts)


def wilson_interval(rate: float, num: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); the whole range for no trials."""
    if num <= 0:
        return 0.0, 1.0
    z = 1.959964
    centre = (rate + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(rate * (1 - rate) / num + z * z / (4 * num * num))
    return max(0.0, centre - half), min(1.0, centre + half)


def _ticks(values: Sequence[float], is_fraction: bool) -> list[float]:
    """About five round ticks from end to end of the axis, with 0 unless the data is far from it."""
    if is_fraction and max(values, default=1.0) > 0.5:
        return [0.0, 0.25, 0.5, 0.75, 1.0]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low > 0 and low < 0.6 * high:
        low = 0.0
    if high < 0 and high > 0.6 * low:
        high = 0.0
    if low == high:
        low, high = (low - abs(low) * 0.5, high + abs(high) * 0.5) if low else (0.0, 1.0)
    return round_ticks(low, high)


def _ticks_scale(ticks: Sequence[float]) -> Scale:
    return Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)


def _steps_scale(chart: Chart) -> Scale:
    steps = chart.steps or (0,)
    return Scale(steps[0], steps[-1], LEFT, WIDTH - RIGHT)


def _smooth(points: Sequence[tuple[float, float] | None]) -> list[tuple[float, float] | None]:
    """Centred moving average over about a tenth of the curve."""
    reach = max(2, len(points) // 20)
    smooth: list[tuple[float, float] | None] = []
    for i, point in enumerate(points):
        near = [p[1] for p in points[max(0, i - reach) : i + reach + 1] if p is not None]
        smooth.append(None if point is None else (point[0], sum(near) / len(near)))
    return smooth


def _marks(
    chart: Chart, series: Series, points: Sequence[tuple[float, float] | None], colour: str
) -> str:
    stride = max(1, math.ceil(len(points) / MAX_MARKS))
    shown = " shown" if len(points) <= 25 else ""
    parts = []
    for i, point in enumerate(points):
        if point is None or i % stride:
            continue
        value = number(series.values[i], chart.is_fraction)
        tip = f"step {chart.steps[i]}, {series.label}: {value} {chart.unit}".rstrip()
        parts.append(
            element(
                "circle",
                element("title", text(tip)),
                class_=f"mark {colour}{shown}",
                cx=point[0],
                cy=point[1],
                r="3.2",
            )
        )
    return "".join(parts)


def _grid(chart: Chart, ticks: Sequence[float], places: Sequence[float]) -> str:
    """A line and a number for each tick, and some of the steps, which lie at `places`."""
    up, parts = _ticks_scale(ticks), []
    for tick in ticks:
        y = up(tick)
        said = f"{100 * tick:.3g}%" if chart.is_fraction else number(tick)
        base = " base" if tick == ticks[0] else ""
        line = f"M{LEFT} {tenth(y)}H{WIDTH - RIGHT}"
        parts.append(element("path", class_=f"grid{base}", d=line))
        parts.append(label(LEFT - 8, y, said, class_="tick y", dy=4))
    for i in _labelled(chart.steps):
        parts.append(label(places[i], HEIGHT - 10, chart.steps[i], class_="tick x"))
    return "".join(parts)


def _labelled(steps: Sequence[int]) -> list[int]:
    """Indices of about six steps with round numbers; of all if they are few."""
    if len(steps) <= 7:
        return list(range(len(steps)))
    span = steps[-1] - steps[0]
    every = next(m * 10**k for k in range(18) for m in (1, 2, 5) if span <= m * 10**k * 7)
    return [i for i in range(len(steps)) if i == 0 or steps[i] // every > steps[i - 1] // every]


def _binned(chart: Chart, num_bins: int) -> Chart:
    if len(chart.steps) <= num_bins:
        return chart
    size = math.ceil(len(chart.steps) / num_bins)
    starts = range(0, len(chart.steps), size)

    def mean(values: Sequence[float | None]) -> float:
        return sum(value or 0.0 for value in values) / len(values)

    return Chart(
        title=chart.title,
        steps=tuple(chart.steps[i] for i in starts),
        series=tuple(
            Series(label=s.label, values=tuple(mean(s.values[i : i + size]) for i in starts))
            for s in chart.series
        ),
        unit=chart.unit,
    )


def _card(chart: Chart, body: str) -> str:
    said, legend = [], []
    for index, series in enumerate(chart.series):
        present = [value for value in series.values if value is not None]
        first, last = (
            (number(present[0], chart.is_fraction), number(present[-1], chart.is_fraction))
            if present
            else ("–", "–")
        )
        said.append(f"{series.label} from {first} to {last}")
        legend.append(
            f'<span><i class="swatch c{index % NUM_COLOURS}"></i>{text(series.label)} '
            f"<b>{last}</b></span>"
        )
    span = f"steps {chart.steps[0]} to {chart.steps[-1]}" if chart.steps else "no steps"
    aria = f"{chart.title}, {span}: {'; '.join(said)}"
    unit = f" <small>{text(chart.unit)}</small>" if chart.unit else ""
    return (
        f'<figure class="card"><figcaption>{text(chart.title)}{unit}'
        f'<span class="legend">{"".join(legend)}</span></figcaption>'
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(aria)}">'
        f"{body}</svg></figure>"
    )


def number(value: float | None, is_fraction: bool = False) -> str:
    """Short and readable: 87.5 %, 1.2e-05, 3,456, 0.0312."""
    if value is None or not math.isfinite(value):
        return "–"
    if is_fraction:
        return f"{value:.1%}"
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{int(value):,}"
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A duration as people read it: 1:05 or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
