"""Lists of tensors as the fused update's kernels read them: one table of addresses and chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 14  # elements a program updates or sums


@dataclass(frozen=True)
class TensorTable:
    """Lists of tensors as the kernels read them. Valid while every tensor keeps its memory.

    `address` [lists, tensors] int64; `chunks` int32 pairs (tensor, chunk within it); `sizes` int64.
    """

    address: Tensor
    sizes: Tensor
    chunks: Tensor
    num_tensors: int
    num_chunks: int
    dtypes: tuple[torch.dtype, ...]
    is_aligned: bool
    key: tuple[tuple[int, ...], ...]
