"""A comparison as a table, a picture and a page, from the rows of comparison.json.

The picture has a panel for each variant: success in training against sampled tokens, a mean over
the seeds with a band from the least to the most of them, and behind it the baseline's.
Left out: anything that is not in the rows; whoever has the JSON can draw these again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanorl.observability.report.charts import number
from nanorl.observability.report.html import page
from nanorl.observability.report.markup import element, table, text
from nanorl.observability.report.svg import Point, Scale, curve, label, outline
from nanorl.observability.report.svg import picture as drawn_picture

Row = Mapping[str, Any]
About = Mapping[str, Any]
PANEL, TALL, COLUMNS = 230, 150, 4  # pixels of a panel, and panels in a line
LEFT, TOP, BOTTOM = 38, 30, 22
UNEXPLAINED = "helps less than half as much as {baseline}, and nobody has said why yet"
_STYLE = (
    "svg.panels text{font:11px system-ui,sans-serif;fill:#5a6472}"
    "svg.panels .title{font-weight:600;fill:#14181f}"
    "svg.panels .frame{stroke:#c9d0da;fill:none}svg.panels .own{stroke:#2563eb;fill:none;"
    "stroke-width:2}svg.panels .band{fill:#2563eb;fill-opacity:.18}"
    "svg.panels .other{stroke:#8a94a3;fill:none;stroke-width:1.5;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){svg.panels text{fill:#9aa5b4}svg.panels .title{fill:#e8ebf0}"
    "svg.panels .own{stroke:#6ea3ff}svg.panels .band{fill:#6ea3ff}"
    "svg.panels .frame{stroke:#2a313c}}"
)


# -- the table -------------------------------------------------------------------------------------


def heads(about: About) -> list[str]:
    """The titles of the table's columns."""
    baseline, level = about["baseline"], about["level"]
    return [
        "variant",
        "held out, before → after",
        "gain, points",
        f"× {baseline}",
        f"against {baseline}, points",
        "sampled tokens",
        "trained tokens",
        "wall s",
        "CPU s",
        "peak MiB",
        f"steps to {level:.0%}",
        f"s to {level:.0%}",
    ]


def cells(row: Row, about: About) -> list[str]:
    """One line of the table."""
    num, asked = row["num_seeds"], len(about["seeds"])
    mark = "" if num == asked else f" ({num} of {asked} seeds)"
    share, against = row["share_of_baseline"], row["against_baseline"]
    return [
        row["name"] + mark + (" ⚠" if row["is_little"] else ""),
        f"{100 * row['before']:.1f} → {_measured(row['after'], signed=False)}",
        _measured(row["gain"]),
        "–" if share is None else f"{share:.2f}",
        "–" if against is None else _measured(against),
        number(round(row["sampled_tokens"])),
        number(round(row["trained_tokens"])),
        number(round(row["wall_s"])),
        number(round(row["cpu_s"])),
        number(round(row["peak_rss_bytes"] / 2**20)),
        _reached(row),
        "–" if row["seconds_to_level"] is None else number(round(row["seconds_to_level"])),
    ]


def _measured(value: Row, *, signed: bool = True) -> str:
    """Points, and the interval where there is one."""
    sign = "+" if signed else ""
    middle = f"{100 * value['value']:{sign}.1f}"
    if value["low"] is None or value["high"] is None:
        return middle
    return f"{middle} ({100 * value['low']:{sign}.1f} to {100 * value['high']:{sign}.1f})"


def _reached(row: Row) -> str:
    if row["step_to_level"] is not None:
        return f"{row['step_to_level']:.3g}"
    return f"{row['num_reached']} of {row['num_seeds']} seeds" if row["num_reached"] else "not"


def remarks(rows: Sequence[Row], about: About) -> list[tuple[str, str, str]]:
    """(variant, options, what must be said of it): settings of its own with their reason, little
    help, and failed runs."""
    found = []
    for row in rows:
        name = row["name"]
        if row["reason"]:
            found.append((name, row["options"], row["reason"]))
        if row.get("is_little"):
            found.append((name, "", row["note"] or UNEXPLAINED.format(**about)))
        for seed, error in row["errors"].items():
            found.append((name, "", f"seed {seed} failed: {error}"))
    return found


def conditions(about: About) -> str:
    """What holds for the whole table, in a few sentences."""
    interval = (
        "Student's over the seeds"
        if len(about["seeds"]) > 1
        else "paired over the tasks: one seed says nothing of others"
    )
    return (
        f"Preset {about['preset']}, {_seeds(about)}, {about['steps']} RL steps each, with the "
        "settings that are named. All runs of a seed fork from one warm "
        "start: they begin with equal weights and meet the same tasks. Success is greedy, on "
        "held-out tasks; intervals are of 95 %, "
        f"{interval}. Tokens and seconds are of the RL steps; CPU seconds of the run's process, "
        "without the sandbox's programs. The last columns say when the mean success of the "
        f"rollouts of {about['window']} steps first reached {about['level']:.0%}."
    )


def _seeds(about: About) -> str:
    seeds = ", ".join(map(str, about["seeds"]))
    return f"seed {seeds}" if len(about["seeds"]) == 1 else f"seeds {seeds}"


def markdown(rows: Sequence[Row], about: About) -> str:
    """The table, and what must be said of it, as Markdown."""
    titles = heads(about)
    lines = [f"# {about['title']}", "", conditions(about), ""]
    lines += [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    lines += [f"| {' | '.join(cells(row, about))} |" for row in rows if row["runs"]]
    said = [
        f"- **{name}**{f' (`{options}`)' if options else ''}: {what}"
        for name, options, what in remarks(rows, about)
    ]
    lines += ["", *said] if said else []
    return "\n".join(lines) + "\n"


def html(rows: Sequence[Row], about: About) -> str:
    """report.html, whole in one file."""
    body = [[text(cell) for cell in cells(row, about)] for row in rows if row["runs"]]
    said = "".join(
        f"<p><b>{text(name)}</b> <code>{text(options)}</code> {text(what)}</p>"
        for name, options, what in remarks(rows, about)
    )
    return page(
        about["title"],
        f"<header><h1>{text(about['title'])}</h1><p>{text(conditions(about))}</p></header>"
        '<section><h2>Held-out success and what it cost</h2><div class="card scroll">'
        f"{table(heads(about), body)}</div></section>"
        + (f'<section><h2>Remarks</h2><div class="card">{said}</div></section>' if said else "")
        + '<section><h2>Success in training, by sampled tokens</h2><div class="card">'
        f"{picture(rows, about)}</div></section>",
    )


# -- the picture -----------------------------------------------------------------------------------


def picture(rows: Sequence[Row], about: About) -> str:
    """comparison.svg: a panel for each variant that has a run."""
    drawn = [row for row in rows if row["runs"] and row["curve"]]
    baseline = next((row for row in drawn if row["name"] == about["baseline"]), None)
    most = max((row["curve"][-1]["tokens"] for row in drawn), default=1.0)
    lines = -(-len(drawn) // COLUMNS)
    panels = [
        element("g", _panel(row, baseline, most), transform=_place(i))
        for i, row in enumerate(drawn)
    ]
    said = f"{about['title']}: success of the rollouts against sampled tokens, {len(drawn)} panels"
    size = (PANEL * max(1, min(COLUMNS, len(drawn))), TALL * max(lines, 1) + 4)
    return drawn_picture([element("style", _STYLE), *panels], size, said=said, class_="panels")


def _place(i: int) -> str:
    return f"translate({i % COLUMNS * PANEL} {i // COLUMNS * TALL})"


def _panel(row: Row, baseline: Row | None, most: float) -> str:
    across, up = Scale(0.0, most, LEFT, PANEL - 12), Scale(0.0, 1.0, TALL - BOTTOM, TOP)

    def line(points: Sequence[Row], end: str) -> list[Point]:
        return [(across(p["tokens"]), up(p[end])) for p in points if p[end] is not None]

    steps = row["curve"]
    outcome = f"{row['before']:.0%} → {row['after']['value']:.0%}"
    parts = [
        element(
            "text",
            text(f"{row['name']} "),
            element("tspan", outcome, font_weight=400),
            class_="title",
            x=LEFT,
            y=20,
        ),
        element("path", class_="frame", d=f"M{LEFT} {TOP}V{TALL - BOTTOM}H{PANEL - 12}"),
        label(LEFT - 4, TOP + 4, "100%", text_anchor="end"),
        label(LEFT - 4, TALL - BOTTOM + 4, "0", text_anchor="end"),
        label(PANEL - 12, TALL - 7, f"{number(round(most))} tokens", text_anchor="end"),
    ]
    if baseline is not None and baseline is not row:
        parts.append(curve(line(baseline["curve"], "mean"), class_="other"))
    band = outline([*line(steps, "high"), *reversed(line(steps, "low"))])
    parts.append(element("path", class_="band", d=f"{band}Z"))
    parts.append(curve(line(steps, "mean"), class_="own"))
    return "".join(parts)
