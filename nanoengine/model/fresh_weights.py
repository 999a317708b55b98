"""Fresh weights for a model that nobody has trained.

Left out: norms and biases of layers as they are made (layers.py).
"""

from __future__ import annotations

import torch

from nanoengine.model.transformer import Transformer


def init_weights(model: Transformer, seed: int, std: float) -> None:
    """Draw normal weights; projections into the residual stream are smaller by √(2·layers),
    as in GPT-2. Norms multiply by 1, biases and sinks are 0. The same seed gives the same
    weights in every dtype and however the model is split. Not of int8 matrices: quantise
    afterwards."""
    assert model.quantization != "int8", "their parameters have no memory"
    generator = torch.Generator().manual_seed(seed)
    residual_std = std / (2 * model.config.num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.zero_()
                continue
            if parameter.dim() == 1:
                parameter.fill_(model.rms.neutral)
                continue
            scale = residual_std if name.endswith(("out.weight", "down.weight")) else std
            # of a part of a model the whole is drawn (parallel/parameter_record.py)
            part = getattr(getattr(parameter, "record", None), "slice", None)
            shape = parameter.shape if part is None else part.whole_shape(parameter.shape)
            fresh = torch.randn(shape, generator=generator) * scale
            parameter.copy_(fresh if part is None else part.take(fresh))
    model.repack()
