"""Matrices in 8 bits: fp8 for sampling on a GPU, int8 on a CPU.

fp8 is a copy beside the parameter, which updates are written to; int8 values are all there is, and
`weight` is a shape without memory, so that such a matrix takes a byte a weight. `quantize` puts
them in the place of a model's matrices of attention and of dense MLPs; router, experts and output
head stay as they are (but see `quantize_head`).
Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from kernels import Int8Weight, fp8_linear, int8_linear, pack_int8, quantize_fp8
from kernels.cpp.decoder import DecoderMatrix
from kernels.cpp.low_rank_ops import LowRankTable
from kernels.linear import InputRecipe
from kernels.quantized.fp8 import GROUP
from nanoengine.model.linear import MatrixChange, Packed, PackedLinear
from nanoengine.model.transformer import Transformer

QuantizedFormat = Literal["fp8", "int8"]


class WeightChange(MatrixChange, Protocol):
    """A change that is part of the weight for every row: of an adapter over an int8 matrix, which
    it cannot be merged into."""

    def merge_into(self, weight_OI: Tensor) -> None:
        """Add the change to a wide copy of the weight."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """The tensors that it is made of."""
        ...

    @property
    def table(self) -> LowRankTable | None:
        """The low-rank matrices that the decoder in C++ adds; None where it cannot."""
        ...


class _Quantized(PackedLinear):
    """A matrix that takes the place of another."""

    def __init__(self, plain: PackedLinear) -> None:
        Packed.__init__(self)
        self.weight, self.bias = plain.weight, plain.bias
        self.packed = None
        self.batch_invariant, self.adapters = plain.batch_invariant, plain.adapters


class Fp8Linear(_Quantized):
    """A copy in fp8 with a scale for each block of 128 x 128, and for each 128 of a row of the
    input; forward only. `weight` stays, to be written to; `repack` quantises it again."""

    format = "fp8"

    def __init__(self, plain: PackedLinear) -> None:
        super().__init__(plain)
        self.fp8 = quantize_fp8(self.weight.detach(), (GROUP, GROUP))

    def _multiply(self, x: Tensor, recipe: InputRecipe | None) -> Tensor:
        weight, weight_scale = self.fp8
        values, scale = quantize_fp8(x.reshape(-1, x.shape[-1]), GROUP)
        y = fp8_linear(values, weight, scale, weight_scale, x.dtype)
        y = y if self.bias is None else y.add_(self.bias)
        return y.view(*x.shape[:-1], y.shape[1])

    def repack(self) -> None:
        fresh = quantize_fp8(self.weight.detach(), (GROUP, GROUP))
        for old, new in zip(self.fp8, fresh, strict=True):
            old.copy_(new)


class Int8Linear(_Quantized):
    """int8 values with a scale for each output (quantized/int8.py). `weight` is frozen and its
    memory freed; a trainer may read such a matrix, for adapters."""

    format = "int8"

    def __init__(self, plain: PackedLinear) -> None:
        super().__init__(plain)
        self.int8 = pack_int8(self.weight.detach(), self.weight.dtype)
        self.weight = nn.Parameter(self.weight.detach().to("meta"), requires_grad=False)
        self.change: WeightChange | None = None

    @property
    def device(self) -> torch.device:
        return self.int8.values.device

    def _multiply(self, x: Tensor, recipe: InputRecipe | None) -> Tensor:
        y = int8_linear(x, self.int8, self.bias)
        return y if self.change is None else self.change.add_to(y, x)

    def native(self) -> DecoderMatrix | None:
        table = None if self.change is None else self.change.table
        if self.change is not None and table is None:
            return None
        return DecoderMatrix(self.int8.values, self.int8.scale_O, self.bias, table)

    def write(self, weight_OI: Tensor) -> None:
        """Quantise another weight of this shape into the place of the values."""
        pack_int8(weight_OI, self.weight.dtype, self.int8)

    def dequantized(self) -> Tensor:
        """The matrix that the integers stand for, in fp32 (fp64), with its change merged into
        it."""
        weight_OI = self.int8.dequantized()
        if self.change is not None:
            self.change.merge_into(weight_OI)
        return weight_OI

    def repack(self) -> None:
        """Nothing to do: the values are no copy."""


class Int8Head(Packed):
    """The output head in int8, a copy for sampling."""

    def __init__(self, weight_VE: nn.Parameter, dtype: torch.dtype) -> None:
        """`dtype` is that of the logits."""
        super().__init__()
        self._source = [weight_VE]  # in a list: it is the model's parameter, not this module's
        self._dtype = dtype
        self.int8: Int8Weight = pack_int8(weight_VE.detach(), dtype)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, V]."""
        return int8_linear(hidden_TE.to(self._dtype), self.int8)

    def repack(self) -> None:
        pack_int8(self._source[0].detach(), self._dtype, self.int8)


_KINDS: dict[str, type[_Quantized]] = {"fp8": Fp8Linear, "int8": Int8Linear}


def quantize(model: Transformer, kind: QuantizedFormat) -> None:
    """Multiply by the matrices of attention and of dense MLPs in 8 bits from now on; they are
    frozen. fp8: for sampling only; `Transformer.repack` quantises them again. int8: on a CPU."""
    _check_model(model, kind)
    for layer in model.layers:
        quantize_layer(layer, kind)


def quantize_layer(layer: nn.Module, kind: QuantizedFormat) -> None:
    """The same of one layer."""
    for name in ("qkv", "out", "gate_up", "down"):
        matrix = getattr(layer, name, None)
        if isinstance(matrix, PackedLinear):
            setattr(layer, name, _KINDS[kind](matrix))


def quantize_head(model: Transformer) -> None:
    """Compute logits from an int8 copy of the output head, for sampling only; `repack` renews it.
    The embedding, tied or not, stays."""
    _check_model(model, "int8")
    model.lm_head_packed = None
    model.int8_head = Int8Head(model.lm_head_weight, model.head_dtype)


def _check_model(model: Transformer, kind: QuantizedFormat) -> None:
    is_split = model.split.size > 1 or model.experts is not None
    check_quantizable(kind, model.device, is_split=is_split)


def check_quantizable(kind: QuantizedFormat, device: torch.device, *, is_split: bool) -> None:
    """`ValueError` for a model that is split, or on another device than the product is for."""
    if is_split:
        raise ValueError(
            f"quantization={kind!r}: this model is split over ranks, and what shares a scale "
            "would be cut apart; use one rank, or leave quantization out"
        )
    if kind == "int8" and device.type != "cpu":
        raise ValueError(
            f"quantization='int8': the model is on {device}, and the product is a CPU's; use "
            "quantization='fp8' there, or device='cpu'"
        )
