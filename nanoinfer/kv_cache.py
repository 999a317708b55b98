"""The paged cache as the model sees it: write this step's keys and values, attend to all.

`KVCache` owns the memory; `PagedContext` is the `AttentionContext` of one step. What a CPU needs
once a step (gather indices, masks) is planned here and used by all layers.

A cache may hold fp8 (e4m3): half the bytes of bf16, a quarter of fp32. Its keys and values are
rounded to 4 significant bits, so log-probs are no longer the trainer's; what is lost is said where
it is asked for (`InferConfig.kv_cache_dtype`). Next: kv_cache.py (the scales of such a cache).
Left out: other attention than causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from kernels import make_kv_cache, make_paged_plan, paged_attention, reshape_and_cache
from kernels.attention_torch import Scratch
from kernels.cpp.ops import Tiles
from kernels.kv_cache import cache_rows, index_dtype
from kernels.paged_attention import PagedPlan
from nanoengine.model.attention import AttentionContext, PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import StepInput
from nanoinfer.config import CacheKind

"""auto: the model's dtype."""


def cache_dtype(kind: CacheKind, model_dtype: torch.dtype) -> torch.dtype:
    """What a cache of that kind stores."""
    if kind not in get_args(CacheKind):
        raise ValueError(
            f"kv_cache_dtype={kind!r}: must be one of {', '.join(get_args(CacheKind))}"
        )
    return torch.float8_e4m3fn if kind == "fp8" else model_dtype


class KVCache:
    """Keys and values of all layers, [layers, 2, blocks, block_size, key heads, head_dim].

    A cache of fp8 holds k / scale and v / scale, `scales` [layers, 2] in fp32; they are read by
    address (CUDA graphs), so change them in place, and only while no block is in use.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        tp: int = 1,
        kind: CacheKind = "auto",
        has_padding_block: bool = False,
        populate: bool = False,
    ) -> None:
        """`dtype` is the model's. `tp` ranks share the key heads; this is one rank's cache. With
        `has_padding_block` there is one more block, the last, that belongs to no sequence: rows
        of padding are written there (cuda_graph.py). `populate` takes a CPU's memory at once."""
        heads = config.num_kv_heads // tp
        size = num_blocks + has_padding_block
        self._shape = (config.num_layers, 2, size, block_size, heads, config.head_dim)
        self.num_heads = config.num_heads // tp  # of the queries
        self.model_dtype = dtype
        self.dtype = cache_dtype(kind, dtype)
        self.num_blocks = num_blocks
        self.padding_block = num_blocks if has_padding_block else None
        self.block_size = block_size
        self.blocks_per_seq = min(-(-config.max_position_embeddings // block_size), num_blocks)
        self._device = device
        self._populate = populate
        self.scales: Tensor | None = None
        if self.dtype.itemsize == 1:
            # 16 bytes apart: Triton compiles a kernel again for pointers that are not aligned so
            self.scales = torch.ones(config.num_layers, 2, 4, device=device)[:, :, 0]
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; all of it reads zero."""
        self.data = make_kv_cache(self._shape, self.dtype, self._device)
        if self._populate:
            self.data.view(index_dtype(self.dtype)).zero_()
        self.layers: list[tuple[Tensor, Tensor]] = [(kv[0], kv[1]) for kv in self.data]
        self.scratch = Scratch()

    def release(self) -> None:
        """Give the memory back, content and all; `allocate` before the next step."""
        self.data = self.data.new_empty(0)
        self.layers = []
        self.scratch = Scratch()

    @property
    def is_asleep(self) -> bool:
        """Whether the memory is given back."""
        return not self.layers

    def copy_blocks(self, copies: Tensor) -> None:
        """Copy whole blocks in all layers, `copies` [n, 2] from block to block, on the cache's
        device. All are read before the first is written."""
        sources, targets = copies.T
        data = self.data.view(index_dtype(self.dtype))
        data.index_copy_(2, targets, data.index_select(2, sources))

    def layer_scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values; None for a cache that is not fp8."""
        if self.scales is None:
            return None, None
        return self.scales[layer, 0], self.scales[layer, 1]

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
    ) -> int:
        """`dtype` is the cache's."""
        per_token = 2 * config.num_layers * config.num_kv_heads // tp * config.head_dim
        return per_token * block_size * dtype.itemsize

    @staticmethod
    def blocks_in(
        cache_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype, *, tp: int = 1
    ) -> int:
        """How many blocks that memory holds. `ValueError` if it holds none."""
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
            any_layer = cache.layers[0][0]
            self._plan = make_paged_plan(
                query_starts,
                seq_lens,
                block_tables,
                cache=any_layer,
                num_heads=cache.num_heads,
                dtype=cache.model_dtype,
                scratch=cache.scratch,
            )
            self._rows = cache_rows(slots_T, any_layer)

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
    def native(self) -> tuple[Tensor, Tiles] | None:
        """Cache rows of the new tokens, and where queries find keys, if C++ attends."""
        if self._plan is None or not isinstance(self._plan.layout, Tiles):
            return None
        assert self._rows is not None, "made with the plan"
        return self._rows, self._plan.layout

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k_cache, v_cache = self._cache.layers[layer]
        scales = self._cache.layer_scales(layer)
        slots, rows = self._slots_T, self._rows
        reshape_and_cache(k_TKD, v_TKD, k_cache, v_cache, slots, *scales, rows=rows)
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
            k_scale=scales[0],
            v_scale=scales[1],
            plan=self._plan,
            batch_invariant=self._batch_invariant,
        )


# The scales of an fp8 cache, one for the keys and one for the values of each layer.
#
# e4m3 is a floating-point format, so a scale moves its range (2^-9 to 448) and not its precision: 1
# serves every model whose keys and values lie well inside, and is the default. A model with large
# biases in its key projection does not; its range is then measured on one given text, when the
# engine is made and after every weight update. Nothing depends on what is served, so a request's
# tokens are the same whatever ran before it.
#
# Scales are powers of two: dividing by them is exact, and two versions of the weights nearly always
# have the same. Left out: scales by head or by token, scales stored in checkpoints.

HEADROOM = 4.0
"""A served text may have keys this much larger than the measured one before they saturate."""


class _Extremes:
    """An attention context that notes the largest key and value of each layer."""

    def __init__(self, context: AttentionContext, num_layers: int) -> None:
        self._context = context
        self.largest = torch.zeros(num_layers, 2)  # on the host: read once a layer, not in serving

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        for i, x in enumerate((k_TKD, v_TKD)):
            self.largest[layer, i] = x.abs().amax()
        return self._context.attend(layer, q_THD, k_TKD, v_TKD)


@torch.inference_mode()
def calibrated_scales(model: Transformer, ids: Sequence[int]) -> Tensor:
    """[layers, 2] in fp32: the smallest powers of two that hold the keys and values of `ids`
    `HEADROOM` times over. Of tensor-parallel ranks each has those of its own heads."""
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
