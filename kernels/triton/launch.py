"""Starts Triton kernels on the device that their tensors are on.

Triton launches on the thread's current device, whatever device the pointers belong to, and a
thread's current device is the first GPU until somebody sets it. So every launch goes through here.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: Sequence[int]) -> Callable[..., None]:
    """`kernel[grid]`, to be called with the kernel's arguments: it starts on the device of the
    first tensor among them, on that device's current stream."""

    def start(*args: Any, **options: Any) -> None:
        with _current(next(x.device for x in args if isinstance(x, Tensor))):
            kernel[grid](*args, **options)

    return start


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Nothing to set on a CPU (the interpreter) and for meta tensors (the compile gate)."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
