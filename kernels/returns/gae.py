"""Generalised advantage estimation over packed sequences, as a reverse scan.

On the action tokens of a sequence (`mask`; all tokens without one), with V and A of the *next
action token* and 0 after the last:

    A_t = r_t + γ·V' − V_t + γλ·A',   return_t = A_t + V_t

Tokens outside the mask neither discount nor bootstrap and get 0. A step backwards is an affine map
of (V', A'), and maps compose associatively: a sequence is scanned in log depth. PyTorch does it
for all sequences at once in fp64 by doubling; a GPU runs one program a sequence.
Source: arXiv 1506.02438; why the mask compresses the sequence: `nanorl.algorithms.advantages`.
"""

from itertools import pairwise

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_bounds,
    check_floating,
    check_integers,
    check_tensors,
    use_triton,
)


def gae_ref(
    rewards_T: Tensor,
    values_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    mask_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token from the end."""
    advantages, returns = torch.zeros_like(values_T), torch.zeros_like(values_T)
    bounds = cu_seqlens.tolist()
    for first, end in pairwise(bounds):
        next_value = next_advantage = values_T.new_zeros(())
        for t in reversed(range(first, end)):
            if mask_T is not None and not mask_T[t]:
                continue
            delta = rewards_T[t] + gamma * next_value - values_T[t]
            next_value, next_advantage = values_T[t], delta + gamma * lam * next_advantage
            advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return advantages, returns


def _scan(
    rewards_T: Tensor,
    values_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    mask_T: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """After pass i, entry t holds the sum over its next 2^i action tokens."""
    lengths = cu_seqlens.diff().long()
    owner_T = torch.repeat_interleave(
        torch.arange(len(lengths), device=values_T.device), lengths, output_size=len(values_T)
    )
    at = None if mask_T is None else mask_T.bool().nonzero().squeeze(-1)
    rewards, values, owner = (
        x if at is None else x[at] for x in (rewards_T.double(), values_T.double(), owner_T)
    )
    goes_on = torch.zeros_like(values)
    goes_on[:-1] = owner[1:] == owner[:-1]
    total = rewards - values
    total[:-1] += gamma * goes_on[:-1] * values[1:]
    factor, step = gamma * lam * goes_on, 1
    while step < len(total) and bool(factor.any()):
        total[:-step] += factor[:-step] * total[step:]
        factor[:-step] *= factor[step:].clone()
        step *= 2
    advantages, returns = torch.zeros_like(values_T), torch.zeros_like(values_T)
    where = slice(None) if at is None else at
    advantages[where] = total.to(values_T.dtype)
    returns[where] = (total + values).to(values_T.dtype)
    return advantages, returns


def gae(
    rewards_T: Tensor,
    values_T: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    lam: float,
    *,
    mask_T: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) in the dtype of the values, 0 outside the mask. `cu_seqlens` int32
    [sequences + 1]; no gradient flows."""
    if values_T.dim() != 1 or rewards_T.shape != values_T.shape:
        raise ValueError(
            f"rewards: shape {tuple(rewards_T.shape)} must be [tokens] like values "
            f"{tuple(values_T.shape)}"
        )
    if mask_T is not None and mask_T.shape != values_T.shape:
        raise ValueError(
            f"mask: shape {tuple(mask_T.shape)} must be values' {tuple(values_T.shape)}"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name}={number}: must be in [0, 1]")
    on_triton = use_triton(backend, values_T)
    check_tensors(
        values_T, "values", on_triton, rewards=rewards_T, cu_seqlens=cu_seqlens, mask=mask_T
    )
    check_floating(rewards=rewards_T)
    check_integers(cu_seqlens=cu_seqlens)
    check_bounds("cu_seqlens", cu_seqlens, len(values_T))
    with torch.no_grad():
        if not on_triton:
            return _scan(rewards_T, values_T, cu_seqlens, gamma, lam, mask_T)
        from kernels.triton import gae as triton_ops  # here: not every machine has Triton

        return triton_ops.scan(rewards_T, values_T, cu_seqlens, gamma, lam, mask_T)
