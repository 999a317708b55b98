"""Sums over the segments of a packed tensor, which advantages and losses share.

Suffixes: T tokens of all sequences in a row, S sequences, R rollouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

DELTA = 1e-6
"""What keeps a division from 0."""


def segment_sum(value_T: Tensor, segment_ids_T: Tensor, num_segments: int) -> Tensor:
    """Sum of the values of each segment, shape [num_segments], differentiable."""
    total_S = value_T.new_zeros(num_segments)
    return total_S.index_add(0, segment_ids_T, value_T)


def segment_mean(
    value_T: Tensor, mask_T: Tensor, segment_ids_T: Tensor, num_segments: int
) -> Tensor:
    """Masked mean of each segment; a segment without a masked-in token gives 0."""
    mask_T = mask_T.to(value_T.dtype)
    count_S = segment_sum(mask_T, segment_ids_T, num_segments)
    return segment_sum(value_T * mask_T, segment_ids_T, num_segments) / count_S.clamp(min=1)


def index_by_id(ids: Sequence[Hashable]) -> tuple[Tensor, int]:
    """Dense indices of arbitrary keys, in order of first appearance, and how many there are."""
    order: dict[Hashable, int] = {}
    index = [order.setdefault(key, len(order)) for key in ids]
    return torch.tensor(index, dtype=torch.long), len(order)


def required(value: Tensor | None, name: str, reason: str) -> Tensor:
    """`value`; a `ValueError` that says who reads it if it is None."""
    if value is None:
        raise ValueError(f"{name} is missing: {reason} reads it")
    return value
