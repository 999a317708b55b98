"""C++ products with a low-rank change of a matrix (`cpp/low_rank.h`), for adapters beside a base.

The conventions are those of ops.py. A `LowRankTable` goes into `decoder.py` too, whose layers then
add the change to their products.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp.ops import function


class _LowRankPart(ctypes.Structure):
    _fields_ = [
        ("high", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("begin", "width", "rank")),
    ]


class _LowRank(ctypes.Structure):
    _fields_ = [
        ("low", ctypes.c_void_p), ("rank", ctypes.c_int64),
        ("parts", ctypes.POINTER(_LowRankPart)), ("num_parts", ctypes.c_int64),
    ]  # fmt: skip


class LowRankTable:
    """A low-rank change of a matrix as C++ reads it, and the tensors that it points to."""

    def __init__(
        self, low: Tensor, rank: int, parts: Sequence[tuple[Tensor, int, int, int]]
    ) -> None:
        """`pack`ed fp32: low [rank, in], and for each part (high [width, its rank], the matrix's
        output it begins at, width, its rank)."""
        found = (_LowRankPart * len(parts))(*(_LowRankPart(x.data_ptr(), *s) for x, *s in parts))
        self._held = low, parts, found
        self._struct = _LowRank(low.data_ptr(), rank, found, len(parts))

    def data_ptr(self) -> int:
        return ctypes.addressof(self._struct)


def add_low_rank_(y_TO: Tensor, x_TI: Tensor, table: LowRankTable) -> None:
    """y += the change's product with x, in place; y is in one piece."""
    x = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    function("add_low_rank", x.dtype)(
        y_TO.data_ptr(), x.data_ptr(), table.data_ptr(), *x.shape, y_TO.shape[1], x.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
