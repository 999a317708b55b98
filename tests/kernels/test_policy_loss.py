"""policy_loss on a CPU: the losses, gradients and statistics of `nanorl.algorithms`."""

import math

import pytest
import torch

from kernels import policy_loss
from nanorl.algorithms.advantages import token_weights
from nanorl.algorithms.losses import LossBatch, make_loss
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import per_action_token

LENGTHS = [13, 1, 0, 30, 6]


def batch(dtype=torch.float64):
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -3 * torch.rand(num_tokens, dtype=dtype)
    mask = torch.rand(num_tokens) < 0.7

    def near(spread):
        return old + spread * torch.randn(num_tokens, dtype=dtype)

    logp = near(0.5).requires_grad_()
    weight = token_weights("seq_mean_token_mean", mask, ids, len(LENGTHS)).to(dtype)
    held = LossBatch(
        old_logp_T=old, rollout_logp_T=near(0.5), advantage_T=torch.randn(num_tokens, dtype=dtype),
        mask_T=mask, weight_T=weight, sequence_ids_T=ids, num_sequences=len(LENGTHS),
        ref_logp_T=near(1.0),
    )  # fmt: skip
    return logp, held


def ours(logp, held, **options):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return policy_loss(
        logp, held.old_logp_T, held.advantage_T, held.mask_T, weights=held.weight_T,
        cu_seqlens=ends, **options,
    )  # fmt: skip


CASES = [
    ("grpo", {}, {"loss": "ppo"}),
    ("ppo", {"dual_clip": None}, {"loss": "ppo", "dual_clip": None}),
    ("dapo", {"clip_high": 0.28}, {"loss": "ppo", "clip_high": 0.28}),
    ("cispo", {}, {"loss": "cispo", "clip_low": 0.2, "clip_high": 0.2}),
    ("gspo", {"clip_low": 0.03, "clip_high": 0.04},
     {"loss": "gspo", "clip_low": 0.03, "clip_high": 0.04}),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "mine", "spec"), CASES)
@pytest.mark.parametrize("kl_kind", ["k2", "k3"])
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_it_is_the_loss_of_nanorl(variant, mine, spec, kl_kind, correction):
    logp, held = batch()
    theirs = AlgorithmSpec(
        **spec, kl_coef=0.3, kl_estimator=kl_kind, correction=correction, correction_cap=1.3
    )
    expected, stats = make_loss(theirs)(logp, held)
    (expected_grad,) = torch.autograd.grad(expected, logp)
    rollout = held.rollout_logp_T if correction == "tis" else None
    loss, found = ours(
        logp, held, variant=variant, ref_logprobs=held.ref_logp_T, rollout_logprobs=rollout,
        rollout_cap=1.3, kl_coef=0.3, kl_kind=kl_kind, **mine,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-14)
    stats = per_action_token({name: float(value) for name, value in stats.items()})
    for name, theirs_name in (
        ("clip_fraction", "clip_fraction"), ("ratio_mean", "ratio"), ("old_kl", "old_kl"),
        ("ref_kl", "ref_kl"),
    ):  # fmt: skip
        assert float(found[name]) == pytest.approx(stats[theirs_name], rel=1e-6), name
    assert 0 < found["clip_fraction"] < 1


def test_an_infinite_cap_is_decoupled_ppo():
    logp, held = batch()
    spec = AlgorithmSpec(loss="decoupled_ppo")
    expected = make_loss(spec)(logp, held)[0]
    loss, _ = ours(
        logp, held, rollout_logprobs=held.rollout_logp_T, rollout_cap=math.inf, dual_clip=None
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


def test_one_token_by_hand():
    logp = torch.tensor([math.log(1.5) - 1.0], requires_grad=True)
    old, mask = torch.tensor([-1.0]), torch.ones(1, dtype=torch.bool)
    for advantage, loss, grad in ((2.0, -2.4, 0.0), (-2.0, 3.0, 3.0)):  # clipped at 1.2; not
        found, stats = policy_loss(logp, old, torch.tensor([advantage]), mask)
        assert float(found.detach()) == pytest.approx(loss)
        assert float(torch.autograd.grad(found, logp)[0]) == pytest.approx(grad)
        assert float(stats["ratio_max"]) == pytest.approx(1.5)
        assert float(stats["clip_fraction"]) == float(advantage > 0)


def test_whatever_lies_outside_the_mask_has_no_say():
    logp, held = batch()
    hidden = ~held.mask_T
    clean = ours(logp, held)[0]
    dirty = logp.detach().masked_fill(hidden, torch.nan).requires_grad_()
    for x in (held.old_logp_T, held.advantage_T, held.weight_T):
        x[hidden] = torch.inf
    loss, _ = ours(dirty, held)
    loss.backward()
    assert torch.equal(loss, clean) and not dirty.grad[hidden].any()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"variant": "trpo"}, "variant='trpo'"),
        ({"variant": "gspo"}, "cu_seqlens"),
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"clip_low": 1.0}, "clip_low=1.0"),
        ({"dual_clip": 0.5}, "dual_clip=0.5"),
        ({"weights": torch.zeros(3)}, "weights"),
        ({"kl_kind": "k1"}, "kl_kind"),
        ({"rollout_cap": 0.0}, "rollout_cap"),
    ],
)
def test_bad_input_names_the_argument(options, name):
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=name):
        policy_loss(x, x, x, x.bool(), **options)
