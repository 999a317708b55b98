"""Triton kernels of `qk_norm_rope`. Forward: one program a token, its heads of q and then of k as
one tile each. Backward: a fixed number of programs walk over their tokens, a tile of heads at a
time, and keep both weights' gradients in registers (no atomics); 1/rms is computed again from x,
which is read anyway."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.rope import dense_last, load_angle
from kernels.triton.tiles import NUM_PARTIALS, head_tile, power_of_2, sum_partials, warps_for

_NUM_PARTIALS = 4 * NUM_PARTIALS  # they are one head wide: nothing beside the tokens


@triton.jit
def _load_halves(x_ptr, token, first, num_heads, half, token_stride, head_stride,
                 HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (heads < num_heads - first) & (cols < half)
    at = x_ptr + token * token_stride + tl.cast(first, tl.int64) * head_stride
    at = at + heads.to(tl.int64) * head_stride + cols  # heads may lie a whole sequence apart
    x1 = tl.load(at, mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + half, mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_halves(x1, x2, x_ptr, token, first, num_heads, half, HEADS: tl.constexpr,
                  HALF: tl.constexpr):  # fmt: skip
    heads, cols = first + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (heads < num_heads) & (cols < half)
    at = x_ptr + (token * num_heads + heads) * 2 * half + cols
    tl.store(at, x1.to(x_ptr.dtype.element_ty), mask)
    tl.store(at + half, x2.to(x_ptr.dtype.element_ty), mask)


@triton.jit
def _load_weight(w_ptr, half, HALF: tl.constexpr):
    cols = tl.arange(0, HALF)[None, :]
    w1 = tl.load(w_ptr + cols, cols < half, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptr + half + cols, cols < half, other=0.0).to(tl.float32)
    return w1, w2


@triton.jit
def _normalise(x1, x2, half, eps):
    """x / rms and 1 / rms of every head."""
    square = tl.sum(x1 * x1 + x2 * x2, 1, keep_dims=True)
    rstd = tl.rsqrt(square / (2 * half) + eps)
    return x1 * rstd, x2 * rstd, rstd


@triton.jit
def _forward_heads(x_ptr, y_ptr, w_ptr, cos, sin, token, num_heads, half, token_stride,
                   head_stride, eps, HEADS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    x1, x2 = _load_halves(x_ptr, token, 0, num_heads, half, token_stride, head_stride, HEADS, HALF)
    w1, w2 = _load_weight(w_ptr, half, HALF)
    n1, n2, _ = _normalise(x1, x2, half, eps)
    y1, y2 = n1 * w1, n2 * w2
    _store_halves(y1 * cos - y2 * sin, y2 * cos + y1 * sin, y_ptr, token, 0, num_heads, half, HEADS,
                  HALF)  # fmt: skip


@triton.jit
def qk_norm_rope_forward_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr, position_ptr,
    num_q_heads, num_k_heads, half, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    eps, HAS_POSITIONS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angle(cos_ptr, sin_ptr, position_ptr, token, half, HAS_POSITIONS, HALF)
    _forward_heads(q_ptr, q_out_ptr, qw_ptr, cos, sin, token, num_q_heads, half, q_token_stride,
                   q_head_stride, eps, Q_HEADS, HALF)  # fmt: skip
    _forward_heads(k_ptr, k_out_ptr, kw_ptr, cos, sin, token, num_k_heads, half, k_token_stride,
                   k_head_stride, eps, K_HEADS, HALF)  # fmt: skip


@triton.jit
def _backward_heads(x_ptr, dy_ptr, dx_ptr, w1, w2, dw1, dw2, cos, sin, token, num_heads, half,
                    token_stride, head_stride, dy_token_stride, dy_head_stride, eps,
                    HEADS: tl.constexpr, HALF: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    for first in tl.range(0, TILES * HEADS, HEADS, num_stages=1):
        x1, x2 = _load_halves(x_ptr, token, first, num_heads, half, token_stride, head_stride,
                              HEADS, HALF)  # fmt: skip
        dy1, dy2 = _load_halves(dy_ptr, token, first, num_heads, half, dy_token_stride,
                                dy_head_stride, HEADS, HALF)  # fmt: skip
        n1, n2, rstd = _normalise(x1, x2, half, eps)
        g1, g2 = dy1 * cos + dy2 * sin, dy2 * cos - dy1 * sin
        dw1 += g1 * n1
        dw2 += g2 * n2
        g1, g2 = g1 * w1, g2 * w2
        mean = tl.sum(g1 * n1 + g2 * n2, 1, keep_dims=True) / (2 * half)
        _store_halves((g1 - n1 * mean) * rstd, (g2 - n2 * mean) * rstd, dx_ptr, token, first,
                      num_heads, half, HEADS, HALF)  # fmt: skip
    return dw1, dw2


@triton.jit
def _store_partial(dw1, dw2, partial_ptr, half, HALF: tl.constexpr):
    cols = tl.arange(0, HALF)
    tl.store(partial_ptr + cols, tl.sum(dw1, 0), cols < half)
    tl.store(partial_ptr + half + cols, tl.sum(dw2, 0), cols < half)


@triton.jit
def qk_norm_rope_backward_kernel(
    q_ptr, k_ptr, dq_out_ptr, dk_out_ptr, dq_ptr, dk_ptr, qw_ptr, kw_ptr, cos_ptr, sin_ptr,
    position_ptr, q_partial_ptr, k_partial_ptr, num_tokens, tokens_each, num_q_heads, num_k_heads,
    half, q_token_stride, q_head_stride, k_token_stride, k_head_stride, dq_token_stride,
    dq_head_stride, dk_token_stride, dk_head_stride, eps, HAS_POSITIONS: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    qw1, qw2 = _load_weight(qw_ptr, half, HALF)
    kw1, kw2 = _load_weight(kw_ptr, half, HALF)
    dqw1 = tl.zeros([Q_HEADS, HALF], dtype=tl.float32)
    dqw2 = tl.zeros([Q_HEADS, HALF], dtype=tl.float32)
    dkw1 = tl.zeros([K_HEADS, HALF], dtype=tl.float32)
    dkw2 = tl.zeros([K_HEADS, HALF], dtype=tl.float32)
    first = program * tokens_each
    for token in range(first, tl.minimum(first + tokens_each, num_tokens)):
        cos, sin = load_angle(cos_ptr, sin_ptr, position_ptr, token, half, HAS_POSITIONS, HALF)
        dqw1, dqw2 = _backward_heads(
            q_ptr, dq_out_ptr, dq_ptr, qw1, qw2, dqw1, dqw2, cos, sin, token, num_q_heads, half,
            q_token_stride, q_head_stride, dq_token_stride, dq_head_stride, eps, Q_HEADS, HALF,
            Q_TILES,
        )  # fmt: skip
        dkw1, dkw2 = _backward_heads(
            k_ptr, dk_out_ptr, dk_ptr, kw1, kw2, dkw1, dkw2, cos, sin, token, num_k_heads, half,
            k_token_stride, k_head_stride, dk_token_stride, dk_head_stride, eps, K_HEADS, HALF,
            K_TILES,
        )  # fmt: skip
    _store_partial(dqw1, dqw2, q_partial_ptr + program * 2 * half, half, HALF)
    _store_partial(dkw1, dkw2, k_partial_ptr + program * 2 * half, half, HALF)


def forward(q, k, q_weight, k_weight, cos, sin, positions, eps) -> tuple[Tensor, Tensor]:
    q, k = dense_last(q), dense_last(k)
    num_tokens, num_q_heads, head_dim = q.shape
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    q_heads, half_block = power_of_2(num_q_heads), power_of_2(head_dim // 2)
    if num_tokens:
        launch(qk_norm_rope_forward_kernel, (num_tokens,))(
            q, k, *outs, q_weight.contiguous(), k_weight.contiguous(), cos.contiguous(),
            sin.contiguous(), positions, num_q_heads, k.shape[1], head_dim // 2, q.stride(0),
            q.stride(1), k.stride(0), k.stride(1), eps, HAS_POSITIONS=positions is not None,
            Q_HEADS=q_heads, K_HEADS=power_of_2(k.shape[1]), HALF=half_block,
            num_warps=warps_for(2 * q_heads * half_block),
        )  # fmt: skip
    return outs[0], outs[1]


def backward(
    dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, positions, eps
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and both weights."""
    q, k, dq_out, dk_out = (dense_last(x) for x in (q, k, dq_out, dk_out))
    num_tokens, num_q_heads, head_dim = q.shape
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    tokens_each = max(1, triton.cdiv(num_tokens, _NUM_PARTIALS))
    num_programs = triton.cdiv(num_tokens, tokens_each)
    q_partial, k_partial = (
        torch.empty(num_programs, head_dim, dtype=torch.float32, device=q.device) for _ in "qk"
    )
    half_block = power_of_2(head_dim // 2)
    q_heads, k_heads = (head_tile(x.shape[1], half_block) for x in (q, k))
    if num_tokens:
        launch(qk_norm_rope_backward_kernel, (num_programs,))(
            q, k, dq_out, dk_out, dq, dk, q_weight.contiguous(), k_weight.contiguous(),
            cos.contiguous(), sin.contiguous(), positions, q_partial, k_partial, num_tokens,
            tokens_each, num_q_heads, k.shape[1], head_dim // 2, q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), dq_out.stride(0), dq_out.stride(1), dk_out.stride(0),
            dk_out.stride(1), eps, HAS_POSITIONS=positions is not None, Q_HEADS=q_heads,
            K_HEADS=k_heads, HALF=half_block, Q_TILES=triton.cdiv(num_q_heads, q_heads),
            K_TILES=triton.cdiv(k.shape[1], k_heads),
            num_warps=warps_for(2 * q_heads * half_block),
        )  # fmt: skip
    dqw = sum_partials(q_partial, q_weight.dtype)
    return dq, dk, dqw, sum_partials(k_partial, k_weight.dtype)
