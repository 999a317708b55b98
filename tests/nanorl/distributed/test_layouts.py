"""A step of reinforcement learning is the same in every layout of the learner: gradients, norm,
loss, statistics and log-probs on stored rollouts equal those of one process, for every loss,
correction and aggregation, with a reference and with a critic. Bugs planted on purpose are found.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import layout_cases as cases
import pytest
import torch
from layout_cases import SPECS, Setting, Step
from parallel_cases import Result
from pool import WorkerPool
from test_parallel_training import put_together

from nanoengine.packing import Sample, make_micro_batches
from nanoengine.parallel.dealing import Deal, data_index, deal
from nanoengine.parallel.layout import Layout, SplitConfig
from nanorl.algorithms import option_groups
from nanorl.algorithms.entropy_mask import with_choice
from nanorl.batching import TrainBatch
from nanorl.policy_loss import PolicyLoss

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
STATISTICS = 1e-5  # they are fp32 sums whatever the model computes in
PLANTED = 1e-3
IN_FP32 = ("gspo", "gmpo", "sequence_tis", "geometric")
"""Losses of whole sequences; the others' fp32 differs from these in single tokens alone."""

SETTINGS = {
    "dp2": Setting(layout=Layout(dp=2)),
    "tp2": Setting(layout=Layout(tp=2), split=SplitConfig(sequence_parallel=True)),
    "pp2": Setting(layout=Layout(pp=2), split=SplitConfig(schedule="zb_h1")),
    "dp2-zero1": Setting(layout=Layout(dp=2), zero=1),
    "dp2-zero2": Setting(layout=Layout(dp=2), zero=2),
    "dp2-zero3": Setting(layout=Layout(dp=2), zero=3),
    "dp2-shared": Setting(layout=Layout(dp=2), share_prefix=True),
    "cp2": Setting(layout=Layout(cp=2)),
    "ep2": Setting(layout=Layout(ep=2), model="moe"),
    "tp2-dp2": Setting(layout=Layout(tp=2, dp=2), zero=1),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: cases.write_model(root / name, shape) for name, shape in cases.SHAPES.items()}
    return found | {"teacher": cases.write_model(root / "teacher", cases.DENSE, seed=5)}


@pytest.fixture(scope="module")
def batches(folders: dict[str, Path]) -> dict[str, TrainBatch]:
    return cases.make_batches(folders["dense"], folders["teacher"])


@pytest.fixture(scope="module")
def steps(batches: dict[str, TrainBatch]) -> dict[str, Step]:
    return cases.make_steps(batches)


Truth = Mapping[tuple[str, str], Mapping[str, Result]]


@pytest.fixture(scope="module")
def truth(folders: dict[str, Path], steps: dict[str, Step]) -> Truth:
    """One process, one micro-batch, by model and dtype."""
    found = {}
    for model in cases.SHAPES:
        for dtype in TOLERANCE:
            setting = Setting(model=model, dtype=dtype, budget=10_000)
            found[model, dtype] = cases.take_steps(folders[model], setting, steps)
    return found


def gradient_error(parts: Sequence[Result], expected: Result) -> float:
    """The worst relative error of a parameter's gradient."""
    found = put_together(parts, "gradient")
    true = put_together([expected], "gradient")
    assert found.keys() == true.keys()
    largest = max(float(gradient.norm()) for gradient in true.values())
    return max(
        float((found[name] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        for name, gradient in true.items()
    )


def check(parts: Sequence[Result], expected: Result, dtype: str, name: str) -> None:
    limit = TOLERANCE[dtype]
    assert gradient_error(parts, expected) <= limit, name
    told, true = parts[0].steps[0], expected.steps[0]
    assert all(part.steps[0] == told for part in parts), f"{name}: ranks report differently"
    assert told.keys() == true.keys()
    for key, value in true.items():
        bound = limit if key in ("loss", "grad_norm") else STATISTICS
        assert cases.is_close(told[key], value, bound), (name, key, told[key], value)
    logps = {index: values for part in parts for index, values in part.logps.items()}
    assert logps.keys() == expected.logps.keys()
    for index, values in expected.logps.items():
        torch.testing.assert_close(logps[index], values, rtol=0, atol=limit)


def test_the_specs_use_every_loss_correction_aggregation_and_advantage() -> None:
    for name, choices in (
        ("loss", option_groups.Loss),
        ("resolved_correction", option_groups.Correction),
        ("aggregation", option_groups.Aggregation),
        ("advantage", option_groups.Advantage),
        ("reward_level", option_groups.RewardLevel),
        ("turn_peers", option_groups.TurnPeers),
        ("distill_kl", option_groups.DistillKL),
    ):
        used = {getattr(spec, name) for spec in SPECS.values()}
        assert used == set(get_args(choices)) - {"auto"}, name


def test_clips_and_rejections_act_on_the_stored_rollouts(truth: Truth) -> None:
    """What never acts is not compared."""
    found = truth["dense", "fp64"]
    for name in ("grpo", "gspo", "gmpo", "veto", "dapo", "ppo", "dppo_kl", "dppo_tv"):
        assert found[name].steps[0]["clip_fraction_sum"] > 0, name
    for name in ("geometric", "veto", "icepop", "kl_cov"):
        told = found[name].steps[0]
        assert 0 < told["rejected_fraction_sum"] < told["action_count"], name
    assert all(result.steps[0]["grad_norm"] > 0 for result in found.values())


def test_tokens_are_chosen_on_the_stored_rollouts(batches: dict[str, TrainBatch]) -> None:
    for name in ("clip_cov", "kl_cov", "entropy"):
        chosen = [sum(sample.fields["chosen"]) for sample in batches[name].samples]
        actions = sum(sum(sample.loss_mask) for sample in batches[name].samples)
        assert 0.05 * actions < sum(chosen) < 0.3 * actions and len(set(chosen)) > 2, name


@pytest.mark.parametrize("name", SETTINGS)
def test_a_policy_step_of_a_layout_equals_that_of_one_process(
    pool: WorkerPool,
    folders: dict[str, Path],
    steps: dict[str, Step],
    truth: Truth,
    name: str,
) -> None:
    wide, narrow = (replace(SETTINGS[name], dtype=dtype) for dtype in TOLERANCE)
    folder = folders[wide.model]
    jobs = [(folder, wide, steps), (folder, narrow, {name: steps[name] for name in IN_FP32})]
    by_rank = pool.run(wide.layout.world, cases.on_rank, jobs)
    for i, (_, setting, taken) in enumerate(jobs):
        for step in taken:
            parts = [found[i][step] for found in by_rank]
            expected = truth[setting.model, setting.dtype][step]
            check(parts, expected, setting.dtype, f"{name} {setting.dtype} {step}")


@pytest.mark.parametrize("name", ["dp2", "pp2", "cp2"])
def test_log_probs_that_ranks_found_come_back_in_the_order_of_the_batch(
    pool: WorkerPool,
    folders: dict[str, Path],
    batches: dict[str, TrainBatch],
    name: str,
) -> None:
    """As the old policy's and a reference's are asked for."""
    setting, samples = SETTINGS[name], batches["grpo"].samples
    engine = cases.build_engine(folders["dense"], Setting().config)
    expected = engine.forward_logprobs(samples, temperature=cases.TEMPERATURE, only_masked=True)
    answers = pool.run(2, cases.scores_on_rank, folders["dense"], setting, samples)
    found = deal(samples, setting.layout).collect(answers)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "cp2", "dp2-shared"])
def test_the_entropies_that_ranks_found_choose_the_tokens_that_one_process_chooses(
    pool: WorkerPool,
    folders: dict[str, Path],
    batches: dict[str, TrainBatch],
    name: str,
) -> None:
    setting, samples = SETTINGS[name], batches["grpo"].samples
    engine = cases.build_engine(folders["dense"], Setting().config)
    expected = engine.forward_entropies(samples, temperature=cases.TEMPERATURE)
    answers = pool.run(2, cases.entropies_on_rank, folders["dense"], setting, samples)
    found = deal(samples, setting.layout).collect(answers)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-10)
    chosen = [
        [one.fields["chosen"] for one in with_choice(samples, entropies, 0.2)]
        for entropies in (found, expected)
    ]
    assert chosen[0] == chosen[1] and sum(map(sum, chosen[0])) > 0


@pytest.mark.parametrize("k", [3, cases.VOCAB])
@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "cp2", "dp2-shared", "dp2-zero3"])
def test_the_likeliest_tokens_that_ranks_found_are_those_of_one_process(
    pool: WorkerPool,
    folders: dict[str, Path],
    batches: dict[str, TrainBatch],
    name: str,
    k: int,
) -> None:
    """A part of the vocabulary holds fewer tokens than the largest k."""
    setting, samples = SETTINGS[name], batches["grpo"].samples
    engine = cases.build_engine(folders["dense"], Setting().config)
    expected = engine.forward_top(samples, k, temperature=cases.TEMPERATURE)
    answers = pool.run(2, cases.tops_on_rank, folders["dense"], setting, samples, k)
    found = deal(samples, setting.layout).collect(answers)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.logps, true.logps, rtol=0, atol=1e-6)
        assert torch.equal(mine.ids, true.ids) and bool(true.ids.any())


@pytest.mark.parametrize("name", ["dp2", "dp2-zero3"])
def test_a_rank_without_samples_finds_no_tokens(
    pool: WorkerPool, folders: dict[str, Path], batches: dict[str, TrainBatch], name: str
) -> None:
    setting, samples = SETTINGS[name], batches["grpo"].samples[:1]
    answers = pool.run(2, cases.tops_on_rank, folders["dense"], setting, samples, 3)
    assert sorted(map(len, answers)) == [0, 1]


@pytest.mark.parametrize("name", ["dp2-zero3", "cp2"])
def test_a_critic_over_ranks_gives_the_values_and_takes_the_step_of_one_process(
    pool: WorkerPool,
    folders: dict[str, Path],
    batches: dict[str, TrainBatch],
    name: str,
) -> None:
    setting, samples = SETTINGS[name], batches["turn_gae"].critic_samples
    values, step = cases.critic_step(folders["dense"], Setting(), samples)
    by_rank = pool.run(2, cases.critic_on_rank, folders["dense"], setting, samples)
    found = deal(samples, setting.layout).collect([values for values, _ in by_rank])
    for mine, true in zip(found, values, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-10)
    assert any(value.any() for value in found)
    check([result for _, result in by_rank], step, "fp64", name)


@pytest.mark.parametrize(
    ("bug", "name", "step"),
    [
        ("mean of means", "dp2", "grpo"),
        ("a ratio over a part of the sequence", "dp2", "gspo"),
        ("a ratio over a part of the sequence", "cp2", "geometric"),
    ],
)
def test_the_comparison_finds_a_planted_bug(
    pool: WorkerPool,
    folders: dict[str, Path],
    steps: dict[str, Step],
    truth: Truth,
    bug: str,
    name: str,
    step: str,
) -> None:
    jobs = [(folders["dense"], replace(SETTINGS[name], bug=bug), {step: steps[step]})]
    by_rank = pool.run(2, cases.on_rank, jobs)
    parts = [found[0][step] for found in by_rank]
    assert gradient_error(parts, truth["dense", "fp64"][step]) > PLANTED


def test_statistics_of_a_single_rank_are_found(
    pool: WorkerPool, folders: dict[str, Path], steps: dict[str, Step], truth: Truth
) -> None:
    setting = replace(SETTINGS["dp2"], bug="statistics of one rank")
    jobs = [(folders["dense"], setting, {"grpo": steps["grpo"]})]
    by_rank = pool.run(2, cases.on_rank, jobs)
    parts = [found[0]["grpo"] for found in by_rank]
    with pytest.raises(AssertionError, match="ranks report differently"):
        check(parts, truth["dense", "fp64"]["grpo"], "fp64", "grpo")


# -- dealing -------------------------------------------------------------------------------------


def sample(length: int, group: str | None = None, prefix: int = 0) -> Sample:
    tokens = [*range(prefix), *(100 + length + t for t in range(length - prefix))]
    return Sample(tokens=tokens, loss_mask=[0] + [1] * (length - 1), group=group)


def test_every_rank_is_dealt_what_its_data_coordinate_says() -> None:
    layout = Layout(pp=2, dp=2, ep=2, tp=2)
    samples = [sample(n) for n in (9, 5, 7, 3, 8, 2, 6)]
    dealt = deal(samples, layout)
    assert sorted(i for part in dealt.parts for i in part) == list(range(7))
    answers = [dealt.hand([f"{i}" for i in range(7)], rank) for rank in range(layout.world)]
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        assert data_index(layout, rank) == 2 * place["dp"] + place["ep"]
        neighbours = layout.members(rank, ("pp", "tp"))
        assert all(answers[other] == answers[rank] for other in neighbours)
    assert dealt.collect(answers) == [f"{i}" for i in range(7)]
    assert deal(samples, Layout(tp=2)).parts == (tuple(range(7)),)
    assert deal(samples[:1], Layout(dp=2)).parts == ((0,), ())


def shared_rows(samples: list[Sample], dealt: Deal) -> list[int]:
    hands = [[samples[i] for i in part] for part in dealt.parts]
    micros = [make_micro_batches(hand, 10_000, share_prefix=True) for hand in hands]
    return [sum(micro.num_rows for micro in each) for each in micros]


def test_groups_stay_together_where_that_balances_and_are_parted_where_not() -> None:
    lengths = [(g, 48 + (5 * g + 3 * m) % 7) for g in range(4) for m in range(4)]
    groups = [sample(length, group=f"g{g}", prefix=40) for g, length in lengths]
    for num_ranks, num_hands in ((2, 4), (3, 6)):  # of four groups; the last of 3 goes to each
        dealt = deal(groups, Layout(dp=num_ranks), share_prefix=True)
        assert sum(len({i // 4 for i in part}) for part in dealt.parts) == num_hands
        plain = deal(groups, Layout(dp=num_ranks))
        assert max(shared_rows(groups, dealt)) <= max(shared_rows(groups, plain))
        assert sum(shared_rows(groups, dealt)) < sum(shared_rows(groups, plain))
    lonely = [sample(40 + m, group="g", prefix=10) for m in range(4)]
    assert [len(part) for part in deal(lonely, Layout(dp=2), share_prefix=True).parts] == [2, 2]


def test_a_loss_that_travelled_is_the_same_loss() -> None:
    loss = PolicyLoss(SPECS["gspo"])
    assert pickle.loads(pickle.dumps(loss)) == loss
