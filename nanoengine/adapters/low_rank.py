"""The product with a low-rank change beside a matrix: y += (x · Aᵀ) · (scale · B)ᵀ.

It is in fp32 (fp64 over fp64) whatever the model's dtype, by the packed product whose rows do not
depend on the batch, and y is rounded once for each module. Inference engines add what requests name
(nanoinfer/variants/adapters.py); over an int8 base, which nothing can be merged into, trainer and
rollout engine add the trained adapter with these lines, so that both have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import linear, pack_weight
from kernels.cpp.low_rank_ops import LowRankTable, add_low_rank_
from kernels.cpp.ops import has_native
from nanoengine.adapters.lora import LowRank
from nanoengine.model.linear import PackedLinear


@dataclass(frozen=True)
class _Factor:
    """A matrix and its packed copy."""

    weight: Tensor
    packed: Tensor | None

    @classmethod
    def of(cls, weight: Tensor) -> _Factor:
        return cls(weight, pack_weight(weight))

    def times(self, x: Tensor, *, batch_invariant: bool) -> Tensor:
        return linear(x, self.weight, packed=self.packed, batch_invariant=batch_invariant)


@dataclass(frozen=True)
class AddedChange:
    """One adapter's change of one of our matrices: the A of all modules in it, one below the other,
    and for each module its output columns lo:hi and scale · B."""

    low: _Factor
    highs: tuple[tuple[int, int, _Factor], ...]
    table: LowRankTable | None
    """The same for C++, where the model's dtype has its kernels."""

    @classmethod
    @torch.no_grad()
    def of(cls, matrix: PackedLinear, parts: Sequence[tuple[int, int, LowRank]]) -> AddedChange:
        """From the rows lo:hi of the matrix and their changes, whose numbers are copied."""
        wide = torch.promote_types(matrix.weight.dtype, torch.float32)
        lows = [change.low_RI.detach().to(matrix.device, wide) for *_, change in parts]
        highs = [
            (lo, hi, _Factor.of(change.high_OR.detach().to(matrix.device, wide) * change.scale))
            for lo, hi, change in parts
        ]
        low = _Factor.of(torch.cat(lows))
        return cls(low, tuple(highs), _make_table(matrix, low, highs))

    @torch.no_grad()
    def add_to(self, y_NO: Tensor, x_NI: Tensor, *, batch_invariant: bool) -> None:
        """Add to y, which is rounded once for each module."""
        if self.table is not None and x_NI.dim() == 2 and y_NO.is_contiguous():
            add_low_rank_(y_NO, x_NI, self.table)
            return
        low = self.low.times(x_NI.to(self.low.weight.dtype), batch_invariant=batch_invariant)
        parts = low.split([factor.weight.shape[1] for *_, factor in self.highs], 1)
        for (lo, hi, factor), part in zip(self.highs, parts, strict=True):
            columns = y_NO[:, lo:hi]
            change = factor.times(part.contiguous(), batch_invariant=batch_invariant)
            columns.copy_(columns.to(change.dtype) + change)


def _make_table(
    matrix: PackedLinear, low: _Factor, highs: Sequence[tuple[int, int, _Factor]]
) -> LowRankTable | None:
    factors = [low, *(factor for *_, factor in highs)]
    packed = [x.packed for x in factors if x.packed is not None and not x.packed.is_mkldnn]
    has_all = has_native(torch.empty(0, dtype=matrix.weight.dtype)) and len(packed) == len(factors)
    if not has_all or matrix.device.type != "cpu":
        return None
    parts = [
        (high, lo, hi - lo, factor.weight.shape[1])
        for high, (lo, hi, factor) in zip(packed[1:], highs, strict=True)
    ]
    return LowRankTable(packed[0], len(low.weight), parts)
