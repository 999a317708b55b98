"""Mixture of experts on a GPU: the interpreter's bar at model sizes, and the same bits twice."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))
from guard import check

from kernels import fused_moe, grouped_gemm, moe_align, topk_softmax
from kernels.moe.grouped_gemm import grouped_gemm_ref
from kernels.moe.moe_routing import moe_align_ref, topk_softmax_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape, scale=1.0):
    return torch.randn(shape, device="cuda") * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", [(8191, 128, 8), (4096, 60, 4), (1, 512, 10)])
def test_topk_softmax(dtype, renormalize, shape):
    torch.manual_seed(0)
    rows, experts, k = shape
    logits = normal(rows, experts).to(dtype)
    ids = topk_softmax(logits, k, renormalize=renormalize)[1]
    expected = topk_softmax_ref(logits.double(), k, renormalize)[1]
    p = torch.softmax(logits.double(), -1)  # near ties may swap: the probabilities must agree
    assert torch.allclose(p.gather(1, ids.long()), p.gather(1, expected.long()), rtol=1e-6)
    check(
        lambda z: topk_softmax(z, k, renormalize=renormalize)[0],
        lambda z: topk_softmax_ref(z, k, renormalize)[0],
        [logits],
        dtype,
        times=2 if rows > 1 else 4,  # a GPU's fast exp2: the sum's error is that of the whole row
    )


@pytest.mark.parametrize(
    "tokens, k, experts", [(16384, 8, 128), (1, 8, 128), (0, 2, 5), (333, 1, 3)]
)
@pytest.mark.parametrize("block_m", [16, 128])
def test_moe_align_equals_the_stable_sort(tokens, k, experts, block_m):
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :k].int()
    ours, expected = moe_align(ids, experts, block_m), moe_align_ref(ids, experts, block_m)
    for name in ("slots", "offsets", "tile_experts", "tile_starts"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[0, 1000, 17, 0, 3000, 1], [3] * 40, [1]])
def test_grouped_gemm(dtype, counts):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    check(
        lambda x, w: grouped_gemm(x, w, offsets),
        lambda x, w: grouped_gemm_ref(x, w, offsets),
        [normal(sum(counts), 1024), normal(len(counts), 760, 1024)],
        dtype,
    )


def moe_by_expert(x, w13, w2, weights, ids):
    """The definition, an expert at a time, differentiable by autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x, dtype=wide)
    for expert in range(w13.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w13[expert].t()).to(wide).chunk(2, -1)
        act = (gate * torch.sigmoid(gate) * up).to(x.dtype)
        part = (act @ w2[expert].t()).to(wide) * weights[token, choice, None]
        y = y.index_add(0, token, part)
    return y.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, experts, k, hidden, width",
    [
        (2049, 64, 8, 1024, 768),
        (64, 128, 8, 2048, 768),
        (1, 8, 2, 512, 264),
        (4096, 8, 2, 1024, 1032),
    ],
)
def test_fused_moe(dtype, tokens, experts, k, hidden, width):
    torch.manual_seed(0)
    weights, ids = topk_softmax(normal(tokens, experts), k)
    inputs = [
        normal(tokens, hidden),
        normal(experts, 2 * width, hidden, scale=hidden**-0.5),
        normal(experts, hidden, width, scale=width**-0.5),
        weights,
    ]
    check(
        lambda *t: fused_moe(*t, ids), lambda *t: moe_by_expert(*t, ids), inputs, dtype, keep=(3,)
    )


def test_no_tokens():
    leaves = [normal(*s).requires_grad_() for s in ((0, 64), (4, 64, 64), (4, 64, 32), (0, 2))]
    ids = torch.zeros(0, 2, dtype=torch.int32, device="cuda")
    y = fused_moe(*leaves, ids)
    y.sum().backward()
    assert y.shape == (0, 64) and not leaves[1].grad.any()
