"""Attention of packed sequences in which every token sees all of its own sequence, on a CPU.

`attention.py` has the formulas. In C++ it is the kernel of causal attention with a step of 0: all
queries of a tile see the same keys (`cpp/attention.h`, `cpp/attention_gradient.h`), and so a
sequence has the same bits whatever is packed with it, on any number of threads. Where there is no
C++ the definition runs sequence by sequence. Left out: windows, sinks, lse, keys of other lengths
than the queries'; a GPU, whose kernel has both masks (`triton/attention.py`).

Legend: T tokens, H query heads, K key heads, D head_dim.
"""

import torch
from torch import Tensor

from kernels.attention import VarlenPlan
from kernels.backend import Backend, resolve, use_native
from kernels.cpp.vision_ops import attend_whole, attend_whole_gradient, whole_spans, whole_tiles

_DEFINITION = "kernels.torch.attention:flash_attn_varlen_ref"


class _WholeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        group = q.shape[1] // k.shape[1]
        tiles = plan.layout(("whole", group), lambda: whole_tiles(plan.bounds, group))
        out = attend_whole(q, k, v, tiles, scale)
        ctx.save_for_backward(q, k, v, out)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, do):
        plan = ctx.plan
        spans = plan.layout("whole spans", lambda: whole_spans(plan.bounds))
        return *attend_whole_gradient(do, ctx.saved_tensors, spans, ctx.scale), None, None


def attend(
    qkv: tuple[Tensor, Tensor, Tensor], plan: VarlenPlan, scale: float, backend: Backend
) -> Tensor:
    """o [T, H, D] of q [T, H, D], k and v [T, K, D] of sequences that `plan` bounds."""
    if use_native(backend, *qkv):
        out: Tensor = _WholeAttention.apply(*qkv, plan, scale)
        return out
    bounds = (plan.bounds, plan.bounds)
    out, _ = resolve(_DEFINITION)(*qkv, *bounds, scale, causal=False)
    return out
