"""Triton kernel of `gae`: one program a sequence walks back in blocks, each an associative scan.

A token is the affine map (V', A') → (v + e·V', a + b·V' + c·A'): an action token has e = 0,
v = V, a = r − V, b = γ, c = γλ; any other token is the identity. Blocks are loaded from the end
backwards, so that the scan itself runs forwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

_BLOCK = 512


@triton.jit
def _after(v, e, a, b, c, v2, e2, a2, b2, c2):
    """The second map after the first (the second token lies before the first one)."""
    return v2 + e2 * v, e2 * e, a2 + b2 * v + c2 * a, b2 * e + c2 * b, c2 * c


@triton.jit
def gae_kernel(
    reward_ptr, value_ptr, mask_ptr, cu_ptr, advantage_ptr, return_ptr, gamma, lam,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.load(cu_ptr + tl.program_id(0)).to(tl.int64)
    end = tl.load(cu_ptr + tl.program_id(0) + 1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    next_value = gamma * 0.0
    next_advantage = gamma * 0.0
    for done in range(0, end - first, BLOCK):
        at = end - 1 - done - lane
        keep = at >= first
        if mask_ptr is not None:
            keep = keep & (tl.load(mask_ptr + at, keep, other=0) != 0)
        reward = tl.load(reward_ptr + at, keep, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + at, keep, other=0.0).to(tl.float32)
        is_action = keep.to(tl.float32)
        v, e, a, b, c = tl.associative_scan(
            (value, 1 - is_action, reward - value, gamma * is_action,
             tl.where(keep, gamma * lam, 1.0)),
            0, _after,
        )  # fmt: skip
        advantage = tl.where(keep, a + b * next_value + c * next_advantage, 0.0)
        inside = at >= first
        tl.store(advantage_ptr + at, advantage.to(advantage_ptr.dtype.element_ty), inside)
        returns = (advantage + value).to(return_ptr.dtype.element_ty)
        tl.store(return_ptr + at, returns, inside)
        is_last = lane == BLOCK - 1
        v, e = tl.sum(tl.where(is_last, v, 0.0), 0), tl.sum(tl.where(is_last, e, 0.0), 0)
        a, b = tl.sum(tl.where(is_last, a, 0.0), 0), tl.sum(tl.where(is_last, b, 0.0), 0)
        c = tl.sum(tl.where(is_last, c, 0.0), 0)
        next_advantage = a + b * next_value + c * next_advantage
        next_value = v + e * next_value


def scan(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, gamma: float, lam: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rewards, values = rewards.contiguous(), values.contiguous()
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    if cu_seqlens.shape[0] > 1:
        launch(gae_kernel, (cu_seqlens.shape[0] - 1,))(
            rewards, values, None if mask is None else mask.contiguous(), cu_seqlens.contiguous(),
            advantages, returns, gamma, lam, BLOCK=_BLOCK,
        )  # fmt: skip
    return advantages, returns
