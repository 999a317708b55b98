"""Which metrics become which chart. Metrics that no rule names get a chart each, so none is lost.

Nested values are named by their path, `time/generate`. Left out: drawing (nanorl.report.charts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanorl.report.charts import Chart, Series
from nanorl.report.metrics import flatten_numbers


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Metrics that share one chart, by their names in metrics.jsonl, in this order. Those that a
    run does not write are left out, and a chart without any."""

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
    Rule(title="Tokens of a batch", names=("action_tokens", "total_tokens"), unit="tokens"),
    Rule(title="Turns", names=("turns",), unit="a rollout"),
    Rule(
        title="Cut off",
        names=("truncated_turn_fraction", "truncated_context_fraction"),
        unit="of rollouts",
        is_fraction=True,
    ),
    Rule(title="Time of a step", names=("wait_s", "train_s", "sync_s"), unit="s", is_stacked=True),
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
    """(charts of the rules, charts of all other numeric metrics by name)."""
    flat = [flatten_numbers(row) for row in rows]
    steps = tuple(int(row["step"]) for row in rows)
    names = sorted({name for row in flat for name in row} - {"step"})
    main = []
    for rule in RULES:
        written = [name for name in rule.names if name in names]
        if written:
            main.append((rule, _chart(rule, written, flat, steps)))
    used = {name for rule in RULES for name in rule.names}
    others = [Rule(title=name, names=(name,)) for name in names if name not in used]
    return main, [(rule, _chart(rule, rule.names, flat, steps)) for rule in others]


def _chart(
    rule: Rule, names: Sequence[str], flat: Sequence[Mapping[str, float]], steps: tuple[int, ...]
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
    """Without the unit, which the chart names."""
    return (name.removesuffix("_s") if rule.unit == "s" else name).replace("_", " ")
