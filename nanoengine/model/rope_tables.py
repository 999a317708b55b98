"""The rope tables that all layers share: cos and sin of every position.

Left out: the scalings that a config.json can ask for (architectures/rope.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoengine.model.config import ModelConfig


def plain_frequencies(theta: float, dim: int) -> Tensor:
    """[dim / 2] in fp32, radians a position, without any scaling."""
    frequencies: Tensor = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return frequencies


def cos_and_sin(
    config: ModelConfig,
    frequencies: Tensor,
    magnitude: float,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D/2] by fp32 arithmetic, as transformers does; fp64 models hold the
    same values in fp64."""
    # a table, not arithmetic in the kernels: both engines and C++ read the same bits
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    wide = torch.promote_types(dtype, torch.float32)
    return cos.to(device, wide), sin.to(device, wide)


def rope_tables(config: ModelConfig, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D/2] of a model, by its scaling."""
    theta, dim, scaling = config.rope_theta, config.rotary_dim, config.rope_scaling
    if scaling is None:
        frequencies, magnitude = plain_frequencies(theta, dim), 1.0
    else:
        frequencies, magnitude = scaling.frequencies(theta, dim), scaling.magnitude
    return cos_and_sin(config, frequencies, magnitude, dtype, device)
