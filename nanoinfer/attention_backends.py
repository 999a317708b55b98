"""How the model's layers read and write the paged cache during one step."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import make_paged_plan, paged_attention, reshape_and_cache
from nanoinfer.batch import StepBatch


class KVCache:
    """One pair of tensors [blocks, block_size, key heads, head_dim] a layer, zeroed once:
    unwritten rows are read with weight 0, and 0 times NaN would be NaN."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @staticmethod
    def block_bytes(
        num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one block over all layers."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


class PagedContext:
    """The attention context of one engine step (nanoengine.model.attention.AttentionContext)."""

    def __init__(self, cache: KVCache, batch: StepBatch) -> None:
        self.cache = cache
        self.batch = batch
        self.max_seq_len = max(batch.seq_lens)
        starts = batch.query_starts
        self.max_query_len = max(b - a for a, b in zip(starts, starts[1:], strict=False))
        key = cache.keys[0]
        self._query_starts: Tensor | list[int] = starts
        self._seq_lens: Tensor | list[int] = batch.seq_lens
        self._tables = batch.block_tables
        self._plan = None
        if key.is_cuda:
            self._query_starts = torch.tensor(starts, dtype=torch.int32, device=key.device)
            self._seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=key.device)
            self._tables = batch.block_tables.to(key.device, torch.int32)
        else:  # masks and gather indices, once for all layers
            self._plan = make_paged_plan(
                starts,
                batch.seq_lens,
                batch.block_tables,
                block_size=cache.block_size,
                dtype=key.dtype,
            )

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        reshape_and_cache(k_TKD, v_TKD, keys, values, self.batch.slots_T)
        return paged_attention(
            q_THD,
            keys,
            values,
            self._query_starts,
            self._seq_lens,
            self._tables,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            plan=self._plan,
        )
