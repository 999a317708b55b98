"""What a run left on the disk, as a replay needs it: options, rollouts, checkpoints, manifests.

Options may have changed where the run was resumed, so they belong to places: a place is the number
of a phase (cursor.py) and, in RL, a step. History.jsonl says from which place on which ones held.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanoengine.state.checkpoint import list_checkpoints, read_cursor
from nanoengine.state.tensor_file import CheckpointError
from nanoinfer.params import SamplingParams
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.results import PHASES
from nanorl.observability.store import (
    Entry,
    RolloutStore,
    StoreError,
    content_hash,
    open_for_reading,
)
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.options.store_address import EVALUATIONS_FILE, training_store
from nanorl.options.trust import require
from nanorl.run.cursor import AFTER_RL, START, WARMING_UP, Cursor
from nanorl.run.heldout_success import GREEDY
from nanorl.run.history import RunHistory
from nanorl.run.manifest import Manifest
from nanorl.run.missing_records import METRICS
from nanorl.run.parse import with_options
from nanorl.run.saved_models import evaluated_models, named_options, read_run
from nanorl.task import Task, derive_seed
from nanorl.types import Rollout, Status, TokenStats

Place = tuple[int, int]
RL = PHASES.index("rl")
UNTRAINED = -1
"""The version of the model that the run began with, before its warm start."""


@dataclass(frozen=True, kw_only=True)
class RunSegment:
    """A part of a run that has one set of options: from `begin` to the next one's."""

    begin: Place
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A stored rollout that is to be played again."""

    entry: Entry
    phase: str

    @property
    def place(self) -> Place:
        number = PHASES.index(self.phase) if self.phase in PHASES else 0
        return number, self.entry.step if number == RL else 0


class PastRun:
    """The folder of a run; nothing in it is changed. Close it."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        """`config` has its options. ValueError if it has no rollouts."""
        one = RunConfig()  # in one process, however the run was laid out
        self.config = replace(config, cluster=one.cluster, learner=one.learner, rollout=one.rollout)
        training = training_store(folder, config.store)
        self.folder = folder
        self._history = RunHistory(folder).read()
        self._stores = [_open(training)]
        if (folder / EVALUATIONS_FILE).is_file():
            self._stores.append(_open(folder / EVALUATIONS_FILE))

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def __enter__(self) -> PastRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- rollouts --------------------------------------------------------------------------------

    @cached_property
    def entries(self) -> list[Chosen]:
        """Every stored rollout but those that the machine failed, in the order of the run."""
        training, *evaluations = self._stores
        found = [Chosen(entry=one, phase="rl") for one in training.entries()]
        for store in evaluations:
            found += [Chosen(entry=one, phase=PHASES[one.step]) for one in store.entries()]
        found = [one for one in found if one.entry.status is not Status.FAILED]
        return sorted(found, key=lambda one: (one.place, *_numbers(one.entry.rollout_id)))

    def rollout(self, chosen: Chosen) -> Rollout:
        return self._store(chosen).get(chosen.entry.rollout_id)

    def task(self, chosen: Chosen) -> Task | None:
        """As it was then; None of runs that kept no tasks."""
        return self._store(chosen).task(chosen.entry.task_id)

    def token_stats(self, chosen: Chosen) -> TokenStats | None:
        """The trainer's numbers on its tokens; None where no step trained on it."""
        return self._store(chosen).token_stats(chosen.entry.rollout_id)

    def sampling(self, chosen: Chosen, config: RunConfig) -> SamplingParams:
        """As the collector and the evaluation seed a rollout; `config` has the options there."""
        if chosen.phase != "rl":
            return replace(GREEDY, seed=derive_seed(GREEDY.seed, chosen.entry.rollout_id))
        seed = derive_seed(config.seed, "rollout", chosen.entry.rollout_id)
        return config.rl.sampling(seed)

    def _store(self, chosen: Chosen) -> RolloutStore:
        return self._stores[0 if chosen.phase == "rl" else 1]

    def tasks(self) -> list[Task]:
        """All that were stored."""
        found = {task.task_id: task for store in self._stores for task in store.tasks()}
        return list(found.values())

    def altered(self, step: int) -> list[str]:
        """The stored rollouts of a training step whose tokens are not those of their content hash,
        by their ids."""
        return [
            one.rollout_id
            for one in self._stores[0].entries(step=step)
            if content_hash(self._stores[0].get(one.rollout_id)) != one.content_hash
        ]

    def groups(self, step: int) -> list[list[Rollout]]:
        """The groups of rollouts that the optimizer step was made of, in its order. ValueError if
        one of them is not stored."""
        rollouts = [one for one in self._stores[0].query(step=step) if one.status != Status.FAILED]
        if len(rollouts) < self._num_played.get(step, 1):
            what = "not all" if rollouts else "not"
            raise ValueError(
                f"{self.folder}: the rollouts of step {step} are {what} stored any more "
                "(--keep-rollout-steps, -days, -mb), so the weights after it cannot be made again"
            )
        rollouts.sort(key=lambda one: _numbers(one.rollout_id))
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        rl = self.segments[self.segment((RL, step))].config.rl
        return [group for group in groups.values() if not _is_left_out(group, step, rl)]

    @cached_property
    def _num_played(self) -> dict[int, int]:
        """How many rollouts the steps had that metrics.jsonl has."""
        rows = read_metrics(self.folder / METRICS)
        return {row["step"]: int(row["num_rollouts"]) for row in rows if "num_rollouts" in row}

    def trained(self, rollout_id: str) -> Rollout:
        """A rollout of RL; KeyError where it is not stored."""
        return self._stores[0].get(rollout_id)

    # -- weights ---------------------------------------------------------------------------------

    @cached_property
    def bases(self) -> dict[int, list[Path]]:
        """Version -> the checkpoints that hold its weights, the newest first."""
        found: dict[int, list[Path]] = {}
        for root in (START, "checkpoints"):
            for folder in list_checkpoints(self.folder / root):
                cursor = self._cursor(folder)
                if cursor is not None and cursor.phase not in WARMING_UP:
                    found.setdefault(cursor.rl_steps_done, []).insert(0, folder)
        return found

    def _cursor(self, checkpoint: Path) -> Cursor | None:
        steps = RunHistory(self.folder).original("rl.steps", self.config.rl.steps)
        try:
            return Cursor.from_json(read_cursor(checkpoint), rl_steps=steps)
        except CheckpointError:
            return None

    @property
    def begins_with_model(self) -> bool:
        """Say whether RL began with the very model of the run's folder."""
        return not (self.config.warm_start.steps or self.config.fork)

    @cached_property
    def rl_steps_done(self) -> int | None:
        """The number of RL steps done when RL ended; None while RL goes on."""
        folders = list_checkpoints(self.folder / "checkpoints")
        cursor = self._cursor(folders[-1]) if folders else None
        return cursor.rl_steps if cursor is not None and cursor.phase in AFTER_RL else None

    def version(self, chosen: Chosen) -> int:
        """The policy that began it. ValueError where that cannot be told."""
        if chosen.phase == "untrained":
            return UNTRAINED
        if chosen.phase == "before":
            return 0
        if chosen.phase == "rl":
            return chosen.entry.version if chosen.entry.version >= 0 else chosen.entry.step
        if self.rl_steps_done is None:
            raise ValueError(
                f"{chosen.entry.rollout_id}: this run goes on with RL, so that it is not known "
                "after how many steps it was evaluated; replay --phase rl, or let it finish"
            )
        return self.rl_steps_done

    def fingerprints(self, version: int) -> dict[str, str] | None:
        """The fingerprints of the weights as they were published; None where they were not
        recorded."""
        name = f"weights/{version}"
        return self._stores[0].facts(name).get(name)

    # -- options and manifests -------------------------------------------------------------------

    @cached_property
    def segments(self) -> list[RunSegment]:
        """In the order of the run; there is one at least."""
        config = self.config
        found: list[RunSegment] = []
        for event in reversed(self._history[1:]):
            changes = {name: then for name, (then, _) in event["changes"].items()}
            changes = {name: value for name, value in changes.items() if not _is_layout(name)}
            if changes:
                found.append(RunSegment(begin=_place(event), config=config))
                config = with_options(config, changes, where=f"{self.folder}/history.jsonl")
        return [RunSegment(begin=(0, 0), config=config), *reversed(found)]

    def segment(self, place: Place) -> int:
        """The number of the segment that the place is in."""
        return max(i for i, one in enumerate(self.segments) if one.begin <= place)

    def begin_version(self, number: int) -> int:
        """The policy with which that segment begins: 0 before RL."""
        phase, step = self.segments[number].begin
        return step if phase == RL else (self.rl_steps_done or 0) if phase > RL else 0

    def manifest(self, place: Place) -> Manifest | None:
        """The manifest of the process that played there; None for runs that recorded none."""
        facts = self._stores[0].facts("start/")
        starts = [
            (_place(event) if number else (0, 0), facts[f"start/{number}"])
            for number, event in enumerate(self._history)
            if f"start/{number}" in facts
        ]
        return next((one for begin, one in reversed(starts) if begin <= place), None)


def _is_left_out(group: Sequence[Rollout], step: int, rl: RLConfig) -> bool:
    """Say whether the batch of the step was made without a group that was played for it, as
    flow/assembly.py sorts them. Those without a signal the learner leaves out itself."""
    oldest = min((one.version for one in group if one.version >= 0), default=-1)
    remedy = "train"
    if len(group) < rl.group_size:
        remedy = rl.batch.spoilt
    elif 0 <= oldest < step - rl.max_staleness:
        remedy = rl.batch.stale
    return remedy in ("drop", "replace")


def _is_layout(option: str) -> bool:
    """Options of where things are computed, which a replay decides for itself."""
    return option.partition(".")[0] in ("cluster", "learner", "rollout", "monitor", "log", "env")


def _place(event: dict[str, Any]) -> Place:
    """From where on the changes of a resumed run hold. One that had ended goes on with RL if it is
    to have more steps, and with the evaluations after it if not."""
    number = PHASES.index(event["phase"])
    if event["phase"] not in AFTER_RL:
        return number, event["step"] if number == RL else 0
    more = event["changes"].get("rl.steps", (0, 0))[1] > event["step"]
    return (RL, event["step"]) if more else (min(number, PHASES.index("after")), 0)


def _open(address: str | Path) -> RolloutStore:
    """Open a store as its writer does: the run may be resumed while it is replayed. For reading
    alone where it belongs to somebody else, or lies on a read-only disk."""
    try:
        return RolloutStore(address)
    except StoreError:
        return open_for_reading(address)


def _numbers(rollout_id: str) -> list[int]:
    """Those in it, so that g10 comes after g9."""
    digits = "".join(one if one.isdigit() else " " for one in rollout_id)
    return [int(one) for one in digits.split()]


class PastEvaluation(PastRun):
    """The folder of a `nanorl eval`: one model, which has not learned meanwhile."""

    def __init__(self, folder: Path) -> None:
        """ValueError if it has not come to its end."""
        found = Evaluation.read(folder / "eval.json")
        about = found.about
        require(about["options"], folder)
        config = RunConfig.from_json(about["options"])
        # The options may be a run's: its store has what it trained on, and nothing of this folder.
        super().__init__(folder, replace(config, out=folder, resume=True, store=""))
        self._temperature = about["temperature"]
        self._scratch = ExitStack()
        model = self._scratch.enter_context(evaluated_models(config, found.title).folder())
        self.config = replace(self.config, model=str(model))

    def close(self) -> None:
        super().close()
        self._scratch.close()

    @cached_property
    def entries(self) -> list[Chosen]:
        found = [Chosen(entry=one, phase="eval") for one in self._stores[0].entries()]
        found = [one for one in found if one.entry.status is not Status.FAILED]
        return sorted(found, key=lambda one: _numbers(one.entry.rollout_id))

    def version(self, chosen: Chosen) -> int:
        return UNTRAINED

    def sampling(self, chosen: Chosen, config: RunConfig) -> SamplingParams:
        seed = derive_seed(config.evaluation.seed, chosen.entry.rollout_id)
        return SamplingParams(temperature=self._temperature, seed=seed)

    def manifest(self, place: Place) -> Manifest | None:
        return self._stores[0].facts("start/0").get("start/0")

    def _store(self, chosen: Chosen) -> RolloutStore:
        return self._stores[0]


def open_past(folder: Path) -> PastRun:
    """Open a run's folder or an evaluation's. ValueError if it is neither."""
    if (folder / "eval.json").is_file() and not (folder / "config.json").is_file():
        return PastEvaluation(folder)
    require(named_options(folder), folder)
    return PastRun(folder, read_run(folder))


def choose(
    run: PastRun,
    rollout_ids: Sequence[str] = (),
    *,
    phase: str = "any",
    steps: tuple[int, int] | None = None,
    num: int = 0,
) -> list[Chosen]:
    """The rollouts of these ids; or those of a phase, or of RL steps from the first to the last of
    `steps`, or `num` of all, spread evenly. ValueError where there is none."""
    if rollout_ids:
        return [_find(run, name) for name in rollout_ids]
    entries = [one for one in run.entries if phase in ("any", one.phase)]
    if steps is not None:
        first, last = steps
        entries = [one for one in entries if one.place[0] == RL and first <= one.place[1] <= last]
    elif num:
        count = min(num, len(entries))
        entries = [entries[i * len(entries) // count] for i in range(count)]
    if not entries:
        raise ValueError(f"{run.folder}: no stored rollout of that phase or of those steps")
    return entries


def _find(run: PastRun, name: str) -> Chosen:
    found = next((one for one in run.entries if one.entry.rollout_id == name), None)
    if found is None:
        ids = [one.entry.rollout_id for one in run.entries]
        raise ValueError(
            f"{run.folder}: no stored rollout is called {name}; they are as {ids[0]}, "
            f"{ids[-1]}; nanorl view shows them"
        )
    return found
