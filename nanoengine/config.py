"""The options of an engine: one frozen dataclass, the optimizer's settings included.

Left out: the shape of the model (model/config.py) and of the grid of processes (parallel/mesh.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nanoengine.optim import AdamWConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """What a run chooses of the computation: memory against time, and the bits of the head."""

    micro_batch_tokens: int = 2048
    """Tokens of one training micro-batch, rows of the model in a forward and a backward pass."""
    activation_mb: int = 0
    """On a CPU: megabytes that the layers keep for the backward pass, to which samples are put
    together; at least 512 rows, and a sample or tree is never cut for it. 0: micro_batch_tokens
    alone counts. 160 cost SmolLM2-135M 3 to 4 % of a step's time."""
    share_prefix: bool = False
    """Read once in training what members of a group begin with alike: a tree of any depth."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time, the same bits."""
    lm_head_fp32: bool = False
    """Multiply the lm_head in fp32 even if the model is bf16."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(AdamWConfig, ComputeConfig):
    """The options of an engine: how it computes; what it inherits says how it updates. Each has
    its help below it, so that a command line can be made of the record."""

    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Parameters and matrix products; masters, moments and gradients stay fp32 (fp64 for fp64)."""
    deterministic: bool = False
    """On a GPU: only kernels that give the same bits every time, and whose rows do not depend on
    the batch, so that log-probs equal those of a deterministic inference engine. A CPU always is
    both."""
    keep_checkpoints: int = 2
    """Checkpoints that stay on the disk; older ones are deleted."""
    zero: int = 0
    """What the data-parallel ranks share: 1 optimizer state, 2 gradients too, 3 parameters too."""
    bucket_bytes: int = 25_000_000
    """Bytes of gradients that travel together; 0 sends each layer alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={self.micro_batch_tokens}: must be at least 1")
        if self.activation_mb < 0:
            raise ValueError(f"activation_mb={self.activation_mb}: must be 0 (no limit) or more")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints={self.keep_checkpoints}: must be at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero}: must be 0, 1, 2 or 3")
        if self.bucket_bytes < 0:
            raise ValueError(
                f"bucket_bytes={self.bucket_bytes}: must be 0 (every layer alone) or more"
            )
