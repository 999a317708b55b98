"""Evaluation while RL goes on: its figures by hand, the best checkpoint, and that a run which looks
computes what one computes that does not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import nanorl
from nanoengine.state.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
    read_cursor,
)
from nanoengine.state.fingerprint import fingerprint
from nanoengine.stop_signals import Interrupted
from nanorl.commands.compare import read_evaluation
from nanorl.observability.report.observer import RLEvaluated, RunObserver
from nanorl.observability.report.rl_evaluations import figures, line
from nanorl.observability.results import StepResult
from nanorl.observability.store import RolloutStore
from nanorl.options.phase_config import EvaluationConfig
from nanorl.run import rl_phase, running_evaluation, state
from nanorl.run.continuation import find_origin, take_over
from nanorl.run.evaluation_beside import WaitingPublisher
from nanorl.run.kept_records import KeptRLEvaluations
from nanorl.run.observers import make_observers
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.running_evaluation import is_better
from nanorl.run.saved_models import find_models, read_run
from nanorl.task import Task
from nanorl.types import Rollout, Status

OPTIONS: dict[str, Any] = {
    **{"dtype": "fp32", "threads": 1, "rl.tasks_per_step": 1, "rl.steps": 5, "save_every": 2},
    **{"warm_start.steps": 30, "warm_start.traces_per_step": 2, "warm_start.drill_fraction": 0.0},
    **{"keep_checkpoints": 1},
    **{"rl.group_size": 8, "rl.algorithm.advantage": "reinforce_pp", "agent.max_turn_tokens": 4},
}
FEW = {"num_tasks": 2, "num_tasks_untrained": 1, "num_tasks_no_tool": 1}
LOOKS = FEW | {"every": 2, "num_tasks_each": 2, "k": 3}
pytestmark = pytest.mark.xdist_group("heavy")


class Say(nanorl.Env):
    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task(f"say {rng.randint(0, 99)}", answer="x")

    def teacher(self, observations: list[str], rng: Any) -> str:
        return str(rng.choice("xy"))  # right half of the time: RL has something to learn


def train(out: Path, **options: Any) -> dict[str, Any]:
    nanorl.train("tiny", env=Say, out=out, options=OPTIONS | options)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def weights(run: Path) -> bytes:
    return (run / "model-trained" / "model.safetensors").read_bytes()


def fingerprints(run: Path, step: int) -> Mapping[str, Any]:
    with RolloutStore(run / "rollouts.sqlite") as store:
        found: Mapping[str, Any] = store.facts()[f"weights/{step}"]
    return found


def played(successes: list[int], k: int) -> list[tuple[Task, Rollout]]:
    """Tasks of k samples each, so many of which succeed."""
    return [
        (
            Task(f"task {i}", answer="x"),
            Rollout(
                task_id=Task(f"task {i}", answer="x").task_id,
                group_id=f"g{i}",
                rollout_id=f"g{i}-{member}",
                tokens=[1, 2],
                loss_mask=[0, 1],
                logps=[0.0, -0.5],
                versions=[0, 0],
                reward=float(member < num),
                status=Status.FINISHED,
            ),
        )
        for i, num in enumerate(successes)
        for member in range(k)
    ]


# -- figures ---------------------------------------------------------------------------------------


def test_figures_are_those_of_a_hand() -> None:
    found = figures(played([3, 1, 0], k=4), 2)
    assert found["success"] == pytest.approx((3 / 4 + 1 / 4 + 0) / 3)
    # Of four samples two are drawn: with three right one is always among them, with one in half
    assert found["pass_at_k"] == pytest.approx((1 + (1 - 3 / 6) + 0) / 3)
    assert found["mean_reward"] == pytest.approx(1 / 3) and found["num_tasks"] == 3
    # three means: their standard deviation is .3819, 1.96 * .3819 / sqrt(3) = .4322
    assert found["success_low"] == 0.0
    assert found["success_high"] == pytest.approx(1 / 3 + 0.4322, abs=1e-4)


def test_a_row_is_said_in_words() -> None:
    one = figures(played([3, 1], k=4), 4)
    row = {"step": 8, "k": 4, "heldout": one, "train": figures(played([4, 4], k=4), 4)}
    assert line(row, is_best=True) == (
        "step 8: held-out 50.0% (95 %: 1.0 to 99.0), pass@4 100.0%; training tasks 100.0%; "
        "the best so far"
    )
    assert "pass@" not in line(row | {"k": 1}, is_best=False)


def test_the_best_is_of_evaluations_that_measured_the_same() -> None:
    """Greedy success is mostly higher than sampled success, and few tasks may be easy ones."""

    def row(success: float, temperature: float = 1.0, num_tasks: int = 50) -> dict[str, Any]:
        return {
            "temperature": temperature,
            "heldout": {"success": success, "num_tasks": num_tasks},
        }

    assert is_better(row(0.0), {})
    assert is_better(row(0.5), row(0.4)) and not is_better(row(0.4), row(0.4))
    assert is_better(row(0.3), row(0.6, temperature=0.0))
    assert is_better(row(0.3), row(0.6, num_tasks=2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 4, "temperature": 0.0}, "greedy samples are all alike"),
        ({"every": -1}, "must be 0 or more"),
        ({"k": 0}, "must be 1 or more"),
        ({"temperature": float("nan")}, "finite"),
        ({"num_tasks_each": 0}, "must be 1 or more"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EvaluationConfig(**options)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain") / "run"
    train(out, evaluation=FEW)
    return out


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out success after 0, 2, 4 and 5 steps: .1, .5, .5 and .3."""
    scores = {0: 0.1, 2: 0.5, 3: 0.2, 4: 0.5, 5: 0.3, 6: 0.2}
    real = running_evaluation.figures

    def figures_of(pairs: list[tuple[Task, Rollout]], k: int) -> dict[str, float]:
        group = pairs[0][1].group_id  # eval-rl2-heldout-0
        step, split = group.removeprefix("eval-rl").split("-")[:2]
        success = scores[int(step)] if split == "heldout" else 0.9
        return real(pairs, k) | {"success": success}

    monkeypatch.setattr(running_evaluation, "figures", figures_of)


def test_a_run_that_looks_computes_what_one_computes_that_does_not(
    plain: Path, scripted: None, tmp_path: Path
) -> None:
    summary = train(tmp_path / "run", evaluation=LOOKS)
    assert weights(tmp_path / "run") == weights(plain)
    for step in range(6):
        assert fingerprints(tmp_path / "run", step) == fingerprints(plain, step)
    assert [row["step"] for row in summary["evaluations"]] == [0, 2, 4, 5]
    assert summary["best_step"] == 2  # the first of two that are equally good
    seconds = [row["seconds"] for row in summary["evaluations"]]
    assert min(seconds) > 0 and sum(seconds) < summary["wall_s"]
    assert "evaluations" not in json.loads((plain / "summary.json").read_text())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "While it learnt" in page and "after 2 steps: 50.0%" in page
    assert "While it learnt" not in (plain / "report.html").read_text()
    with RolloutStore(tmp_path / "run" / "evaluations-rl.sqlite") as store:
        entries = store.entries()
    assert len(entries) == 4 * 2 * 2 * 3 and {one.step for one in entries} == {0, 2, 4, 5}
    config = read_run(tmp_path / "run")
    asyncio.run(KeptRLEvaluations(config).on_restore(2))  # the run goes back to two steps
    with RolloutStore(tmp_path / "run" / "evaluations-rl.sqlite") as store:
        assert {one.step for one in store.entries()} == {0, 2}


def test_the_best_checkpoint_is_kept_by_its_name_and_the_others_by_their_steps(
    scripted: None, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(run, evaluation=LOOKS)
    kept = find_models(f"{run}:best")
    assert kept.is_checkpoint and kept.place.parent == run / "best"
    assert len(list_checkpoints(run / "best")) == 1
    assert open_checkpoint(kept.place).meta["cursor"]["step"] == 2
    with kept.folder() as folder:
        from nanoengine.formats.hf import load_model
        from nanorl.run.manifest import model_fingerprint

        model, last = load_model(folder), load_model(run / "model-trained")
        assert model_fingerprint(folder) == model_fingerprint(run / "model-trained")
        pairs = zip(model.parameters(), last.parameters(), strict=True)
        assert any(not one.equal(other) for one, other in pairs)
    assert find_models(f"{run}@2").place == kept.place
    assert find_models(f"{run}@5").describe().endswith("(a checkpoint: after 5 steps of RL)")
    assert find_models(f"{run}@0").place.parent == run / "start"
    with pytest.raises(ValueError, match=r"no checkpoint after 4 .* there are: @0, @2, @5"):
        find_models(f"{run}@4")
    for name in (f"{run}@2", f"{run}:best"):  # a fork begins there, too
        origin = find_origin(name)
        assert (origin.checkpoint, origin.run, origin.name) == (kept.place, run, f"{run}@2")
    assert find_origin(str(run)).name == f"{run}@5"
    with pytest.raises(ValueError, match=r"no such checkpoint; there are: @0, @2, @5 \(@done\)"):
        find_origin(f"{run}@4")
    take_over(replace(read_run(run), out=tmp_path / "fork", fork=f"{run}:best"))
    [taken] = list_checkpoints(tmp_path / "fork" / "checkpoints")
    assert read_cursor(taken)["step"] == 2 and not read_cursor(taken)["best"]
    before, best = read_evaluation(f"{run}@0"), read_evaluation(f"{run}:best")
    assert [one.task_id for one in before.scores] == [one.task_id for one in best.scores]
    assert before.about["step"] == 0 and best.about["step"] == 2
    assert best.about["samples_per_task"] == 3 and best.about["temperature"] == 1.0


def test_a_run_that_never_looked_says_how_to_keep_the_best(plain: Path) -> None:
    with pytest.raises(ValueError, match=r"--evaluation\.every N"):
        find_models(f"{plain}:best")


def test_a_resumed_run_has_the_evaluations_of_one_that_was_not_stopped(
    scripted: None, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", evaluation=LOOKS)
    train(tmp_path / "cut", **{"rl.steps": 3}, evaluation=LOOKS)
    resumed = train(tmp_path / "cut", evaluation=LOOKS, resume=True)

    def curve(summary: dict[str, Any]) -> list[Any]:
        rows = [row for row in summary["evaluations"] if row["step"] != 3]  # its last step then
        return [(row["step"], row["heldout"]["num_tasks"]) for row in rows]

    assert curve(resumed) == curve(whole)
    assert resumed["best_step"] == whole["best_step"] == 2


def test_an_evaluation_comes_after_all_of_the_step_before_it(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracker whose steps only rise drops what comes late."""
    events: list[tuple[str, int]] = []

    class Witness(RunObserver):
        async def on_step(self, step: StepResult) -> None:
            events.append(("step", step.step))

        async def on_rl_evaluation(self, evaluated: RLEvaluated) -> None:
            events.append(("evaluation", evaluated.step))

    monkeypatch.setattr(
        state, "make_observers", lambda *parts: [*make_observers(*parts), Witness()]
    )
    train(tmp_path / "run", evaluation=LOOKS)
    steps = [("step", step) for step in range(5)]
    assert [one for one in events if one[0] == "step"] == steps
    places = [events.index(("evaluation", step)) for step in (0, 2, 4, 5)]
    assert places == [0, 3, 6, 8]  # before all, and behind steps 1, 3 and 4


def test_an_evaluation_that_is_broken_off_is_made_when_the_run_goes_on(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while it plays: the step before it is whole, and no training waits for its end."""
    whole = train(tmp_path / "whole", evaluation=LOOKS)
    real = running_evaluation.evaluate
    begun: list[str] = []

    async def evaluate(*args: Any, name: str, **options: Any) -> Any:
        begun.append(name)
        if name == "rl2-heldout":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)  # it does not end by itself
        return await real(*args, name=name, **options)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(running_evaluation, "evaluate", evaluate)
        train(tmp_path / "cut", evaluation=LOOKS)
    assert begun == ["rl0-heldout", "rl0-train", "rl2-heldout"]
    resumed = train(tmp_path / "cut", evaluation=LOOKS, resume=True)
    assert [row["step"] for row in resumed["evaluations"]] == [0, 2, 4, 5]
    assert resumed["best_step"] == whole["best_step"]
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert (
        open_checkpoint(find_models(f"{tmp_path / 'cut'}:best").place).meta["cursor"]["step"] == 2
    )


def test_a_run_that_dies_before_it_keeps_the_best_keeps_it_when_it_goes_on(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunCheckpoints.keep_best

    def die_at_two(self: RunCheckpoints) -> None:
        newest = latest_checkpoint(self.folder)
        if newest is not None and open_checkpoint(newest).meta["cursor"]["step"] == 2:
            raise OSError("no space left")
        real(self)

    # The checkpoint of two steps is written by the evaluation, not by `save_every`.
    options = {"save_every": 3, "rl.steps": 3}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(RunCheckpoints, "keep_best", die_at_two)
        train(tmp_path / "run", evaluation=LOOKS, **options)
    resumed = train(tmp_path / "run", evaluation=LOOKS, resume=True, **options)
    assert [row["step"] for row in resumed["evaluations"]] == [0, 2, 3]
    best = find_models(f"{tmp_path / 'run'}:best").place
    assert open_checkpoint(best).meta["cursor"]["step"] == resumed["best_step"] == 2


def test_a_run_without_rl_looks_at_nothing(tmp_path: Path) -> None:
    summary = train(tmp_path / "run", **{"rl.steps": 0}, evaluation=LOOKS)
    assert "evaluations" not in summary and summary["steps"] == 0


def test_a_short_list_of_training_tasks_counts_each_once(scripted: None, tmp_path: Path) -> None:
    splits = ["train"] * 4 + ["heldout"]
    rows = [{"prompt": f"say {i}", "answer": "x", "split": one} for i, one in enumerate(splits)]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"tasks": str(tasks), "rl.steps": 2}
    summary = train(tmp_path / "run", evaluation=LOOKS | {"num_tasks_each": 50}, **options)
    (first, *_) = summary["evaluations"]
    assert first["train"]["num_tasks"] == 4 and first["heldout"]["num_tasks"] == 1
    with RolloutStore(tmp_path / "run" / "evaluations-rl.sqlite") as store:
        played = [one for one in store.entries() if one.step == 0]
    assert len(played) == 5 * 3


def test_it_plays_as_many_held_out_tasks_as_it_says_whatever_those_around_rl_play(
    scripted: None, tmp_path: Path
) -> None:
    looks = LOOKS | {"num_tasks": 2, "num_tasks_each": 5}
    summary = train(tmp_path / "run", evaluation=looks, **{"rl.steps": 2})
    numbers = [
        (row["heldout"]["num_tasks"], row["train"]["num_tasks"]) for row in summary["evaluations"]
    ]
    assert numbers == [(5, 5), (5, 5)]
    assert summary["heldout_n"] == summary["heldout_n_before"] == 2


def test_a_fork_has_a_best_of_its_own(scripted: None, tmp_path: Path) -> None:
    train(tmp_path / "run", evaluation=LOOKS)
    forked = train(
        tmp_path / "fork", fork=f"{tmp_path / 'run'}@5", **{"rl.steps": 6}, evaluation=LOOKS
    )
    assert [row["step"] for row in forked["evaluations"]] == [0, 2, 4, 5, 6]
    assert forked["best_step"] == 6  # the better ones are of a run whose checkpoints it has not
    assert find_models(f"{tmp_path / 'fork'}:best").place.is_relative_to(tmp_path / "fork")


def test_a_fork_that_plays_something_else_takes_no_score_and_no_group_along(
    scripted: None, tmp_path: Path
) -> None:
    """Success before RL would be of other tasks, or of other rewards, than success after it."""
    run = tmp_path / "run"
    train(run, **{"rl.replay.share": 0.5, "rl.algorithm.advantage": "grpo"}, evaluation=LOOKS)
    origin = read_run(run)
    stands = read_cursor(find_origin(f"{run}@5").checkpoint)
    assert stands["results"] and stands["evaluations"] and stands["flow"]["replay"]["groups"]
    changes: dict[str, dict[str, Any]] = {
        "rate": {"rl": replace(origin.rl, lr=1e-5)},
        "environment": {"env": "mine.py:Mine"},
        "reward": {"reward": "mine.py:score"},
    }
    for name, change in changes.items():
        fork = replace(origin, out=tmp_path / name, fork=f"{run}@5", **change)
        take_over(fork)
        [taken] = list_checkpoints(fork.run_dir / "checkpoints")
        cursor, is_alike = read_cursor(taken), name == "rate"
        assert bool(cursor["results"]) == bool(cursor["evaluations"]) == is_alike
        assert ("replay" in cursor["flow"]) == is_alike
        assert cursor["flow"]["queue"] == stands["flow"]["queue"]


def test_an_asynchronous_run_looks_with_the_weights_that_the_step_left(tmp_path: Path) -> None:
    train(tmp_path / "run", **{"rl.max_staleness": 1}, evaluation=LOOKS)
    with RolloutStore(tmp_path / "run" / "evaluations-rl.sqlite") as store:
        for entry in store.entries():
            versions = {v for v in store.get(entry.rollout_id).versions if v >= 0}
            assert versions == {entry.step}


def test_replicas_with_a_process_of_their_own_play_it_beside_the_next_step(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation after two steps ends only when the optimizer has made the third; were it a
    pause, the two would wait for each other."""
    local = {"cluster": {"backend": "local"}}
    train(tmp_path / "plain", evaluation=FEW, **local)
    real, has_trained = running_evaluation.evaluate, asyncio.Event()

    class Noting(WaitingPublisher):
        async def publish(self, version: int) -> float:
            if version == 3:  # it is asked when the optimizer has made the step
                has_trained.set()
            return await super().publish(version)

    async def evaluate(*args: Any, name: str, **options: Any) -> Any:
        if name == "rl2-heldout":
            await asyncio.wait_for(has_trained.wait(), timeout=120)
        return await real(*args, name=name, **options)

    monkeypatch.setattr(running_evaluation, "evaluate", evaluate)
    monkeypatch.setattr(rl_phase, "WaitingPublisher", Noting)
    run = tmp_path / "run"
    summary = train(run, evaluation=LOOKS, **local)
    assert weights(run) == weights(tmp_path / "plain")
    assert [row["step"] for row in summary["evaluations"]] == [0, 2, 4, 5]
    with RolloutStore(run / "evaluations-rl.sqlite") as store:
        for entry in store.entries():
            assert {v for v in store.get(entry.rollout_id).versions if v >= 0} == {entry.step}
    best = find_models(f"{run}:best")
    assert open_checkpoint(best.place).meta["cursor"]["step"] == summary["best_step"] == 2
    with best.folder() as folder:  # the weights that it keeps are of then
        kept = load_file(folder / "model.safetensors")
    assert {name: fingerprint(one) for name, one in kept.items()} == fingerprints(run, 2)
