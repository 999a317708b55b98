"""The host's part of attention.py's Triton path: bounds beside the queries, and trees as sequences
with more keys than queries. The kernels are in `triton/attention.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import VarlenPlan
from kernels.backend import Backend, check_bounds, check_triton_dtype, resolve, wide_sinks
from kernels.cpp.ops import AttendOptions
from kernels.gpu.gather_rows import RowGather, gather_rows, make_row_gather
from kernels.memory import to_device
from kernels.varlen.flash_attention import flash_attn_varlen

_MAX_HEAD_DIM = 256
_WHOLE_LOADS = 16
"""Elements of a head are a multiple of this, or they are loaded one by one, and registers spill."""
_ATTENTION = "kernels.triton.attention:TritonAttention"


@dataclass(frozen=True)
class Segments:
    """Segments as sequences with more keys than queries: each one's keys, [ancestors, own], are
    gathered one segment after the other. The copies of a shared key cost memory and bandwidth of
    its length, small beside the attention; their gradients are added in a fixed order."""

    gather: RowGather
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _make_segments(bounds: list[int], key_rows: list[Tensor], device: torch.device) -> Segments:
    lengths = [len(rows) for rows in key_rows]
    segments = Segments(
        make_row_gather(torch.cat(key_rows), bounds[-1]),
        torch.tensor(bounds, dtype=torch.int32),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max(hi - lo for lo, hi in pairwise(bounds)),
        max(lengths),
    )
    return to_device(segments, device)


def segments_of(plan: VarlenPlan, device: torch.device) -> Segments:
    """The plan's segments on a device, kept by the plan."""
    return plan.layout(
        ("segments", device), lambda: _make_segments(plan.bounds, plan.key_rows, device)
    )


def attend_trees(
    qkv: tuple[Tensor, Tensor, Tensor], plan: VarlenPlan, options: AttendOptions, backend: Backend
) -> Tensor:
    """`tree_attention` over keys and values that are gathered for each segment."""
    q_THD, k_THD, v_THD = qkv
    segments = segments_of(plan, q_THD.device)
    out = flash_attn_varlen(
        q_THD,
        gather_rows(k_THD, segments.gather, backend=backend),
        gather_rows(v_THD, segments.gather, backend=backend),
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        softmax_scale=options.scale,
        window=options.window,
        sinks=options.sinks,
        backend=backend,
    )
    return cast(Tensor, out)


def attend(
    qkv, cu_seqlens, limits, causal, return_lse, options: AttendOptions, batch_invariant
) -> Tensor | tuple[Tensor, Tensor]:
    """What `flash_attn_varlen` returns."""
    width = qkv[0].shape[2]
    if not causal and width % _WHOLE_LOADS:  # as in towers: zeros change no score
        qkv = tuple(F.pad(x, (0, -width % _WHOLE_LOADS)) for x in qkv)
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
    rest = (causal, options.scale, options.window, batch_invariant)
    sinks = wide_sinks(options.sinks, q)
    out, lse2 = resolve(_ATTENTION).apply(q, k, v, sinks, *bounds, *limits, *rest)
    if out.shape[2] != width:
        out = out[..., :width]
    return (out, lse2.t() * math.log(2.0)) if return_lse else out


def _device_bounds(name: str, cu_seqlens: Tensor | Sequence[int], x: Tensor) -> Tensor:
    """int32 beside the tokens `x` that they bound."""
    check_bounds(name, cu_seqlens, x.shape[0])
    return torch.as_tensor(cu_seqlens, dtype=torch.int32, device=x.device).contiguous()
