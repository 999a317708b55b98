"""The options of an engine and of its optimizer: frozen dataclasses, without PyTorch, so that a
command line is answered before that is loaded.

Left out: the shape of the model (model/config.py), its split over processes (parallel/layout.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal

Schedule = Literal["constant", "cosine", "linear"]
Dtype = Literal["fp32", "bf16", "fp64"]
VisionTrain = Literal["all", "merger", "none"]

_CHECKS = {  # `ValueError` for what cannot be
    "update": "nanoengine.plan.option_checks:check_update",
    "engine": "nanoengine.plan.option_checks:check_engine",
}


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
        resolve_name(_CHECKS["update"])(self)


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
    vision_train: VisionTrain = "all"
    """Parts of a vision tower that are trained: all, its mergers alone, or none."""
    vision_lr: float | None = None
    """Learning rate of the tower, by the same schedule; None: that of the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_name(_CHECKS["engine"])(self)
