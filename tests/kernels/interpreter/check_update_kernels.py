"""Triton's policy_loss, gae, fused_adamw_ and multi_tensor_l2norm, interpreted, against fp64."""

import pytest
import torch
from guard import assert_as_close, guarded, poisoned_memory

from kernels import (
    clip_scale,
    fused_adamw_,
    gae,
    make_tensor_table,
    multi_tensor_l2norm,
    policy_loss,
)
from kernels.adamw import adamw_ref, multi_tensor_l2norm_ref
from kernels.gae import gae_ref
from kernels.policy_loss import PolicyLossInputs, PolicyLossOptions, policy_loss_ref

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [700, 0, 1, 5, 594]
LOSS_SIZE = 4  # bounds the mean of the terms' absolute values in these tests


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def loss_tensors(num_tokens, dtype):
    """Log-probs that leave the clip on both sides, NaN outside the mask."""
    torch.manual_seed(0)
    old = -torch.rand(num_tokens) * 4
    names = ("logprobs", "ref_logprobs", "rollout_logprobs")
    t = {name: old + 0.4 * torch.randn(num_tokens) for name in names}
    t |= {"old_logprobs": old, "advantages": torch.randn(num_tokens)}
    t["weights"] = torch.rand(num_tokens) / num_tokens
    mask = torch.rand(num_tokens) < 0.7
    return {n: guarded(torch.where(mask, x, torch.nan).to(dtype)) for n, x in t.items()}, mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["grpo", "ppo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("kl_kind", [None, "k2", "k3"])
def test_policy_loss(dtype, variant, kl_kind):
    """With a kind of KL also every optional input; ppo without the dual clip."""
    is_full = kl_kind is not None
    t, mask = loss_tensors(sum(LENGTHS), dtype)
    names = ["logprobs", "old_logprobs", "advantages"]
    optional = ["weights", "ref_logprobs", "rollout_logprobs"]
    clip = {"clip_low": 3e-2, "clip_high": 4e-2} if variant == "gspo" else {"clip_low": 0.2}
    clip.setdefault("clip_high", 0.28 if variant == "dapo" else 0.2)
    extra = {n: t[n] for n in optional} if is_full else {}
    kl = {"kl_coef": 0.5, "kl_kind": kl_kind} if is_full else {}
    dual = {"dual_clip": None if variant == "ppo" else 3.0}
    cu = bounds(LENGTHS) if variant == "gspo" else None
    logp = t["logprobs"].clone().requires_grad_()
    with poisoned_memory():
        loss, stats = policy_loss(
            logp, t["old_logprobs"], t["advantages"], mask, cu_seqlens=cu, variant=variant,
            backend="triton", **extra, **kl, **clip, **dual,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss, logp)
    options = PolicyLossOptions(
        variant, clip["clip_low"], clip["clip_high"],
        None if variant == "gspo" else dual["dual_clip"], kl.get("kl_coef", 0.0), kl_kind, 2.0,
    )  # fmt: skip

    def definition(kind):
        wide = {n: None if n in optional and not is_full else x.to(kind) for n, x in t.items()}
        leaf = wide["logprobs"].clone().requires_grad_()
        inputs = PolicyLossInputs(
            leaf, *(wide[n] for n in names[1:]), mask, *(wide[n] for n in optional), cu
        )
        total = policy_loss_ref(inputs, options)
        return [total.detach(), *torch.autograd.grad(total, leaf)]

    plain, exact = definition(dtype), definition(torch.float64)
    assert_as_close([grad], plain[1:], exact[1:])
    assert abs(loss - exact[0]) < 1e-6 * LOSS_SIZE  # one number: plain may be exact by luck
    assert not grad[~mask].any() and grad[mask].isfinite().all()
    expected = policy_loss(
        logp, t["old_logprobs"], t["advantages"], mask, cu_seqlens=cu, variant=variant,
        **extra, **kl, **clip, **dual,
    )[1]  # fmt: skip
    assert 0 < expected["clip_fraction"] < 1
    for name, value in expected.items():
        torch.testing.assert_close(stats[name], value, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["grpo", "gspo"])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_policy_loss_without_an_action_token_is_zero(variant, num_tokens):
    t, _ = loss_tensors(num_tokens, torch.float32)
    logp = t["logprobs"].clone().requires_grad_()
    loss, stats = policy_loss(
        logp, t["old_logprobs"], t["advantages"], torch.zeros(num_tokens, dtype=torch.bool),
        cu_seqlens=bounds([num_tokens]), variant=variant, backend="triton",
    )  # fmt: skip
    loss.backward()
    assert loss == 0 and not logp.grad.any() and all(x == 0 for x in stats.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_mask", [False, True])
def test_gae(dtype, has_mask):
    torch.manual_seed(0)
    lengths = [517, 0, 1, 9]
    rewards, values = (guarded(torch.randn(sum(lengths)).to(dtype)) for _ in range(2))
    mask = torch.rand(sum(lengths)) < 0.6 if has_mask else None
    cu = bounds(lengths)
    with poisoned_memory():
        ours = gae(rewards, values, cu, 0.99, 0.95, mask_T=mask, backend="triton")

    def definition(kind):
        return gae_ref(rewards.to(kind), values.to(kind), cu, 0.99, 0.95, mask)

    assert_as_close(ours, definition(dtype), definition(torch.float64))


def tensors(shapes, dtype):
    return [guarded(torch.randn(shape).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_follows_the_definition_for_three_steps(dtype):
    torch.manual_seed(0)
    shapes = [(130, 127), (3, 5), (1,), (0, 4)]
    options = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    master = tensors(shapes, torch.float32)
    params = [guarded(x.to(dtype)) for x in master]
    exact = [(x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double())
             for x in master]  # fmt: skip
    plain = [(x.clone(), torch.zeros_like(x), torch.zeros_like(x)) for x in master]
    moments = [[guarded(torch.zeros(s)) for s in shapes] for _ in range(2)]
    grads = tensors(shapes, dtype)
    plan = make_tensor_table(params, grads, *moments, master)
    for step in (1, 2, 3):
        for g in grads:
            g.copy_(torch.randn(g.shape))
        scale = clip_scale(multi_tensor_l2norm(grads, backend="triton"), 1.0)
        assert 0 < scale < 0.1
        fused_adamw_(
            params, grads, *moments, master, step=step, grad_scale=scale, plan=plan,
            backend="triton", **options,
        )  # fmt: skip
        for i, g in enumerate(grads):
            exact[i] = adamw_ref(exact[i][0], g, *exact[i][1:], step=step,
                                 grad_scale=float(scale), **options)  # fmt: skip
            plain[i] = adamw_ref(plain[i][0], g, *plain[i][1:], step=step,
                                 grad_scale=float(scale), **options)  # fmt: skip
    for ours, p, e in zip((master, *moments), zip(*plain, strict=True), zip(*exact, strict=True),
                          strict=True):  # fmt: skip
        assert_as_close(*([torch.cat([x.flatten() for x in xs])] for xs in (ours, p, e)))
    for i, param in enumerate(params):
        assert torch.equal(param, master[i].to(dtype))


@pytest.mark.parametrize("offset", [0, 1])
def test_adamw_without_masters_updates_the_parameters_wherever_they_start(offset):
    """At an offset of one element no address is a multiple of 16 bytes."""
    torch.manual_seed(0)
    ours, theirs = [torch.randn(1001)[offset:]], [torch.nn.Parameter(torch.empty(1001 - offset))]
    theirs[0].data.copy_(ours[0])
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    moments = [[torch.zeros(1001)[offset:]] for _ in range(2)]
    for step in (1, 2):
        theirs[0].grad = torch.randn(1001)[offset:]
        reference.step()
        fused_adamw_(
            ours, [theirs[0].grad], *moments, None, lr=0.01, betas=(0.9, 0.999), eps=1e-8,
            weight_decay=0.1, step=step, backend="triton",
        )  # fmt: skip
    torch.testing.assert_close(ours[0], theirs[0].data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm(dtype):
    torch.manual_seed(0)
    given = tensors([(200, 173), (7,), (0,), (1, 1)], dtype)
    with poisoned_memory():
        norm = multi_tensor_l2norm(given, backend="triton")
    assert norm.item() == pytest.approx(multi_tensor_l2norm_ref(given).item(), rel=1e-6)
    unaligned = [guarded(torch.randn(1001))[1:]]
    expected = multi_tensor_l2norm_ref(unaligned).item()
    assert multi_tensor_l2norm(unaligned, backend="triton").item() == pytest.approx(expected)
    given[1][3] = torch.inf
    assert multi_tensor_l2norm(given, backend="triton") == torch.inf
