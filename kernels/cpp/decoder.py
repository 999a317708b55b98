"""The layers of a dense decoder over a paged cache, in one call of C++ (`cpp/decoder.h`).

The functions are those that the ops of this package call, in the order of the model's own forward
pass, so the bits are the same. It saves the interpreter between them, a third of a decoding
step of one sequence: reading the weights of a layer evicts it from the processor's cache.

Only where every op has its C++ kernel (`can_decode`). Left out: gradients, mixtures of experts,
tensor parallelism, fp8 caches, GPUs (a CUDA graph does there what this does here).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpp.ops import QueryTiles, cache_strides, function, has_key_runs, has_native
from kernels.kv_cache import head_rows
from kernels.linear import is_native


class HasAddress(Protocol):
    """What C++ reads by its address: a tensor, or a table such as `LowRankTable`, which holds the
    tensors it points to."""

    def data_ptr(self) -> int: ...


@dataclass(frozen=True)
class DecoderMatrix:
    """`panels` are `pack_weight`'s, or the values of an `Int8Weight` with their scales; `change` is
    added to the product. The order is that of `Matrix` in C++."""

    panels: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    change: HasAddress | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights; the order is that of `Layer` in C++. A query sees the last `window`
    keys, itself included (None: all); without `has_rope` queries and keys are not rotated."""

    input_norm: Tensor
    qkv: DecoderMatrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: DecoderMatrix
    post_norm: Tensor
    gate_up: DecoderMatrix
    down: DecoderMatrix
    window: int | None = None
    has_rope: bool = True

    def addresses(self) -> list[int]:
        found: list[int] = []
        for name, one in vars(self).items():
            if name not in ("window", "has_rope"):
                parts = vars(one).values() if isinstance(one, DecoderMatrix) else [one]
                found += [0 if x is None else x.data_ptr() for x in parts]
        return found


@dataclass(frozen=True)
class DecoderShape:
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    eps: float
    scale: float | None = None
    """Of the scores; None: head_dim ** -0.5."""
    multiplier: float = 1.0
    """Of what attention and MLP add to the residual stream."""


class _Sizes(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "tokens", "hidden", "q_heads", "k_heads", "head_dim", "mlp", "cache_row", "cache_head",
            "head_rows", "has_key_runs",
        )
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "rows", "key_rows", "tiles")),
        ("num_tiles", ctypes.c_int64),
    ]


def can_decode(weight: Tensor, *, is_int8: bool = False) -> bool:
    """True if a model with matrices like this one, or int8 for inputs like it, has all its ops in
    C++."""
    return has_native(weight) if is_int8 else is_native(weight)


class Decoder:
    """Holds the weights and caches that it reads by address: write to them in place, and make
    another one when they are replaced."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        last_norm: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._shape, self._last_norm = shape, last_norm
        self._held = layers, caches
        addresses: list[int] = []
        for layer, cache in zip(layers, caches, strict=True):
            addresses += layer.addresses() + [x.data_ptr() for x in cache]
        self._table = (ctypes.c_void_p * len(addresses))(*addresses)
        switches = [x for layer in layers for x in (layer.window or 0, layer.has_rope)]
        self._switches = (ctypes.c_int64 * len(switches))(*switches)
        self._num_layers = len(layers)
        self._scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self._scratch = torch.empty(0, dtype=last_norm.dtype)
        keys, values = caches[0]
        self._cache_order = *cache_strides(values), head_rows(values), has_key_runs(keys)

    def run(
        self, x_TE: Tensor, cos_TD2: Tensor, sin_TD2: Tensor, rows_T: Tensor, tiles: QueryTiles
    ) -> Tensor:
        """Embeddings [T, E] to hidden states after the last norm, in place. cos and sin are fp32,
        a row a token; `rows` are `cache_rows` of the new tokens."""
        shape = self._shape
        sizes = _Sizes(
            len(x_TE), shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim,
            shape.mlp, *self._cache_order,
        )  # fmt: skip
        step = _Step(
            cos_TD2.data_ptr(), sin_TD2.data_ptr(), rows_T.data_ptr(), tiles.key_rows.data_ptr(),
            tiles.tiles.data_ptr(), len(tiles.tiles),
        )  # fmt: skip
        dtype = x_TE.dtype
        needed = function("decode_scratch", dtype)(ctypes.byref(sizes))
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=dtype)
        function("decode", dtype)(
            x_TE.data_ptr(), self._table, self._switches, self._num_layers,
            self._last_norm.data_ptr(), ctypes.byref(sizes), ctypes.byref(step),
            self._scratch.data_ptr(), shape.eps, self._scale, shape.multiplier,
            torch.get_num_threads(),
        )  # fmt: skip
        return x_TE
