"""Rows of which the last begins past 2^31 elements: with 32-bit offsets their addresses wrap.

The rows lie 2^23 elements apart in memory that is never touched between them.
"""

import pytest
import torch

from kernels import flash_attn_varlen
from kernels.torch.attention import flash_attn_varlen_ref

STRIDE, TOKENS = 1 << 23, 300  # 300 x 2^23 > 2^31


@pytest.fixture(scope="module")
def memory():
    """5 GB of addresses, of which the tests touch some pages a row."""
    return torch.empty(STRIDE * TOKENS, dtype=torch.float16)


def far_apart(memory, x, at):
    view = memory.as_strided(x.shape, (STRIDE, *x.stride()[1:]), at)
    return view.copy_(x)


def test_attention_forward_and_backward(memory):
    torch.manual_seed(0)
    plain = [torch.randn(TOKENS, 1, 16).half() for _ in "qkv"]
    far = [far_apart(memory, x, 64 * i).detach().requires_grad_() for i, x in enumerate(plain)]
    near = [x.requires_grad_() for x in plain]
    cu = torch.tensor([0, TOKENS], dtype=torch.int32)
    results = []
    for leaves in (far, near):
        o = flash_attn_varlen(*leaves, cu, cu, TOKENS, TOKENS, backend="triton")
        grads = torch.autograd.grad(o, leaves, torch.ones(o.shape, dtype=o.dtype))
        results.append([o, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    wide, bounds = [x.detach().double() for x in near], [0, TOKENS]
    exact = flash_attn_varlen_ref(*wide, bounds, bounds, 0.25)[0]
    assert (results[0][0].double() - exact).norm() < 1e-3 * exact.norm()


def test_queries_of_many_heads_far_apart(memory):
    """[heads, tokens, dim] memory, as a transposed projection has: head times stride."""
    torch.manual_seed(0)
    q = torch.randn(TOKENS, 1, 16).half()
    wide = far_apart(memory, q, 0).transpose(0, 1)  # [1, heads, dim]
    k = torch.randn(1, 1, 16).half()
    cu = torch.tensor([0, 1], dtype=torch.int32)
    o = flash_attn_varlen(wide, k, k, cu, cu, 1, 1, backend="triton")
    assert torch.equal(o, k.expand(1, TOKENS, 16))
