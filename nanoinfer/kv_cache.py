"""The paged KV cache as the model sees it: write this step's keys and values, attend to all.

`KVCache` owns the memory, of the size that a `CacheLayout` says; `PagedContext` is the
`AttentionContext` of one step. What a CPU needs once a step (gather indices, masks) is planned here
and used by all layers. A cache in fp8 is variants/fp8_cache.py.

Left out: other attention than causal and windows; freeing the blocks that have left the windows of
all layers (a sequence keeps its blocks to its end).
Next: model_runner.py (who calls this), kernels/paged/paged_attention.py (the attention itself).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from kernels import make_kv_cache, make_paged_plan
from kernels.cpp.ops import QueryTiles
from kernels.kv_cache import PagedPlan, cache_rows, index_dtype, keys_in_runs
from kernels.memory import Scratch
from nanoengine.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The size and place of a cache.

    `CacheLayout(num_blocks=1456, block_size=16, dtype=model.dtype)` is one of 23,296 tokens on the
    CPU."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype  # the model's
    device: str = "cpu"
    tp: int = 1  # ranks that share the key heads; each has a cache of its own heads
    has_padding_block: bool = False
    """One block more, the last, that belongs to no sequence: rows of padding are written there
    (gpu/cuda_graph.py)."""
    populate: bool = False
    """Take a CPU's memory at once, not as it fills."""


class KVCache:
    """Keys and values of all layers, [layers, 2, blocks, block_size, key heads, head_dim]. What
    `data` holds of a block's keys may lie in another order: `layers` says how they are read."""

    def __init__(
        self, config: ModelConfig, layout: CacheLayout, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` is what is stored, if not in the model's own."""
        heads = config.num_kv_heads // layout.tp
        size = layout.num_blocks + layout.has_padding_block
        self._shape = (config.num_layers, 2, size, layout.block_size, heads, config.head_dim)
        self.num_heads = config.num_heads // layout.tp  # of the queries
        self.model_dtype = layout.dtype
        self.dtype = layout.dtype if dtype is None else dtype
        self.num_blocks = layout.num_blocks
        self.padding_block = layout.num_blocks if layout.has_padding_block else None
        self.block_size = layout.block_size
        longest = -(-config.max_position_embeddings // layout.block_size)
        self.blocks_per_seq = min(longest, layout.num_blocks)
        self._device = layout.device
        self._populate = layout.populate
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; all of it reads zero."""
        self.data = make_kv_cache(self._shape, self.dtype, self._device)
        if self._populate:
            self.data.view(index_dtype(self.dtype)).zero_()
        # The kernels multiply a query by as many keys at once as the processor has lanes, so keys
        # lie as those read them. The memory is the same, only its shape is another.
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
        """The scales of a layer's keys and values: none, they are stored as they are."""
        return None, None


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
        # Which keys a query sees is the same in all layers: tables and lengths are checked and laid
        # out once, and the layers only multiply.
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
        # Written first: a token of a prompt sees the others of its chunk through the cache, as if
        # they had been there before, so how a prompt is cut changes nothing.
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
