"""Advantages, losses and weights of the later papers: by hand, against numpy in fp64 written from
the papers' formulas over 200 random batches, and gradients by finite differences."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from agent_doubles import EOS, output_of, tiny_tokenizer
from torch import Tensor

from nanoengine.packing import make_micro_batches
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.algorithms import corrections, distillation, divergences, dppo, old_policy
from nanorl.algorithms.advantages import gdpo, opo
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.covariance import choose_by_covariance
from nanorl.algorithms.observed import Scaffold
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.algorithms.token_baseline import collision, optimal_token_baseline
from nanorl.batch_metrics import action_mask
from nanorl.batching import build_batch
from nanorl.grpo import Field, LossBatch
from nanorl.policy_loss import make_loss
from nanorl.types import Rollout, TurnSpan

NUM_BATCHES = 200
LOG = math.log


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def same(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(
        actual.detach().double(), torch.as_tensor(expected).double(), rtol=0, atol=1e-6
    )


@dataclass
class Drawn:
    """A random batch: log-probs of θ, o and μ, advantages with zeros among them."""

    theta: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    advantage: np.ndarray


def batches() -> Iterator[Drawn]:
    rng = np.random.default_rng(11)
    for _ in range(NUM_BATCHES):
        num = rng.integers(1, 60)
        old = -rng.exponential(rng.choice([0.01, 0.5, 4.0]), num)
        near = [np.minimum(old + rng.normal(0, 0.4, num), 0.0) for _ in range(2)]
        advantage = rng.normal(size=num) * rng.integers(0, 2, num)
        yield Drawn(near[0], old, near[1], advantage)


# -- OPO -------------------------------------------------------------------------------------------


def test_opo_by_hand() -> None:
    reward, length = values(1, 0, 0, 5, 1, 1), values(1, 2, 1, 9, 3, 3)
    got = opo(reward, ["a", "a", "a", "b", "c", "c"], length)
    same(got, [0.75, -0.25, -0.25, 0, 0, 0])  # (1·1 + 2·0 + 1·0)/4 = 1/4


def test_opo_against_numpy() -> None:
    rng = np.random.default_rng(1)
    for _ in range(NUM_BATCHES):
        num = rng.integers(1, 20)
        ids = rng.integers(0, 4, num)
        reward, length = rng.normal(size=num), rng.integers(1, 300, num)
        expected = np.empty(num)
        for one in set(ids.tolist()):
            its = ids == one
            expected[its] = reward[its] - np.average(reward[its], weights=length[its])
        same(opo(torch.tensor(reward), ids.tolist(), torch.tensor(length)), expected)


# -- GDPO ------------------------------------------------------------------------------------------


def test_gdpo_by_hand() -> None:
    """Sums 1, 1, 0, 0: grpo could not tell the first two apart, one of which is rare."""
    parts = {"right": values(1, 0, 0, 0), "form": values(0, 1, 0, 0)}
    ids = ["g"] * 4
    # Each part alone: mean 1/4, sample std 1/2, so 3/2 and -1/2.
    got = gdpo(parts, {"right": 1.0, "form": 2.0}, ids)
    total = np.array([1.5 - 1.0, -0.5 + 3.0, -1.5, -1.5])
    same(got, (total - total.mean()) / (total.std(ddof=1) + 1e-6))
    assert got[1] > got[0] > got[2] == got[3]


def test_gdpo_against_numpy() -> None:
    rng = np.random.default_rng(6)
    for _ in range(NUM_BATCHES):
        num = int(rng.integers(1, 24))
        ids = rng.integers(0, 4, num)
        parts = {name: rng.integers(0, 3, num).astype(float) for name in "abc"}
        weights = {"a": 1.0, "b": -0.3, "c": 2.5}
        total = np.zeros(num)
        for name, reward in parts.items():
            for one in set(ids.tolist()):
                mine = reward[ids == one]
                std = mine.std(ddof=1) if len(mine) > 1 else 0.0
                total[ids == one] += weights[name] * (mine - mine.mean()) / (std + 1e-6)
        std = total.std(ddof=1) if num > 1 else 0.0
        expected = (total - total.mean()) / (std + 1e-6)
        given = {name: torch.tensor(reward) for name, reward in parts.items()}
        same(gdpo(given, weights, ids.tolist()), expected)


def with_parts(member: int, turn_rewards: list[float], group: str = "g", **parts: float) -> Rollout:
    """Two turns of a token each."""
    return Rollout(
        task_id="t",
        group_id=group,
        rollout_id=f"{group}-m{member}",
        tokens=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logps=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
        turn_spans=[
            TurnSpan(action_start=1, action_end=2, observation_end=2),
            TurnSpan(action_start=2, action_end=3, observation_end=3),
        ],
        turn_rewards=turn_rewards,
        metrics={f"reward/{name}": value for name, value in parts.items()},
    )


def gdpo_advantages(rollouts: list[Rollout], *parts: str) -> list[float]:
    spec = AlgorithmSpec(advantage="gdpo", reward_parts=parts, entropy_coef=0.1)
    batch = build_batch([rollouts], spec, max_tokens=8, version=0)
    return [sample.fields[Field.ADVANTAGE][-1] for sample in batch.samples]


def test_gdpo_counts_what_turns_earned_as_a_part_of_its_own() -> None:
    """Part right: 1, 0, 0, 0, so 3/2 and -1/2; what the turns earned: 0, 0.2 + 0.3, 0, 0."""
    rollouts = [
        with_parts(0, [], right=1.0),
        with_parts(1, [0.2, 0.3], right=0.0),
        with_parts(2, [0.0, 0.0], right=0.0),
        with_parts(3, [], right=0.0),
    ]
    for weight, named in [(1.0, ()), (0.5, ("turn_rewards=0.5",)), (2.0, ("turn_rewards=2",))]:
        total = np.array([1.5 - 0.5 * weight, -0.5 + 1.5 * weight, *[-0.5 - 0.5 * weight] * 2])
        expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
        found = gdpo_advantages(rollouts, "right", *named)
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
    # Where no turn earned anything there is no such part.
    plain = [with_parts(i, [], right=float(i == 0)) for i in range(4)]
    same(values(*gdpo_advantages(plain, "right")), gdpo(
        {"right": values(1, 0, 0, 0)}, {"right": 1.0}, ["g"] * 4
    ))  # fmt: skip


def test_gdpo_refuses_a_part_by_the_name_of_the_rewards_of_turns() -> None:
    taken = with_parts(0, [], right=1.0)
    taken.metrics["reward/turn_rewards"] = 0.5
    with pytest.raises(ValueError, match=r"g-m0: its reward has a part 'turn_rewards'.* another"):
        gdpo_advantages([taken], "right")


def test_gdpo_never_takes_a_part_that_is_no_number() -> None:
    for value in (math.nan, math.inf, 1e39):
        rollouts = [with_parts(0, [], right=1.0), with_parts(1, [], right=value)]
        with pytest.raises(ValueError, match=r"g-m1: its (metric 'reward/right'|reward) is"):
            gdpo_advantages(rollouts, "right")


def test_gdpo_has_a_signal_where_parts_make_up_for_each_other() -> None:
    """Right and long, or wrong and short: each earned 1 in all."""
    unlike = [
        with_parts(0, [], "a", right=1.0, short=0.0),
        with_parts(1, [], "a", right=0.0, short=1.0),
    ]
    alike = [with_parts(i, [], "b", right=1.0, short=1.0) for i in range(2)]
    turns = [with_parts(i, [0.1 * i], "c", right=1.0, short=1.0) for i in range(2)]
    for one in turns:
        one.turn_spans = one.turn_spans[:1]
    spec = AlgorithmSpec(
        advantage="gdpo", reward_parts=("right", "short=0.5"), dynamic_sampling=True
    )
    batch = build_batch([unlike, alike, turns], spec, max_tokens=8, version=0)
    assert [sample.group for sample in batch.samples] == ["a", "a", "c", "c"]
    assert batch.metrics["groups_with_signal"] == 2


def test_gdpo_needs_parts_that_are_there() -> None:
    spec = AlgorithmSpec(advantage="gdpo", reward_parts=("rule", "short=-0.1"))
    assert spec.part_weights == {"rule": 1.0, "short": -0.1, "turn_rewards": 1.0}
    rollout = Rollout(
        task_id="t",
        group_id="g",
        rollout_id="s0-g0-m0",
        tokens=[1, 2],
        loss_mask=[0, 1],
        logps=[0.0, -1.0],
        versions=[-1, 0],
        metrics={"reward/rule": 1.0},
    )
    with pytest.raises(ValueError, match="s0-g0-m0: its reward has no part 'short'; there are: ru"):
        build_batch([[rollout]], spec, max_tokens=8, version=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "gdpo"}, "reward_parts=none with advantage='gdpo'"),
        ({"reward_parts": ("a",)}, "reward_parts=a with advantage='grpo'"),
        ({"advantage": "gdpo", "reward_parts": ("a=x",)}, "a weight that is no number"),
        ({"advantage": "gdpo", "reward_parts": ("a=0",)}, "a=0: it must be finite and not 0"),
        ({"advantage": "gdpo", "reward_parts": ("a", "a=2")}, "a name comes twice"),
        (
            {"advantage": "gdpo", "reward_parts": ("a",), "reward_level": "turn"},
            "set reward_level='outcome'",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmSpec(**options)


# -- OTB -------------------------------------------------------------------------------------------


def test_the_collision_probability_follows_from_two_temperatures() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(5, 300, generator=generator, dtype=torch.float64) * 3
    for temperature in (1.0, 0.7):
        logp = torch.log_softmax(logits / temperature, -1)
        sharp = torch.log_softmax(2 * logits / temperature, -1)
        expected = logp.exp().square().sum(-1)
        same(collision(logp, sharp), expected[:, None].expand_as(logp))


def test_otb_by_hand() -> None:
    """Two rollouts of a task, of two and three tokens, rewards 1 and 0; one alone in its group."""
    mask = values(1, 0, 1, 1, 1, 1, 1)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    energy = values(0.5, 9, 0.5, 1.5, 0.5, 0.5, 1)
    returns = values(1, 9, 1, 0, 0, 0, 1)
    got = optimal_token_baseline(returns, energy, mask, ids, ["g", "g", "h"])
    # First tokens: W 0.5 and 1.5, baseline 0.25. Second: W 1 and 2, baseline 1/3. Third: alone.
    same(got, [0.75, 0, 2 / 3, -0.25, -1 / 3, 0, 0])
    praised = optimal_token_baseline(1 - returns, energy, mask, ids, ["g", "g", "h"])
    same(praised[5], 1.0)  # beyond all others: its return, without a baseline


def test_otb_against_numpy() -> None:
    rng = np.random.default_rng(9)
    for _ in range(NUM_BATCHES):
        lengths = rng.integers(1, 12, rng.integers(1, 8))
        groups = rng.integers(0, 3, len(lengths)).tolist()
        ids = np.repeat(np.arange(len(lengths)), lengths)
        mask = (rng.random(len(ids)) < 0.7).astype(float)
        energy, returns = rng.random(len(ids)), rng.normal(size=len(ids))
        own = [np.flatnonzero((ids == s) & (mask == 1)) for s in range(len(lengths))]
        expected = np.zeros(len(ids))
        for sequence, tokens in enumerate(own):
            others = [s for s, group in enumerate(groups) if group == groups[sequence]]
            for place, token in enumerate(tokens):
                there = [s for s in others if len(own[s]) > place]
                weights = [energy[own[s][: place + 1]].sum() for s in there]
                baseline = np.average([returns[own[s][place]] for s in there], weights=weights)
                if len(there) == 1 and len(others) > 1:
                    baseline = 0.0
                expected[token] = returns[token] - baseline
        tensors = [torch.tensor(one) for one in (returns, energy, mask, ids)]
        same(optimal_token_baseline(*tensors, groups), expected)


# -- DPPO ------------------------------------------------------------------------------------------


def numpy_dppo(drawn: Drawn, kind: str, most: float) -> tuple[np.ndarray, np.ndarray]:
    """(loss, its derivative by log π_θ) of each token; equations 11 to 14 of arXiv 2602.04879."""
    pi, mu = np.exp(drawn.theta), np.exp(drawn.rollout)
    if kind == "dppo_tv":
        distance = np.abs(mu - pi)
    else:
        rest = np.log(np.maximum(1 - mu, 1e-6) / np.maximum(1 - pi, 1e-6))
        distance = mu * (drawn.rollout - drawn.theta) + (1 - mu) * rest
    leaves = ((drawn.advantage > 0) & (pi > mu)) | ((drawn.advantage < 0) & (pi < mu))
    mask = np.where(leaves & (distance > most), 0.0, 1.0)
    weight = mask * np.minimum(pi / mu, 20.0) * drawn.advantage
    return -weight * drawn.theta, -weight


@pytest.mark.parametrize(("name", "most"), [("dppo_tv", 0.15), ("dppo_kl", 0.05)])
def test_dppo_against_numpy(name: str, most: float) -> None:
    num_masked = 0
    for drawn in batches():
        theta, batch = as_loss_batch(drawn)
        loss, _ = make_loss(named_spec(name))(theta, batch)
        loss.backward()
        expected, slope = numpy_dppo(drawn, name, most)
        same(loss, expected.sum())
        same(theta.grad, slope)
        num_masked += int(((slope == 0) & (drawn.advantage != 0)).sum())
    assert num_masked > 100, "the mask was never put to the test"


def test_dppo_masks_by_hand() -> None:
    # A likely token that gets likelier, a rare one that gets ten times likelier, one that falls.
    old, new = values(0.5, 0.001, 0.5).log(), values(0.7, 0.01, 0.3).log()
    up, down = values(1, 1, 1), values(-1, -1, -1)
    both = (0.15, 0.15)
    assert dppo.dppo_mask("dppo_tv", new, old, up, both).tolist() == [0, 1, 1]
    assert dppo.dppo_mask("dppo_tv", new, old, down, both).tolist() == [1, 1, 0]
    # KL(0.5 ‖ 0.7) = 0.5·log(0.5/0.7) + 0.5·log(0.5/0.3) = 0.0872
    same(divergences.binary_kl(old, new)[0], 0.5 * LOG(0.5 / 0.7) + 0.5 * LOG(0.5 / 0.3))
    assert dppo.dppo_mask("dppo_kl", new, old, up, (0.05, 0.05)).tolist() == [0, 1, 1]
    assert dppo.dppo_mask("dppo_kl", new, old, up, (0.05, 0.1)).tolist() == [1, 1, 1]


# -- the trust region of OPD -----------------------------------------------------------------------

REGION = 0.2
TRUSTED = replace(named_spec("opd"), distill_trust_region=REGION)


def test_the_trust_region_of_distillation_by_hand() -> None:
    """A token stays out where it went too far, and the teacher would have it go on."""
    old, new = values(0.5, 0.5, 0.5, 0.5, 0.9).log(), values(0.75, 0.75, 0.25, 0.25, 0.75).log()
    teacher = values(0.9, 0.5, 0.1, 0.5, 0.1).log()
    batch = LossBatch(
        rollout_logp_T=old,
        ref_logp_T=teacher,
        advantage_T=torch.zeros(5, dtype=torch.float64),
        mask_T=torch.ones(5),
        weight_T=torch.ones(5, dtype=torch.float64),
        sequence_ids_T=torch.zeros(5, dtype=torch.int64),
        num_sequences=1,
    )
    theta = new.clone().requires_grad_()
    loss, stats = make_loss(TRUSTED)(theta, batch)
    loss.backward()
    assert theta.grad is not None
    near = -LOG(0.1 / 0.75) * 0.75 / 0.9
    same(theta.grad, [0, -LOG(0.5 / 0.75) * 1.5, 0, -LOG(0.5 / 0.25) * 0.5, near])
    assert float(stats["clip_fraction_sum"]) == 2


@pytest.mark.parametrize("has_hindsight", [False, True])
def test_the_trust_region_of_distillation_against_numpy(has_hindsight: bool) -> None:
    num_masked = num_free = 0
    rng = np.random.default_rng(5)
    spec = replace(TRUSTED, hindsight="solution" if has_hindsight else "none")
    for drawn in batches():
        theta, batch = as_loss_batch(drawn)
        teacher = np.minimum(drawn.theta + rng.normal(0, 1, len(drawn.theta)), 0)
        word = torch.tensor(teacher)
        given = {"teacher_logp_T": word} if has_hindsight else {"ref_logp_T": word}
        loss, stats = make_loss(spec)(theta, replace(batch, **given))
        loss.backward()
        pi, mu, gain = np.exp(drawn.theta), np.exp(drawn.rollout), teacher - drawn.theta
        leaves = (np.sign(gain) == np.sign(pi - mu)) & (np.abs(pi - mu) > REGION)
        expected = np.where(leaves, 0.0, -gain * pi / mu)
        same(loss, expected.sum())
        assert theta.grad is not None
        same(theta.grad, expected)
        assert float(stats["clip_fraction_sum"]) == leaves.sum()
        num_masked += int(leaves.sum())
        num_free += int(((np.abs(pi - mu) > REGION) & ~leaves).sum())
    assert min(num_masked, num_free) > 50, "the mask was never put to the test"


def test_the_trust_region_is_a_number_and_its_gradient_that_of_opd() -> None:
    """The mask and the gain are numbers: what is differentiated is π_θ/μ alone."""
    old, teacher = values(0.3, 0.6, 0.8).log(), values(0.9, 0.1, 0.9).log()
    theta = values(0.35, 0.2, 0.9).log().requires_grad_()
    mask = dppo.dppo_mask("dppo_tv", theta, old, teacher - theta, (REGION, REGION))
    assert mask.tolist() == [1, 0, 1] and not mask.requires_grad
    gain = (teacher - theta).detach()
    assert torch.autograd.gradcheck(lambda x: (-mask * gain * (x - old).exp()).sum(), theta)
    (found,) = torch.autograd.grad((mask * distillation.opd(theta, old, teacher)).sum(), theta)
    same(found, -mask * gain * (theta - old).exp())


def test_only_opd_has_a_trust_region() -> None:
    for name in ("grpo", "opd_topk", "sdpo"):
        with pytest.raises(ValueError, match=r"distill_trust_region=0.2: loss='.*' has none"):
            replace(named_spec(name), distill_trust_region=0.2)
    with pytest.raises(ValueError, match=r"distill_trust_region=1.5: must be at most 1"):
        replace(named_spec("opd"), distill_trust_region=1.5)
    assert named_spec("opd").distill_trust_region == 0


# -- KPop ------------------------------------------------------------------------------------------


def test_kpop_by_hand() -> None:
    old, sampler = values(0.5, 0.9, 0.999999, 1.0).log(), values(0.5, 0.5, 0.5, 1.0).log()
    got = corrections.kpop(old - sampler, sampler, 0.1)
    # KL((0.9, 0.1) ‖ (0.5, 0.5)) = 0.368 nats
    same(got, [1, 0, 0, 1])
    same(corrections.kpop(old - sampler, sampler, 0.6), [1, 1.8, 0, 1])


def test_kpop_against_numpy() -> None:
    for drawn in batches():
        p, q = np.exp(drawn.old), np.exp(drawn.rollout)

        def apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            rest = np.log(np.maximum(1 - a, 1e-6) / np.maximum(1 - b, 1e-6))
            return a * np.log(a / b) + (1 - a) * rest

        is_kept = (apart(p, q) <= 0.1) & (apart(q, p) <= 0.1)
        log_w = torch.tensor(drawn.old - drawn.rollout)
        got = corrections.kpop(log_w, torch.tensor(drawn.rollout), 0.1)
        same(got, np.where(is_kept, p / q, 0.0))


def test_a_nan_is_no_rejection() -> None:
    assert corrections.kpop(values(math.nan), values(-1.0), 0.1).isnan().all()


# -- Clip-Cov and KL-Cov ---------------------------------------------------------------------------

KL_COV, CLIP_COV = named_spec("kl_cov"), named_spec("clip_cov")


def test_kl_cov_chooses_the_largest_covariances() -> None:
    rng = np.random.default_rng(2)
    for _ in range(NUM_BATCHES):
        num = int(rng.integers(1, 400))
        mask = (rng.random(num) < 0.7).astype(float)
        advantage, logp = rng.normal(size=num) * mask, -rng.exponential(size=num)
        share = float(rng.choice([2e-3, 0.1]))
        spec = replace(KL_COV, covariance_share=share)
        got = choose_by_covariance(spec, *map(torch.tensor, (advantage, logp, mask)))
        acts = mask == 1
        if not acts.any():
            assert not got.any()
            continue
        covariance = (advantage - advantage[acts].mean()) * (logp - logp[acts].mean())
        covariance[~acts] = -np.inf
        expected = np.zeros(num)
        expected[np.argsort(-covariance)[: max(int(share * acts.sum()), 1)]] = 1
        assert got.tolist() == expected.tolist()


def test_clip_cov_chooses_so_many_of_the_band_and_none_elsewhere() -> None:
    generator = torch.Generator().manual_seed(3)
    spec = replace(CLIP_COV, covariance_share=0.01, covariance_high=2.0)
    advantage = torch.randn(20_000, generator=generator, dtype=torch.float64)
    logp = torch.randn(20_000, generator=generator, dtype=torch.float64)
    ones = torch.ones(20_000, dtype=torch.float64)
    chosen = choose_by_covariance(spec, advantage, logp, ones).bool()
    covariance = (advantage - advantage.mean()) * (logp - logp.mean())
    in_band = (covariance > 1) & (covariance < 2)
    assert int(chosen.sum()) == 200 and bool(in_band[chosen].all())
    # Any of the band: their mean is the band's, give or take four standard errors.
    error = covariance[in_band].std() / 200**0.5
    assert abs(covariance[chosen].mean() - covariance[in_band].mean()) < 4 * error
    order = torch.randperm(20_000, generator=generator)
    again = choose_by_covariance(spec, advantage[order], logp[order], ones)
    assert torch.equal(again.bool(), chosen[order]), "the order of the tokens has no say"
    band_is_empty = replace(spec, covariance_low=50.0, covariance_high=60.0)
    assert not choose_by_covariance(band_is_empty, advantage, logp, ones).any()


def as_loss_batch(drawn: Drawn, chosen: np.ndarray | None = None) -> tuple[Tensor, LossBatch]:
    """log π_θ, which has a gradient, and the rest, every token of weight 1."""
    num = len(drawn.theta)
    ones = torch.ones(num, dtype=torch.float64)
    batch = LossBatch(
        old_logp_T=torch.tensor(drawn.old),
        rollout_logp_T=torch.tensor(drawn.rollout),
        advantage_T=torch.tensor(drawn.advantage),
        mask_T=ones,
        weight_T=ones,
        sequence_ids_T=torch.zeros(num, dtype=torch.int64),
        num_sequences=1,
        chosen_T=None if chosen is None else torch.tensor(chosen),
    )
    return torch.tensor(drawn.theta, requires_grad=True), batch


def numpy_clip_cov(drawn: Drawn, chosen: np.ndarray) -> np.ndarray:
    ratio = np.exp(drawn.theta - drawn.old)
    plain, clipped = ratio * drawn.advantage, np.clip(ratio, 0.8, 1.2) * drawn.advantage
    return np.where(chosen == 1, 0.0, -np.minimum(plain, clipped))


def numpy_kl_cov(drawn: Drawn, chosen: np.ndarray) -> np.ndarray:
    log_ratio = drawn.theta - drawn.old
    return -np.exp(log_ratio) * drawn.advantage + chosen * np.abs(log_ratio)


@pytest.mark.parametrize(
    ("spec", "reference"), [(CLIP_COV, numpy_clip_cov), (KL_COV, numpy_kl_cov)]
)
def test_the_losses_against_numpy(
    spec: AlgorithmSpec, reference: Callable[[Drawn, np.ndarray], np.ndarray]
) -> None:
    rng = np.random.default_rng(4)
    for drawn in batches():
        chosen = (rng.random(len(drawn.theta)) < 0.2).astype(float)
        theta, batch = as_loss_batch(drawn, chosen)
        loss, _ = make_loss(replace(spec, correction="none"))(theta, batch)
        same(loss, reference(drawn, chosen).sum())
        weighed, _ = make_loss(spec)(theta, batch)
        tis = np.minimum(np.exp(drawn.old - drawn.rollout), 2.0)
        same(weighed, (reference(drawn, chosen) * tis).sum())


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "kpop", "opo"])
def test_gradients_by_finite_differences(name: str) -> None:
    drawn = next(batches())
    rng = np.random.default_rng(5)
    chosen = (rng.random(len(drawn.theta)) < 0.3).astype(float)
    theta, batch = as_loss_batch(drawn, chosen)
    token_loss = make_loss(named_spec(name))
    assert torch.autograd.gradcheck(lambda logp: token_loss(logp, batch)[0], theta)


def test_the_choice_reaches_the_loss_through_the_batch() -> None:
    with pytest.raises(ValueError, match="chosen_T is missing: loss='kl_cov' reads it"):
        theta, batch = as_loss_batch(next(batches()))
        make_loss(KL_COV)(theta, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance_share": 0.0}, "covariance_share=0"),
        ({"covariance_share": 1.5}, "covariance_share=1.5"),
        ({"correction_kl": 0.0}, "correction_kl=0"),
        ({"covariance_kl_coef": -1.0}, "covariance_kl_coef=-1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(KL_COV, **options)


# -- ECHO ------------------------------------------------------------------------------------------


def two_rollouts() -> list[Rollout]:
    """The first calls a tool, which answers with three tokens; the second only answers."""
    first = Rollout(
        task_id="t",
        group_id="g",
        rollout_id="a",
        tokens=[5, 6, 7, 8, 9, 1, 2, 3],
        loss_mask=[0, 0, 1, 0, 0, 0, 1, 1],
        logps=[0.0, 0.0, -0.5, 0.0, 0.0, 0.0, -0.1, -0.2],
        versions=[-1, -1, 0, -1, -1, -1, 0, 0],
        turn_spans=[
            TurnSpan(action_start=2, action_end=3, observation_end=6),
            TurnSpan(action_start=6, action_end=8, observation_end=8),
        ],
        reward=1.0,
    )
    second = Rollout(
        task_id="t",
        group_id="g",
        rollout_id="b",
        tokens=[5, 6, 4],
        loss_mask=[0, 0, 1],
        logps=[0.0, 0.0, -0.7],
        versions=[-1, -1, 0],
        turn_spans=[TurnSpan(action_start=2, action_end=3, observation_end=3)],
        reward=0.0,
    )
    return [first, second]


def engine_step(spec: AlgorithmSpec) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, its gradient by the log-probs, statistics) of both in one micro-batch, all log-probs
    being what was sampled, or -2 for observations."""
    batch = build_batch([two_rollouts()], spec, max_tokens=16, version=0)
    micro = make_micro_batches(batch.samples, 64)[0]
    logp = torch.where(
        micro.fields_T[Field.ROLLOUT_LOGP] == 0, -2.0, micro.fields_T[Field.ROLLOUT_LOGP]
    )
    logp = (logp * micro.loss_mask_T).requires_grad_()
    loss, stats = batch.loss_fn(logp, None, micro)
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad, stats


def test_echo_by_hand() -> None:
    plain, slope, told = engine_step(AlgorithmSpec())
    loss, both, more = engine_step(AlgorithmSpec(observation_coef=0.3))
    same(loss - plain, 0.3 * 2.0)
    same(more["observation_loss"], 2.0)
    # Predictions 3 to 5 of the first are its tool's answer, each a third of the mean.
    same(both - slope, [0, 0, -0.1, -0.1, -0.1, 0, 0, 0, 0])
    assert {name: more[name] for name in told} == told, "it is no part of any other statistic"


def test_echo_learns_where_rewards_say_nothing() -> None:
    rollouts = [replace(one, reward=1.0) for one in two_rollouts()]
    assert build_batch([rollouts], AlgorithmSpec(), max_tokens=16, version=0).samples == []
    echo = build_batch([rollouts], named_spec("echo"), max_tokens=16, version=0)
    assert [sum(sample.loss_mask) for sample in echo.samples] == [6, 1]
    assert [sum(action_mask(sample)) for sample in echo.samples] == [3, 1]
    shares = [sample.fields[Field.OBSERVATION] for sample in echo.samples]
    assert shares == [[0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0], [0, 0, 0]]


def test_echo_learns_what_was_said_and_nothing_of_the_template() -> None:
    """A turn `run`, what it was answered in the chat's own form, and a turn without its end."""
    tokenizer = tiny_tokenizer()
    builder = TurnBuilder(tokenizer, Limits(), task_id="t", group_id="g", rollout_id="a")
    builder.start([{"role": "user", "content": "hi"}])
    for said, seen in (("run", "4\n"), ("look", "xyz")):
        end = [EOS] if said == "run" else []
        builder.append_action(output_of([*tokenizer.encode(said), *end], version=0))
        assert builder.append_observation([{"role": "tool", "content": seen}])
    rollouts = [builder.close(1.0), replace(builder.close(0.0), rollout_id="b")]
    spec = named_spec("echo")
    batch = build_batch(
        [rollouts], spec, max_tokens=99, version=0, scoring=Scoring(scaffold=Scaffold(tokenizer))
    )
    for sample in batch.samples:
        shares = sample.fields[Field.OBSERVATION]
        learnt = [token for token, share in zip(sample.tokens, shares, strict=True) if share]
        assert tokenizer.decode(learnt) == "4\nxyz"
        # Five tokens each, all of the same weight in the mean of both.
        assert [share for share in shares if share] == pytest.approx([1 / 10] * 5)
        assert sum(sample.loss_mask) == len("run") + 1 + len("look") + 5
        assert action_mask(sample) == rollouts[0].loss_mask
    assert batch.metrics["observed_tokens"] == 10
    whole = build_batch([rollouts], spec, max_tokens=99, version=0)
    assert whole.metrics["observed_tokens"] > 60, "with the template it is mostly template"


def test_echo_takes_the_mean_over_the_observations_of_a_minibatch() -> None:
    """Three observed tokens in the first, one in the second, none in the third; over the whole
    batch each would be a quarter."""
    short = two_rollouts()[0]
    short.turn_spans[0] = replace(short.turn_spans[0], observation_end=4)
    groups = [
        [replace(one, group_id=name, rollout_id=f"{name}-{one.rollout_id}") for one in rollouts]
        for name, rollouts in zip(
            "xyz", (two_rollouts()[:1], [short], two_rollouts()[1:]), strict=True
        )
    ]
    batch = build_batch(groups, named_spec("echo"), max_tokens=16, version=0, num_minibatches=3)
    assert batch.minibatches() == [[0], [1], [2]]
    shares = [sample.fields[Field.OBSERVATION] for sample in batch.samples]
    third = 1 / 3
    assert shares[0] == pytest.approx([0, 0, 0, third, third, third, 0, 0])
    assert shares[1] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert shares[2] == [0, 0, 0]
    # Two rollouts of a minibatch share one mean.
    both = build_batch(
        [groups[0], groups[1]], named_spec("echo"), max_tokens=16, version=0, num_minibatches=1
    )
    assert {share for one in both.samples for share in one.fields[Field.OBSERVATION]} == {0, 1 / 4}


# -- the interpolated old policy -------------------------------------------------------------------


def test_the_interpolated_policy_lies_so_far_on_the_way_as_the_token_is_old() -> None:
    """α = (v_o - v_μ)/(v_θ - v_μ), where o is one version behind θ and μ was d behind o: with
    d = 0, 1, 3 it is 0, 1/2, 3/4. log μ = -2 and log π_θ = -1."""
    theta, mu = torch.full((3,), -1.0), torch.full((3,), -2.0)
    staleness = torch.tensor([0.0, 1.0, 3.0])
    got = old_policy.interpolated(theta, mu, staleness)
    same(got, [-2.0, -1.5, -1.25])
    for d in range(9):
        v_theta, v_o, v_mu = 10 + 1, 10, 10 - d
        alpha = (v_o - v_mu) / (v_theta - v_mu)
        same(old_policy.interpolated(theta[:1], mu[:1], torch.tensor([float(d)])), [-2 + alpha])


def test_the_interpolated_policy_is_the_centre_of_the_loss_and_weighs_it() -> None:
    """-sg[π_o/μ]·r·A with r = π_θ/π_o: of a fresh token o is μ, so the weight is 1 and r = e^0.1;
    of one of three versions ago log π_o = -2 + 0.075, the weight e^0.075 and r = e^0.025. No
    gradient goes through o."""
    batch = LossBatch(
        rollout_logp_T=values(-2, -2),
        advantage_T=values(1, 1),
        mask_T=values(1, 1),
        weight_T=values(1, 1),
        sequence_ids_T=torch.tensor([0, 1]),
        num_sequences=2,
        staleness_T=values(0, 3),
    )
    logp = values(-1.9, -1.9).requires_grad_()
    loss, stats = make_loss(named_spec("decoupled_ppo"))(logp, batch)
    loss.backward()
    same(loss, -2 * math.exp(0.1))
    assert logp.grad is not None
    same(logp.grad, [-math.exp(0.1)] * 2)
    same(stats["ratio_sum"], math.exp(0.1) + math.exp(0.025))
    # Beyond the clip of 1.2 only the old one still learns: r is e^0.3, and e^0.075.
    logp = values(-1.7, -1.7).requires_grad_()
    make_loss(named_spec("decoupled_ppo"))(logp, batch)[0].backward()
    assert logp.grad is not None
    same(logp.grad, [0.0, -math.exp(0.3)])
    with pytest.raises(ValueError, match="staleness_T is missing"):
        make_loss(named_spec("decoupled_ppo"))(logp, replace(batch, staleness_T=None))
