"""Checks of arguments that ops share. They come before any work: a kernel would read wrong memory
where PyTorch raises, and PyTorch's own message names no argument."""

import torch
from torch import Tensor


def check_tensors(x: Tensor, name: str, on_triton: bool, **others: Tensor | None) -> None:
    """`x` is floating point (on Triton not fp64) and every other tensor lies on its device."""
    check_floating(**{name: x})
    if on_triton and x.dtype == torch.float64:
        raise ValueError(
            f"{name}: float64 would be computed in float32; use backend='torch' or a smaller dtype"
        )
    for other_name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{other_name}: is on {other.device}, must be on {name}'s {x.device}")


def check_floating(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.dtype.is_floating_point:
            raise ValueError(f"{name}: dtype {x.dtype} must be floating point")


def check_integers(**tensors: object) -> None:
    """Tensors of indices; lists of numbers pass."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name}: dtype {x.dtype} must be int32 or int64")


def check_bounds(cu_seqlens: Tensor, num_tokens: int) -> None:
    """[sequences + 1] from 0 to the tokens. A GPU's values are not read: that would stop it."""
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)} must be [sequences + 1]")
    if cu_seqlens.device.type != "cpu":
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens={bounds}: must start at 0 and never decrease")
    if bounds[-1] != num_tokens:
        raise ValueError(f"cu_seqlens: ends at {bounds[-1]}, not at {num_tokens}")


def check_per_row(logits_BV: Tensor, **values: Tensor | None) -> None:
    """Every value is [B]: one number for each row of logits."""
    for name, value in values.items():
        if value is not None and value.shape != logits_BV.shape[:1]:
            raise ValueError(
                f"{name}: shape {tuple(value.shape)} must be one number for each of the "
                f"{logits_BV.shape[0]} rows of logits"
            )
