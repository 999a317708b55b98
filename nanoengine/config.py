"""How an engine computes and updates: one frozen dataclass, the optimizer's settings included.

Left out: the shape of the model (model/config.py) and of the grid of processes (parallel/mesh.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nanoengine.optim import AdamWConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(AdamWConfig):
    """How the engine computes; what it inherits says how it updates."""

    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"  # parameters and matmuls; masters stay fp32
    micro_batch_tokens: int = 2048  # rows of the model in one forward and backward pass
    share_prefix: bool = False  # read the common leading tokens of a group once
    activation_checkpointing: bool = False  # less memory, a third more work, the same bits
    lm_head_fp32: bool = False  # output head in fp32 over a bf16 model
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits every time, and whose rows do not depend on
    the batch, so that log-probs equal those of a deterministic inference engine. A CPU always is
    both."""
    keep_checkpoints: int = 2
    zero: int = 0  # over the data-parallel ranks: 1 cuts optimizer state, 2 gradients, 3 parameters
    bucket_bytes: int = 25_000_000  # of gradients that travel together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={self.micro_batch_tokens}: must be at least 1")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints={self.keep_checkpoints}: must be at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero}: must be 0, 1, 2 or 3")
        if self.bucket_bytes < 0:
            raise ValueError(
                f"bucket_bytes={self.bucket_bytes}: must be 0 (every layer alone) or more"
            )
