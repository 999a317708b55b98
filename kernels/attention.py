"""Grouped-query attention over packed sequences (training), differentiable.

    S = scale · Q · Kᵀ   over the keys a query sees,   lse_i = log Σ_j exp(S_ij)
    P = exp(S − lse),    O = P · V

    dV = Pᵀ · dO,   dS = P ∘ (dO · Vᵀ − delta),   delta_i = Σ_d dO·O − dlse_i
    dQ = scale · dS · K,   dK = scale · dSᵀ · Q   (dK, dV summed over the heads that share a key)

Sequences are packed along the first dimension, queries and keys each with their own bounds. Causal:
the last query of a sequence sits at its last key, so query i of n sees `num_keys − n + i + 1` keys;
with `window=w` the last w of those. A query that sees no key gives o = 0 and lse = −inf.

Three back ends: Triton (`triton/attention.py`: tiles, online softmax, no atomics); a CPU
path for whole causal sequences (`attention_torch.py`: the bits of decoding); and the
definition below, which covers everything else on a CPU. Left out: dropout, sinks, score caps.

Legend: T query tokens, S key tokens, H query heads, K key heads, D head_dim.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.attention_torch import CpuAttention, VarlenPlan, make_varlen_plan
from kernels.backend import (
    Backend,
    check_bounds,
    check_integers,
    check_tensors,
    check_triton_dtype,
    compute_dtype,
    ints,
    use_native,
    use_triton,
)

__all__ = ["VarlenPlan", "flash_attn_varlen", "flash_attn_varlen_ref", "make_varlen_plan"]

_MAX_HEAD_DIM = 256


def flash_attn_varlen_ref(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    softmax_scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one sequence at a time, differentiable by autograd alone: (o, lse [T, H])."""
    group = q_THD.shape[1] // k_SKD.shape[1]
    outs, lses = [q_THD[:0]], [q_THD[:0, :, 0].to(compute_dtype(q_THD.dtype))]
    for (q_lo, q_hi), (k_lo, k_hi) in zip(
        pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True
    ):
        q = q_THD[q_lo:q_hi].transpose(0, 1)
        k = k_SKD[k_lo:k_hi].transpose(0, 1).repeat_interleave(group, 0)
        v = v_SKD[k_lo:k_hi].transpose(0, 1).repeat_interleave(group, 0)
        hidden = _hidden(q_hi - q_lo, k_hi - k_lo, causal, window, q.device)
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(hidden, -math.inf)
        blind = hidden.all(-1)[:, None]
        p = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        outs.append((p @ v).transpose(0, 1))
        wide = scores.to(compute_dtype(scores.dtype))
        lses.append(
            wide.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[:, 0], -math.inf).T
        )
    return torch.cat(outs), torch.cat(lses)


def _hidden(
    num_q: int, num_k: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """True where a query does not see a key."""
    key = torch.arange(num_k, device=device)
    position = torch.arange(num_k - num_q, num_k, device=device).unsqueeze(1)
    hidden = (
        key > position if causal else torch.zeros(num_q, num_k, dtype=torch.bool, device=device)
    )
    return hidden if window is None else hidden | (key <= position - window)


def flash_attn_varlen(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    plan: VarlenPlan | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """o [T, H, D], or (o, lse [T, H] in fp32, natural logarithm) with `return_lse`.

    `cu_seqlens_*` [sequences + 1] start at 0, never decrease and end at T and S; on a GPU int32
    tensors, whose contents are not read by the host. `max_seqlen_*` bound the sequences' lengths.
    `softmax_scale` defaults to head_dim ** -0.5. `window` needs `causal`. `plan` is
    `make_varlen_plan(cu_seqlens_q, dtype)`, for a CPU and whole sequences only (equal bounds,
    causal, no window, no lse); it owns scratch memory, so one plan serves one thread.
    `batch_invariant` on a GPU gives a query the bits that `paged_attention(batch_invariant=True)`
    gives it; on a CPU it always has them.
    """
    _check_tensors(q_THD, k_SKD, v_SKD)
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window}: must be at least 1, with causal=True")
    check_integers(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    scale = softmax_scale if softmax_scale is not None else q_THD.shape[-1] ** -0.5
    if use_triton(backend, q_THD):
        out, lse = _on_triton(
            (q_THD, k_SKD, v_SKD),
            (cu_seqlens_q, cu_seqlens_k),
            (max_seqlen_q, max_seqlen_k),
            causal,
            scale,
            window,
            batch_invariant,
        )
        return (out, lse.t()) if return_lse else out
    is_plain = causal and window is None and not return_lse and q_THD.device.type == "cpu"
    if plan is None:
        check_bounds("cu_seqlens_q", cu_seqlens_q, q_THD.shape[0])
        check_bounds("cu_seqlens_k", cu_seqlens_k, k_SKD.shape[0])
        bounds_q, bounds_k = ints(cu_seqlens_q), ints(cu_seqlens_k)
        if len(bounds_q) != len(bounds_k):
            raise ValueError(
                f"cu_seqlens_k: {len(bounds_k) - 1} sequences, must be cu_seqlens_q's "
                f"{len(bounds_q) - 1}"
            )
        if not is_plain or bounds_q != bounds_k:
            out, lse = flash_attn_varlen_ref(
                q_THD, k_SKD, v_SKD, bounds_q, bounds_k, scale, causal=causal, window=window
            )
            return (out, lse) if return_lse else out
        plan = make_varlen_plan(bounds_q, q_THD.dtype)
    elif not is_plain:
        raise ValueError("plan: only for causal=True, window=None, return_lse=False on a CPU")
    if not plan.num_tokens == q_THD.shape[0] == k_SKD.shape[0]:
        raise ValueError(
            f"plan: made for {plan.num_tokens} tokens, q has {q_THD.shape[0]}, k {k_SKD.shape[0]}"
        )
    is_native = use_native(backend, q_THD)
    return CpuAttention.apply(
        q_THD.contiguous(), k_SKD.contiguous(), v_SKD.contiguous(), plan, scale, is_native
    )


def _on_triton(
    qkv, cu_seqlens, limits, causal, scale, window, batch_invariant
) -> tuple[Tensor, Tensor]:
    from kernels.triton.attention import TritonAttention

    q, k, v = qkv
    check_triton_dtype("q", q.dtype)
    if q.shape[2] > _MAX_HEAD_DIM:
        raise ValueError(f"q: head_dim {q.shape[2]} must be at most {_MAX_HEAD_DIM}")
    bounds = [
        _device_bounds(name, cu, x)
        for name, cu, x in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, (q, k), strict=True)
    ]
    if bounds[0].shape != bounds[1].shape:
        raise ValueError(
            f"cu_seqlens_k: shape {tuple(bounds[1].shape)} must be cu_seqlens_q's "
            f"{tuple(bounds[0].shape)}"
        )
    for name, limit in zip(("max_seqlen_q", "max_seqlen_k"), limits, strict=True):
        if limit < 0 or (limit == 0 and q.shape[0] and k.shape[0]):
            raise ValueError(f"{name}={limit}: must be the length of the longest sequence")
    options = (causal, scale, window, batch_invariant)
    return TritonAttention.apply(q, k, v, *bounds, *limits, *options)


def _device_bounds(name: str, cu_seqlens: Tensor | Sequence[int], x: Tensor) -> Tensor:
    """int32 beside the tokens `x` that they bound."""
    check_bounds(name, cu_seqlens, x.shape[0])
    return torch.as_tensor(cu_seqlens, dtype=torch.int32, device=x.device).contiguous()


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(f"q, k: must be [tokens, heads, head_dim], got {q.dim()}-d, {k.dim()}-d")
    if k.shape != v.shape or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"k, v: shapes {tuple(k.shape)}, {tuple(v.shape)} must be equal and match q "
            f"{tuple(q.shape)} in head_dim"
        )
    check_tensors(q, "q", False, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"k, v: dtypes {k.dtype}, {v.dtype} must be q's {q.dtype}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q: {q.shape[1]} heads must be a multiple of k's {k.shape[1]}")
