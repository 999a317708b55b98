"""Evaluations while RL goes on: their figures, in words, and as a section of the report.

A row of them is {"step": 8, "k": 4, "temperature": 1.0, "heldout": figures, "train": figures,
"seconds": 12.5}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanorl.observability.report.charts import Chart, Series, line_chart
from nanorl.observability.report.evaluation import Evaluation, percent
from nanorl.observability.report.statistics import Measured
from nanorl.task import Task
from nanorl.types import Rollout

SPLITS: Mapping[str, str] = MappingProxyType({"heldout": "held-out", "train": "training tasks"})
"""The two kinds of tasks, and what they are called."""


def figures(played: Sequence[tuple[Task, Rollout]], k: int) -> dict[str, float]:
    """The numbers that a curve shows, with the interval of 95 % of the success."""
    found = Evaluation.of(played, title="", about={}, seconds=0.0)
    success = found.success
    return {
        "success": success.value,
        "success_low": success.low,
        "success_high": success.high,
        "pass_at_k": found.pass_at(k).value,
        "mean_reward": found.mean_reward.value,
        "num_tasks": len(found.scores),
    }


def line(row: Mapping[str, Any], *, is_best: bool) -> str:
    """A row of the curve in words."""
    one, other = row["heldout"], row["train"]
    among = f", pass@{row['k']} {one['pass_at_k']:.1%}" if row["k"] > 1 else ""
    return (
        f"step {row['step']}: held-out {percent(success_of(one))}{among}; training tasks "
        f"{other['success']:.1%}{'; the best so far' if is_best else ''}"
    )


def success_of(numbers: Mapping[str, float]) -> Measured:
    """The success of `figures` with its interval."""
    return Measured(numbers["success"], numbers["success_low"], numbers["success_high"])


def progress_section(rows: Sequence[Mapping[str, Any]], best_step: int | None) -> str:
    """Sampled success while RL went on, a point an evaluation; empty where there was none."""
    if not rows:
        return ""
    ks = {row["k"] for row in rows}
    labels = {"success": "pass@1"}
    if ks != {1}:
        labels["pass_at_k"] = f"pass@{ks.pop() if len(ks) == 1 else 'k'}"
    chart = Chart(
        title="Sampled success while RL went on",
        steps=tuple(row["step"] for row in rows),
        series=tuple(
            Series(label=f"{title}, {label}", values=tuple(row[split][name] for row in rows))
            for split, title in SPLITS.items()
            for name, label in labels.items()
        ),
        is_fraction=True,
    )
    said = "".join(
        f" The best on held-out tasks was after {best_step} steps: "
        f"{percent(success_of(row['heldout']))}. Its checkpoint is kept."
        for row in rows
        if row["step"] == best_step
    )
    return (
        '<section id="progress"><h2>While it learnt</h2><p>Tasks played between the steps of RL, '
        f"sampled and trained on by nobody; the first point is before RL.{said}</p>"
        f'<div class="charts">{line_chart(chart)}</div></section>'
    )
