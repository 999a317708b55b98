"""glibc's allocator under PyTorch's tensors on the host, which a program may tell to keep memory.

glibc gives every tensor beyond 32 MB, and at first beyond 128 KB, pages of its own from the kernel
and hands them back when the tensor dies; the next one pays a page fault for every 4 KB. In a CPU
training step those faults cost about as much as the arithmetic. Nothing here runs at import: it is
set for the whole process, so the program decides.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # as glibc numbers them
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
