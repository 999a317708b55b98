"""The parts of an engine that is not plain, as its config and its model's device want them."""

from __future__ import annotations

import torch

from nanoengine.architectures.quantized import quantize, quantize_head
from nanoengine.model.transformer import Transformer
from nanoinfer.block_manager import BlockManager
from nanoinfer.config import InferConfig
from nanoinfer.engine_core import EngineParts
from nanoinfer.engine_memory import blocks_in
from nanoinfer.gpu.cuda_graph import CudaCapture, StaticDecode, can_capture
from nanoinfer.kv_cache import CacheLayout
from nanoinfer.variants.fp8_cache import cache_dtype, make_cache
from nanoinfer.variants.full_runner import FullRunner
from nanoinfer.variants.speculative import Drafter, DraftingScheduler


def make_parts(model: Transformer, config: InferConfig) -> EngineParts:
    """The parts of an engine over that model, with all sizes chosen. It is quantised here where the
    config says so."""
    num_blocks = count_blocks(model, config)
    blocks = BlockManager(num_blocks, config.block_size, config.prefix_caching)
    drafter = Drafter(config.speculate, config.speculate_free_rows, config.speculate_siblings)
    sizes = (config.max_batch_tokens, config.max_num_seqs)
    scheduler = DraftingScheduler(blocks, *sizes, drafter)
    return EngineParts(blocks, scheduler, make_runner(model, config, num_blocks))


def count_blocks(model: Transformer, config: InferConfig) -> int:
    """The blocks of an engine's cache: as asked for, or as many as its memory holds."""
    if config.num_blocks is not None:
        return config.num_blocks
    dtype = cache_dtype(config.kv_cache_dtype, model.dtype)
    tp = model.split.size
    return blocks_in(config.cache_bytes, model.config, config.block_size, dtype, tp=tp)


def make_runner(model: Transformer, config: InferConfig, num_blocks: int) -> FullRunner:
    """The runner of an engine: a cache of that many blocks and, where decode steps can be graphs,
    one block more for their rows of padding."""
    model.batch_invariant = model.batch_invariant or config.deterministic
    kind = config.quantization
    if kind != "none" and kind != model.quantization:
        quantize(model, kind)
    if kind == "int8":
        model.head_dtype = torch.float32 if config.lm_head_fp32 else model.head_dtype
        quantize_head(model)
    is_static = config.cuda_graphs and can_capture(model)
    layout = CacheLayout(
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
        device=str(model.device),
        tp=model.split.size,
        has_padding_block=is_static,
        populate=config.populate_cache,
    )
    cache = make_cache(model.config, layout, config.kv_cache_dtype)
    decode = None
    if is_static:
        capture = CudaCapture(model.device)
        decode = StaticDecode(model, cache, config.max_num_seqs, capture)
    return FullRunner(model, cache, config.lm_head_fp32, decode, config.kv_calibration_ids)
