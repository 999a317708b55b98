"""What a run did at a glance, as HTML without scripts: rates, curves, times; and runs compared.

The parts of report.html are made of the numbers of this moment, so that a run which goes on has
them, too. Every text passes `markup.text`; links lead to views of the page (static/main.js).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from nanorl.inspection.viewer.runs import TRAINING, ViewedRun
from nanorl.observability.report.charts import (
    NUM_COLOURS,
    Chart,
    Series,
    duration,
    line_chart,
    number,
)
from nanorl.observability.report.comparison import PairedComparison
from nanorl.observability.report.evaluation import Evaluation, percent
from nanorl.observability.report.examples import NUM_STAGES
from nanorl.observability.report.html import (
    curves_section,
    environments_section,
    outcome_section,
    types_section,
)
from nanorl.observability.report.markup import element, table, text
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.observability.store.listing import Tally

COMPARED = (("Success", "success"), ("Reward", "reward"), ("Entropy", "entropy"))
MOST_TASKS = 50  # that two runs differ in


def overview_html(run: ViewedRun) -> str:
    """The overview of one run, or of one evaluation."""
    if run.is_evaluation:
        return _evaluation_section(Evaluation.read(run.folder / "eval.json"))
    summary = _current_summary(run)
    rows = read_metrics(run.folder / "metrics.jsonl")
    sections = [
        outcome_section(summary),
        curves_section(rows),
        _training_section(run),
        environments_section(summary.get("per_environment") or {}, rows),
        types_section(summary["per_type"]),
        _times_section(summary.get("phase_wall_s") or {}),
    ]
    return "\n".join(section for section in sections if section)


def _current_summary(run: ViewedRun) -> dict[str, Any]:
    """summary.json, completed by the evaluations that a run which goes on has made so far."""
    summary = run.summary()
    per_type: dict[str, dict[str, Any]] = defaultdict(dict)
    per_environment: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, result in evaluations_of(run).items():
        summary.setdefault(f"heldout_success_{name}", result.success.value)
        summary.setdefault(
            "heldout_n" if name == "after" else f"heldout_n_{name}", len(result.scores)
        )
        both = (per_type, result.per_kind()), (per_environment, result.per_environment())
        for rates, groups in both:
            for group, scores in groups.items():
                rates[group][name] = sum(score.share for score in scores) / len(scores)
                rates[group][f"n_{name}"] = len(scores)
    found = {"per_type": per_type, "per_environment": per_environment}
    return {**summary, **{name: summary.get(name) or new for name, new in found.items()}}


def evaluations_of(run: ViewedRun) -> dict[str, Evaluation]:
    """The evaluations that a folder holds, by their phases."""
    if run.is_evaluation:
        return {"after": Evaluation.read(run.folder / "eval.json")}
    files = {name: run.folder / f"eval-{name}.json" for name in EVALUATIONS}
    return {name: Evaluation.read(file) for name, file in files.items() if file.is_file()}


def _evaluation_section(result: Evaluation) -> str:
    rows = [("success", percent(result.success))]
    rows += [(f"pass@{k}", percent(result.pass_at(k))) for k in result.pass_ks() if k > 1]
    rows += [
        ("mean reward", number(result.mean_reward.value)),
        *((name, number(value.value)) for name, value in result.parts().items()),
        ("turns a rollout", number(result.mean_turns)),
        ("sampled tokens a rollout", number(result.mean_action_tokens)),
        ("seconds", number(result.seconds)),
    ]
    tables = [_table("Result", ("", result.title), rows)]
    for head, groups in (
        ("Environment", result.per_environment()),
        ("Task type", result.per_kind()),
    ):
        shares = [
            (name, f"{sum(score.share for score in scores) / len(scores):.1%} of {len(scores)}")
            for name, scores in groups.items()
        ]
        tables += [_table(f"By {head.lower()}", (head, "Success"), shares)] if shares else []
    return "".join(tables)


def _training_section(run: ViewedRun) -> str:
    """Success in training by task type, in three parts of the steps that were taken."""
    if TRAINING not in run.phases():
        return ""
    with run.open(TRAINING) as store:
        rows = store.tally()
    steps = sorted({row.step for row in rows})
    if not steps:
        return ""
    stage = {step: i * NUM_STAGES // len(steps) for i, step in enumerate(steps)}
    cells: dict[tuple[str, int], list[Tally]] = defaultdict(list)
    for row in rows:
        cells[row.kind, stage[row.step]].append(row)
    stages = sorted(set(stage.values()))
    heads = ["Task type"]
    for one in stages:
        members = [step for step in steps if stage[step] == one]
        heads.append(f"steps {members[0]} to {members[-1]}")
    body = [
        (kind, *(_rate(cells.get((kind, one), [])) for one in stages))
        for kind in sorted({row.kind for row in rows})
    ]
    return _table("Success in training, by task type", heads, body)


def _rate(rows: Sequence[Tally]) -> str:
    num = sum(row.num - row.num_failed for row in rows)
    return f"{sum(row.num_right for row in rows) / num:.1%} of {num}" if num else "–"


def _times_section(seconds: Mapping[str, float]) -> str:
    rows = [(name, duration(value)) for name, value in seconds.items()]
    return _table("Time of the phases", ("Phase", "Wall time"), rows) if rows else ""


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[text(cell) for cell in row] for row in rows]
    return (
        f'<section><h2>{text(title)}</h2><div class="card scroll">{table(heads, cells)}</div>'
        "</section>"
    )


# -- runs beside each other ----------------------------------------------------------------------


def comparison_html(runs: Sequence[ViewedRun]) -> str:
    """Runs beside each other: rates, curves in one drawing, and the tasks in which the last
    evaluations of the first and of each other run differ."""
    found = {run.name: evaluations_of(run) for run in runs}
    rows = [
        (EVALUATIONS[name], *(_percent(found[run.name].get(name)) for run in runs))
        for name in EVALUATIONS
        if any(name in results for results in found.values())
    ]
    sections = [
        _table("Held-out success", ("", *(run.name for run in runs)), rows) if rows else "",
        _common_curves(runs),
    ]
    first = found[runs[0].name]
    for run in runs[1:]:
        if "after" in first and "after" in found[run.name]:
            sections.append(_pair_section(runs[0], run, first["after"], found[run.name]["after"]))
    return "\n".join(section for section in sections if section)


def _percent(result: Evaluation | None) -> str:
    return "–" if result is None else f"{percent(result.success)}, {len(result.scores)} tasks"


def _common_curves(runs: Sequence[ViewedRun]) -> str:
    metrics = {run.name: read_metrics(run.folder / "metrics.jsonl") for run in runs}
    steps = tuple(sorted({int(row["step"]) for rows in metrics.values() for row in rows}))
    drawn = []
    for title, name in COMPARED:
        curves = []
        for run_name, rows in list(metrics.items())[:NUM_COLOURS]:
            by_step = {int(row["step"]): row[name] for row in rows if name in row}
            if by_step:
                values = tuple(by_step.get(step) for step in steps)
                curves.append(Series(label=run_name, values=values))
        if curves:
            chart = Chart(
                title=title, steps=steps, series=tuple(curves), is_fraction=name == "success"
            )
            drawn.append(line_chart(chart))
    if not drawn:
        return ""
    return f'<section><h2>Curves</h2><div class="charts">{"".join(drawn)}</div></section>'


def _pair_section(a: ViewedRun, b: ViewedRun, old: Evaluation, new: Evaluation) -> str:
    title = f"<h2>{text(b.name)} against {text(a.name)}</h2>"
    try:
        pair = PairedComparison.of(old, new)
    except ValueError as error:
        return f"<section>{title}<p>{text(error)}</p></section>"
    difference = pair.difference
    said = (
        f"{100 * difference.value:+.1f} points (95 %: {100 * difference.low:+.1f} to "
        f"{100 * difference.high:+.1f}) on {len(pair.pairs)} common tasks, {len(pair.won)} won, "
        f"{len(pair.lost)} lost, p = {pair.p_value:.2g}"
    )
    return (
        f"<section>{title}<p>{text(said)}</p>"
        f"{_task_links('Lost', pair.lost)}{_task_links('Won', pair.won)}</section>"
    )


def _task_links(title: str, pairs: Sequence[tuple[Any, Any]]) -> str:
    if not pairs:
        return ""
    rows = [
        (
            element("a", text(after.prompt or after.task_id), href=_place_of(after.task_id)),
            text(after.kind),
            f"{before.share:.0%} → {after.share:.0%}",
        )
        for before, after in pairs[:MOST_TASKS]
    ]
    rest = len(pairs) - MOST_TASKS
    more = f"<p>and {rest} more</p>" if rest > 0 else ""
    drawn = table(("Task", "Type", "Success"), rows, has_names=False, class_="tasks")
    return f'<h3>{title}</h3><div class="card scroll">{drawn}</div>{more}'


def _place_of(task_id: str) -> str:
    return f"#{urlencode({'view': 'task', 'task': task_id})}"
