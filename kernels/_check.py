"""Checks of arguments that ops share; a kernel would read wrong memory where PyTorch raises."""

import torch
from torch import Tensor


def check_launch(x: Tensor, name: str, **others: Tensor | None) -> None:
    """`x` is floating point and every other tensor lies on its device."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name}: dtype {x.dtype} must be floating point")
    if x.dtype == torch.float64:
        raise ValueError(
            f"{name}: float64 would be computed in float32; use backend='torch' or a smaller dtype"
        )
    for other_name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{other_name}: is on {other.device}, must be on {name}'s {x.device}")


def check_per_row(logits_BV: Tensor, **values: Tensor | None) -> None:
    """Every value is [B]: one number for each row of logits."""
    for name, value in values.items():
        if value is not None and value.shape != logits_BV.shape[:1]:
            raise ValueError(
                f"{name}: shape {tuple(value.shape)} must be one number for each of the "
                f"{logits_BV.shape[0]} rows of logits"
            )
