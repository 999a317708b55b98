"""Losses: values by hand, gradients against exact ones of a seven-symbol softmax in fp64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanorl import grpo, policy_loss
from nanorl.algorithms import corrections, distillation, divergences, losses
from nanorl.algorithms.aggregation import token_weights
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.registry import CORRECTIONS, LOSSES, path_of
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batch_metrics import per_action_token
from nanorl.grpo import LossBatch
from nanorl.policy_loss import make_loss

generator = torch.Generator().manual_seed(3)
THETA, REF, TEACHER, MU = (
    torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(4)
)
REWARD = torch.randn(7, generator=generator, dtype=torch.float64)


def gradient(expression) -> Tensor:
    """d/dlogits of `expression(log-probs of all seven symbols)`."""
    logits = THETA.clone().requires_grad_()
    expression(torch.log_softmax(logits, -1)).backward()
    return logits.grad


def expected_gradient(token_loss, sampler_logits: Tensor = THETA) -> Tensor:
    """Exact expectation, over the sampled symbol, of the gradient of a token loss."""
    probability = torch.softmax(sampler_logits, -1)
    return gradient(lambda logp: (probability * token_loss(logp)).sum())


def kl_gradient(reverse: bool, other: Tensor) -> Tensor:
    other = torch.log_softmax(other, -1)
    if reverse:  # KL(π_θ ‖ other)
        return gradient(lambda logp: (logp.exp() * (logp - other)).sum())
    return gradient(lambda logp: (other.exp() * (other - logp)).sum())


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


OLD = torch.log_softmax(THETA, -1)
POLICY_GRADIENT = gradient(lambda logp: -(logp.exp() * REWARD).sum())


def test_on_policy_every_loss_has_the_exact_policy_gradient() -> None:
    ids = torch.arange(7)
    for token_loss in (
        lambda logp: losses.reinforce(logp, REWARD),
        lambda logp: policy_loss.ppo(logp, OLD, REWARD),
        lambda logp: losses.gspo(logp, OLD, REWARD, (torch.ones(7), ids, 7)),
        lambda logp: losses.sapo(logp, OLD, REWARD),
        lambda logp: losses.cispo(logp, OLD, REWARD),
        lambda logp: losses.decoupled_ppo(logp, OLD, OLD, REWARD),
    ):
        same(expected_gradient(token_loss), POLICY_GRADIENT)


def test_decoupled_ppo_weighs_by_the_sampling_policy() -> None:
    mu = torch.log_softmax(MU, -1)
    got = expected_gradient(lambda logp: losses.decoupled_ppo(logp, OLD, mu, REWARD), MU)
    same(got, POLICY_GRADIENT)


def test_gradients_of_the_kl_estimators_as_losses() -> None:
    ref = torch.log_softmax(REF, -1)
    grads = {
        kind: expected_gradient(lambda logp, kind=kind: divergences.kl(kind, logp, ref, OLD))
        for kind in ("k1", "k2", "k3", "rk3")
    }
    same(grads["k1"], torch.zeros(7, dtype=torch.float64))
    same(grads["k2"], kl_gradient(True, REF))
    same(grads["k3"], kl_gradient(False, REF))
    same(grads["rk3"], kl_gradient(True, REF))


def test_k1_and_k3_are_unbiased_values_and_k2_is_half_the_square() -> None:
    ref = torch.log_softmax(REF, -1)
    exact = (OLD.exp() * (OLD - ref)).sum()
    for kind in ("k1", "k3"):
        same((OLD.exp() * divergences.kl(kind, OLD, ref)).sum(), exact)
    assert float(divergences.kl("k2", torch.tensor(-1.0), torch.tensor(-3.0))) == 2.0
    with pytest.raises(ValueError, match="kind='k9'"):
        divergences.kl("k9", OLD, ref)


def test_the_tutorial_kl_has_the_wrong_gradient() -> None:
    # p·(log p − log q) on the sampled token, the formula this project grew from.
    ref = torch.log_softmax(REF, -1)
    wrong = expected_gradient(lambda logp: logp.exp() * (logp - ref))
    assert float((wrong - kl_gradient(True, REF)).abs().max()) > 1e-2


def test_distillation_loss_descends_the_exact_reverse_kl_from_any_sampler() -> None:
    teacher, mu = torch.log_softmax(TEACHER, -1), torch.log_softmax(MU, -1)
    got = expected_gradient(lambda logp: distillation.opd(logp, mu, teacher), MU)
    same(got, kl_gradient(True, TEACHER))
    joint = expected_gradient(lambda logp: logp - teacher)
    same(joint, torch.zeros(7, dtype=torch.float64))


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ppo_clip_and_dual_clip_by_hand() -> None:
    ratio = f64(1.5, 1.5, 0.5, 0.5, 5.0, 1.1)
    advantage = f64(1, -1, 1, -1, -1, 2)
    single = policy_loss.clipped(ratio, advantage, clip_low=0.2, clip_high=0.28)
    same(single, f64(-1.28, 1.5, -0.5, 0.8, 5.0, -2.2))
    dual = policy_loss.clipped(ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    same(dual, f64(-1.28, 1.5, -0.5, 0.8, 3.0, -2.2))


def test_a_clipped_token_has_no_gradient_and_any_other_its_ratio_times_the_advantage() -> None:
    logp = f64(1.5, 1.5).log().requires_grad_()
    policy_loss.ppo(logp, f64(0.0, 0.0), f64(2.0, -2.0)).sum().backward()
    same(logp.grad, f64(0.0, 3.0))


def test_decoupled_ppo_is_ppo_weighed_without_a_cap() -> None:
    logp, old, mu = f64(0.3, -0.5, 0.1), f64(0.0, -0.1, 0.4), f64(-2.0, 0.2, 0.3)
    plain = policy_loss.ppo(logp, old, f64(1, -1, 2), dual_clip=None)
    weighed = policy_loss.tis(old - mu, math.inf) * plain
    same(losses.decoupled_ppo(logp, old, mu, f64(1, -1, 2)), weighed)


def test_gspo_ratio_is_the_geometric_mean_over_action_tokens() -> None:
    old = torch.zeros(5, dtype=torch.float64)
    logp = f64(0.2, 0.4, 50.0, -0.3, 0.1)
    mask, ids = torch.tensor([1, 1, 0, 1, 0]), torch.tensor([0, 0, 0, 1, 1])
    got = losses.gspo_ratio(logp, old, mask, ids, 2)
    same(got, f64(0.3, 0.3, 0.3, -0.3, -0.3).exp())


def test_gspo_gradient_reaches_each_token_with_the_sequence_ratio() -> None:
    logp = f64(0.2, 0.4).requires_grad_()
    ids = torch.zeros(2, dtype=torch.long)
    advantage = f64(2.0, 2.0)
    loss = losses.gspo(logp, f64(0, 0), advantage, (torch.ones(2), ids, 1), clip_high=1.0)
    loss.sum().backward()
    same(logp.grad, f64(-2 * math.exp(0.3), -2 * math.exp(0.3)))


def test_sapo_has_slope_one_at_ratio_one_and_saturates() -> None:
    logp = f64(0.0, 0.0).requires_grad_()
    losses.sapo(logp, f64(0, 0), f64(1, -1)).sum().backward()
    same(logp.grad, f64(-1, 1))
    far = f64(math.log(2.0))
    # r = 2 and τ = 1.05 for A < 0.
    expected = 4 / 1.05 / (1 + math.exp(-1.05))
    same(losses.sapo(far, f64(0), f64(-1)), f64(expected))


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logp = f64(math.log(3.0)).requires_grad_()
    losses.cispo(logp, f64(0.0), f64(2.0), clip_high=0.28).sum().backward()
    same(logp.grad, f64(-1.28 * 2))
    logp.grad = None
    policy_loss.ppo(logp, f64(0.0), f64(2.0)).sum().backward()
    same(logp.grad, f64(0.0))


def test_every_name_of_a_loss_and_of_a_correction_has_a_function() -> None:
    for kind, names in {"loss": LOSSES, "correction": CORRECTIONS}.items():
        assert all(callable(grpo.part(kind, name)) for name in names)
    for (kind, name), path in grpo._PARTS.items():  # GRPO's own stand in two tables
        assert path_of(kind, name) == path


def test_value_loss_takes_the_worse_of_clipped_and_unclipped() -> None:
    got = losses.value_loss(f64(1.0, 0.5), f64(0.0, 0.5), f64(1.0, 0.0), clip=0.2)
    same(got, f64(0.5 * 0.8**2, 0.5 * 0.5**2))


def test_token_corrections_by_hand() -> None:
    log_w = f64(0.25, 1.0, 3.0).log()
    same(policy_loss.tis(log_w, 2.0), f64(0.25, 1, 2))
    same(corrections.mis(log_w, 2.0), f64(0.25, 1, 0))
    same(corrections.icepop(log_w, 0.5, 5.0), f64(0, 1, 3))


def test_sequence_corrections_ignore_masked_tokens() -> None:
    log_w = f64(2.0, 0.5, 1e-9, 3.0, 4.0, 1e-5).log()
    mask = torch.tensor([1, 1, 0, 1, 1, 1])
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    segments = (mask, ids, 3)
    same(corrections.sequence_tis(log_w, *segments, 5.0), f64(1, 1, 1, 5, 5, 1e-5))
    # Geometric means: 1, sqrt(12) = 3.46, 1e-5.
    kept = corrections.geometric_rejection(log_w, *segments, 0.5, 2.0)
    same(kept, f64(1, 1, 1, 0, 0, 0))
    same(corrections.veto(log_w, *segments), f64(1, 1, 1, 1, 1, 0))


MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 0])
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])


def test_aggregation_weights_by_hand() -> None:
    def weights(kind: str, **extra) -> list[float]:
        return [round(float(w), 6) for w in token_weights(kind, MASK, IDS, 4, **extra)]

    assert weights("token_mean") == [0, *[0.142857] * 3, 0, *[0.142857] * 4, 0]
    third = round(1 / 12, 6)
    assert weights("seq_mean_token_mean") == [
        0, 0.125, 0.125, 0.25, 0, third, third, third, 0.25, 0,
    ]  # fmt: skip
    assert weights("seq_mean_token_sum") == [0, 0.25, 0.25, 0.25, 0, 0.25, 0.25, 0.25, 0.25, 0]
    constant = weights("constant", constant_length=10)
    assert constant == [0, 0.025, 0.025, 0.025, 0, 0.025, 0.025, 0.025, 0.025, 0]
    prompts = weights("prompt_mean", prompt_ids_S=torch.tensor([5, 5, 9, 9]))
    sixth = round(1 / 6, 6)
    assert prompts == [0, sixth, sixth, sixth, 0, 0.125, 0.125, 0.125, 0.125, 0]


def test_samples_of_one_rollout_share_its_denominator() -> None:
    got = token_weights(
        "seq_mean_token_mean", MASK, IDS, 4, rollout_ids_S=torch.tensor([7, 7, 8, 9])
    )
    ninth = 1 / 9  # three tokens of rollout 7, three rollouts
    expected = torch.tensor([0, ninth, ninth, ninth, 0, ninth, ninth, ninth, 3 * ninth, 0])
    torch.testing.assert_close(got, expected)


def test_aggregation_mistakes_are_named() -> None:
    for kind, match in (("mean", "aggregation='mean'"), ("constant", "constant_length=None")):
        with pytest.raises(ValueError, match=match):
            token_weights(kind, MASK, IDS, 4)
    with pytest.raises(ValueError, match="prompt_ids_S"):
        token_weights("prompt_mean", MASK, IDS, 4)


def whole_batch() -> LossBatch:
    noise = torch.Generator().manual_seed(5)
    logps = [-torch.rand(10, generator=noise, dtype=torch.float64) * 2 for _ in range(3)]
    return LossBatch(
        old_logp_T=logps[0],
        rollout_logp_T=logps[0] + 0.1 * logps[1],
        advantage_T=torch.randn(10, generator=noise, dtype=torch.float64),
        mask_T=MASK,
        weight_T=torch.empty(0),
        sequence_ids_T=IDS,
        num_sequences=4,
        ref_logp_T=logps[2],
    )


def micro_batches(batch: LossBatch, num: int) -> list[tuple[slice, LossBatch]]:
    parts = []
    for first in range(0, 4, 4 // num):
        held = ((first <= IDS) & (first + 4 // num > IDS)).nonzero().flatten()
        part = slice(int(held[0]), int(held[-1]) + 1)
        tensors = {
            name: value[part] for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        tensors["sequence_ids_T"] = tensors["sequence_ids_T"] - first
        parts.append((part, replace(batch, **tensors, num_sequences=4 // num)))
    return parts


SPECS = [
    named_spec(name)
    for name in ("grpo", "dr_grpo", "rloo", "dapo", "gspo", "sapo", "cispo", "opd", "ppo")
] + [
    AlgorithmSpec(loss="decoupled_ppo", aggregation="prompt_mean", dual_clip=None),
    AlgorithmSpec(correction="sequence_tis", kl_coef=0.1, aggregation="seq_mean_token_sum"),
    AlgorithmSpec(correction="geometric", kl_coef=0.1, kl_estimator="rk3"),
    AlgorithmSpec(correction="icepop", veto_below=1e-4, kl_coef=0.1, kl_estimator="k3"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.loss}-{s.aggregation}-{s.correction}")
def test_the_gradient_does_not_depend_on_the_split(spec: AlgorithmSpec) -> None:
    weight = token_weights(
        spec.aggregation, MASK, IDS, 4, constant_length=spec.constant_length,
        prompt_ids_S=torch.tensor([0, 0, 1, 1]),
    ).double()  # fmt: skip
    batch = replace(whole_batch(), weight_T=weight)
    token_loss = make_loss(spec)
    grads, totals = [], []
    for num in (1, 2, 4):
        logp = (batch.old_logp_T + 0.05).requires_grad_()
        stats = []
        for part, micro in micro_batches(batch, num):
            loss, stat = token_loss(logp[part], micro)
            loss.backward()
            stats.append(stat)
        grads.append(logp.grad)
        added = {name: sum(float(stat[name]) for stat in stats) for name in stats[0]}
        totals.append(per_action_token(added))
        assert float(logp.grad[MASK == 0].abs().sum()) == 0.0
        assert float(logp.grad.abs().sum()) > 0
    for other, total in zip(grads[1:], totals[1:], strict=True):
        torch.testing.assert_close(other, grads[0], rtol=0, atol=1e-14)
        assert total == pytest.approx(totals[0], rel=1e-5)


def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient() -> None:
    batch = replace(whole_batch(), weight_T=token_weights("token_mean", MASK, IDS, 4).double())
    spec = AlgorithmSpec(kl_coef=0.1, correction="tis")
    clean, _ = make_loss(spec)(batch.old_logp_T, batch)
    dirt = torch.where(MASK.bool(), 0.0, torch.inf)
    dirty = replace(
        batch, advantage_T=batch.advantage_T + dirt, rollout_logp_T=batch.rollout_logp_T - dirt
    )
    logp = (batch.old_logp_T + 1e4 * (MASK == 0)).requires_grad_()
    loss, stats = make_loss(spec)(logp, dirty)
    loss.backward()
    assert float(loss.detach()) == float(clean)
    assert bool(logp.grad.isfinite().all())
    assert all(bool(torch.isfinite(value)) for value in stats.values())


def test_a_batch_without_an_action_token_weighs_nothing() -> None:
    batch = replace(whole_batch(), mask_T=torch.zeros(10, dtype=torch.long))
    for loss in ("ppo", "gspo", "cispo"):
        weight = token_weights("token_mean", batch.mask_T, IDS, 4).double()
        logp = batch.old_logp_T.clone().requires_grad_()
        total, _ = make_loss(AlgorithmSpec(loss=loss))(logp, replace(batch, weight_T=weight))
        total.backward()
        assert float(total.detach()) == 0.0 and not logp.grad.any()


def test_entropy_bonus_and_statistics_by_hand() -> None:
    zeros = torch.zeros(4)
    batch = LossBatch(
        old_logp_T=zeros,
        rollout_logp_T=torch.tensor([0.0, -0.5, 0.0, -9.0]),
        advantage_T=torch.tensor([1.0, 1.0, -1.0, 1.0]),
        mask_T=torch.tensor([1, 1, 1, 0]),
        weight_T=torch.tensor([0.5, 0.25, 0.25, 0.0]),
        sequence_ids_T=torch.zeros(4, dtype=torch.long),
        num_sequences=1,
        entropy_T=torch.tensor([2.0, 4.0, 4.0, 100.0]),
    )
    spec = AlgorithmSpec(loss="reinforce", entropy_coef=0.1, correction="none")
    logp = torch.tensor([0.5, 0.0, -0.5, 3.0])
    loss, stats = make_loss(spec)(logp, batch)
    # −(.5·.5) + 0 + .25·(−.5)  −  .1·(1 + 1 + 1)
    assert float(loss) == pytest.approx(-0.25 - 0.125 - 0.3)
    means = per_action_token({name: float(value) for name, value in stats.items()})
    assert means["clip_fraction"] == pytest.approx(2 / 3)
    assert means["entropy"] == pytest.approx(10 / 3)
    assert means["ratio"] == pytest.approx((math.exp(0.5) + 1 + math.exp(-0.5)) / 3)


def test_bypassing_the_old_policy_uses_the_rollout_logps_and_never_w() -> None:
    batch = replace(whole_batch(), weight_T=token_weights("token_mean", MASK, IDS, 4).double())
    bypass, _ = make_loss(AlgorithmSpec(old_policy="rollout"))(batch.old_logp_T, batch)
    same_batch = replace(batch, old_logp_T=batch.rollout_logp_T)
    plain, _ = make_loss(AlgorithmSpec(correction="none"))(batch.old_logp_T, same_batch)
    assert float(bypass) == float(plain)
    for extra in ({"correction": "tis"}, {"loss": "decoupled_ppo"}, {"veto_below": 1e-4}):
        with pytest.raises(ValueError, match="old_policy='rollout'"):
            AlgorithmSpec(old_policy="rollout", **extra)


def one_token_batch(logp: Tensor, mu: Tensor, advantage: Tensor, **fields: Tensor) -> LossBatch:
    """Every token a sequence of its own, all of weight 1."""
    return LossBatch(
        rollout_logp_T=mu,
        advantage_T=advantage,
        mask_T=torch.ones_like(logp),
        weight_T=torch.ones_like(logp),
        sequence_ids_T=torch.arange(len(logp)),
        num_sequences=len(logp),
        **fields,
    )


def test_stale_tokens_are_weighed_by_default_and_the_policy_itself_is_the_old_one() -> None:
    """w = 1.5 and 4, cut at 2; r = 1: the loss is -(1.5 · 2) + 2 · 1, its gradient -w·A."""
    logp = f64(-1.0, -1.0).requires_grad_()
    mu = logp.detach() - f64(1.5, 4.0).log()
    loss, stats = make_loss(AlgorithmSpec())(logp, one_token_batch(logp, mu, f64(2.0, -1.0)))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-3.0 + 2.0)
    same(logp.grad, f64(-3.0, 2.0))
    assert float(stats["correction_sum"]) == pytest.approx(3.5)
    assert float(stats["ratio_sum"]) == 2.0


def test_the_weighed_gradient_is_that_of_the_present_policy_whoever_sampled() -> None:
    """Without the cap: exact, over all seven symbols of another policy."""
    mu = torch.log_softmax(MU, -1)
    for loss in ("ppo", "reinforce", "sapo", "cispo"):
        token_loss = make_loss(AlgorithmSpec(loss=loss, correction="tis", correction_cap=1e9))
        logits = THETA.clone().requires_grad_()
        logp = torch.log_softmax(logits, -1)
        batch = replace(one_token_batch(logp, mu, REWARD), weight_T=mu.exp())
        token_loss(logp, batch)[0].backward()
        same(logits.grad, POLICY_GRADIENT)
        logits.grad = None
        logp = torch.log_softmax(logits, -1)
        uncorrected = make_loss(AlgorithmSpec(loss=loss, correction="none"))
        uncorrected(logp, batch)[0].backward()
        assert float((logits.grad - POLICY_GRADIENT).abs().max()) > 1e-2


def test_the_correction_that_nobody_chose() -> None:
    assert AlgorithmSpec().resolved_correction == "tis"
    for spec in (
        AlgorithmSpec(old_policy="rollout"),
        AlgorithmSpec(loss="decoupled_ppo"),
        named_spec("opd"),
    ):
        assert (spec.resolved_correction, spec.answers_for_staleness) == ("none", True)
    for spec in (
        AlgorithmSpec(correction="none"),
        AlgorithmSpec(correction="none", veto_below=1e-4),
        AlgorithmSpec(loss="reinforce", old_policy="rollout"),
    ):
        assert not spec.answers_for_staleness


def test_a_nan_is_never_taken_for_a_rejection() -> None:
    log_w, mask, ids = f64(math.nan, 0.0), torch.ones(2), torch.tensor([0, 1])
    for weight in (
        policy_loss.tis(log_w, 2.0),
        corrections.mis(log_w, 2.0),
        corrections.icepop(log_w, 0.5, 5.0),
        corrections.sequence_tis(log_w, mask, ids, 2, 2.0),
        corrections.geometric_rejection(log_w, mask, ids, 2, 0.999, 1.001),
    ):
        assert math.isnan(weight[0]) and weight[1] == 1.0


def test_clips_and_bounds_are_those_of_the_papers() -> None:
    assert AlgorithmSpec().clip == (0.2, 0.2)
    assert AlgorithmSpec(loss="gspo").clip == named_spec("gspo").clip == (3e-4, 4e-4)
    assert AlgorithmSpec(loss="gspo", clip_low=1e-3).clip == (1e-3, 4e-4)
    assert named_spec("dapo").clip == (0.2, 0.28)
    assert AlgorithmSpec(correction="icepop").bounds == (0.5, 5.0)
    assert AlgorithmSpec(correction="geometric").bounds == (0.999, 1.001)
    low, high = named_spec("cispo").clip
    ratio = f64(1e-3, 1.0, 9.0)
    logp = ratio.log().requires_grad_()
    losses.cispo(logp, f64(0, 0, 0), f64(1, 1, 1), clip_low=low, clip_high=high).sum().backward()
    same(logp.grad, -f64(1e-3, 1.0, 1.28))  # no lower bound


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss": "pp"}, "loss='pp': choose one of reinforce"),
        ({"advantage": "x"}, "advantage='x'"),
        ({"aggregation": "x"}, "aggregation='x'"),
        ({"correction": "x"}, "correction='x'"),
        ({"kl_estimator": "k1"}, "gradient is 0 in expectation"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"dual_clip": 0.5}, "dual_clip=0.5"),
        ({"gamma": 2.0}, "gamma=2.0"),
        ({"constant_length": 3}, "constant_length=3"),
        ({"loss": "opd", "correction": "tis"}, "twice"),
        ({"correction": "icepop", "correction_low": 3.0}, "correction_low=3.0: must be at most 1"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
        ({"kl_coef": math.nan}, "kl_coef=nan: must be a finite number"),
        ({"correction_cap": math.inf}, "correction_cap=inf: must be a finite number"),
        ({"correction_cap": 0.5}, "correction_cap=0.5: must be 1 or more"),
        ({"clip_high": -0.1}, "clip_high=-0.1: must be 0 or more"),
        ({"loss": "gspo", "clip_low": 0.2}, "clip_low=0.2: must be at most 0.1: a sequence's"),
        ({"loss": "gspo", "clip_high": 0.2}, "clip_high=0.2: must be at most 0.1: a sequence's"),
        ({"correction_low": 0.5}, "correction_low=0.5: correction='auto' has no bounds"),
        ({"correction": "geometric", "correction_high": 2.0}, "correction_high=2.0: .* never"),
        ({"correction": "geometric", "correction_low": 0.5}, "correction_low=0.5: .* never"),
        ({"kl_reward_coef": 0.1}, "kl_reward_coef=0.1: advantage='grpo'"),
        ({"advantage": "maxrl", "overlong_buffer": 8}, "overlong_buffer=8"),
        ({"advantage": "none"}, "advantage='none': nothing is left"),
        ({"tau_negative": 0.0}, "tau_negative=0.0: must be more than 0"),
        ({"veto_below": 1.0}, "veto_below=1.0"),
    ],
)
def test_impossible_specs_are_refused_with_the_reason(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AlgorithmSpec(**options)


def test_a_missing_reference_is_named() -> None:
    batch = replace(
        whole_batch(), weight_T=token_weights("token_mean", MASK, IDS, 4), ref_logp_T=None
    )
    with pytest.raises(ValueError, match="ref_logp_T is missing"):
        make_loss(AlgorithmSpec(kl_coef=0.1))(batch.old_logp_T, batch)
    with pytest.raises(ValueError, match="choose one of grpo"):
        named_spec("nope")


def test_distillation_weighs_a_sampled_token_by_its_log_ratio_alone() -> None:
    logp = f64(-1.0).requires_grad_()
    distillation.opd(logp, f64(-1.0), f64(-3.0)).sum().backward()
    same(logp.grad, f64(2.0))  # without the stop-gradient it would be 3


# -- what bugs that were planted said nothing about ------------------------------------------------


def told(spec: AlgorithmSpec, logp: Tensor, batch: LossBatch) -> dict[str, float]:
    """Means per action token."""
    _, stats = make_loss(spec)(logp, batch)
    return per_action_token({name: float(value) for name, value in stats.items()})


def test_a_veto_drops_a_sequence_below_the_threshold_that_was_given() -> None:
    """w = 0.3 and 0.5, in sequences of their own."""
    logp = f64(-1.0, -1.0)
    batch = one_token_batch(logp, logp - f64(0.3, 0.5).log(), f64(1.0, 1.0))
    for below, kept in ((0.0, [0.3, 0.5]), (0.4, [0.0, 0.5]), (0.2, [0.3, 0.5])):
        leaf = logp.clone().requires_grad_()
        make_loss(AlgorithmSpec(veto_below=below))(leaf, batch)[0].backward()
        same(leaf.grad, -f64(*kept))
        rejected = told(AlgorithmSpec(veto_below=below), logp, batch)["rejected_fraction"]
        assert rejected == kept.count(0.0) / 2


def test_the_clip_statistics_are_those_of_the_loss() -> None:
    """r = 1.5, 1.25, 1.25 and 0.5 where A pushes on, and 1.5, 0.5 where it pulls back."""
    ratio, advantage = f64(1.5, 1.25, 1.25, 0.5, 1.5, 0.5), f64(1, 1, 1, -1, -1, 1)
    logp, zero = ratio.log(), torch.zeros(6, dtype=torch.float64)
    batch = one_token_batch(logp, zero, advantage, old_logp_T=zero)
    for low, high, count in ((0.2, 0.2, 4), (0.6, 0.2, 3), (0.2, 0.3, 2), (0.6, 0.6, 0)):
        spec = AlgorithmSpec(clip_low=low, clip_high=high)
        assert told(spec, logp, batch)["clip_fraction"] == pytest.approx(count / 6)
    # Distances of probabilities: from .4 to .6, .5, .5 and .2.
    old = torch.full((6,), math.log(0.4), dtype=torch.float64)
    batch = one_token_batch(logp, old, advantage)
    for low, high, count in ((0.15, 0.15, 2), (0.25, 0.15, 1), (0.25, 0.05, 3), (0.15, 0.25, 1)):
        spec = AlgorithmSpec(loss="dppo_tv", old_policy="rollout", clip_low=low, clip_high=high)
        assert told(spec, logp + old, batch)["clip_fraction"] == pytest.approx(count / 6)


def test_the_ratio_of_gspo_s_statistics_is_the_sequence_s() -> None:
    """log r of 0.2 and 0.4 in one sequence: both are told as e^0.3, and both are clipped."""
    logp, zero = f64(0.2, 0.4), torch.zeros(2, dtype=torch.float64)
    batch = LossBatch(
        rollout_logp_T=zero, old_logp_T=zero, advantage_T=f64(1, 1), mask_T=f64(1, 1),
        weight_T=f64(0.5, 0.5), sequence_ids_T=torch.tensor([0, 0]), num_sequences=1,
    )  # fmt: skip
    stats = told(AlgorithmSpec(loss="gspo", clip_high=0.1), logp, batch)
    assert stats["ratio"] == pytest.approx(math.exp(0.3))
    assert stats["clip_fraction"] == 1.0
    assert stats["old_kl"] == pytest.approx((math.exp(-0.2) + math.exp(-0.4)) / 2 - 1 + 0.3)


def test_an_observation_without_a_share_may_be_impossible() -> None:
    """-inf, as of a token that a grammar forbids, is no part of ECHO's term."""
    batch = replace(
        one_token_batch(f64(-1.0, 0.0, 0.0), f64(-1.0, 0.0, 0.0), f64(0.0, 0.0, 0.0)),
        mask_T=f64(1, 0, 0),
        observation_T=f64(0, 0.5, 0),
    )
    logp = f64(-1.0, -2.0, -math.inf)
    loss, stats = make_loss(AlgorithmSpec(observation_coef=0.1))(logp, batch)
    assert float(loss) == pytest.approx(0.1 * 0.5 * 2.0)
    assert float(stats["observation_loss"]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (named_spec("decoupled_ppo"), "staleness_T"),
        (AlgorithmSpec(advantage="none", loss="opd", hindsight="solution"), "teacher_logp_T"),
        (named_spec("kl_cov"), "chosen_T"),
        (named_spec("opd"), "ref_logp_T"),
        (AlgorithmSpec(entropy_coef=0.1), "entropy_T"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_field_says_outside_the_mask_is_never_read(spec: AlgorithmSpec, field: str) -> None:
    ones = torch.full((10,), 0.5, dtype=torch.float64)
    names = ("staleness_T", "teacher_logp_T", "chosen_T", "ref_logp_T", "entropy_T")
    weight = token_weights("token_mean", MASK, IDS, 4).double()
    clean = replace(whole_batch(), weight_T=weight, **dict.fromkeys(names, ones))
    dirty = replace(clean, **{field: torch.where(MASK.bool(), ones, math.nan)})
    found = []
    for batch in (clean, dirty):
        logp = batch.rollout_logp_T.clone().requires_grad_()
        loss, stats = make_loss(spec)(logp, batch)
        loss.backward()
        found.append((float(loss.detach()), logp.grad.tolist(), float(stats["ratio_sum"])))
    assert found[0] == found[1] and math.isfinite(found[0][0])
