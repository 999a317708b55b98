"""Which metrics become which chart. Metrics that no rule names get a chart each, so none is lost.

Nested values are named by their path, `time/generate`. Left out: drawing (nanorl.report.charts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanorl.report.charts import Chart, Series
from nanorl.report.metrics import flatten_numbers


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Metrics whose whole name matches a pattern share one chart; order of patterns is kept."""

    title: str
    patterns: tuple[str, ...]
    unit: str = ""
    is_fraction: bool = False
    is_stacked: bool = False


RULES = (
    Rule(
        title="Success",
        patterns=("success(_rate)?", "success_mean", "heldout_success"),
        is_fraction=True,
    ),
    Rule(title="Reward", patterns=("reward(_mean)?", "reward_std")),
    Rule(
        title="Log-prob gap, engine against trainer",
        patterns=("logp_gap_max", "logp_gap(_mean)?", "logp_gap_kl"),
        unit="nats",
    ),
    Rule(title="Entropy", patterns=("entropy(_mean)?",), unit="nats a token"),
    Rule(
        title="Response length",
        patterns=("response_(tokens|length)(_mean|_max)?", "num_action_tokens(_mean)?"),
        unit="sampled tokens",
    ),
    Rule(title="Turns", patterns=("(num_)?turns(_mean)?",), unit="a rollout"),
    Rule(
        title="Time per phase",
        patterns=(r"(time|phase)(_s)?/.+", r"(time|phase)_.+_s"),
        unit="s",
        is_stacked=True,
    ),
    Rule(title="Throughput", patterns=("tokens_per_s_.+", "tokens_per_s"), unit="tokens/s"),
    Rule(title="Loss", patterns=("loss", "policy_loss", "kl_loss")),
    Rule(title="Gradient norm", patterns=("grad_norm", "gradient_norm")),
    Rule(
        title="Clipped and truncated",
        patterns=("clip_(fraction|frac)(_.+)?", "truncated(_fraction)?", "tis_.*fraction"),
        is_fraction=True,
    ),
    Rule(title="Learning rate", patterns=("lr", "learning_rate")),
    Rule(title="Staleness", patterns=(r"staleness(/.+|_.+)?",), unit="policy versions"),
    Rule(title="KV blocks in use", patterns=("kv_(use|usage)(_.+)?",), is_fraction=True),
    Rule(title="Tool latency", patterns=(r"tool_(latency|time)(_.+|/.+)?",), unit="s"),
)


def build_charts(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[Rule, Chart]], list[tuple[Rule, Chart]]]:
    """(charts of the rules, charts of all other numeric metrics by name)."""
    flat = [flatten_numbers(row) for row in rows]
    steps = tuple(int(row["step"]) for row in rows)
    names = sorted({name for row in flat for name in row} - {"step"})
    main, used = [], set()
    for rule in RULES:
        matching = []
        for pattern in rule.patterns:
            fresh = [name for name in names if name not in used and re.fullmatch(pattern, name)]
            matching += fresh
            used.update(fresh)
        if matching:
            main.append((rule, _chart(rule, matching, flat, steps)))
    others = [Rule(title=name, patterns=()) for name in names if name not in used]
    return main, [(rule, _chart(rule, [rule.title], flat, steps)) for rule in others]


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
    if rule.is_stacked:
        name = re.sub(r"^(time|phase)(_s)?/|^(time|phase)_|_s$", "", name)
    return name.replace("_", " ")
