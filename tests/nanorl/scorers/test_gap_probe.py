"""The log-prob gap where rollouts run ahead of the trainer: measured on what waits, and told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_training import PROMPT, make_model, train
from test_transfer_queue import group
from waiting import turns

from nanoengine.config import EngineConfig
from nanoengine.packing import Sample
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import TrainBatch, build_batch
from nanorl.flow.group import FinishedGroup
from nanorl.flow.transfer_queue import GROUP, TransferQueue
from nanorl.learner import Learner
from nanorl.observability.report.summary import gap_text
from nanorl.options.agent_config import AgentConfig
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.scorers.gap_probe import NUM_ROLLOUTS, WAIT_SHARE, GapProbe, gap_on
from nanorl.scorers.scored_learner import ScoredLearner, make_learner
from nanorl.types import Rollout

SPEC = AlgorithmSpec(entropy_coef=0.1)


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await scenario()

    return asyncio.run(limited())


def played(version: int, name: str = "a", members: int = 2) -> list[Rollout]:
    """Rollouts that the model of `make_model` sampled as policy `version`: their log-probs are its
    own."""
    engine = Engine(make_model(), EngineConfig(dtype="fp32"))
    tokens = [*PROMPT, 7, 5, 9]
    mask = [0] * len(PROMPT) + [1] * 3
    [logp_T] = engine.forward_logprobs([Sample(tokens=tokens, loss_mask=mask)])
    logps = [value if m else 0.0 for value, m in zip(logp_T.tolist(), mask, strict=True)]
    return [
        Rollout(
            task_id=name,
            group_id=name,
            rollout_id=f"{name}-m{member}",
            tokens=tokens,
            loss_mask=mask,
            logps=logps,
            versions=[version if m else -1 for m in mask],
            reward=float(member),
        )
        for member in range(members)
    ]


def batch_of(rollouts: list[Rollout], version: int) -> TrainBatch:
    return build_batch([rollouts], SPEC, max_tokens=8, version=version)


def test_a_stale_batch_is_measured_on_a_rollout_of_the_present_policy_that_waits() -> None:
    engine, waiting = Engine(make_model(), EngineConfig(dtype="fp32")), played(3, "b")
    batch = batch_of(played(2), 3)
    found = gap_on(waiting, 3, engine, batch, temperature=1.0)
    assert found["logp_gap_tokens"] == 2 * 3 and found["logp_gap_max"] == 0.0
    wrong = [replace(one, logps=[logp - 0.25 for logp in one.logps]) for one in waiting]
    found = gap_on(wrong, 3, engine, batch, temperature=1.0)
    assert found["logp_gap_max"] == pytest.approx(0.25, abs=1e-5)
    assert found["logp_gap_mean"] == pytest.approx(0.25, abs=1e-5)


def test_only_the_tokens_of_the_present_policy_are_measured() -> None:
    """The others are of weights that are gone."""
    engine = Engine(make_model(), EngineConfig(dtype="fp32"))
    [mixed] = played(3, "b", members=1)
    mixed.versions[3], mixed.logps[3] = 2, -9.0
    found = gap_on([mixed], 3, engine, batch_of(played(2), 3), temperature=1.0)
    assert found["logp_gap_tokens"] == 2 and found["logp_gap_max"] == 0.0
    assert not any(name.startswith("drift") for name in found)


def test_nothing_is_scored_for_a_batch_that_measures_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(make_model(), EngineConfig(dtype="fp32"))

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a forward pass")

    monkeypatch.setattr(engine, "forward_logprobs", refuse)
    assert gap_on(played(3), 3, engine, batch_of(played(3), 3), temperature=1.0) == {}


async def find(
    batch: Sequence[FinishedGroup], waiting: Sequence[FinishedGroup], *, saved_s: float = 0.0
) -> list[str]:
    queue = TransferQueue(capacity=8)
    queue.consumer(order="task")
    probe = GapProbe(queue)
    probe.note_group(0.001)
    probe.note_step(saved_s / WAIT_SHARE)
    for one in waiting:
        await queue.put(one.index, GROUP, one)
    found = await probe.find(3, batch, is_playing=True)
    return [one.rollout_id for one in found]


def test_rollouts_of_the_batch_go_before_those_that_wait_and_they_are_few() -> None:
    old, own, later = (group(i, version=v) for i, v in ((0, 2), (1, 3), (2, 3)))
    many = group(3, rewards=[0.0] * 8, version=3, size=8)
    assert run(lambda: find([old, own], [later])) == ["s0-g1-m0", "s0-g1-m1"]
    assert run(lambda: find([old], [group(4, version=2), later])) == ["s0-g2-m0", "s0-g2-m1"]
    assert len(run(lambda: find([old], [many]))) == NUM_ROLLOUTS
    assert run(lambda: find([old], [])) == []


def test_it_waits_for_a_group_only_with_time_that_it_has_saved() -> None:
    async def scenario(saved_s: float, *, is_playing: bool = True) -> list[str] | None:
        """What it finds, where the group comes while it waits; None if it did not wait."""
        queue = TransferQueue(capacity=8)
        queue.consumer(order="task")
        probe = GapProbe(queue)
        probe.note_group(5.0)
        probe.note_step(saved_s / WAIT_SHARE)
        wanted = asyncio.ensure_future(probe.find(3, [group(0, version=2)], is_playing=is_playing))
        await turns(10)
        if wanted.done():
            return None
        await queue.put(1, GROUP, group(1, version=3))
        return [one.rollout_id for one in await wanted]

    assert run(lambda: scenario(5.1)) == ["s0-g1-m0", "s0-g1-m1"]
    assert run(lambda: scenario(4.9)) is None
    assert run(lambda: scenario(5.1, is_playing=False)) is None


def test_what_it_waits_for_in_vain_costs_what_it_has_saved() -> None:
    async def scenario() -> tuple[list[Any], list[Any], float]:
        queue = TransferQueue(capacity=8)
        queue.consumer(order="task")
        probe = GapProbe(queue)
        probe.note_group(0.01)
        probe.note_step(0.011 / WAIT_SHARE)
        clock, batch = asyncio.get_running_loop().time, [group(0, version=2)]
        first = await probe.find(3, batch, is_playing=True)
        start = clock()
        second = await probe.find(3, batch, is_playing=True)
        return first, second, clock() - start

    first, second, again_s = run(scenario)
    assert first == second == []
    assert again_s < 0.01, "it has nothing left to wait with"


def scored_learner() -> ScoredLearner:
    config = RunConfig(
        rl=RLConfig(lr=1e-2, max_staleness=2, algorithm=SPEC),
        agent=AgentConfig(max_turn_tokens=4, max_context_tokens=8),
    )
    engine = Engine(make_model(), EngineConfig(dtype="fp32", lr=1e-2))
    nobody: Any = None
    learner = make_learner(config, engine=engine, publisher=nobody, thread=nobody)
    assert isinstance(learner, ScoredLearner)
    learner.version = 3
    return learner


def step_of(groups: Any, probe: Sequence[Rollout] = ()) -> dict[str, Any]:
    learner = scored_learner()
    learner.prepare(probe=probe)
    return learner.train_on(groups)


def test_a_step_on_stale_rollouts_says_the_gap_of_what_waits_before_it_updates() -> None:
    metrics = step_of([played(2)], played(3, "b"))
    assert metrics["grad_norm"] > 0 and metrics["drift_max"] == 0.0
    assert metrics["logp_gap_tokens"] == 2 * 3 and metrics["logp_gap_max"] == 0.0
    alone = step_of([played(2)])
    assert alone["logp_gap_tokens"] == 0 and "logp_gap_max" not in alone
    assert alone["grad_norm"] == metrics["grad_norm"], "it is measured, not trained on"
    wrong = [replace(one, logps=[logp - 0.5 for logp in one.logps]) for one in played(3, "b")]
    metrics = step_of([played(2)], wrong)
    assert metrics["logp_gap_max"] == pytest.approx(0.5, abs=1e-5)


def test_the_trainer_hands_over_rollouts_of_the_policy_that_it_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed: dict[int, Sequence[Rollout]] = {}
    train_on = Learner.train_on

    def note(learner: Learner, groups: Any) -> Any:
        handed[learner.version] = getattr(learner, "_probe", ())
        return train_on(learner, groups)

    monkeypatch.setattr(Learner, "train_on", note)
    steps, _ = train(steps=12, tasks_per_step=4, max_staleness=2)
    assert sorted(handed) == list(range(12)) and handed[0]
    assert any(handed[version] for version in range(1, 12))
    for version, rollouts in handed.items():
        assert all(version in one.versions for one in rollouts)
    for step in steps:
        measured = step.metrics.get("logp_gap_tokens")
        assert step.metrics.get("logp_gap_max") == (0.0 if measured else None), "not 0: no number"
    handed.clear()
    train(steps=3)
    assert not any(handed.values()), "a synchronous step measures itself"


def test_a_summary_says_on_how_much_the_gap_was_measured() -> None:
    assert gap_text({"logp_gap_max": None, "steps": 4}) == "not measured"
    assert gap_text({"logp_gap_max": 0.0, "steps": 4}) == "at most 0 nats", "of an earlier version"
    share = {"logp_gap_max": 0.0, "steps": 20, "logp_gap_steps": 5, "logp_gap_share": 0.0712}
    assert gap_text(share) == "at most 0 nats (on 7% of the tokens, 5 of 20 steps)"
