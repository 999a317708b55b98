"""Sizes of an engine on a GPU where its owner gave none (0): what its memory has room for.

On a GPU the cache takes GPU_SHARE of what is free when the engine is made, after the model and
whatever else is there, less what one step needs, and no more than `max_num_seqs` sequences of the
model's full length can use. The constants are chosen, not measured.
"""

from __future__ import annotations

from dataclasses import replace

from nanoengine.model.transformer import Transformer
from nanoengine.parallel.device import free_bytes
from nanoinfer.config import InferConfig
from nanoinfer.engine_memory import bytes_per_block, step_bytes
from nanoinfer.variants.fp8_cache import cache_dtype

GPU_SHARE = 0.85
"""The cache's share of the free memory; the rest is for CUDA's libraries, graphs and the
allocator's fragments."""
GPU_NUM_SEQS, GPU_BATCH_TOKENS = 256, 8192


def sized(config: InferConfig, model: Transformer) -> InferConfig:
    """`config` with every size that was 0 chosen for the model's device."""
    if model.device.type == "cpu":
        return config.sized()
    config = config.sized(GPU_NUM_SEQS, GPU_BATCH_TOKENS, cache_bytes=config.cache_bytes)
    if config.cache_bytes or config.num_blocks is not None:
        return config
    return replace(config, cache_bytes=_gpu_cache(config, model))


def _gpu_cache(config: InferConfig, model: Transformer) -> int:
    shape, tp = model.config, model.split.size
    free = free_bytes(model.device)
    room = GPU_SHARE * free
    room -= step_bytes(shape, model.dtype, config.max_num_seqs, config.max_batch_tokens)
    dtype = cache_dtype(config.kv_cache_dtype, model.dtype)
    block = bytes_per_block(shape, config.block_size, dtype, tp=tp)
    longest = -(-shape.max_position_embeddings // config.block_size)
    if room < block:
        raise ValueError(
            f"cache_bytes: {free / 2**30:.1f} GiB of {model.device} are free beside the model, "
            "too little for a cache; end what else uses the GPU, choose a smaller model or "
            "max_batch_tokens, or take device cpu"
        )
    return int(min(room, config.max_num_seqs * longest * block))
