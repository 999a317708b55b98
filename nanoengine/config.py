"""The options of an engine and of its optimizer: frozen dataclasses, without PyTorch, so that a
command line is answered before that is loaded.

Left out: the shape of the model (model/config.py), its split over processes (parallel/layout.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["constant", "cosine", "linear"]
Dtype = Literal["fp32", "bf16", "fp64"]


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """A run's choices for the update, phase by phase; the rest is AdamW's own."""

    lr: float = 1e-6
    """Learning rate, the highest that the schedule reaches."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: Schedule = "constant"
    """Learning-rate schedule after the warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are spared."""
    max_grad_norm: float = 1.0
    """Global gradient-norm clip."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(UpdateConfig):
    """Hyperparameters of the update. A `max_grad_norm` of 0 never clips."""

    betas: tuple[float, float] = (0.9, 0.95)
    """How slowly the mean of the gradient and of its square forget."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    total_steps: int = 0
    """Where the schedule ends; cosine and linear need it."""
    min_lr_ratio: float = 0.0
    """The learning rate at the end of the schedule, as a share of `lr`."""

    def __post_init__(self) -> None:
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"lr={self.lr}: must be 0 or positive, and finite")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: both must be in [0, 1)")
        if not 0 < self.eps < math.inf:
            raise ValueError(f"eps={self.eps}: must be positive and finite")
        for name in ("weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be 0 (off) or positive, and finite"
                )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio={self.min_lr_ratio}: must be in [0, 1]")
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule={self.schedule!r}: must be constant, cosine or linear")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}: must be 0 or positive")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps={self.total_steps}: the {self.schedule} schedule needs more than "
                f"warmup_steps={self.warmup_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """A run's choices for the computation: memory against time, and the bits of the head."""

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

    dtype: Dtype = "fp32"
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
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(get_args(Dtype))}")
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
