"""Lists of tensors as the fused update's kernels read them: one table of addresses and chunks.

It is a plan to build once and keep, because tensors of a training run stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.adamw import AdamWStep, Tensors, check_lists
from kernels.backend import resolve

CHUNK = 1 << 14  # elements a program updates or sums
_STEP = "kernels.triton.adamw:step"


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


def make_tensor_table(*lists: Tensors) -> TensorTable:
    """The table of lists that run in step: entry i of every list has the same number of elements,
    all of a list have one dtype, each is contiguous, all lie on one device."""
    check_lists(lists)
    first = lists[0]
    device = first[0].device
    key = _key(lists)
    sizes = torch.tensor([x.numel() for x in first], dtype=torch.int64, device="cpu")
    counts = (sizes + CHUNK - 1) // CHUNK
    owner = torch.repeat_interleave(counts)
    within = torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]
    return TensorTable(
        address=torch.tensor(key, dtype=torch.int64, device=device),
        sizes=sizes.to(device),
        chunks=torch.stack([owner, within], 1).to(device=device, dtype=torch.int32),
        num_tensors=len(first),
        num_chunks=len(owner),
        dtypes=tuple(tensors[0].dtype for tensors in lists),
        is_aligned=all(address % 16 == 0 for row in key for address in row),
        key=key,
    )


def _key(lists: Sequence[Tensors]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.data_ptr() for x in tensors) for tensors in lists)


def _table_for(plan: TensorTable | None, lists: Sequence[Tensors]) -> TensorTable:
    if plan is None:
        return make_tensor_table(*lists)
    if plan.key != _key(lists):
        raise ValueError("plan: was made of other tensors; make it again with make_tensor_table")
    return plan


def step(
    lists: Sequence[Tensors],
    plan: TensorTable | None,
    scale: Tensor | float,
    update: AdamWStep,
    *,
    has_master: bool,
) -> None:
    """One AdamW step over the table of these lists, in one launch."""
    table = _table_for(plan, lists)
    if torch.float64 in table.dtypes:
        raise ValueError("params: float64 would be updated in float32; use backend='torch'")
    scale = _device_scale(scale, lists[0][0].device)
    lr, betas, eps, decay, number = update
    resolve(_STEP)(table, scale, lr, betas, eps, decay, number, has_master=has_master)


def _device_scale(scale: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        return scale.to(torch.float32)
    return torch.full((), scale, dtype=torch.float32, device=device)
