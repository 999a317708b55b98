"""Triton kernel of `apply_rope`: one program a token, all heads of q or k as one tile. The
backward pass is the same kernel with the sine's sign turned."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, position_ptr, num_heads, half, token_stride, head_stride, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads, cols = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    position = tl.load(position_ptr + token).to(tl.int64)
    angle = position * half + cols
    cos = tl.load(cos_ptr + angle, cols < half, other=0.0)
    sin = tl.load(sin_ptr + angle, cols < half, other=0.0) * sign
    mask = (heads < num_heads) & (cols < half)
    source = x_ptr + token * token_stride + heads * head_stride + cols
    x1 = tl.load(source, mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + half, mask, other=0.0).to(tl.float32)
    target = y_ptr + (token * num_heads + heads) * 2 * half + cols
    tl.store(target, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask)
    tl.store(target + half, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, sign: float) -> Tensor:
    """x may be a slice of a fused projection: only its last dimension must be contiguous."""
    x_THD = x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()
    num_tokens, num_heads, head_dim = x_THD.shape
    y = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if num_tokens:
        _rotate_kernel[(num_tokens,)](
            x_THD, y, cos.contiguous(), sin.contiguous(), positions, num_heads, head_dim // 2,
            x_THD.stride(0), x_THD.stride(1), sign,
            HEADS=triton.next_power_of_2(num_heads), HALF=triton.next_power_of_2(head_dim // 2),
        )  # fmt: skip
    return y
