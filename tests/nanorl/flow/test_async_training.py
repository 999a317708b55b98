"""Whole training loops over a small model and a task without tools: synchronous, asynchronous, and
on batches that have nothing to teach. The task: say token 7 among four."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import make_model, train

from nanoengine.config import EngineConfig
from nanoengine.state.whole_engine import Engine
from nanoinfer.params import SamplingParams
from nanorl.agents.collector import RolloutCollector
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.flow.batch_policy import BatchPolicy
from nanorl.flow.journal import Journal
from nanorl.observability.results import StepResult
from nanorl.run.trainer import Trainer
from nanorl.task import Task
from nanorl.types import Rollout


def versions(step: StepResult) -> set[int]:
    return {v for group in step.groups for r in group for v in r.versions if v >= 0}


def test_a_synchronous_run_trains_on_its_own_tokens_alone_and_its_gap_is_zero() -> None:
    steps, _ = train()
    assert [versions(step) for step in steps] == [{0}, {1}, {2}, {3}]
    for step in steps:
        assert step.metrics["staleness_max"] == 0.0
        assert step.metrics["logp_gap_max"] == 0.0 and step.metrics["logp_gap_tokens"] > 0
        assert "drift_max" not in step.metrics


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_an_asynchronous_run_keeps_its_bound_and_tells_age_from_error(max_staleness: int) -> None:
    steps, _ = train(steps=8, max_staleness=max_staleness)
    ages = [step.metrics["staleness_max"] for step in steps]
    assert ages[0] == 0.0 and 1.0 <= max(ages) <= max_staleness
    for step in steps:
        assert step.metrics["staleness_max"] == step.step - min(versions(step))
        assert step.metrics.get("logp_gap_max", 0.0) == 0.0  # same weights: the same bits
        assert {r.version for group in step.groups for r in group} <= versions(step)
    drifts = [step.metrics["drift_max"] for step in steps if "drift_max" in step.metrics]
    assert max(drifts) > 1e-3
    corrections = [step.metrics["correction"] for step in steps if "correction" in step.metrics]
    assert corrections[0] == 1.0 and any(abs(c - 1) > 1e-4 for c in corrections)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_policy_learns_with_and_without_staleness(max_staleness: int) -> None:
    steps, _ = train(steps=24, tasks_per_step=4, max_staleness=max_staleness)
    rewards = [step.metrics["reward"] for step in steps]
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-3:]) / 3 > 0.9


NO_SIGNAL: list[dict[str, Any]] = [
    {"max_staleness": 1},
    {"epochs": 2},
    {"algorithm": AlgorithmSpec(dynamic_sampling=True)},
    {"algorithm": AlgorithmSpec(dynamic_sampling=True, entropy_coef=0.1), "max_staleness": 1},
]


@pytest.mark.parametrize("options", NO_SIGNAL)
def test_a_batch_without_signal_changes_nothing_and_the_run_goes_on(options: dict) -> None:
    steps, engine = train(score=lambda _: 0.0, **options)
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert all(step.metrics["groups_with_signal"] == 0 for step in steps)
    assert steps[0].metrics["logp_gap_max"] == 0.0  # measured all the same
    assert all(step.metrics["num_trained_rollouts"] == 0 for step in steps)
    before = Engine(make_model(), EngineConfig(dtype="fp32")).export_state()
    for (name, now), (_, then) in zip(engine.export_state(), before, strict=True):
        assert torch.equal(now, then), name


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_batch_whose_rollouts_all_failed_claims_no_reward_and_the_run_goes_on(
    max_staleness: int,
) -> None:
    steps, engine = train(failing_step=1, max_staleness=max_staleness)
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert engine.version == 3
    lost = steps[1]
    assert lost.metrics["num_rollouts"] == 0
    assert not {"reward", "success", "logp_gap_max"} & set(lost.metrics)
    assert sum(len(step.failed) for step in steps) == 2 * 4


def test_no_forward_pass_is_spent_on_the_old_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first epoch it is the policy itself, in the second the log-probs of the first."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a separate forward pass")

    monkeypatch.setattr(Engine, "forward_logprobs", refuse)
    options = {"epochs": 2, "max_staleness": 1, "algorithm": AlgorithmSpec(entropy_coef=0.01)}
    steps, engine = train(**options, measures_gap=False)
    assert engine.version == 4 * 2
    ratios = [step.metrics["ratio"] for step in steps]  # of the second epoch
    assert all(abs(ratio - 1) > 1e-5 for ratio in ratios)


def test_rollout_time_is_when_a_group_is_played_and_not_the_time_between() -> None:
    """Two groups overlap from 1 to 4 on the clock, a third is played from 10 to 12."""
    now = 0.0

    async def scenario() -> list[float]:
        nonlocal now
        doors = {name: asyncio.Event() for name in "abc"}

        async def play(task: Task, *, group_id: str, **_: Any) -> Rollout:
            await doors[task.task_id].wait()
            return Rollout(
                task_id="", group_id="", rollout_id="", tokens=[], loss_mask=[], logps=[],
                versions=[],
            )  # fmt: skip

        collector = RolloutCollector(play, run_seed=0, clock=lambda: now)
        found = []

        async def begin(name: str) -> asyncio.Task[list[Rollout]]:
            task = Task(task_id=name, kind="", prompt="", answer="")
            group = asyncio.create_task(
                collector.run_group(task, group_id=name, size=1, sampling=SamplingParams())
            )
            await asyncio.sleep(0)
            return group

        now = 1.0
        first = await begin("a")
        now = 2.0
        second = await begin("b")
        now = 3.0
        found.append(collector.take_busy_s())  # both go on
        doors["a"].set()
        await first
        now = 4.0
        doors["b"].set()
        await second
        now = 10.0
        third = await begin("c")
        now = 12.0
        doors["c"].set()
        await third
        now = 20.0
        return [*found, collector.take_busy_s(), collector.take_busy_s()]

    assert asyncio.run(scenario()) == [2.0, 1.0 + 2.0, 0.0]


def test_a_step_reports_the_time_of_its_rollouts_and_not_its_own_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_busy_s(_: RolloutCollector) -> float:
        return 7.0

    monkeypatch.setattr(RolloutCollector, "take_busy_s", take_busy_s)
    steps, _ = train(steps=2)
    assert [step.metrics["rollout_s"] for step in steps] == [7.0, 7.0]
    assert all(0 < step.metrics["wait_s"] <= step.metrics["step_s"] for step in steps)


# -- batches of what has finished ------------------------------------------------------------------

FINISH = BatchPolicy(order="finish")


def test_batches_of_whatever_is_complete_are_the_same_bits_without_staleness() -> None:
    """All groups of a step are needed, and a batch is in the order of its tasks."""
    in_order, first = train(steps=3)
    as_complete, second = train(steps=3, batch=FINISH)
    for one, other in zip(in_order, as_complete, strict=True):
        assert [r.tokens for g in one.groups for r in g] == [
            r.tokens for g in other.groups for r in g
        ]
    for (name, here), (_, there) in zip(first.export_state(), second.export_state(), strict=True):
        assert torch.equal(here, there), name


@pytest.mark.parametrize("leftover", ["carry", "cut"])
def test_over_sampled_groups_are_carried_over_or_given_up(leftover: Any) -> None:
    batch = BatchPolicy(order="finish", oversample=2, leftover=leftover)
    steps, _ = train(steps=6, batch=batch)
    assert [step.step for step in steps] == list(range(6))
    ids = [r.rollout_id for step in steps for group in step.groups for r in group]
    assert len(ids) == len(set(ids)) == 6 * 2 * 4  # each is trained on once
    assert all(len(step.groups) == 2 for step in steps)
    oldest = max(step.metrics["staleness_max"] for step in steps)
    assert oldest >= 1  # some began under an earlier policy
    for step in steps:
        of_ages = {
            name: value for name, value in step.metrics.items() if "staleness_tokens/" in name
        }
        assert sum(of_ages.values()) == step.metrics["action_tokens"]
        assert step.metrics.get("logp_gap_max", 0.0) == 0.0
        assert ("groups_cut" in step.metrics) == (leftover == "cut")


def test_dynamic_sampling_replaces_groups_and_the_run_is_still_reproducible() -> None:
    def run() -> tuple[list[list[str]], list[float], Engine]:
        spec = AlgorithmSpec(dynamic_sampling=True)
        steps, engine = train(steps=6, tasks_per_step=3, lr=3e-2, algorithm=spec)
        names = [sorted({r.group_id for g in step.groups for r in g}) for step in steps]
        return names, [step.metrics["groups_replaced"] for step in steps], engine

    names, replaced, engine = run()
    again, _, other = run()
    assert names == again and sum(replaced) > 0
    flat = [name for step in names for name in step]
    assert len(flat) == len(set(flat))  # nothing is played twice
    assert [len(step) for step in names] == [3 + int(n) for n in replaced]
    for (name, here), (_, there) in zip(engine.export_state(), other.export_state(), strict=True):
        assert torch.equal(here, there), name


def test_every_step_says_how_old_its_tokens_were_and_who_was_idle() -> None:
    steps, _ = train(steps=5, max_staleness=1, batch=FINISH)
    for step in steps:
        metrics = step.metrics
        ages = {name: n for name, n in metrics.items() if name.startswith("staleness_tokens/")}
        assert sum(ages.values()) == metrics["action_tokens"] > 0
        assert 0 <= metrics["idle_trainer"] < 1 and 0 <= metrics["idle_collector"] <= 1
        assert metrics["wasted_tokens"] == 0


def test_a_straggler_stalls_nobody_where_batches_are_made_of_what_is_complete() -> None:
    """Task 1-0 ends after five steps, if they do not wait for it."""

    def step_of_straggler(batch: BatchPolicy) -> int:
        options: dict[str, Any] = {"steps": 6, "max_staleness": 2, "batch": batch}
        steps, _ = train(straggler="1-0", until_step=5, **options)
        [found] = [step.step for step in steps for g in step.groups if g[0].task_id == "1-0"]
        return found

    assert step_of_straggler(BatchPolicy()) == 1
    assert step_of_straggler(FINISH) == 5
    # Begun by version 0, it is to be in a batch of version 2 at the latest.
    assert step_of_straggler(BatchPolicy(order="finish", stale="wait")) == 2


# -- minibatches -----------------------------------------------------------------------------------


def test_minibatches_are_steps_of_their_own_against_one_old_policy() -> None:
    spec = AlgorithmSpec(entropy_coef=0.01)  # no sample without a gradient
    steps, engine = train(steps=4, tasks_per_step=4, minibatches=2, epochs=2, algorithm=spec)
    assert engine.version == 4 * 2 * 2
    assert all(step.metrics["logp_gap_max"] == 0.0 for step in steps)
    assert all(abs(step.metrics["ratio"] - 1) > 1e-5 for step in steps)


def test_stale_minibatches_are_scored_once_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    score = Engine.forward_logprobs

    def count(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return score(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "forward_logprobs", count)
    train(steps=3, minibatches=2)
    assert calls == 0  # the rollouts' own log-probs are those of the old policy
    train(steps=3, minibatches=2, max_staleness=1, measures_gap=False)
    assert calls == 3
    spec = AlgorithmSpec(loss="decoupled_ppo", old_policy="interpolated")
    train(steps=3, minibatches=2, max_staleness=1, algorithm=spec, measures_gap=False)
    assert calls == 3


# -- a run that is killed --------------------------------------------------------------------------


class Killed(Exception):  # noqa: N818 - named as what happened
    """Where a process would die."""


@pytest.mark.parametrize("order", ["task", "finish"])
def test_a_killed_asynchronous_run_loses_no_rollout_and_trains_none_twice(
    tmp_path: Path, order: Any
) -> None:
    """Checkpoints after steps 3 and 6; it dies in step 5, and again in step 8."""
    options: dict[str, Any] = {
        "steps": 10, "max_staleness": 2, "tasks_per_step": 2, "batch": BatchPolicy(order=order),
    }  # fmt: skip
    saved: dict[str, Any] = {}
    trained: dict[int, list[str]] = {}
    played: list[str] = []

    def attempt(dies_in: int | None) -> None:
        def after(trainer: Trainer, engine: Engine, result: StepResult) -> None:
            if result.step == dies_in:
                raise Killed
            trained[result.step] = [r.rollout_id for g in result.groups for r in g]
            if result.step in (3, 6):
                weights = {name: value.clone() for name, value in engine.export_state()}
                saved.update(step=result.step + 1, state=trainer.state, weights=weights)

        journal = Journal(tmp_path / "journal.sqlite")
        try:
            train(after=after, journal=journal, saved=saved, played=played, **options)
        except Killed:
            pass
        finally:
            journal.close()

    attempt(5)
    before = len(played)
    attempt(8)
    attempt(None)
    flat = [name for step in sorted(trained) for name in trained[step]]
    assert sorted(trained) == list(range(10))
    assert len(flat) == len(set(flat)) == 10 * 2 * 4
    numbers = sorted({int(name.split("-g")[1].split("-")[0]) for name in flat})
    assert numbers == list(range(20))  # every task, once
    assert before < len(played) < 3 * 10 * 2 * 4
