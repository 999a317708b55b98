"""Triton's routing, grouped matmul and fused MoE, interpreted, against their definitions in fp64.

Inputs lie between NaN guard bands; every output is allocated full of NaN first.
"""

import pytest
import torch
from guard import assert_as_good_as_plain_torch, poisoned_memory

from kernels import fused_moe, grouped_gemm, moe_align, topk_softmax
from kernels.moe.fused_moe import fused_moe_ref
from kernels.moe.grouped_gemm import grouped_gemm_ref
from kernels.moe.moe_routing import moe_align_ref, topk_softmax_ref
from kernels.triton import moe_routing as triton_ops

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", [(37, 60, 4), (5, 8, 8), (1, 3, 1), (9, 256, 8), (7, 512, 10)])
def test_topk_softmax(dtype, renormalize, shape):
    torch.manual_seed(0)
    rows, experts, k = shape
    logits = torch.randn(rows, experts).to(dtype)
    ids = topk_softmax(logits, k, renormalize=renormalize, backend="triton")[1]
    assert torch.equal(ids, topk_softmax_ref(logits, k, renormalize)[1])
    assert_as_good_as_plain_torch(
        lambda z: topk_softmax(z, k, renormalize=renormalize, backend="triton")[0],
        lambda z: topk_softmax_ref(z, k, renormalize)[0],
        [logits],
        dtype,
    )


def test_equal_probabilities_go_to_the_lower_expert_and_nan_stays_in_range():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [torch.nan] * 6])
    ids = topk_softmax(logits, 4, backend="triton")[1]
    assert ids[0].tolist() == [1, 3, 2, 4]
    assert ids[1].min() >= 0 and ids[1].max() < 6


@pytest.mark.parametrize("tokens, k, experts", [(0, 2, 5), (1, 1, 3), (150, 3, 60), (700, 1, 2)])
def test_moe_align_equals_the_stable_sort(tokens, k, experts):
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).argsort(1)[:, :k].int()
    with poisoned_memory():
        ours = moe_align(ids, experts, 16, backend="triton")
    expected = moe_align_ref(ids, experts, 16)
    for name in ("slots", "offsets", "tile_experts", "tile_starts"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


def test_moe_align_of_more_runs_than_are_added_up_at_a_time(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(triton_ops, "_RUNS", 2)
    ids = torch.rand(100, 9).argsort(1)[:, :3].int()  # 300 slots in 5 runs
    ours, expected = (moe_align(ids, 9, 16, backend=b) for b in ("triton", "torch"))
    for name in ("slots", "offsets"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[0, 5, 17, 0, 70], [1], [0, 0, 0]])
def test_grouped_gemm(dtype, counts):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    inputs = [torch.randn(sum(counts), 44), torch.randn(len(counts), 37, 44)]
    assert_as_good_as_plain_torch(
        lambda x, w: grouped_gemm(x, w, offsets, backend="triton"),
        lambda x, w: grouped_gemm_ref(x, w, offsets),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, experts, k", [(23, 5, 2), (1, 6, 3)])
def test_fused_moe(dtype, tokens, experts, k):
    torch.manual_seed(0)
    weights, ids = topk_softmax(torch.randn(tokens, experts), k)
    inputs = [
        torch.randn(tokens, 40),
        torch.randn(experts, 2 * 35, 40) * 0.3,
        torch.randn(experts, 40, 35),
        weights,
    ]
    assert_as_good_as_plain_torch(
        lambda *t: fused_moe(*t, ids, backend="triton"),
        lambda *t: fused_moe_ref(*t, ids),
        inputs,
        dtype,
        keep=(3,),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("tokens, experts, k", [(23, 5, 2), (2, 6, 3)])
def test_fused_moe_with_biases(dtype, activation, tokens, experts, k):
    torch.manual_seed(0)
    weights, ids = topk_softmax(torch.randn(tokens, experts), k)
    inputs = [
        torch.randn(tokens, 40),
        torch.randn(experts, 2 * 35, 40) * 0.8,  # the clamps move some
        torch.randn(experts, 40, 35),
        weights,
        torch.randn(experts, 2 * 35),
        torch.randn(experts, 40),
    ]

    def run(op, *given, **options):
        *rest, b13, b2 = given
        return op(*rest, ids, biases=(b13, b2), activation=activation, **options)

    assert_as_good_as_plain_torch(
        lambda *t: run(fused_moe, *t, backend="triton"),
        lambda *t: run(fused_moe_ref, *t),
        inputs,
        dtype,
        keep=(3,),
    )


def test_no_tokens_give_empty_outputs_and_zero_gradients():
    leaves = [torch.randn(s).requires_grad_() for s in ((0, 8), (3, 12, 8), (3, 8, 6), (0, 2))]
    with poisoned_memory():
        y = fused_moe(*leaves, torch.zeros(0, 2, dtype=torch.int32), backend="triton")
        y.sum().backward()
    assert y.shape == (0, 8)
    assert not leaves[1].grad.any() and not leaves[2].grad.any()


def test_main_grad_takes_the_experts_gradients_by_addition():
    torch.manual_seed(0)
    weights, ids = topk_softmax(torch.randn(9, 4), 2)
    x, w13, w2 = torch.randn(9, 24), torch.randn(4, 32, 24), torch.randn(4, 24, 16)
    totals = {}
    for backend in ("torch", "triton"):
        leaves = [t.bfloat16().requires_grad_() for t in (w13, w2)]
        for leaf in leaves:
            leaf.main_grad = torch.ones(leaf.shape)
        fused_moe(x.bfloat16(), *leaves, weights, ids, backend=backend).sum().backward()
        assert all(leaf.grad is None for leaf in leaves)
        totals[backend] = [leaf.main_grad for leaf in leaves]
    for ours, expected in zip(totals["triton"], totals["torch"], strict=True):
        assert (ours - expected).norm() < 1e-2 * expected.norm()


def test_fused_moe_gives_the_same_bits_every_time_and_in_every_batch():
    torch.manual_seed(0)
    weights, ids = topk_softmax(torch.randn(30, 4), 2)
    x, w13, w2 = torch.randn(30, 24), torch.randn(4, 32, 24), torch.randn(4, 24, 16)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, w13, w2, weights)]
        y = fused_moe(*leaves, ids, backend="triton")
        return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, 24).expand(30, 24))]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
