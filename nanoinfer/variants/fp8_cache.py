"""A KV cache of fp8 (e4m3): half the bytes of bf16, a quarter of fp32.

Its keys and values are rounded to 4 significant bits, so log-probs are no longer the trainer's:
such a cache is for serving (`InferConfig.kv_cache_dtype`). e4m3 is a floating-point format, so a
scale moves its range (2^-9 to 448) and not its precision: a scale of 1 serves every model whose
keys and values lie well inside, and is the default. A model with large biases in its key projection
does not; `calibrated_scales` measures the range on one given text, one scale for the keys and one
for the values of each layer, when the engine is made and after every weight update. Nothing depends
on what is served, so a request's tokens are the same whatever ran before it. Scales are powers of
two: dividing by them is exact, and two versions of the weights nearly always have the same.

Left out: scales by head or by token, scales stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from nanoengine.model.attention import AttentionContext, PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoinfer.config import CacheKind
from nanoinfer.kv_cache import CacheLayout, KVCache

HEADROOM = 4.0
"""A served text may have keys this much larger than the measured one before they saturate."""


def cache_dtype(kind: CacheKind, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that a cache of that kind stores."""
    if kind not in get_args(CacheKind):
        raise ValueError(
            f"kv_cache_dtype={kind!r}: must be one of {', '.join(get_args(CacheKind))}"
        )
    return torch.float8_e4m3fn if kind == "fp8" else model_dtype


def make_cache(config: ModelConfig, layout: CacheLayout, kind: CacheKind) -> KVCache:
    """The cache of that kind. `ValueError` if there is none."""
    stored = cache_dtype(kind, layout.dtype)
    return Fp8Cache(config, layout) if stored != layout.dtype else KVCache(config, layout)


class Fp8Cache(KVCache):
    """A cache that holds k / scale and v / scale, `scales` [layers, 2] in fp32. They are read by
    address (CUDA graphs), so change them in place, and only while no block is in use."""

    def __init__(self, config: ModelConfig, layout: CacheLayout) -> None:
        # 16 bytes apart: Triton compiles a kernel again for pointers that are not aligned so
        self.scales = torch.ones(config.num_layers, 2, 4, device=layout.device)[:, :, 0]
        super().__init__(config, layout, torch.float8_e4m3fn)

    def layer_scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of a layer's keys and values."""
        return self.scales[layer, 0], self.scales[layer, 1]


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
