"""Triton kernel of `apply_rope`: one program a token rotates its heads of q, then of k, with one
read of the angle. The backward pass is the same kernel with the sine's sign turned."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import power_of_2, warps_for


@triton.jit
def load_angle(cos_ptr, sin_ptr, position_ptr, token, half, HAS_POSITIONS: tl.constexpr,
               HALF: tl.constexpr):  # fmt: skip
    """cos and sin of a token, [1, HALF]; without positions the tables have one row a token."""
    position = token
    if HAS_POSITIONS:
        position = tl.load(position_ptr + token).to(tl.int64)
    cols = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + position * half + cols, cols < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * half + cols, cols < half, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos, sin, token, num_heads, half, token_stride, head_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask = (heads < num_heads) & (cols < half)
    source = x_ptr + token * token_stride + heads * head_stride + cols
    x1 = tl.load(source, mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + half, mask, other=0.0).to(tl.float32)
    target = y_ptr + (token * num_heads + heads) * 2 * half + cols
    tl.store(target, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask)
    tl.store(target + half, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr, num_q_heads, num_k_heads,
    half, q_token_stride, q_head_stride, k_token_stride, k_head_stride, sign,
    HAS_POSITIONS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angle(cos_ptr, sin_ptr, position_ptr, token, half, HAS_POSITIONS, HALF)
    sin = sin * sign
    _rotate_heads(q_ptr, q_out_ptr, cos, sin, token, num_q_heads, half, q_token_stride,
                  q_head_stride, Q_HEADS, HALF)  # fmt: skip
    _rotate_heads(k_ptr, k_out_ptr, cos, sin, token, num_k_heads, half, k_token_stride,
                  k_head_stride, K_HEADS, HALF)  # fmt: skip


def rotate(
    q_THD: Tensor, k_TKD: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: float
) -> tuple[Tensor, Tensor]:
    """q and k may be slices of a fused projection: only their last dimension must be dense."""
    q_THD, k_TKD = dense_last(q_THD), dense_last(k_TKD)
    num_tokens, num_q_heads, head_dim = q_THD.shape
    num_k_heads = k_TKD.shape[1]
    q_out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k_out = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    q_heads, half_block = power_of_2(num_q_heads), power_of_2(head_dim // 2)
    if num_tokens:
        launch(rope_kernel, (num_tokens,))(
            q_THD, k_TKD, q_out, k_out, cos.contiguous(), sin.contiguous(), positions,
            num_q_heads, num_k_heads, head_dim // 2, q_THD.stride(0), q_THD.stride(1),
            k_TKD.stride(0), k_TKD.stride(1), sign, HAS_POSITIONS=positions is not None,
            Q_HEADS=q_heads, K_HEADS=power_of_2(num_k_heads), HALF=half_block,
            num_warps=warps_for(2 * q_heads * half_block),
        )  # fmt: skip
    return q_out, k_out


def dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
