"""The scales of an fp8 cache, one for the keys and one for the values of each layer.

e4m3 is a floating-point format, so a scale moves its range (2^-9 to 448) and not its precision: 1
serves every model whose keys and values lie well inside, and is the default. A model with large
biases in its key projection does not; its range is then measured on one given text, when the
engine is made and after every weight update. Nothing depends on what is served, so a request's
tokens are the same whatever ran before it.

Scales are powers of two: dividing by them is exact, and two versions of the weights nearly always
have the same. Left out: scales by head or by token, scales stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoengine.model.attention import AttentionContext, PackedContext, packed_positions
from nanoengine.model.transformer import Transformer

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
