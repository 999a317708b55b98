"""What a notebook shows of a run, an evaluation or a rehearsal: a small table, and nothing else.

`_repr_html_` of those classes calls it. Whatever a model or a task says is untrusted: every text
passes `markup.text`. There is no script, and nothing is loaded from outside.
Left out: curves and rollouts, which are report.html's and `nanorl view`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nanorl.observability.report.charts import duration, number
from nanorl.observability.report.markup import text
from nanorl.observability.report.statistics import Measured
from nanorl.observability.report.summary import success_rates

_CHARS = 600
"""Of one text; the rest is said to be left out."""
_KINDS = 20
_MESSAGES = 40
Row = Sequence[object]


def run_html(summary: Mapping[str, Any], folder: Path) -> str:
    """The success of a run before and after, its time, and where it lies."""
    rates = [
        (title, f"{rate:.1%} of {num_tasks}")
        for title, rate, num_tasks in success_rates(summary)
        if rate is not None
    ]
    about = [
        ("steps", summary.get("steps", "")),
        ("time", duration(summary.get("wall_s", 0.0))),
        ("folder", folder),
    ]
    title = f"{summary.get('preset', 'run')}, seed {summary.get('seed', 0)}: held-out tasks solved"
    return _table(title, [*rates, *about])


def evaluation_html(
    title: str, shares: Mapping[str, Measured], kinds: Mapping[str, tuple[float, int]]
) -> str:
    """Success and pass@k with their intervals of 95 %, by their names, and what share of how many
    tasks of each kind is solved."""
    rows: list[Row] = [(name, *_measured(share)) for name, share in shares.items()]
    for kind, (share, num_tasks) in islice(kinds.items(), _KINDS) if len(kinds) > 1 else ():
        rows.append((kind, f"{share:.1%}", f"of {num_tasks} tasks"))
    return _table(title, [*rows, *_rest(len(kinds) - _KINDS, "kinds of task")])


def rehearsal_html(
    messages: Sequence[Mapping[str, Any]], turn_rewards: Sequence[float], outcome: str
) -> str:
    """A table of who said what, and of the rewards of each turn and the episode."""
    rewards = iter(turn_rewards)
    rows: list[Row] = []
    for message in messages[:_MESSAGES]:
        is_turn = message["role"] == "assistant"
        earned = number(next(rewards, None)) if is_turn else ""
        rows.append((message["role"], _cut(message["content"]), earned))
    return _table(outcome, [*rows, *_rest(len(messages) - _MESSAGES, "messages")])


def _measured(one: Measured) -> tuple[str, str]:
    return f"{one.value:.1%}", f"95 %: {100 * one.low:.1f} to {100 * one.high:.1f}"


def _cut(content: object) -> str:
    said = str(content)
    left = len(said) - _CHARS
    return said if left <= 0 else f"{said[:_CHARS]} … {left:,} more characters"


def _rest(num: int, what: str) -> list[Row]:
    return [("…", f"{num:,} more {what}")] if num > 0 else []


def _table(title: str, rows: Iterable[Row]) -> str:
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    caption = f'<caption style="text-align:left;font-weight:bold">{text(title)}</caption>'
    return f"<table>{caption}{body}</table>"


def _cell(value: object) -> str:
    return f'<td style="text-align:left;white-space:pre-wrap">{text(value)}</td>'
