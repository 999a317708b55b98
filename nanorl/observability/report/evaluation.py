"""eval.json: what an evaluation found, task by task, so that two of them can be compared.

The rollouts themselves lie beside it (rollouts.sqlite; of a run's own evaluations
evaluations.sqlite). Left out: averages without the tasks behind them, which cannot be paired.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from statistics import fmean
from typing import Any

from nanorl.observability.report.statistics import (
    Measured,
    mean_of_tasks,
    pass_at_k,
    share_of_tasks,
)
from nanorl.observability.report.summary import write_atomically
from nanorl.task import Task
from nanorl.types import REWARD_PART, Rollout

ENVIRONMENT_OF = "nanorl.envs.mix:environment_of"
"""Which environment a task of several is of."""
PROMPT_CHARS = 200  # of a task in the file


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's samples. `mean_reward` has the rewards of single turns in it."""

    task_id: str
    kind: str
    prompt: str
    num_samples: int
    num_successes: int
    mean_reward: float
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        return self.num_successes / self.num_samples


@dataclass(kw_only=True)
class Evaluation:
    """Every task's score, the costs, and `about`: what was evaluated with which options."""

    title: str
    about: dict[str, Any]
    scores: list[TaskScore]
    mean_turns: float
    mean_action_tokens: float
    seconds: float

    @classmethod
    def of(
        cls,
        played: Sequence[tuple[Task, Rollout]],
        *,
        title: str,
        about: dict[str, Any],
        seconds: float,
    ) -> Evaluation:
        """From rollouts that ended, all of one task beside each other or not."""
        samples: dict[str, list[tuple[Task, Rollout]]] = defaultdict(list)
        for task, rollout in played:
            samples[task.task_id].append((task, rollout))
        return cls(
            title=title,
            about=about,
            scores=[_score(pairs[0][0], [r for _, r in pairs]) for pairs in samples.values()],
            mean_turns=fmean(rollout.num_turns for _, rollout in played),
            mean_action_tokens=fmean(rollout.num_action_tokens for _, rollout in played),
            seconds=seconds,
        )

    @property
    def num_samples(self) -> int:
        """Samples of the task that has fewest."""
        return min(score.num_samples for score in self.scores)

    @property
    def success(self) -> Measured:
        """The share of rollouts that succeed, which is pass@1."""
        return share_of_tasks([score.share for score in self.scores])

    @property
    def mean_reward(self) -> Measured:
        return mean_of_tasks([score.mean_reward for score in self.scores])

    def pass_at(self, k: int) -> Measured:
        """The probability that at least one of `k` samples succeeds, over the tasks."""
        return share_of_tasks(
            [pass_at_k(score.num_samples, score.num_successes, k) for score in self.scores]
        )

    def pass_ks(self) -> list[int]:
        """1, 2, 4, ... and the number of samples."""
        powers = [1 << i for i in range(self.num_samples.bit_length())]
        return sorted({*powers, self.num_samples})

    def parts(self) -> dict[str, Measured]:
        """The named parts of the reward, of the tasks that have them."""
        names = sorted({name for score in self.scores for name in score.parts})
        return {
            name: mean_of_tasks([s.parts[name] for s in self.scores if name in s.parts])
            for name in names
        }

    def per_kind(self) -> dict[str, list[TaskScore]]:
        kinds: dict[str, list[TaskScore]] = defaultdict(list)
        for score in self.scores:
            kinds[score.kind].append(score)
        return dict(sorted(kinds.items()))

    def per_environment(self) -> dict[str, list[TaskScore]]:
        """The scores by environment, in the evaluation of several; else nothing."""
        if not isinstance(self.about.get("env"), list | tuple):
            return {}
        environment_of = resolve_name(ENVIRONMENT_OF)
        found: dict[str, list[TaskScore]] = defaultdict(list)
        for score in self.scores:
            found[environment_of(score.kind)].append(score)
        return dict(sorted(found.items()))

    def to_json(self) -> dict[str, Any]:
        several = self.per_environment()
        return {
            "title": self.title,
            "about": self.about,
            "num_tasks": len(self.scores),
            "samples_per_task": self.num_samples,
            "success": self.success.to_json(),
            "pass_at": {str(k): self.pass_at(k).to_json() for k in self.pass_ks()},
            "mean_reward": self.mean_reward.to_json(),
            "parts": {name: one.to_json() for name, one in self.parts().items()},
            **({"per_environment": _shares(several)} if several else {}),
            "per_kind": _shares(self.per_kind()),
            "mean_turns": self.mean_turns,
            "mean_action_tokens": self.mean_action_tokens,
            "seconds": self.seconds,
            "tasks": [asdict(score) for score in self.scores],
        }

    def _repr_html_(self) -> str:
        # Here: only a notebook asks.
        from nanorl.observability.report.notebook import evaluation_html

        shares = {"success": self.success}
        shares |= {f"pass@{k}": self.pass_at(k) for k in self.pass_ks() if k > 1}
        kinds = {
            kind: (fmean(score.share for score in scores), len(scores))
            for kind, scores in self.per_kind().items()
        }
        return evaluation_html(f"{self.title}: {len(self.scores)} held-out tasks", shares, kinds)

    def write(self, path: Path) -> None:
        """Replace the file in one piece."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """ValueError if the file is not what `write` writes."""
        try:
            data = json.loads(path.read_text("utf-8"))
            return cls(
                scores=[TaskScore(**score) for score in data["tasks"]],
                **{
                    name: data[name]
                    for name in ("title", "about", "mean_turns", "mean_action_tokens", "seconds")
                },
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not the result of an evaluation ({error!r}); nanorl eval writes one"
            ) from None


def _shares(groups: Mapping[str, Sequence[TaskScore]]) -> dict[str, Any]:
    """Success and number of tasks of each group of scores."""
    return {
        name: share_of_tasks([score.share for score in scores]).to_json()
        | {"num_tasks": len(scores)}
        for name, scores in groups.items()
    }


def _score(task: Task, rollouts: Sequence[Rollout]) -> TaskScore:
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            if name.startswith(REWARD_PART):
                parts[name.removeprefix(REWARD_PART)].append(value)
    return TaskScore(
        task_id=task.task_id,
        kind=task.kind,
        prompt=task.prompt_text[:PROMPT_CHARS],
        num_samples=len(rollouts),
        num_successes=sum(rollout.is_success for rollout in rollouts),
        mean_reward=fmean(rollout.total_reward for rollout in rollouts),
        parts={name: fmean(values) for name, values in parts.items()},
    )


def evaluation_text(result: Evaluation) -> str:
    """The figures in plain lines."""
    num, k = len(result.scores), result.num_samples
    how = "once each" if k == 1 else f"{k} times each"
    lines = [f"{result.title}: {num} held-out tasks, played {how}"]
    rows = [("success" if k == 1 else "pass@1", percent(result.success))]
    rows += [(f"pass@{i}", percent(result.pass_at(i))) for i in result.pass_ks() if i > 1]
    rows.append(("mean reward", plain(result.mean_reward)))
    rows += [(f"  {name}", plain(value)) for name, value in result.parts().items()]
    kinds = result.per_kind()
    rows += [
        (f"  {name}", f"{percent(share_of_tasks([one.share for one in scores]))} of {len(scores)}")
        for name, scores in result.per_environment().items()
    ]
    for kind, scores in kinds.items() if len(kinds) > 1 else ():
        share = share_of_tasks([score.share for score in scores])
        rows.append((f"  {kind}", f"{percent(share)} of {len(scores)}"))
    rows.append(("turns", f"{result.mean_turns:.1f} a rollout"))
    rows.append(("tokens", f"{result.mean_action_tokens:.0f} sampled a rollout"))
    rows.append(("seconds", f"{result.seconds:.1f}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join([*lines, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def percent(one: Measured) -> str:
    """`40.0 % (95 %: 21.9 to 61.3)`."""
    return f"{one.value:.1%} (95 %: {100 * one.low:.1f} to {100 * one.high:.1f})"


def plain(one: Measured) -> str:
    """`0.40 (95 %: 0.22 to 0.61)`, without an interval where there is none."""
    ends = one.to_json()
    if ends["low"] is None:
        return f"{one.value:.3g}"
    return f"{one.value:.3g} (95 %: {one.low:.3g} to {one.high:.3g})"
