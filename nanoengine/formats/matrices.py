"""Which Hugging Face modules lie in which of our matrices: q, k and v are rows of one, gate and up
of another. These are the matrices that adapters change and that are quantised.

Left out: embedding, output head, routers and experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nanoengine.architectures.family_layer import FamilyLayer
from nanoengine.architectures.quantized import Int8Linear
from nanoengine.formats.families import ModelFamily, family_of
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer


@dataclass(frozen=True)
class MatrixRows:
    """The rows lo:hi of one of our matrices, which are a Hugging Face module's."""

    matrix: PackedLinear
    lo: int
    hi: int

    @property
    def weight(self) -> Tensor:
        """[out, in], a view; after writing to it the matrix has to be repacked. Of an int8 matrix
        on the meta device: a shape without numbers."""
        return self.matrix.weight.detach()[self.lo : self.hi]


def adaptable(model: Transformer) -> dict[str, MatrixRows]:
    """The modules that can be trained or served as adapters, in the order of the model: every
    matrix of attention and of dense MLPs."""
    found: dict[str, MatrixRows] = {}
    family = family_of(model.config.model_type)
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):  # others are on another pipeline stage
            for matrix, names, widths in _matrices(layer, family):
                lo = 0
                for name, width in zip(names, widths, strict=True):
                    found[f"model.layers.{layer.index}.{name}"] = MatrixRows(matrix, lo, lo + width)
                    lo += width
    return found


def int8_places(model: Transformer) -> Iterator[tuple[str, MatrixRows, Int8Linear]]:
    """The tensors, by their names, that lie in int8 matrices and have no view."""
    if model.quantization != "int8":
        return
    for name, place in adaptable(model).items():
        if isinstance(place.matrix, Int8Linear):
            yield f"{name}.weight", place, place.matrix


def _matrices(
    layer: DecoderLayer, family: ModelFamily
) -> Iterator[tuple[PackedLinear, Sequence[str], Sequence[int]]]:
    """Each matrix of a layer, with the modules that lie in it and the rows of each."""
    if family.fused_qkv:
        yield layer.qkv, ("self_attn.qkv_proj",), (len(layer.qkv.weight),)
    else:
        widths = (layer.q_width, layer.kv_width, layer.kv_width)
        yield layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), widths
    yield layer.out, ("self_attn.o_proj",), (len(layer.out.weight),)
    if not isinstance(layer, FamilyLayer) or layer.moe is None:
        width = len(layer.gate_up.weight) // 2
        if family.fused_gate_up:
            yield layer.gate_up, ("mlp.gate_up_proj",), (2 * width,)
        else:
            yield layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (width, width)
        yield layer.down, ("mlp.down_proj",), (len(layer.down.weight),)
