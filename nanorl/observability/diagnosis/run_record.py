"""`RunRecord` holds what a run's folder says of its learning, finished or not.

    early, late     rollouts of the first and of the last third of the steps of RL
    rows            metrics.jsonl, a row a step
    curve           evaluations while RL went on, held-out and training tasks
    before, after   greedy evaluations around RL, and how many of their answers are the same

Two thirds are enough: what changes between them is held against its standard error, whose unit is
the group, since rollouts of one task are alike. Left out: whether that is good (diagnosis.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.rl_evaluations import SPLITS, figures
from nanorl.observability.results import PHASES
from nanorl.observability.store import RolloutStore
from nanorl.options.run_config import RunConfig
from nanorl.options.store_address import EVALUATIONS_FILE, RL_EVALUATIONS_FILE
from nanorl.task import Task
from nanorl.types import Rollout, Status

NUM_PARTS = 3
"""The steps are cut into so many: the first part and the last one are compared."""
LEAST_STEPS = 6
"""Two in each part: before, nothing is said of what changed between them."""
MOST_READ = 1024
"""Rollouts of a window, whole ones: a third of a second; its newest steps, or its oldest."""
CLEAR = 2.0
"""Standard errors of a change that is told: one run in forty shows that by accident, each way."""
LEAST_CHANGE = 0.02
"""A smaller change of success or reward is no news, however sure it is."""


@dataclass(frozen=True)
class Change:
    """A mean of the early window, of the late one, and the standard error of their difference."""

    early: float
    late: float
    error: float

    @property
    def rose(self) -> bool:
        return self.late - self.early > max(CLEAR * self.error, LEAST_CHANGE)

    @property
    def fell(self) -> bool:
        return self.early - self.late > max(CLEAR * self.error, LEAST_CHANGE)

    def text(self, form: str = ".0%") -> str:
        both = (self.early, self.late)  # the early rollouts may have expired, or be another run's
        return " -> ".join("unknown" if math.isnan(one) else f"{one:{form}}" for one in both)


@dataclass(frozen=True, kw_only=True)
class GreedyMove:
    """Says how far RL has moved the policy, by the greedy rollouts before it and after it:
    `num_same` of `num` are token by token the same, and the log-probs of those differ by `nats` a
    token."""

    num: int
    num_same: int
    nats: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive steps, and the groups that were played in them, without failed rollouts."""

    rows: Sequence[Mapping[str, Any]]
    groups: Sequence[Sequence[Rollout]]

    @cached_property
    def rollouts(self) -> list[Rollout]:
        return [one for group in self.groups for one in group]

    @property
    def steps(self) -> str:
        return f"steps {self.rows[0]['step']} to {self.rows[-1]['step']}"

    def means(self, value: Callable[[Rollout], float]) -> list[float]:
        """The mean of every group."""
        return [fmean(map(value, group)) for group in self.groups]

    def mean(self, value: Callable[[Rollout], float]) -> float:
        return fmean(map(value, self.rollouts)) if self.rollouts else math.nan

    def numbers(self, name: str) -> list[float]:
        """A metric of its steps, where they have it and it is a number."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    @cached_property
    def trained_share(self) -> float:
        """The share of rollouts that the update was made of: those of groups with a signal. All of
        them where it was not counted, as in runs of earlier versions."""
        trained, played = self.numbers("num_trained_rollouts"), sum(self.numbers("num_rollouts"))
        return sum(trained) / played if trained and played else 1.0


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything that a diagnosis reads."""

    config: RunConfig
    rows: Sequence[Mapping[str, Any]]
    early: Window
    late: Window
    tasks: Mapping[str, Task]
    times_seen: float = 1.0
    """Groups of RL for each task, in the mean."""
    curve: Sequence[Mapping[str, Any]] = ()
    """Rows as of rl_evaluations.py, and `shares`: split -> task_id -> success."""
    before: Evaluation | None = None
    after: Evaluation | None = None
    greedy: GreedyMove | None = None
    tokenizer: ChatTokenizer

    @property
    def num_steps(self) -> int:
        return len(self.rows)

    @cached_property
    def success(self) -> Change:
        return self.change(lambda one: one.is_success)

    @cached_property
    def reward(self) -> Change:
        return self.change(lambda one: one.total_reward)

    @cached_property
    def both(self) -> list[Rollout]:
        return [*self.early.rollouts, *self.late.rollouts]

    def text(self) -> str:
        """Say in a line what was looked at."""
        if not self.late.rollouts:
            return f"{self.num_steps} steps of RL: too few to say anything"
        return (
            f"{self.num_steps} steps of RL, {self.early.steps} against {self.late.steps}: sampled "
            f"success {self.success.text()}, reward {self.reward.text('.3g')}"
        )

    def change(self, value: Callable[[Rollout], float]) -> Change:
        """Compare the mean of something between the windows."""
        early, late = self.early.means(value), self.late.means(value)
        error = math.sqrt(sum(_squared_error(some) for some in (early, late)))
        return Change(_mean(early), _mean(late), error)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _squared_error(values: Sequence[float]) -> float:
    """Square the error of a mean; infinite where one value or none says nothing about others."""
    return pvariance(values) / (len(values) - 1) if len(values) > 1 else math.inf


def windows(num_steps: int) -> tuple[range, range]:
    """Return the places of the first and of the last part of so many steps; of one step, the same
    one."""
    size = max(1, num_steps // NUM_PARTS)
    return range(min(size, num_steps)), range(max(0, num_steps - size), num_steps)


def read_record(
    folder: Path,
    config: RunConfig,
    rows: Sequence[Mapping[str, Any]],
    store: RolloutStore,
    tokenizer: ChatTokenizer,
) -> RunRecord:
    """Read the record of the run in a folder. `rows` are its metrics, `store` has its rollouts of
    RL."""
    entries = store.entries()
    num_of_step = Counter(one.step for one in entries)
    first, last = windows(len(rows))
    early = [rows[place] for place in _affordable(first, rows, num_of_step)]
    late = [rows[place] for place in reversed(_affordable(reversed(last), rows, num_of_step))]
    tasks = {one.task_id for one in entries}
    groups = {one.group_id for one in entries}
    return RunRecord(
        config=config,
        rows=rows,
        early=Window(rows=early, groups=_groups(store, early)),
        late=Window(rows=late, groups=_groups(store, late)),
        tasks={one.task_id: one for one in store.tasks()},
        times_seen=len(groups) / max(len(tasks), 1),
        curve=_curve(folder / RL_EVALUATIONS_FILE),
        before=_evaluation(folder / "eval-before.json"),
        after=_evaluation(folder / "eval-after.json"),
        greedy=_greedy_move(folder / EVALUATIONS_FILE),
        tokenizer=tokenizer,
    )


def _affordable(
    places: Iterable[int], rows: Sequence[Mapping[str, Any]], num_of_step: Mapping[int, int]
) -> list[int]:
    """The first of the places that have no more than MOST_READ rollouts together, one at least."""
    found: list[int] = []
    total = 0
    for place in places:
        total += num_of_step.get(rows[place]["step"], 0)
        if found and total > MOST_READ:
            break
        found.append(place)
    return found


def _groups(store: RolloutStore, rows: Sequence[Mapping[str, Any]]) -> list[list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for row in rows:
        for rollout in store.query(step=row["step"]):
            if rollout.status is not Status.FAILED:
                found.setdefault(rollout.group_id, []).append(rollout)
    return list(found.values())


def _evaluation(file: Path) -> Evaluation | None:
    return Evaluation.read(file) if file.is_file() else None


def _greedy_move(file: Path) -> GreedyMove | None:
    """Compare the held-out tasks that were played both before RL and after it; None without any."""
    if not file.is_file():
        return None
    with RolloutStore(file, is_read_only=True) as store:
        before, after = (
            {one.task_id: one for one in store.query(step=PHASES.index(name))}
            for name in ("before", "after")
        )
    pairs = [(before[name], after[name]) for name in before.keys() & after.keys()]
    same = [pair for pair in pairs if pair[0].sequences[0].keys == pair[1].sequences[0].keys]
    differences = [
        abs(one - other)
        for old, new in same
        for one, other, is_action in zip(old.logps, new.logps, old.loss_mask, strict=True)
        if is_action
    ]
    if not pairs:
        return None
    return GreedyMove(num=len(pairs), num_same=len(same), nats=_mean(differences))


def _curve(file: Path) -> list[dict[str, Any]]:
    """Read the evaluations while RL went on, from their rollouts: a run that goes on has no
    summary, and may have gone on with another number of samples."""
    if not file.is_file():
        return []
    with RolloutStore(file, is_read_only=True) as store:
        tasks = {one.task_id: one for one in store.tasks()}
        found = []
        for step in sorted(store.steps()):
            played = {split: _of_split(store.query(step=step), tasks, split) for split in SPLITS}
            if all(played.values()):  # the training tasks of one may be on their way
                k = min(map(_num_samples, played.values()))
                row = {name: figures(one, k) for name, one in played.items()}
                shares = {name: _shares(one) for name, one in played.items()}
                found.append({"step": step, "k": k, "shares": shares, **row})
    return found


def _num_samples(played: Sequence[tuple[Task, Rollout]]) -> int:
    """Count the samples of the task that has fewest."""
    return min(Counter(task.task_id for task, _ in played).values())


def _shares(played: Sequence[tuple[Task, Rollout]]) -> dict[str, float]:
    """The success of each task."""
    found: dict[str, list[float]] = {}
    for task, rollout in played:
        found.setdefault(task.task_id, []).append(rollout.is_success)
    return {name: fmean(values) for name, values in found.items()}


def _of_split(
    played: Sequence[Rollout], tasks: Mapping[str, Task], split: str
) -> list[tuple[Task, Rollout]]:
    return [(tasks[one.task_id], one) for one in played if f"-{split}-" in one.group_id]
