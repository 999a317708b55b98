"""Chooses the rollouts that the report shows: some of every task type and stage of a run.

What went wrong comes first. Left out: all others, which are in rollouts.sqlite.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nanorl.store import Entry
from nanorl.types import Rollout, Status, Task, kind_of

NUM_STAGES = 3  # equal parts of the steps that were taken
MAX_CELLS = 60  # of a task type in a stage: what a page of moderate size holds
MAX_FAILED = 6
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Example:
    """A rollout with the task that it tried, if that is known, and where in the run it belongs."""

    rollout: Rollout
    task: Task | None
    when: str

    @property
    def kind(self) -> str:
        return kind_of(self.rollout.task_id) if self.task is None else self.task.kind


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The rollouts of a task type in the steps `first` to `last`, and how many were right."""

    first: int
    last: int
    num_right: int
    num: int


def choose(
    items: Iterable[Item],
    *,
    kind: Callable[[Item], object],
    is_right: Callable[[Item], bool],
    num_wrong: int = 2,
    num_right: int = 1,
) -> list[Item]:
    """Choose from each kind so many items that went wrong, then so many that went right."""
    cells: dict[object, list[list[Item]]] = defaultdict(lambda: [[], []])
    for item in items:
        cells[kind(item)][is_right(item)].append(item)
    return [
        item
        for wrong, right in list(cells.values())[:MAX_CELLS]
        for item in [*wrong[:num_wrong], *right[:num_right]]
    ]


def choose_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Choose from each task type and stage, the last stage first; then attempts that failed."""
    stage = _stages(entries)
    played = [entry for entry in reversed(entries) if entry.status is not Status.FAILED]
    failed = [entry for entry in entries if entry.status is Status.FAILED]
    chosen = choose(
        played,
        kind=lambda entry: (stage[entry.step], kind_of(entry.task_id)),
        is_right=lambda entry: entry.reward >= 1.0,
    )
    return [*chosen, *failed[:MAX_FAILED]]


def rates_by_stage(entries: Sequence[Entry]) -> dict[str, list[Rate]]:
    """Task type -> its success in each stage in which it occurred."""
    stage = _stages(entries)
    cells: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.status is not Status.FAILED:
            cells[kind_of(entry.task_id), stage[entry.step]].append(entry)
    steps: dict[int, list[int]] = defaultdict(list)
    for step, number in stage.items():
        steps[number].append(step)
    rates: dict[str, list[Rate]] = defaultdict(list)
    for (kind, number), members in sorted(cells.items()):
        rates[kind].append(
            Rate(
                first=min(steps[number]),
                last=max(steps[number]),
                num_right=sum(entry.reward >= 1.0 for entry in members),
                num=len(members),
            )
        )
    return dict(rates)


def _stages(entries: Sequence[Entry]) -> dict[int, int]:
    """The stage of each step that was taken."""
    steps = sorted({entry.step for entry in entries})
    return {step: i * NUM_STAGES // len(steps) for i, step in enumerate(steps)}
