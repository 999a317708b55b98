"""The same bits every time on a GPU: of cuBLAS, and of PyTorch's own kernels.

On a CPU every kernel of ours gives the same bits whatever the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CUBLAS_CHOICE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")
"""NVIDIA's two (cuBLAS documentation, "Results reproducibility"); the first is the faster one."""


def require_deterministic_cublas() -> None:
    """Make cuBLAS add in the same order every time. It reads this choice once, when CUDA starts,
    so whoever trains with `deterministic` calls this before anything touches a GPU; raises
    ValueError where it is too late or another choice was made."""
    chosen, best = os.environ.get(_CUBLAS_CHOICE), _DETERMINISTIC_CUBLAS[0]
    if chosen is None and not torch.cuda.is_initialized():
        os.environ[_CUBLAS_CHOICE] = chosen = best
    if chosen not in _DETERMINISTIC_CUBLAS:
        state = "not set, and CUDA has started" if chosen is None else f"{chosen!r}"
        raise ValueError(
            f"deterministic=True: {_CUBLAS_CHOICE} is {state}; it must be "
            f"{' or '.join(_DETERMINISTIC_CUBLAS)} before the program first uses a GPU: run it as "
            f"{_CUBLAS_CHOICE}={best} COMMAND"
        )


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, PyTorch refuses operations that may give other bits the next time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
