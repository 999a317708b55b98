"""How values cross to a GPU and back.

A copy between host and GPU costs some ten microseconds whatever its size, and one that the host
waits for costs the work that it could have queued meanwhile. So what one step needs goes up in one
copy from pinned memory (`to_device`), and what it gives comes down in one (`to_host`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_ALIGNMENT = 16  # bytes; Triton compiles a kernel again for pointers that are not aligned so


def to_device(value: T, device: torch.device) -> T:
    """`value`, a dataclass, with all its tensors (in dataclasses and dictionaries in it, too) on
    `device`. A GPU gets them in one copy from pinned memory, not waited for."""
    if device.type == "cpu":
        return value
    tensors = list(_tensors(value))
    is_gpu = device.type == "cuda"  # else the device of tensors without values
    moved = _upload(tensors, device) if is_gpu else [x.to(device) for x in tensors]
    rebuilt: T = _rebuilt(value, iter(moved))
    return rebuilt


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in _parts(value):
            yield from _tensors(part)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _rebuilt(value: Any, moved: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(moved)
    parts = [_rebuilt(part, moved) for part in _parts(value)]
    if not parts:
        return value
    if isinstance(value, dict):
        return dict(zip(value, parts, strict=True))
    names = [field.name for field in fields(value)]
    return replace(value, **dict(zip(names, parts, strict=True)))


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Pinned memory comes from PyTorch's cache of it, which waits for the copy before it hands the
    same bytes out again."""
    starts, size = [], 0
    for x in tensors:
        starts.append(size)
        size += -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for x, start in zip(tensors, starts, strict=True):
        _piece(host, start, x).copy_(x)
    packed = host.to(device, non_blocking=True)
    return [_piece(packed, start, x) for x, start in zip(tensors, starts, strict=True)]


def _piece(packed: Tensor, start: int, like: Tensor) -> Tensor:
    end = start + like.numel() * like.element_size()
    return packed[start:end].view(like.dtype).view(like.shape)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' values on the CPU, in one copy that the host waits for. They may be of any
    dtypes whose values fp64 holds (of int64 those below 2^53)."""
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    packed = torch.cat([x.detach().reshape(-1).to(torch.float64) for x in tensors]).cpu()
    parts = packed.split([x.numel() for x in tensors])
    return [part.to(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]
