"""Keeps large host buffers instead of returning them, or takes pages past the allocator.

glibc gives every tensor beyond 32 MB, and at first beyond 128 KB, pages of its own from the kernel
and hands them back when the tensor dies; the next one pays a page fault for every 4 KB. In a CPU
training step those faults cost about as much as the arithmetic. Nothing here runs at import: the
setting is the whole process's, so the program decides.
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEP_BYTES = 2**31 - 1


def reuse_large_buffers() -> bool:
    """Tells glibc to serve large tensors from memory it keeps. False where there is no glibc.

    The process's memory then stays at its peak until it ends, or until `release_free_memory`.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (
        (_M_MMAP_THRESHOLD, _KEEP_BYTES),
        (_M_TRIM_THRESHOLD, _KEEP_BYTES),
        (_M_ARENA_MAX, 1),  # else every thread that ever trained keeps a peak of its own
    )
    return all([mallopt(option, value) == 1 for option, value in options])


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
