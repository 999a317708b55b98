"""Chooses the rollouts that the report shows, out of what a run has stored.

    what is still wrong   by task type, of the last evaluation
    a whole group         of the newest ones the one whose rollouts differ most
    first and last        the same held-out tasks in the first and in the last evaluation
    while it learnt       the same held-out tasks in evaluations while RL went on, in four at most
    others                some of every task type and stage of the training

What went wrong comes first. Left out: all others, which nanorl view shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

from nanorl.observability.report.summary import EVALUATIONS
from nanorl.observability.results import PHASES, Phase
from nanorl.observability.store import Entry, RolloutStore
from nanorl.options.store_address import EVALUATIONS_FILE, RL_EVALUATIONS_FILE
from nanorl.task import Task
from nanorl.types import Rollout, Status, TokenStats, kind_of

NUM_STAGES = 3  # equal parts of the steps that were taken
MAX_CELLS = 60  # of a task type in a stage: what a page of moderate size holds
MAX_FAILED = 6
MAX_WRONG = 3  # of a task type in the last evaluation
MAX_MEMBERS = 8  # of the group that is shown
MAX_PAIRS = 4
MAX_FOLLOWED = 2  # tasks that are shown as RL went on
MAX_POINTS = 4  # evaluations in which they are
COMPARED: tuple[Phase, ...] = ("untrained", "before", "after")
"""The evaluations with tools, in their order."""
Item = TypeVar("Item")
Part = Literal["", "wrong", "group", "pair", "progress"]
"""Where an example stands in the report; empty: among the others."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A rollout with the task that it tried, if that is known, and where in the run it belongs."""

    rollout: Rollout
    task: Task | None
    when: str
    stats: TokenStats | None = None
    part: Part = ""

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


def collect_examples(folder: Path, training: RolloutStore) -> list[Example]:
    """The examples of a run: its evaluations lie in its folder, `training` has the others."""
    found: list[Example] = []
    if (folder / EVALUATIONS_FILE).is_file():
        with RolloutStore(folder / EVALUATIONS_FILE) as store:
            found += _of_evaluations(store)
    if (folder / RL_EVALUATIONS_FILE).is_file():
        with RolloutStore(folder / RL_EVALUATIONS_FILE) as store:
            found += _of_progress(store)
    return [*found, *_of_training(training)]


def _of_evaluations(store: RolloutStore) -> list[Example]:
    played = {
        name: entries for name in COMPARED if (entries := store.entries(step=PHASES.index(name)))
    }
    if not played:
        return []
    *_, last = played
    right = choose(
        played[last],
        kind=lambda entry: entry.kind,
        is_right=lambda entry: entry.reward >= 1.0,
        num_wrong=0,
    )
    wrong = choose(
        played[last],
        kind=lambda entry: entry.kind,
        is_right=lambda entry: entry.reward >= 1.0,
        num_wrong=MAX_WRONG,
        num_right=0,
    )
    when = f"held out, {EVALUATIONS[last]}"
    return [
        *(_example(store, entry, when, "wrong") for entry in wrong),
        *(
            _example(store, entry, f"held out, {EVALUATIONS[name]}", "pair")
            for pair in _telling_pairs(played)
            for name, entry in pair
        ),
        *(_example(store, entry, when) for entry in right),
    ]


def _telling_pairs(played: Mapping[Phase, Sequence[Entry]]) -> list[list[tuple[Phase, Entry]]]:
    """First and last attempt at the same task: what was learned, what was lost, then any."""
    first, *_, last = [*played, *played]  # the same one where there is but one
    if first == last:
        return []
    begun = {entry.task_id: entry for entry in played[first]}
    pairs = [(begun[one.task_id], one) for one in played[last] if one.task_id in begun]
    change = [(new.reward >= 1.0) - (old.reward >= 1.0) for old, new in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (-abs(change[i]), -change[i]))
    lost = [i for i in order if change[i] < 0][:1]
    chosen = list(dict.fromkeys([*order[: MAX_PAIRS - len(lost)], *lost]))
    return [[(first, pairs[i][0]), (last, pairs[i][1])] for i in chosen]


def _of_progress(store: RolloutStore) -> list[Example]:
    """The first samples of held-out tasks in evaluations while RL went on."""
    firsts: dict[str, dict[int, Entry]] = defaultdict(dict)
    for entry in store.entries():
        firsts[entry.task_id].setdefault(entry.step, entry)
    for task_id in list(firsts):
        task = store.task(task_id)
        if task is None or task.split != "heldout":
            del firsts[task_id]
    return [
        _example(store, entry, f"after {step} steps", "progress")
        for task_id in followed({task: _successes(one) for task, one in firsts.items()})
        for step, entry in _spread(sorted(firsts[task_id].items()), MAX_POINTS)
    ]


def _successes(entries: Mapping[int, Entry]) -> list[bool]:
    return [entry.reward >= 1.0 for _, entry in sorted(entries.items())]


def followed(successes: Mapping[str, Sequence[bool]]) -> list[str]:
    """The tasks that tell most of what was learnt: wrong at first and right at last, in as few
    turns back and forth as possible. `successes` are those of each task in all evaluations."""

    def rank(task: str) -> tuple[bool, bool, int]:
        one = successes[task]
        changes = sum(before != after for before, after in pairwise(one))
        return not (one[-1] and not one[0]), not one[-1], changes

    several = [task for task, one in successes.items() if len(one) > 1]
    return sorted(several, key=rank)[:MAX_FOLLOWED]


def _spread(items: Sequence[Item], count: int) -> list[Item]:
    """So many of the items, evenly, with the first and the last; all if they are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _of_training(store: RolloutStore) -> list[Example]:
    entries = store.entries()
    group = [_example(store, one, f"step {one.step}", "group") for one in telling_group(entries)]
    chosen = [_example(store, one, f"step {one.step}") for one in choose_entries(entries)]
    return [*group, *chosen]


def telling_group(entries: Sequence[Entry]) -> list[Entry]:
    """The group of the newest step whose rewards differ most, at most MAX_MEMBERS of its
    rollouts."""
    steps = [entry.step for entry in entries]
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.step == max(steps) and entry.status is not Status.FAILED:
            groups[entry.group_id].append(entry)
    if not groups:
        return []

    def spread(members: list[Entry]) -> tuple[float, int]:
        rewards = [entry.reward for entry in members]
        return max(rewards) - min(rewards), len(members)

    best = max(groups.values(), key=spread)
    return sorted(best, key=lambda entry: entry.reward)[:MAX_MEMBERS]


def _example(store: RolloutStore, entry: Entry, when: str, part: Part = "") -> Example:
    return Example(
        rollout=store.get(entry.rollout_id),
        task=store.task(entry.task_id),
        when=when,
        stats=store.token_stats(entry.rollout_id),
        part=part,
    )


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
