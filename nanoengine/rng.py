"""The state of the random generators a run may use, in a form that a checkpoint can hold.

Python's and NumPy's global generators and PyTorch's of the CPU and of the engine's GPU. Left out:
generators that their owner seeds by itself, as the samplers do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def get_rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON values)."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [name, [int(key) for key in keys], position, has_gauss, gauss]
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def set_rng_state(
    device: torch.device, names: list[str], read: Callable[[str], Tensor], values: dict[str, Any]
) -> None:
    """Restore what `get_rng_state` gave; `read` returns a tensor by its name."""
    torch.set_rng_state(read("rng.cpu"))
    if device.type == "cuda" and "rng.cuda" in names:
        torch.cuda.set_rng_state(read("rng.cuda"), device)
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
