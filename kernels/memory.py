"""Memory of values: buffers that live on, pages past the allocator, ways to a GPU and back.

A copy between host and GPU costs some ten microseconds whatever its size, and one that the host
waits for costs the work that it could have queued meanwhile. So what one step needs goes up in one
copy from pinned memory (`to_device`), and what it gives comes down in one (`to_host`).
"""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from kernels.backend import resolve
from kernels.cpp import ops

T = TypeVar("T")

_UPLOAD = "kernels.gpu.upload:upload"
_EXTREMES = "kernels.torch.finite:are_finite"


class Scratch:
    """Buffers that outlive a call. A fresh large tensor costs a page fault for every 4 KB, which
    for attention is more than the arithmetic; a buffer reused by all layers costs it once."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the same name is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(*shape)


def release_free_memory() -> None:
    """Gives back what was freed, after a phase that needed more than the next one will."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def release_memory() -> None:
    """Gives back what was freed on host and GPU, after a phase that needed more than the next one
    will: both keep it for themselves otherwise."""
    release_free_memory()
    torch.cuda.empty_cache()


def fresh_pages(num_bytes: int) -> Tensor:
    """Zeros, uint8, that take memory as they are first written to, and give all of it back when the
    tensor dies, however the allocator is set: for a buffer that comes and goes, such as a cache.
    (From memory that the allocator has kept, `torch.zeros` would be written out at once.)"""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)


def to_device(value: T, device: torch.device) -> T:
    """`value`, a dataclass, with all its tensors (in dataclasses and dictionaries in it, too) on
    `device`. A GPU gets them in one copy from pinned memory, not waited for."""
    if device.type == "cpu":
        return value
    return resolve(_UPLOAD)(value, device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' values on the CPU, in one copy that the host waits for. They may be of any
    dtypes whose values fp64 holds (of int64 those below 2^53)."""
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    packed = torch.cat([x.detach().reshape(-1).to(torch.float64) for x in tensors]).cpu()
    parts = packed.split([x.numel() for x in tensors])
    return [part.to(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def all_finite(xs: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor holds neither NaN nor infinity; a GPU is waited for once. On a CPU the
    C++ looks at all of them in one pass: threads that meet after each of hundreds of tensors spend
    their time waiting."""
    are_plain = [is_plain(x) and are_floats(x) for x in xs]
    plain = [x for x, is_native in zip(xs, are_plain, strict=True) if is_native]
    others = [x for x, is_native in zip(xs, are_plain, strict=True) if not is_native]
    natively = iter(ops.for_ranges(plain, has_finite=True)[1])
    in_torch = iter(resolve(_EXTREMES)(others) if others else [])
    return [next(natively if is_native else in_torch) for is_native in are_plain]


def is_plain(*tensors: Tensor) -> bool:
    """True if C++ can read their bytes one after the other."""
    lie_so = all(x.is_cpu and x.is_contiguous() for x in tensors)
    return lie_so and ops.library() is not None


def are_floats(*tensors: Tensor) -> bool:
    """True if C++ finds NaN and infinity in them."""
    return all(x.dtype in ops.NATIVE_DTYPES for x in tensors)
