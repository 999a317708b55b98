"""Grouped-query attention over trees of segments, and so over packed sequences, in training.

    S = scale · Q · Kᵀ   over the keys a query sees,   lse_i = log Σ_j exp(S_ij)
    P = exp(S − lse),    O = P · V

    dV = Pᵀ · dO,   dS = P ∘ (dO · Vᵀ − delta),   delta_i = Σ_d dO·O − dlse_i
    dQ = scale · dS · K,   dK = scale · dSᵀ · Q   (dK, dV summed over the heads that share a key)

Segments are packed along the first dimension. Causal: a query sees the keys up to its own; with
`window=w` the last w of those, its own included.

With `sinks` [H] each head has one more score, z, that takes part in the softmax of every query and
has no value: lse_i = log(e^z + Σ_j exp(S_ij)), and dz = −Σ_i exp(z − lse_i) · delta_i.

In a tree (`tree_attention`) a segment continues the one named in `prefix_of_S` (-1: none). Its
queries see all keys of its ancestors and its own up to themselves, which is what they would see in
a sequence of their own, in that order, hence with the same bits on a CPU. In GRPO all members of a
group share the prompt, so the linear layers, which are nearly all of the work, run over the prompt
once instead of once a member. Packed sequences are a tree without parents.

Back ends: on a CPU C++ (`cpp/attention.h`, `cpp/attention_gradient.h`) or PyTorch
(`torch/attention.py`), with the bits of decoding; on a GPU Triton, which sees a tree as sequences
with more keys than queries (`gpu/attention.py`). Left out: keys with bounds of their own, masks
that are not causal, lse (`varlen/flash_attention.py`); dropout, score caps.

Legend: T tokens, S segments, H query heads, K key heads, D head_dim.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_bounds,
    check_sinks,
    check_tensors,
    check_window,
    ints,
    resolve,
    scale_of,
    use_native,
    use_triton,
    wide_sinks,
)
from kernels.cpp.ops import (
    AttendOptions,
    QuerySpan,
    QueryTiles,
    SpanTrees,
    attend_packed,
    attend_packed_gradient,
    make_span_trees,
    make_tiles,
)
from kernels.memory import Scratch

_ATTEND = "kernels.torch.attention:attend"
_DIFFERENTIATE = "kernels.torch.attention:differentiate"
_TREES = "kernels.gpu.attention:attend_trees"

Layout = TypeVar("Layout")


@dataclass
class VarlenPlan:
    """Where the queries of a micro-batch find their keys: made once, serves all layers.

    It owns scratch memory, so one plan serves one thread.
    """

    bounds: list[int]
    prefix_of_S: list[int]
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    _layouts: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def layout(self, key: Hashable, make: Callable[[], Layout]) -> Layout:
        """What a path made of this plan under `key` before, else what it makes now: once for all
        layers."""
        if key not in self._layouts:
            self._layouts[key] = make()
        return self._layouts[key]

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    @property
    def is_tree(self) -> bool:
        return any(parent >= 0 for parent in self.prefix_of_S)

    @cached_property
    def key_rows(self) -> list[Tensor]:
        """The rows of each segment's keys, [ancestors, own]."""
        keys: list[Tensor] = []
        for (lo, hi), parent in zip(pairwise(self.bounds), self.prefix_of_S, strict=True):
            own = torch.arange(lo, hi, dtype=torch.int32)
            keys.append(own if parent < 0 else torch.cat([keys[parent], own]))
        return keys

    @cached_property
    def spans(self) -> list[QuerySpan]:
        """The segments as runs of queries that find their keys in `flat_rows`."""
        firsts = [0, *accumulate(len(rows) for rows in self.key_rows)]
        return [
            QuerySpan(lo, hi - lo, len(rows), first)
            for (lo, hi), rows, first in zip(
                pairwise(self.bounds), self.key_rows, firsts, strict=False
            )
        ]

    @cached_property
    def flat_rows(self) -> Tensor:
        """`key_rows`, one segment after the other."""
        return torch.cat([torch.zeros(0, dtype=torch.int32), *self.key_rows])

    def tiles(self, group: int) -> QueryTiles:
        """For C++, with `group` heads to a key head."""
        return self.layout(("tiles", group), lambda: make_tiles(self.spans, self.flat_rows, group))

    @cached_property
    def span_trees(self) -> SpanTrees:
        """For the gradient in C++."""
        return make_span_trees(self.spans, self.prefix_of_S, self.flat_rows)


class PackedAttention(torch.autograd.Function):
    """Attention of a plan, in C++ or PyTorch. Keeps q, k, v and o, which the output projection
    keeps anyway, and computes the probabilities again. `sinks` are in the dtype of the softmax;
    those of `options` are not read."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, plan, options, is_native):
        options = options._replace(sinks=None if sinks is None else sinks.detach())
        if is_native:
            out = attend_packed(q, k, v, plan.tiles(q.shape[1] // k.shape[1]), options)
        else:
            out = resolve(_ATTEND)(q, k, v, plan, options)
        ctx.save_for_backward(q, k, v, out)
        ctx.plan, ctx.options, ctx.is_native = plan, options, is_native
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out = ctx.saved_tensors
        if ctx.is_native:
            trees = ctx.plan.span_trees
            grads = attend_packed_gradient(do, q, k, v, out, trees, ctx.options)
        else:
            grads = resolve(_DIFFERENTIATE)(do, (q, k, v, out), ctx.plan, ctx.options)
        return *grads, None, None, None


def make_varlen_plan(
    cu_seqlens: Tensor | Sequence[int], prefix_of_S: Sequence[int] | None = None
) -> VarlenPlan:
    """A plan for `flash_attn_varlen(..., plan=)`, or with `prefix_of_S` for `tree_attention`.

    `cu_seqlens` [S + 1] bounds the sequences, or the segments, of which a parent comes before its
    children.
    """
    check_bounds("cu_seqlens", cu_seqlens)
    bounds = ints(cu_seqlens)
    parents = [-1] * (len(bounds) - 1) if prefix_of_S is None else list(prefix_of_S)
    if len(bounds) != len(parents) + 1:
        raise ValueError(f"cu_seqlens has {len(bounds)} bounds for {len(parents)} segments")
    for segment, parent in enumerate(parents):
        if not -1 <= parent < segment:
            raise ValueError(f"prefix_of_S[{segment}]={parent}: a parent must come before it")
    return VarlenPlan(bounds, parents)


def tree_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    plan: VarlenPlan,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """o [T, H, D] of the segments of `plan`, `make_varlen_plan(cu_seqlens, prefix_of_S)`. With
    `window=w` a query sees the last w of its keys, ancestors' and own, itself included. `sinks` [H]
    as in `flash_attn_varlen`."""
    check_attention(q_THD, k_THD, v_THD)
    check_sinks(sinks, q_THD)
    check_window(window)
    check_plan(plan, q_THD, k_THD)
    options = AttendOptions(scale_of(softmax_scale, q_THD), window, sinks)
    if use_triton(backend, q_THD, has_cpp=True):
        return resolve(_TREES)((q_THD, k_THD, v_THD), plan, options, backend)
    return attend_planned((q_THD, k_THD, v_THD), plan, options, backend)


def attend_planned(
    qkv: tuple[Tensor, Tensor, Tensor], plan: VarlenPlan, options: AttendOptions, backend: Backend
) -> Tensor:
    """Attention of tensors that fit the plan, in C++ or PyTorch."""
    sinks = wide_sinks(options.sinks, qkv[0])
    return PackedAttention.apply(*qkv, sinks, plan, options, use_native(backend, *qkv))


def check_plan(plan: VarlenPlan, q: Tensor, k: Tensor) -> None:
    """Raises where the plan was made for another number of tokens."""
    if not plan.num_tokens == q.shape[0] == k.shape[0]:
        raise ValueError(
            f"plan: made for {plan.num_tokens} tokens, q has {q.shape[0]}, k {k.shape[0]}"
        )


def check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises unless shapes, dtypes and devices fit each other."""
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
