"""What functions of whole sequences share: masked means, and a refusal of what is missing."""

from __future__ import annotations

from torch import Tensor

from nanorl.group_advantage import segment_sum
from nanorl.grpo import LossBatch


def segments_of(batch: LossBatch) -> tuple[Tensor, Tensor, int]:
    """The arguments that functions of whole sequences ask for: `(mask_T, ids_T, count)`."""
    return batch.mask_T, batch.sequence_ids_T, batch.num_sequences


def segment_mean(
    value_T: Tensor, mask_T: Tensor, segment_ids_T: Tensor, num_segments: int
) -> Tensor:
    """Masked mean of each segment; a segment without a masked-in token gives 0."""
    mask_T = mask_T.to(value_T.dtype)
    count_S = segment_sum(mask_T, segment_ids_T, num_segments)
    return segment_sum(value_T * mask_T, segment_ids_T, num_segments) / count_S.clamp(min=1)


def required(value: Tensor | None, name: str, reason: str) -> Tensor:
    """`value`; a `ValueError` that says who reads it if it is None."""
    if value is None:
        raise ValueError(f"{name} is missing: {reason} reads it")
    return value
