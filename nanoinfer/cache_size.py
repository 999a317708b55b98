"""The memory of a KV cache that is not made yet: bytes of a block, blocks of so many bytes."""

from __future__ import annotations

import torch

from nanoengine.model.config import ModelConfig


def bytes_per_block(
    config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
) -> int:
    """The memory of one block on one rank. `dtype` is the cache's."""
    per_token = 2 * config.num_layers * config.num_kv_heads // tp * config.head_dim
    return per_token * block_size * dtype.itemsize


def blocks_in(
    cache_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
) -> int:
    """Count the blocks that `cache_bytes` hold. `ValueError` if they hold none."""
    size = bytes_per_block(config, block_size, dtype, tp=tp)
    if cache_bytes < size:
        raise ValueError(
            f"cache_bytes={cache_bytes}: one block of {block_size} tokens takes {size} bytes; "
            "give at least that"
        )
    return cache_bytes // size
