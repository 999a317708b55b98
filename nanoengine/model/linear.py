"""TODO linear"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from kernels import (
    add_rows_,
    fp8_linear,
    linear,
    pack_weight,
    quantize_fp8,
)
from kernels.fp8 import GROUP

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Slice:
    """Which part of a whole tensor a rank holds: the runs [start, stop) along `dim`, in order."""

    dim: int
    whole: int
    runs: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part; a view where it is one run."""
        parts = [whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.whole, *shape[self.dim + 1 :]))


class TensorSplit(Protocol):
    """What a layer asks of the ranks that share its matrices.

    Parameters carry what the optimizer needs to know: `param.slice` (a Slice; absent where all
    ranks hold the same) and `param.is_partial` (each rank's gradient is one term of the sum).
    """

    size: int
    rank: int
    sequence_parallel: bool

    def run(self, whole: int) -> tuple[int, int]:
        """This rank's indices of `whole` items."""
        ...

    def enter(self, x: Tensor, num_rows: int) -> Tensor:
        """Before matrices split by columns: the rows every rank needs, `num_rows` of them."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """After matrices split by rows: the sum over the ranks."""
        ...

    def embed(self, ids_T: Tensor, weight_VE: Tensor, vocab_size: int) -> Tensor: ...

    def gather_columns(self, x: Tensor, whole: int) -> Tensor:
        """The ranks' columns side by side, without gradient."""
        ...


class PackedLinear(nn.Module):
    """x · weightᵀ + bias, with the weight's prepacked copy beside it."""

    def __init__(
        self, num_in: int, num_out: int, has_bias: bool, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_out, num_in, dtype=dtype, device=device))
        bias = torch.zeros(num_out, dtype=dtype, device=device) if has_bias else None
        self.bias = nn.Parameter(bias) if bias is not None else None
        self.packed: Tensor | None = None
        self.batch_invariant = False  # set by `Transformer.batch_invariant`
        self.fp8: tuple[Tensor, Tensor] | None = None  # values and scales, where it was quantised

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8 is not None:
            return self._multiply_fp8(x)
        return linear(
            x,
            self.weight,
            self.bias,
            packed=self.packed,
            batch_invariant=self.batch_invariant,
        )

    def _multiply_fp8(self, x: Tensor) -> Tensor:
        assert self.fp8 is not None, "the caller has seen it"
        weight, weight_scale = self.fp8
        values, scale = quantize_fp8(x.reshape(-1, x.shape[-1]), GROUP)
        y = fp8_linear(values, weight, scale, weight_scale, x.dtype)
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], y.shape[1])

    def quantize(self) -> None:
        """From now on multiply by the weight in fp8, a scale for each block of 128 x 128, and the
        input a scale for each 128 of a row. Forward only; `weight` stays, to be written to."""
        self.fp8 = quantize_fp8(self.weight.detach(), (GROUP, GROUP))
        self.packed = None

    def repack(self) -> None:
        """The weight has changed: renew the copy that `forward` reads, in its place."""
        if self.fp8 is None:
            self.packed = refresh_packed(self.packed, self.weight)
            return
        fresh = quantize_fp8(self.weight.detach(), (GROUP, GROUP))
        for old, new in zip(self.fp8, fresh, strict=True):
            old.copy_(new)


def refresh_packed(packed: Tensor | None, weight: Tensor) -> Tensor | None:
    """The prepacked copy of `weight`, written into `packed` where that fits, so that holders of
    the old copy see the new values; None where there is no such layout (fp64, GPU)."""
    fresh = pack_weight(weight.detach())
    if packed is None or fresh is None or packed.dtype != fresh.dtype:
        return fresh
    return packed.copy_(fresh)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, ids_T: Tensor, weight_VE: Tensor
    ) -> Tensor:
        ctx.save_for_backward(ids_T, weight_VE)
        return weight_VE.index_select(0, ids_T)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_TE: Tensor
    ) -> tuple[None, Tensor | None]:
        ids_T, weight_VE = ctx.saved_tensors  # type: ignore[attr-defined]
        target = getattr(weight_VE, "main_grad", None)
        if isinstance(target, Tensor):
            add_rows_(target, ids_T, grad_TE)
            return None, None
        wide = torch.promote_types(grad_TE.dtype, torch.float32)
        target = torch.zeros(weight_VE.shape, dtype=wide, device=grad_TE.device)
        add_rows_(target, ids_T, grad_TE)
        return None, target.to(weight_VE.dtype)


def embed(ids_T: Tensor, weight_VE: Tensor) -> Tensor:
    """Rows of the embedding. The gradient is summed in fp32, into `weight.main_grad` (added to
    what the tied output head left there) where that exists."""
    if torch.is_grad_enabled() and weight_VE.requires_grad:
        out: Tensor = _Embedding.apply(ids_T, weight_VE)
        return out
    return weight_VE.index_select(0, ids_T)


def mark_slice(
    parameter: nn.Parameter | None, dim: int, widths: tuple[int, ...], split: TensorSplit
) -> None:
    """Several matrices of the given local widths lie side by side; each is split evenly."""
    if parameter is None:
        return
    runs, begin = [], 0
    for width in widths:
        runs.append((begin + split.rank * width, begin + (split.rank + 1) * width))
        begin += split.size * width
    parameter.slice = Slice(dim, begin, tuple(runs))  # type: ignore[attr-defined]


def mark_partial(parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        parameter.is_partial = True  # type: ignore[attr-defined]


def slice_of(parameter: Tensor) -> Slice | None:
    found: Slice | None = getattr(parameter, "slice", None)
    return found
