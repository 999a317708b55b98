"""Refuses options of a training engine that cannot be, each by its name.

Left out: whether a model fits its layout (build.py), or a machine (estimate.py).
"""

from __future__ import annotations

import math
from typing import get_args

from nanoengine.config import AdamWConfig, Dtype, EngineConfig, VisionTrain


def check_update(config: AdamWConfig) -> None:
    """`ValueError` for numbers with which nothing could be learnt."""
    if not 0 <= config.lr < math.inf:
        raise ValueError(f"lr={config.lr}: must be 0 or positive, and finite")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas={config.betas}: both must be in [0, 1)")
    if not 0 < config.eps < math.inf:
        raise ValueError(f"eps={config.eps}: must be positive and finite")
    for name in ("weight_decay", "max_grad_norm"):
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(
                f"{name}={getattr(config, name)}: must be 0 (off) or positive, and finite"
            )
    if not 0 <= config.min_lr_ratio <= 1:
        raise ValueError(f"min_lr_ratio={config.min_lr_ratio}: must be in [0, 1]")
    if config.schedule not in ("constant", "cosine", "linear"):
        raise ValueError(f"schedule={config.schedule!r}: must be constant, cosine or linear")
    if config.warmup_steps < 0:
        raise ValueError(f"warmup_steps={config.warmup_steps}: must be 0 or positive")
    if config.schedule != "constant" and config.total_steps <= config.warmup_steps:
        raise ValueError(
            f"total_steps={config.total_steps}: the {config.schedule} schedule needs more than "
            f"warmup_steps={config.warmup_steps}"
        )


def check_engine(config: EngineConfig) -> None:
    """`ValueError` for a dtype, a stage of ZeRO or an amount that there is not."""
    if config.dtype not in get_args(Dtype):
        raise ValueError(f"dtype={config.dtype!r}: must be one of {', '.join(get_args(Dtype))}")
    if config.micro_batch_tokens < 1:
        raise ValueError(f"micro_batch_tokens={config.micro_batch_tokens}: must be at least 1")
    if config.activation_mb < 0:
        raise ValueError(f"activation_mb={config.activation_mb}: must be 0 (no limit) or more")
    if config.keep_checkpoints < 1:
        raise ValueError(f"keep_checkpoints={config.keep_checkpoints}: must be at least 1")
    if config.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={config.zero}: must be 0, 1, 2 or 3")
    if config.bucket_bytes < 0:
        raise ValueError(
            f"bucket_bytes={config.bucket_bytes}: must be 0 (every layer alone) or more"
        )
    if config.vision_train not in get_args(VisionTrain):
        raise ValueError(
            f"vision_train={config.vision_train!r}: must be one of "
            f"{', '.join(get_args(VisionTrain))}"
        )
    if config.vision_lr is not None and not 0 < config.vision_lr < math.inf:
        raise ValueError(f"vision_lr={config.vision_lr}: must be positive and finite, or None")
