"""Two evaluations on the same tasks: who is better, how sure that is, and which tasks decide it.

Only tasks that both played count, paired by their id: two models are then compared on equal terms,
and the difference is surer than the two figures are (Miller 2024).
Left out: correction for many comparisons; three models against one are three tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanorl.observability.report.evaluation import Evaluation, TaskScore, percent
from nanorl.observability.report.statistics import (
    Measured,
    paired_difference,
    share_of_tasks,
    sign_test,
)

MOST_ROWS = 12  # of the tasks that were lost, and of those that were won
PROMPT_CHARS = 60


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """`new` against `old`: of each common task its score in both, the worst change first."""

    old: Evaluation
    new: Evaluation
    pairs: list[tuple[TaskScore, TaskScore]]

    @classmethod
    def of(cls, old: Evaluation, new: Evaluation) -> PairedComparison:
        """ValueError if they have no task in common."""
        before = {score.task_id: score for score in old.scores}
        pairs = [(before[s.task_id], s) for s in new.scores if s.task_id in before]
        if not pairs:
            raise ValueError(
                f"{old.title} and {new.title} have no task in common: play the same ones (the same "
                "environment, tasks and --seed) with nanorl eval, then compare"
            )
        return cls(old=old, new=new, pairs=sorted(pairs, key=_order))

    @property
    def difference(self) -> Measured:
        return paired_difference([_change(pair) for pair in self.pairs])

    @property
    def lost(self) -> list[tuple[TaskScore, TaskScore]]:
        return [pair for pair in self.pairs if _change(pair) < 0]

    @property
    def won(self) -> list[tuple[TaskScore, TaskScore]]:
        """The greatest gain first."""
        return [pair for pair in reversed(self.pairs) if _change(pair) > 0]

    @property
    def p_value(self) -> float:
        return sign_test(len(self.won), len(self.lost))

    def success(self, side: int) -> Measured:
        """The success on the common tasks: 0 the old, 1 the new."""
        return share_of_tasks([pair[side].share for pair in self.pairs])

    def to_json(self) -> dict[str, Any]:
        return {
            "old": self.old.title,
            "new": self.new.title,
            "num_common": len(self.pairs),
            "num_tasks": [len(self.old.scores), len(self.new.scores)],
            "success": [self.success(0).to_json(), self.success(1).to_json()],
            "difference": self.difference.to_json(),
            "num_won": len(self.won),
            "num_lost": len(self.lost),
            "p_value": self.p_value,
            "tasks": [
                {
                    "task_id": before.task_id,
                    "kind": before.kind,
                    "prompt": before.prompt,
                    "old": before.share,
                    "new": after.share,
                }
                for before, after in self.pairs
                if before.share != after.share
            ],
        }


def comparison_text(one: PairedComparison) -> str:
    """The comparison in plain lines."""
    num, difference = len(one.pairs), one.difference
    others = len(one.old.scores) + len(one.new.scores) - 2 * num
    counted = f"{num} tasks that both played"
    if others:
        counted += f" ({others} that only one of them played are left out)"
    sure = "no difference that these tasks can show"
    if difference.low > 0 or difference.high < 0:
        sure = "better" if difference.value > 0 else "worse"
    lines = [
        f"{one.new.title} against {one.old.title}: {sure}, on the {counted}",
        f"  {one.old.title}: {percent(one.success(0))}",
        f"  {one.new.title}: {percent(one.success(1))}",
        f"  difference: {100 * difference.value:+.1f} points (95 %: {100 * difference.low:+.1f} to "
        f"{100 * difference.high:+.1f}), {len(one.won)} won, {len(one.lost)} lost, "
        f"p = {one.p_value:.2g} ({_test(one)})",
    ]
    lines += _environments(one)
    for name in ("temperature", "samples_per_task"):
        values = [result.about.get(name) for result in (one.old, one.new)]
        if values[0] != values[1]:
            lines.append(f"  note: not sampled alike, {name} {values[0]} and {values[1]}")
    lines += _table("lost", one.lost) + _table("won", one.won)
    return "\n".join(lines)


def _environments(one: PairedComparison) -> list[str]:
    """A line for each environment, where both were evaluated in several."""
    lines = []
    for name, scores in one.new.per_environment().items():
        those = {score.task_id for score in scores}
        pairs = [pair for pair in one.pairs if pair[1].task_id in those]
        if pairs:
            change = paired_difference([_change(pair) for pair in pairs])
            lines.append(
                f"  {name}: {100 * change.value:+.1f} points (95 %: {100 * change.low:+.1f} to "
                f"{100 * change.high:+.1f}) on {len(pairs)} tasks"
            )
    return lines


def _test(one: PairedComparison) -> str:
    is_single = max(score.num_samples for pair in one.pairs for score in pair) == 1
    return "McNemar's exact test" if is_single else "exact sign test over the tasks"


def _table(name: str, pairs: list[tuple[TaskScore, TaskScore]]) -> list[str]:
    shown = pairs[:MOST_ROWS]
    rows = [
        f"    {before.share:>4.0%} -> {after.share:>4.0%}  {after.task_id}  "
        f"{' '.join(after.prompt.split())[:PROMPT_CHARS]}"
        for before, after in shown
    ]
    rest = [f"    and {len(pairs) - len(shown)} more"] if len(pairs) > len(shown) else []
    return [f"  {name}:", *rows, *rest] if rows else []


def _change(pair: tuple[TaskScore, TaskScore]) -> float:
    return pair[1].share - pair[0].share


def _order(pair: tuple[TaskScore, TaskScore]) -> tuple[float, float, str]:
    """Worst first; of equals the one whose reward fell most."""
    return _change(pair), pair[1].mean_reward - pair[0].mean_reward, pair[0].task_id
