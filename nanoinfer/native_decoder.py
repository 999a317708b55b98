"""The model's layers as one call (`kernels/decoder.py`), where the model and its cache allow it."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from kernels.decoder import Decoder, DecoderShape, LayerWeights, can_decode
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.transformer import Transformer
from nanoinfer.attention_backends import KVCache


def make_decoder(model: Transformer, cache: KVCache) -> Decoder | None:
    """None where a layer needs more than the C++ functions do. Make another one when the weights
    or the cache are replaced; what is written to them in place counts at once."""
    layers = [cast(DecoderLayer, layer) for layer in model.layers]
    is_plain = model.split is None and model.experts is None and cache.dtype == model.dtype
    if not is_plain or any(layer.moe is not None for layer in layers) or not can_decode(model.norm):
        return None
    config = model.config
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    if any(width * model.dtype.itemsize % 4 for width in widths):  # the kernels read whole words
        return None
    shape = DecoderShape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        eps=config.rms_norm_eps,
    )
    weights = [_weights(layer) for layer in layers]
    return Decoder(shape, weights, model.norm.detach(), cache.layers)


def _weights(layer: DecoderLayer) -> LayerWeights:
    packed = [layer.qkv.packed, layer.out.packed, layer.gate_up.packed, layer.down.packed]
    qkv, out, gate_up, down = [cast(Tensor, x) for x in packed]  # `can_decode`: all have this form
    return LayerWeights(
        input_norm=layer.input_norm,
        qkv=qkv,
        qkv_bias=layer.qkv.bias,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        out=out,
        out_bias=layer.out.bias,
        post_norm=layer.post_norm,
        gate_up=gate_up,
        down=down,
    )
