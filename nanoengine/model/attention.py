"""The question a layer asks of attention; the caller decides where keys and values live.

The model hands over queries, keys and values of a flat run of tokens; the context knows which
tokens belong together. Training packs whole sequences (`PackedContext`), or trees of segments in
which a prompt that several completions share is read once (`SharedPrefixContext`). The inference
engine brings its own context that writes to and reads from a paged cache.

Shapes: T tokens of all sequences, H query heads, K key/value heads, D head dimension.
Left out: masks other than causal ones and windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict, Unpack, cast

import torch
from torch import Tensor

import kernels
from kernels import make_varlen_plan, tree_attention
from kernels.attention import VarlenPlan
from kernels.backend import Backend


class ScoreOptions(TypedDict, total=False):
    """A layer's own way to score keys, where that is not softmax(q · k / √D) over all tokens
    before."""

    scale: float | None
    """What the scores are multiplied by."""
    window: int | None
    """A token sees the last so many tokens up to itself, itself included; layers may differ."""
    sinks: Tensor | None
    """[H] scores that take part in every query's softmax and have no value."""


class AttentionContext(Protocol):
    """Causal attention of one forward pass, called once per layer, layers in order."""

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, **how: Unpack[ScoreOptions]
    ) -> Tensor:
        """Return o_THD. Queries and keys are rotated already; v may be a strided view."""
        ...


class PackedContext:
    """Whole sequences one after the other; each attends to itself only. Differentiable.

    `cu_seqlens` [num_sequences + 1] int32 holds the cumulative lengths, starting with 0.
    `batch_invariant` is the model's.
    """

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, *, batch_invariant: bool = False
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.batch_invariant = batch_invariant
        self.max_seqlen = max_seqlen
        self._plan: VarlenPlan | None = None  # the CPU layout, built once for all layers

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: str = "cpu") -> PackedContext:
        """The context of sequences of the given lengths, in tokens."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return cls(ends.to(device=device, dtype=torch.int32), max(lengths))

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, **how: Unpack[ScoreOptions]
    ) -> Tensor:
        if self._plan is None and not q_THD.is_cuda:
            self._plan = make_varlen_plan(self.cu_seqlens)
        ends, longest = self.cu_seqlens, self.max_seqlen
        out = kernels.flash_attn_varlen(
            q_THD,
            k_TKD,
            v_TKD,
            ends,
            ends,  # queries and keys are the same tokens
            longest,
            longest,
            softmax_scale=how.get("scale"),
            window=how.get("window"),
            sinks=how.get("sinks"),
            plan=self._plan,
            batch_invariant=self.batch_invariant,
        )
        return cast(Tensor, out)


def supports_shared_prefix(device: torch.device | str) -> bool:
    return torch.device(device).type in ("cpu", "cuda")


class SharedPrefixContext:
    """Trees of segments: each continues the segment named in `prefix_of_S` (-1: none), and sees its
    ancestors and itself. Differentiable.

    `cu_seqlens` [S + 1] bounds the segments; a parent comes before its children.
    """

    def __init__(
        self,
        cu_seqlens: Tensor | Sequence[int],
        prefix_of_S: Sequence[int],
        backend: Backend = "auto",
    ) -> None:
        # the plan says where each query's keys lie: no key of a shared prompt is copied
        self._plan = make_varlen_plan(cu_seqlens, prefix_of_S)
        self._backend = backend

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, **how: Unpack[ScoreOptions]
    ) -> Tensor:
        return tree_attention(
            *(q_THD, k_TKD, v_TKD, self._plan),
            softmax_scale=how.get("scale"),
            window=how.get("window"),
            sinks=how.get("sinks"),
            backend=self._backend,
        )


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """Positions [T] of packed sequences: each counts from 0."""
    return torch.cat([torch.arange(length) for length in lengths])
