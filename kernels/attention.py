"""Grouped-query attention over packed sequences and over trees of segments (training),
differentiable.

    S = scale · Q · Kᵀ   over the keys a query sees,   lse_i = log Σ_j exp(S_ij)
    P = exp(S − lse),    O = P · V

    dV = Pᵀ · dO,   dS = P ∘ (dO · Vᵀ − delta),   delta_i = Σ_d dO·O − dlse_i
    dQ = scale · dS · K,   dK = scale · dSᵀ · Q   (dK, dV summed over the heads that share a key)

Sequences are packed along the first dimension, queries and keys each with their own bounds. Causal:
the last query of a sequence sits at its last key, so query i of n sees `num_keys − n + i + 1` keys;
with `window=w` the last w of those, its own included. A query that sees no key gives o = 0 and
lse = −inf.

With `sinks` [H] each head has one more score, z, that takes part in the softmax of every query and
has no value: lse_i = log(e^z + Σ_j exp(S_ij)), and dz = −Σ_i exp(z − lse_i) · delta_i.

In a tree (`tree_attention`) a segment continues the one named in `prefix_of_S` (-1: none). Its
queries see all keys of its ancestors and its own up to themselves, which is what they would see in
a sequence of their own, in that order, hence with the same bits on a CPU. In GRPO all members of a
group share the prompt, so the linear layers, which are nearly all of the work, run over the prompt
once instead of once a member. Packed sequences are a tree without parents.

Back ends: Triton (`triton/attention.py`: tiles, online softmax, no atomics), which sees a tree as
sequences with more keys than queries; on a CPU C++ (`cpp/attention.h`, `cpp/attention_gradient.h`)
or PyTorch (`attention_torch.py`), with the bits of decoding, for whole causal sequences and trees;
and the definition below, which covers everything else on a CPU. Left out: dropout, score caps.

Legend: T query tokens, S key tokens (of a tree: segments), H query heads, K key heads, D head_dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from kernels.attention_torch import (
    KeyTable,
    PackedAttention,
    PackedCall,
    Rectangles,
    Scratch,
    packed_rectangles,
)
from kernels.backend import (
    Backend,
    check_bounds,
    check_integers,
    check_sinks,
    check_tensors,
    check_triton_dtype,
    check_window,
    compute_dtype,
    ints,
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
from kernels.gather_rows import RowGather, gather_rows, make_row_gather
from kernels.transfer import to_device

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
    sinks: Tensor | None = None,
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
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(-1, q_hi - q_lo, 1)
            scores = torch.cat([scores, column], -1)
            p = torch.softmax(scores, -1)[:, :, :-1]
            outs.append((p @ v).transpose(0, 1))
            lses.append(scores.to(compute_dtype(scores.dtype)).logsumexp(-1).T)
            continue
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


@dataclass(frozen=True)
class _Segments:
    """Segments as sequences with more keys than queries: each one's keys, [ancestors, own], are
    gathered one segment after the other. The copies of a shared key cost memory and bandwidth of
    its length, small beside the attention; their gradients are added in a fixed order."""

    gather: RowGather
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _make_segments(bounds: list[int], key_rows: list[Tensor], device: torch.device) -> _Segments:
    lengths = [len(rows) for rows in key_rows]
    segments = _Segments(
        make_row_gather(torch.cat(key_rows), bounds[-1]),
        torch.tensor(bounds, dtype=torch.int32),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max(hi - lo for lo, hi in pairwise(bounds)),
        max(lengths),
    )
    return to_device(segments, device)


@dataclass
class VarlenPlan:
    """Where the queries of a micro-batch find their keys: made once, serves all layers.

    It owns scratch memory, so one plan serves one thread.
    """

    bounds: list[int]
    prefix_of_S: list[int]
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    _tiles: dict[int, QueryTiles] = field(default_factory=dict, repr=False)
    _rectangles: dict[tuple[int, torch.dtype, int | None], Rectangles] = field(
        default_factory=dict, repr=False
    )
    _segments: dict[torch.device, _Segments] = field(default_factory=dict, repr=False)

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
    def _spans(self) -> list[QuerySpan]:
        firsts = [0, *accumulate(len(rows) for rows in self.key_rows)]
        return [
            QuerySpan(lo, hi - lo, len(rows), first)
            for (lo, hi), rows, first in zip(
                pairwise(self.bounds), self.key_rows, firsts, strict=False
            )
        ]

    @cached_property
    def _flat_rows(self) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.int32), *self.key_rows])

    def tiles(self, group: int) -> QueryTiles:
        """For C++, with `group` heads to a key head."""
        if group not in self._tiles:
            self._tiles[group] = make_tiles(self._spans, self._flat_rows, group)
        return self._tiles[group]

    def rectangles(self, num_kv: int, dtype: torch.dtype, window: int | None) -> Rectangles:
        """For PyTorch, with `num_kv` key heads, queries of that dtype and that window."""
        if (num_kv, dtype, window) not in self._rectangles:
            table = KeyTable(self._spans, self._flat_rows, 1, num_kv, dtype, window)
            self._rectangles[num_kv, dtype, window] = packed_rectangles(table, self.scratch)
        return self._rectangles[num_kv, dtype, window]

    def segments(self, device: torch.device) -> _Segments:
        """For Triton."""
        if device not in self._segments:
            self._segments[device] = _make_segments(self.bounds, self.key_rows, device)
        return self._segments[device]

    @cached_property
    def span_trees(self) -> SpanTrees:
        """For the gradient in C++."""
        return make_span_trees(self._spans, self.prefix_of_S, self._flat_rows)

    def attend_in_cpp(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        return attend_packed(q, k, v, self.tiles(q.shape[1] // k.shape[1]), options)

    def differentiate_in_cpp(
        self, do: Tensor, qkvo: tuple[Tensor, Tensor, Tensor, Tensor], options: AttendOptions
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return attend_packed_gradient(do, *qkvo, self.span_trees, options)


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
    _check_tensors(q_THD, k_THD, v_THD)
    check_sinks(sinks, q_THD)
    check_window(window)
    _check_plan(plan, q_THD, k_THD)
    scale = scale_of(softmax_scale, q_THD)
    if use_triton(backend, q_THD, has_cpp=True):
        segments = plan.segments(q_THD.device)
        out = flash_attn_varlen(
            q_THD,
            gather_rows(k_THD, segments.gather, backend=backend),
            gather_rows(v_THD, segments.gather, backend=backend),
            segments.cu_seqlens_q,
            segments.cu_seqlens_k,
            segments.max_seqlen_q,
            segments.max_seqlen_k,
            softmax_scale=scale,
            window=window,
            sinks=sinks,
            backend=backend,
        )
        return cast(Tensor, out)
    options = AttendOptions(scale, window, sinks)
    return _attend_planned((q_THD, k_THD, v_THD), plan, options, backend)


def _attend_planned(
    qkv: tuple[Tensor, Tensor, Tensor], plan: VarlenPlan, options: AttendOptions, backend: Backend
) -> Tensor:
    sinks = wide_sinks(options.sinks, qkv[0])
    call = PackedCall(plan, options, use_native(backend, *qkv))
    out: Tensor = PackedAttention.apply(*qkv, sinks, call)
    return out


def _check_plan(plan: VarlenPlan, q: Tensor, k: Tensor) -> None:
    if not plan.num_tokens == q.shape[0] == k.shape[0]:
        raise ValueError(
            f"plan: made for {plan.num_tokens} tokens, q has {q.shape[0]}, k {k.shape[0]}"
        )


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
    sinks: Tensor | None = None,
    return_lse: bool = False,
    plan: VarlenPlan | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """o [T, H, D], or (o, lse [T, H] in fp32, natural logarithm) with `return_lse`.

    `cu_seqlens_*` [sequences + 1] start at 0, never decrease and end at T and S; on a GPU int32
    tensors, whose contents are not read by the host. `max_seqlen_*` bound the sequences' lengths.
    `softmax_scale` defaults to head_dim ** -0.5. `window` needs `causal`. `sinks` [H] are scores
    without a value, one a head, differentiable and not multiplied by the scale. `plan` is
    `make_varlen_plan(cu_seqlens_q)`, for a CPU and whole sequences only (equal bounds, causal, no
    lse); one serves calls with different windows. `batch_invariant` on a GPU gives a query the bits
    that `paged_attention(batch_invariant=True)` gives it; on a CPU it always has them.
    """
    _check_tensors(q_THD, k_SKD, v_SKD)
    check_sinks(sinks, q_THD)
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window}: must be at least 1, with causal=True")
    check_integers(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    scale = scale_of(softmax_scale, q_THD)
    if use_triton(backend, q_THD, has_cpp=True):
        out, lse2 = _on_triton(
            (q_THD, k_SKD, v_SKD),
            (cu_seqlens_q, cu_seqlens_k),
            (max_seqlen_q, max_seqlen_k),
            causal,
            AttendOptions(scale, window, sinks),
            batch_invariant,
        )
        return (out, lse2.t() * math.log(2.0)) if return_lse else out
    is_plain = causal and not return_lse and q_THD.device.type == "cpu"
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
            use_native(
                backend,
                q_THD,
                refusal="only for causal=True, return_lse=False and keys of the queries' lengths",
            )
            out, lse = flash_attn_varlen_ref(
                q_THD, k_SKD, v_SKD, bounds_q, bounds_k, scale, causal=causal, window=window,
                sinks=sinks,
            )  # fmt: skip
            return (out, lse) if return_lse else out
        plan = make_varlen_plan(bounds_q)
    elif not is_plain or plan.is_tree:
        raise ValueError(
            "plan: only for causal=True, return_lse=False on a CPU, without parents (a tree's is "
            "for tree_attention)"
        )
    _check_plan(plan, q_THD, k_SKD)
    # Whole tensors, for a view would keep the fused projection that it looks into for the gradient.
    whole = q_THD.contiguous(), k_SKD.contiguous(), v_SKD.contiguous()
    return _attend_planned(whole, plan, AttendOptions(scale, window, sinks), backend)


def _on_triton(
    qkv, cu_seqlens, limits, causal, options: AttendOptions, batch_invariant
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
    rest = (causal, options.scale, options.window, batch_invariant)
    return TritonAttention.apply(q, k, v, wide_sinks(options.sinks, q), *bounds, *limits, *rest)


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
