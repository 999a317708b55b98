"""The paged KV cache as the model sees it: write this step's keys and values, attend to all.

`KVCache` owns the memory, of the size that a `CacheLayout` says; `PagedContext` is the
`AttentionContext` of one step. What a CPU needs once a step (gather indices, masks) is planned here
and used by all layers.

A cache may hold fp8 (e4m3): half the bytes of bf16, a quarter of fp32. Its keys and values are
rounded to 4 significant bits, so log-probs are no longer the trainer's: such a cache is for serving
(`InferConfig.kv_cache_dtype`). e4m3 is a floating-point format, so a scale moves its range (2^-9 to
448) and not its precision: a scale of 1 serves every model whose keys and values lie well inside,
and is the default. A model with large biases in its key projection does not; `calibrated_scales`
measures the range on one given text, one scale for the keys and one for the values of each layer,
when the engine is made and after every weight update. Nothing depends on what is served, so a
request's tokens are the same whatever ran before it. Scales are powers of two: dividing by them is
exact, and two versions of the weights nearly always have the same.

Left out: other attention than causal and windows; freeing the blocks that have left the windows of
all layers (a sequence keeps its blocks to its end); scales by head or by token, scales stored in
checkpoints.
Next: model_runner.py (who calls this), kernels/paged/paged_attention.py (the attention itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

import kernels
from kernels import make_kv_cache, make_paged_plan
from kernels.cpp.ops import QueryTiles
from kernels.kv_cache import PagedPlan, cache_rows, index_dtype, keys_in_runs
from kernels.memory import Scratch
from nanoengine.model.attention import AttentionContext, PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import StepInput
from nanoinfer.config import CacheKind

HEADROOM = 4.0
"""A served text may have keys this much larger than the measured one before they saturate."""


def cache_dtype(kind: CacheKind, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that a cache of that kind stores."""
    if kind not in get_args(CacheKind):
        raise ValueError(
            f"kv_cache_dtype={kind!r}: must be one of {', '.join(get_args(CacheKind))}"
        )
    return torch.float8_e4m3fn if kind == "fp8" else model_dtype


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The size and place of a cache.

    `CacheLayout(num_blocks=1456, block_size=16, dtype=model.dtype)` is one of 23,296 tokens on the
    CPU."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    """The model's; `cache_dtype` says what is stored."""
    device: str = "cpu"
    tp: int = 1
    """Ranks that share the key heads; each has a cache of its own heads."""
    kind: CacheKind = "auto"
    has_padding_block: bool = False
    """One block more, the last, that belongs to no sequence: rows of padding are written there
    (cuda_graph.py)."""
    populate: bool = False
    """Take a CPU's memory at once, not as it fills."""


class KVCache:
    """Keys and values of all layers, [layers, 2, blocks, block_size, key heads, head_dim]. What
    `data` holds of a block's keys may lie in another order: `layers` says how they are read.

    A cache of fp8 holds k / scale and v / scale, `scales` [layers, 2] in fp32; they are read by
    address (CUDA graphs), so change them in place, and only while no block is in use.
    """

    def __init__(self, config: ModelConfig, layout: CacheLayout) -> None:
        heads = config.num_kv_heads // layout.tp
        size = layout.num_blocks + layout.has_padding_block
        self._shape = (config.num_layers, 2, size, layout.block_size, heads, config.head_dim)
        self.num_heads = config.num_heads // layout.tp  # of the queries
        self.model_dtype = layout.dtype
        self.dtype = cache_dtype(layout.kind, layout.dtype)
        self.num_blocks = layout.num_blocks
        self.padding_block = layout.num_blocks if layout.has_padding_block else None
        self.block_size = layout.block_size
        longest = -(-config.max_position_embeddings // layout.block_size)
        self.blocks_per_seq = min(longest, layout.num_blocks)
        self._device = layout.device
        self._populate = layout.populate
        self.scales: Tensor | None = None
        if self.dtype.itemsize == 1:
            # 16 bytes apart: Triton compiles a kernel again for pointers that are not aligned so
            self.scales = torch.ones(config.num_layers, 2, 4, device=layout.device)[:, :, 0]
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; all of it reads zero."""
        self.data = make_kv_cache(self._shape, self.dtype, self._device)
        if self._populate:
            self.data.view(index_dtype(self.dtype)).zero_()
        self.layers: list[tuple[Tensor, Tensor]] = [
            (keys_in_runs(kv[0]), kv[1]) for kv in self.data
        ]
        self.scratch = Scratch()

    def release(self) -> None:
        """Give the memory back, content and all; `allocate` before the next step."""
        self.data = self.data.new_empty(0)
        self.layers = []
        self.scratch = Scratch()

    @property
    def is_asleep(self) -> bool:
        """True while the memory is given back."""
        return not self.layers

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy whole blocks in all layers, `copies` [n, 2] from block to block, on the cache's
        device. All are read before the first is written."""
        sources, targets = copies.T
        data = self.data.view(index_dtype(self.dtype))
        data.index_copy_(2, targets, data.index_select(2, sources))

    def layer_scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of a layer's keys and values; None for a cache that is not fp8."""
        if self.scales is None:
            return None, None
        return self.scales[layer, 0], self.scales[layer, 1]

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
    ) -> int:
        """The memory of one block on one rank. `dtype` is the cache's."""
        per_token = 2 * config.num_layers * config.num_kv_heads // tp * config.head_dim
        return per_token * block_size * dtype.itemsize

    @staticmethod
    def blocks_in(
        cache_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
    ) -> int:
        """Count the blocks that `cache_bytes` hold. `ValueError` if they hold none."""
        size = KVCache.bytes_per_block(config, block_size, dtype, tp=tp)
        if cache_bytes < size:
            raise ValueError(
                f"cache_bytes={cache_bytes}: one block of {block_size} tokens takes {size} bytes; "
                "give at least that"
            )
        return cache_bytes // size


class PagedContext:
    """Attention of one step, S sequences. Left out: gradients."""

    def __init__(
        self,
        cache: KVCache,
        slots_T: Tensor,
        query_starts: Tensor | list[int],
        seq_lens: Tensor | list[int],
        block_tables: Tensor,
        max_query_len: int,
        max_seq_len: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`query_starts` [S + 1] and `seq_lens` [S] count tokens, new ones included in the latter.
        All tensors lie on the cache's device. A GPU wants int32 tensors, which the host never
        reads; a CPU plans the step from the values."""
        self._cache = cache
        self._max_query_len = max_query_len
        self._max_seq_len = max_seq_len
        self._batch_invariant = batch_invariant  # the model's
        self._plan: PagedPlan | None = None
        self._rows: Tensor | None = None
        self._slots_T, self._tables = slots_T, block_tables
        self._starts, self._lens = query_starts, seq_lens
        if cache.data.device.type == "cpu":
            _, values = cache.layers[0]
            self._plan = make_paged_plan(
                query_starts,
                seq_lens,
                block_tables,
                cache=values,
                num_heads=cache.num_heads,
                dtype=cache.model_dtype,
                scratch=cache.scratch,
            )
            self._rows = cache_rows(slots_T, values)

    @classmethod
    def of_step(
        cls, cache: KVCache, step: StepInput, *, batch_invariant: bool = False
    ) -> PagedContext:
        longest = max(b - a for a, b in pairwise(step.query_starts))
        starts: Tensor | list[int] = step.starts
        lens: Tensor | list[int] = step.lens
        if cache.data.device.type == "cpu":
            starts, lens = step.query_starts, step.seq_lens
        tables, limit = step.block_tables, max(step.seq_lens)
        where = (step.slots_T, starts, lens, tables, longest, limit)
        return cls(cache, *where, batch_invariant=batch_invariant)

    @property
    def native(self) -> tuple[Tensor, QueryTiles] | None:
        """The cache rows of the new tokens, and where queries find keys; None where PyTorch or
        Triton attends."""
        if self._plan is None or not isinstance(self._plan.layout, QueryTiles):
            return None
        assert self._rows is not None, "made with the plan"
        return self._rows, self._plan.layout

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        k_cache, v_cache = self._cache.layers[layer]
        scales = self._cache.layer_scales(layer)
        slots, rows = self._slots_T, self._rows
        kernels.reshape_and_cache(k_TKD, v_TKD, k_cache, v_cache, slots, *scales, rows=rows)
        return kernels.paged_attention(
            q_THD,
            k_cache,
            v_cache,
            self._starts,
            self._lens,
            self._tables,
            max_query_len=self._max_query_len,
            max_seq_len=self._max_seq_len,
            softmax_scale=scale,
            window=window,
            sinks=sinks,
            k_scale=scales[0],
            v_scale=scales[1],
            plan=self._plan,
            batch_invariant=self._batch_invariant,
        )


class _Extremes:
    """An attention context that notes the largest key and value of each layer."""

    def __init__(self, context: AttentionContext, num_layers: int) -> None:
        self._context = context
        self.largest = torch.zeros(num_layers, 2)  # on the host: read once a layer, not in serving

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        for i, x in enumerate((k_TKD, v_TKD)):
            self.largest[layer, i] = x.abs().amax()
        return self._context.attend(
            layer, q_THD, k_TKD, v_TKD, scale=scale, window=window, sinks=sinks
        )


@torch.inference_mode()
def calibrated_scales(model: Transformer, ids: Sequence[int]) -> Tensor:
    """[layers, 2] in fp32: the smallest powers of two that hold the keys and values of `ids`
    `HEADROOM` times over. Each tensor-parallel rank measures its own heads."""
    shape = model.config
    if min(ids) < 0 or max(ids) >= shape.vocab_size or len(ids) > shape.max_position_embeddings:
        raise ValueError(
            f"kv_calibration_ids: {len(ids)} ids from {min(ids)} to {max(ids)}; must be at most "
            f"{shape.max_position_embeddings} of a vocabulary of {shape.vocab_size}"
        )
    device = str(model.device)
    plain = PackedContext.from_lengths([len(ids)], device)
    context = _Extremes(plain, shape.num_layers)
    model(torch.tensor(ids, device=device), packed_positions([len(ids)]).to(device), context)
    limit = torch.finfo(torch.float8_e4m3fn).max / HEADROOM
    exponents = (context.largest / limit).log2().ceil()
    return torch.where(context.largest > 0, exponents.exp2(), 1.0)
