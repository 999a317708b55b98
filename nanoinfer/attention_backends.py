"""The paged cache as the model sees it: write this step's keys and values, attend to all.

`KVCache` owns the memory; `PagedContext` is the `AttentionContext` of one step. What a CPU needs
once a step (gather indices, masks) is planned here and used by all layers.
Left out: quantised caches, other attention than causal.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels import make_kv_cache, make_paged_plan, paged_attention, reshape_and_cache
from kernels._attend import Scratch
from kernels.kv_cache import cache_rows
from nanoengine.model.config import ModelConfig
from nanoinfer.batch import StepInput


class KVCache:
    """Keys and values of all layers, [layers, 2, blocks, block_size, key heads, head_dim]."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        tp: int = 1,
    ) -> None:
        """`tp` ranks share the key heads; this is one rank's cache."""
        heads = config.num_kv_heads // tp
        self._shape = (config.num_layers, 2, num_blocks, block_size, heads, config.head_dim)
        self.dtype = dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._device = device
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; all of it reads zero."""
        self.data = make_kv_cache(self._shape, self.dtype, self._device)
        self.layers: list[tuple[Tensor, Tensor]] = [(kv[0], kv[1]) for kv in self.data]
        self.scratch = Scratch()

    def release(self) -> None:
        """Give the memory back, content and all; `allocate` before the next step."""
        self.data = torch.empty(0, dtype=self.dtype)
        self.layers = []
        self.scratch = Scratch()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks in all layers. All are read before the first is written."""
        if not copies:
            return
        sources, targets = torch.tensor(copies).to(self.data.device).T
        self.data.index_copy_(2, targets, self.data.index_select(2, sources))

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
    ) -> int:
        per_token = 2 * config.num_layers * config.num_kv_heads // tp * config.head_dim
        return per_token * block_size * dtype.itemsize


class PagedContext:
    """Attention of one step. Left out: gradients."""

    def __init__(self, cache: KVCache, step: StepInput) -> None:
        self._cache = cache
        self._max_query_len = max(
            b - a for a, b in zip(step.query_starts, step.query_starts[1:], strict=False)
        )
        self._max_seq_len = max(step.seq_lens)
        device = cache.data.device
        self._plan, self._rows = None, None
        # a GPU gets the step's indices once for all layers
        self._slots_T, self._tables = step.slots_T.to(device), step.block_tables.to(device)
        self._starts: Tensor | list[int] = step.query_starts
        self._lens: Tensor | list[int] = step.seq_lens
        if device.type != "cpu":
            self._starts = torch.tensor(step.query_starts, dtype=torch.int32, device=device)
            self._lens = torch.tensor(step.seq_lens, dtype=torch.int32, device=device)
        else:
            plan = make_paged_plan(
                step.query_starts,
                step.seq_lens,
                step.block_tables,
                block_size=cache.block_size,
                num_kv_heads=cache.data.shape[4],
                dtype=cache.data.dtype,
            )
            self._plan = replace(plan, scratch=cache.scratch)
            self._rows = cache_rows(step.slots_T, cache.layers[0][0])

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k_cache, v_cache = self._cache.layers[layer]
        reshape_and_cache(k_TKD, v_TKD, k_cache, v_cache, self._slots_T, rows=self._rows)
        return paged_attention(
            q_THD,
            k_cache,
            v_cache,
            self._starts,
            self._lens,
            self._tables,
            max_query_len=self._max_query_len,
            max_seq_len=self._max_seq_len,
            softmax_scale=q_THD.shape[-1] ** -0.5,
            plan=self._plan,
        )
