"""The memory of an engine that is not made yet: its KV cache's, and what a step holds.

Left out: weights, and all that training takes (nanoengine/plan/footprint.py).
"""

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


def step_bytes(shape: ModelConfig, dtype: torch.dtype, num_seqs: int, batch_tokens: int) -> float:
    """Bytes that one inference step holds beside the cache: the rows of a layer, with its products,
    and the logits of every sequence in the model's dtype and three times in fp32 (edits,
    sampling)."""
    widths = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    row = 4 * shape.hidden_size + 2 * widths + 3 * shape.intermediate_size
    logits = num_seqs * shape.vocab_size * (dtype.itemsize + 3 * 4)
    return batch_tokens * row * dtype.itemsize + logits
