"""A matrix and its product, what is known about a parameter, and how matrices are split over ranks.

A CPU keeps each matrix twice, as the parameter (for the backward pass and the optimizer) and in
oneDNN's block layout (for the forward pass of both engines; `kernels/linear.py` says why). The
second copy is no parameter and in no state dict; whoever changes a weight calls
`Transformer.repack`.

The layers ask their `split` before and after their matrices, and never whether there is one: for a
model in one piece it is `NoSplit`, else parallel/tensor_parallel.py.

Quantised matrices: fp8 for sampling on a GPU, a copy beside the parameter, which updates are
written to; int8 on a CPU, where the values are all there is and `weight` a shape without memory.
Shapes: T tokens, E hidden size, V vocabulary, P rows that are scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

import kernels
from kernels import (
    Int8Weight,
    add_rows_,
    fp8_linear,
    int8_linear,
    linear,
    linear_logprob,
    pack_int8,
    pack_weight,
    quantize_fp8,
)
from kernels.cpp.low_rank_ops import LowRankTable
from kernels.linear import InputRecipe
from kernels.quantized.fp8 import GROUP

# -- what is known about a parameter ---------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """The part of a whole tensor that a rank holds: runs [start, stop) along `dim`, in order."""

    dim: int
    whole: int
    runs: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part; a view where it is one run."""
        parts = [whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def single_runs(self, part: Tensor) -> list[tuple[Tensor, Slice]]:
        """Views of this rank's `part`, one for each run, and the slice that each is."""
        views = part.split([hi - lo for lo, hi in self.runs], self.dim)
        return [
            (view, Slice(self.dim, self.whole, (run,)))
            for view, run in zip(views, self.runs, strict=True)
        ]

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.whole, *shape[self.dim + 1 :]))


@dataclass
class ParameterRecord:
    """The facts about a parameter beyond its values, where it is one rank's part of a model.

    It lies on the parameter itself (`record_of`). Two more attributes belong to the kernels, who
    read them in their backward pass: `main_grad`, the fp32 buffer that takes the gradient, and
    `late_grads`, a list that weight gradients wait in (`kernels/linear.py`).
    """

    slice: Slice | None = None
    """The part of the whole tensor that this rank holds; None where all ranks hold the same."""
    is_partial: bool = False
    """Each tensor-parallel rank's gradient is one term of the sum."""
    is_expert: bool = False
    """Ranks along the ep axis hold different ones, so their gradients are not added up."""
    is_copy: bool = False
    """Another pipeline stage holds the same one, and counts it in the gradient's norm."""
    is_deferred: bool = False
    """Its gradient is finished only after the last backward pass (a tied embedding on two pipeline
    stages): its bucket waits for that."""


def record_of(parameter: Tensor) -> ParameterRecord:
    """The parameter's record; writing to it is how a fact is noted."""
    record: ParameterRecord | None = getattr(parameter, "record", None)
    if record is None:
        record = ParameterRecord()
        parameter.record = record  # type: ignore[attr-defined]
    return record


def mark_slice(
    parameter: nn.Parameter | None, dim: int, widths: tuple[int, ...], split: TensorSplit
) -> None:
    """Note that several matrices of the given local widths lie side by side in `parameter`, each
    split evenly."""
    if parameter is not None and split.size > 1:
        record_of(parameter).slice = side_by_side(dim, [split.size * w for w in widths], split)


def side_by_side(dim: int, widths: Sequence[int], split: TensorSplit) -> Slice:
    """The rank's part of matrices of the given whole widths that lie side by side, each split
    evenly."""
    runs, begin = [], 0
    for width in widths:
        share = width // split.size
        runs.append((begin + split.rank * share, begin + (split.rank + 1) * share))
        begin += width
    return Slice(dim, begin, tuple(runs))


def mark_partial(parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        record_of(parameter).is_partial = True


# -- how matrices are split ------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputHead:
    """A rank's part of the output head, as products read it. `dtype` is that of the logits."""

    weight_VE: Tensor
    packed: Tensor | None
    dtype: torch.dtype
    vocab_size: int  # of the whole head
    batch_invariant: bool = False


@dataclass(frozen=True)
class LogprobOptions:
    """What is asked of the output head beside the log-probs of ids, at `temperature`."""

    temperature: float = 1.0
    entropy: bool = False
    expected_grad: Tensor | None = None
    """[P], what the backward pass is expected to bring by logp; a split may save time with it
    (kernels/linear_logprob.py)."""


class TensorSplit(Protocol):
    """The questions that a layer asks of the ranks that share its matrices."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def sequence_parallel(self) -> bool: ...

    def run(self, whole: int) -> tuple[int, int]:
        """This rank's indices of `whole` items."""
        ...

    def enter(self, x: Tensor, num_rows: int) -> Tensor:
        """Return the rows every rank needs, `num_rows` of them, for matrices split by columns."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, after matrices split by rows."""
        ...

    def multiply_rows(
        self, matrix: PackedLinear, x: Tensor, recipe: InputRecipe | None = None
    ) -> Tensor:
        """The product with a matrix split by rows, bias included, summed over the ranks."""
        ...

    def embed(self, ids_T: Tensor, weight_VE: Tensor, vocab_size: int) -> Tensor: ...

    def gather_columns(self, x: Tensor, whole: int) -> Tensor:
        """The ranks' columns side by side, without gradient."""
        ...

    def logprobs(
        self, hidden_PE: Tensor, head: OutputHead, ids_P: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor | None]:
        """logp [P] of the ids (and entropy [P], if asked for), over the whole vocabulary; of ids
        [P, M], logp [P, M]."""
        ...

    def likeliest(
        self, hidden_PE: Tensor, head: OutputHead, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(ids [P, k], logp [P, k]) of the k likeliest tokens of the whole vocabulary, likeliest
        first. No gradient."""
        ...


class NoSplit:
    """The split of a model that is in one piece: every question has the plain answer."""

    size = 1
    rank = 0
    sequence_parallel = False

    def run(self, whole: int) -> tuple[int, int]:
        return 0, whole

    def enter(self, x: Tensor, num_rows: int) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x

    def multiply_rows(
        self, matrix: PackedLinear, x: Tensor, recipe: InputRecipe | None = None
    ) -> Tensor:
        out: Tensor = matrix(x, recipe)
        return out

    def embed(self, ids_T: Tensor, weight_VE: Tensor, vocab_size: int) -> Tensor:
        return embed(ids_T, weight_VE)

    def gather_columns(self, x: Tensor, whole: int) -> Tensor:
        return x

    def logprobs(
        self, hidden_PE: Tensor, head: OutputHead, ids_P: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor | None]:
        scored = linear_logprob(
            hidden_PE,
            head.weight_VE,
            ids_P,
            temperature=options.temperature,
            return_entropy=options.entropy,
            packed=head.packed,
            logits_dtype=head.dtype,
            expected_grad=options.expected_grad,
            batch_invariant=head.batch_invariant,
        )
        return scored if isinstance(scored, tuple) else (scored, None)

    def likeliest(
        self, hidden_PE: Tensor, head: OutputHead, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return kernels.linear_topk(
            hidden_PE,
            head.weight_VE,
            k,
            temperature=temperature,
            packed=head.packed,
            logits_dtype=head.dtype,
        )


# -- products --------------------------------------------------------------------------------------


QuantizedFormat = Literal["fp8", "int8"]


class MatrixChange(Protocol):
    """What is added to a product beside the weight: adapters that requests name."""

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y with the changes added, which may be y itself."""
        ...


class WeightChange(MatrixChange, Protocol):
    """A change that is part of the weight for every row: of an adapter over an int8 matrix, which
    it cannot be merged into."""

    def merge_into(self, weight_OI: Tensor) -> None:
        """Add the change to a wide copy of the weight."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """What it is made of."""
        ...

    @property
    def table(self) -> LowRankTable | None:
        """What the decoder in C++ adds, where it can."""
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
        self.int8: Int8Weight | None = None  # likewise; `weight` is then on the meta device
        self.change: WeightChange | None = None
        self.adapters: MatrixChange | None = None  # of an inference engine (nanoinfer)

    def forward(self, x: Tensor, recipe: InputRecipe | None = None) -> Tensor:
        """With `recipe` the backward pass makes x again."""
        y = self._multiply(x, recipe)
        if self.change is not None:
            y = self.change.add_to(y, x)
        return y if self.adapters is None else self.adapters.add_to(y, x)

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""
        return self.weight.device if self.int8 is None else self.int8.values.device

    def _multiply(self, x: Tensor, recipe: InputRecipe | None) -> Tensor:
        if self.int8 is not None:
            return int8_linear(x, self.int8, self.bias)
        if self.fp8 is not None:
            return self._multiply_fp8(x)
        return linear(
            x,
            self.weight,
            self.bias,
            packed=self.packed,
            recipe=recipe,
            batch_invariant=self.batch_invariant,
        )

    def _multiply_fp8(self, x: Tensor) -> Tensor:
        assert self.fp8 is not None, "the caller has seen it"
        weight, weight_scale = self.fp8
        values, scale = quantize_fp8(x.reshape(-1, x.shape[-1]), GROUP)
        y = fp8_linear(values, weight, scale, weight_scale, x.dtype)
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], y.shape[1])

    def quantize(self, kind: QuantizedFormat) -> None:
        """From now on multiply by the weight in 8 bits. fp8: a scale for each block of 128 x 128,
        and for each 128 of a row of the input; forward only; `weight` stays, to be written to.
        int8: a scale for each output (int8.py); `weight` is frozen and its memory freed."""
        self.packed = None
        if kind == "fp8":
            self.fp8 = quantize_fp8(self.weight.detach(), (GROUP, GROUP))
            return
        self.int8 = pack_int8(self.weight.detach(), self.weight.dtype)
        self.weight = nn.Parameter(self.weight.detach().to("meta"), requires_grad=False)

    def write_int8(self, weight_OI: Tensor) -> None:
        """Quantise another weight of this shape into the place of the int8 values."""
        assert self.int8 is not None, "the caller has seen it"
        pack_int8(weight_OI, self.weight.dtype, self.int8)

    def dequantized(self) -> Tensor:
        """What an int8 matrix stands for, in fp32 (fp64), with its change merged into it."""
        assert self.int8 is not None, "the caller has seen it"
        weight_OI = self.int8.dequantized()
        if self.change is not None:
            self.change.merge_into(weight_OI)
        return weight_OI

    def repack(self) -> None:
        """The weight has changed: renew the copy that `forward` reads, in its place. Nothing to do
        for int8, which is no copy."""
        if self.int8 is not None:
            return
        if self.fp8 is None:
            self.packed = pack_weight(self.weight, self.packed)
            return
        fresh = quantize_fp8(self.weight.detach(), (GROUP, GROUP))
        for old, new in zip(self.fp8, fresh, strict=True):
            old.copy_(new)


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
