"""Triton's rms_norm, rope, qk_norm_rope, swiglu and linear_logprob, interpreted, against fp64.

Inputs lie between NaN guard bands, so a read past the end shows in the result.
"""

import pytest
import torch
from guard import assert_as_good_as_plain_torch, guarded, outputs_and_gradients

from kernels import (
    add_rms_norm,
    apply_rope,
    gather_rows,
    linear_logprob,
    make_row_gather,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
from kernels.gpu.gather_rows import gather_rows_ref
from kernels.torch.linear_logprob import linear_logprob_ref
from kernels.torch.rms_norm import rms_norm_ref
from kernels.torch.rope import apply_rope_ref, qk_norm_rope_ref
from kernels.torch.swiglu import swiglu_ref

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 33), (700, 40), (2, 3, 64), (3, 2500), (5, 9000)])
def test_rms_norm(dtype, shape):
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(shape[-1])
    assert_as_good_as_plain_torch(
        lambda x, w: rms_norm(x, w, 1e-5, backend="triton"),
        lambda x, w: rms_norm_ref(x, w, 1e-5),
        [x, w],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 50), (600, 40), (1, 2500), (0, 24), (3, 16384)])
def test_add_rms_norm(dtype, shape):
    torch.manual_seed(0)

    def plain(x, r, w):
        return rms_norm_ref(x + r, w, 1e-5), x + r

    assert_as_good_as_plain_torch(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5, backend="triton"),
        plain,
        [torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2 * 1500), (2, 3, 34), (1, 2), (0, 24)])
def test_swiglu(dtype, shape):
    torch.manual_seed(0)
    inputs = [torch.randn(shape)]
    assert_as_good_as_plain_torch(lambda x: swiglu(x, backend="triton"), swiglu_ref, inputs, dtype)


def test_swiglu_writes_the_gradient_over_its_input_only_if_asked():
    torch.manual_seed(0)
    x, dy = torch.randn(5, 40), torch.randn(5, 20)
    kept = x.clone().requires_grad_()
    swiglu(kept, backend="triton").backward(dy)
    assert torch.equal(kept, x)
    given = x.clone().requires_grad_()
    out = swiglu(given * 1.0, overwrite_gate_up=True, backend="triton")
    out.backward(dy, retain_graph=True)
    assert torch.equal(given.grad, kept.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (2, 1, 20), (7, 1, 80), (8, 1, 128)])
def test_rope(dtype, heads):
    torch.manual_seed(0)
    h, k, d = heads
    angle, positions = torch.rand(40, d // 2) * 6, torch.randint(0, 40, (6,))
    cos, sin = guarded(angle.cos()), guarded(angle.sin())

    def plain(q, k):
        wide = torch.promote_types(q.dtype, torch.float32)
        return apply_rope_ref(q, k, cos.to(wide), sin.to(wide), positions)

    assert_as_good_as_plain_torch(
        lambda q, k: apply_rope(q, k, cos, sin, positions, backend="triton"),
        plain,
        [torch.randn(6, h, d), torch.randn(6, k, d)],
        dtype,
    )


def split_heads(fused, heads):
    """q and k as an engine has them: slices of one projection, beside v."""
    q_heads, k_heads, dim = heads
    parts = fused.split((q_heads * dim, k_heads * dim, k_heads * dim), -1)
    return [x.view(len(fused), -1, dim) for x in parts[:2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [(9, 3, 64), (2, 1, 20), (4, 4, 128), (7, 1, 80), (8, 1, 64), (80, 70, 64), (96, 2, 128)],
)
@pytest.mark.parametrize("has_positions", [True, False])
def test_qk_norm_rope(dtype, heads, has_positions):
    torch.manual_seed(0)
    num_tokens, dim = 6, heads[2]
    angle = torch.rand(40 if has_positions else num_tokens, dim // 2) * 6
    cos, sin = guarded(angle.cos()), guarded(angle.sin())
    positions = torch.randint(0, 40, (num_tokens,)) if has_positions else None

    def ours(fused, qw, kw):
        q, k = split_heads(fused, heads)
        return qk_norm_rope(q, k, qw, kw, cos, sin, positions, 1e-5, backend="triton")

    def plain(fused, qw, kw):
        q, k = split_heads(fused, heads)
        wide = torch.promote_types(q.dtype, torch.float32)
        at = torch.arange(num_tokens) if positions is None else positions
        return qk_norm_rope_ref(q, k, qw, kw, cos.to(wide), sin.to(wide), at, 1e-5)

    width = (heads[0] + 2 * heads[1]) * dim
    inputs = [torch.randn(num_tokens, width), torch.randn(dim), torch.randn(dim)]
    assert_as_good_as_plain_torch(ours, plain, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_give_no_output_and_a_zero_weight_gradient(dtype):
    x, w = torch.empty(0, 24, dtype=dtype), torch.ones(24, dtype=dtype)
    out = outputs_and_gradients(lambda x, w: rms_norm(x, w, backend="triton"), [x, w])
    assert torch.equal(out[2], 0 * w)
    table = torch.ones(5, 12)
    q, k = torch.empty(0, 2, 24, dtype=dtype), torch.empty(0, 1, 24, dtype=dtype)
    at = torch.empty(0, dtype=torch.int64)
    assert apply_rope(q, k, table, table, at, backend="triton")[1].shape == (0, 1, 24)
    out = outputs_and_gradients(
        lambda q, k, qw, kw: qk_norm_rope(q, k, qw, kw, table, table, at, backend="triton"),
        [q, k, w, w],
    )
    assert torch.equal(out[4], 0 * w) and torch.equal(out[5], 0 * w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [97, 4096 + 31])
def test_linear_logprob(dtype, temperature, vocab):
    torch.manual_seed(0)
    ids = torch.randint(0, vocab, (11,))
    ids[0], ids[1] = 0, vocab - 1

    def ours(h, w):
        return linear_logprob(
            h, w, ids, temperature=temperature, return_entropy=True, chunk_size=4, backend="triton"
        )

    inputs = [torch.randn(11, 16), torch.randn(vocab, 16)]
    # the product of the backward pass is the CPU's here: torch's sum may be in more parts than ours
    assert_as_good_as_plain_torch(
        ours, lambda h, w: linear_logprob_ref(h, w, ids, temperature), inputs, dtype, times=5
    )


def test_backward_is_the_same_bits_every_time():
    torch.manual_seed(0)
    x, w = torch.randn(900, 96), torch.randn(96)

    def op(x, w):
        return rms_norm(x, w, 1e-5, backend="triton")

    first, second = outputs_and_gradients(op, [x, w]), outputs_and_gradients(op, [x, w])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_copy_of_a_row_sends_its_gradient_back(dtype):
    """A prompt's rows are copied once for each of a group's completions: 0 to 40 times here."""
    torch.manual_seed(0)
    copies = torch.tensor([0, 1, 40, 9, 2])
    index = torch.repeat_interleave(torch.arange(5), copies)[torch.randperm(int(copies.sum()))]
    plan = make_row_gather(index, 5)
    assert_as_good_as_plain_torch(
        lambda x: gather_rows(x, plan, backend="triton"),
        lambda x: gather_rows_ref(x, index),
        [torch.randn(5, 3, 50)],
        dtype,
    )
