"""One step on the device: copy blocks, run the model over the new tokens, sample.

`Transformer.forward` is the definition of the layers. On a CPU one call of C++
(`kernels/cpp/decoder.h`) runs a transcript of it, held to the same bits by
`tests/nanoinfer/test_native_decoder.py`; `make_decoder` says for which models, and everything else
calls the definition. Only the last token of a sequence goes through the output head.

This is a dense model, whole, on a CPU. GPUs, ranks, fp8 and int8, LoRA adapters and steps with
scores of prompts are variants/full_runner.py, which gives the same hidden states.
Next: kv_cache.py (the cache), sampler.py.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor

from kernels.cpp.decoder import Decoder, DecoderShape, LayerWeights, can_decode
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.kv_cache import KVCache, PagedContext
from nanoinfer.sampler import sample

_FULL = "nanoinfer.variants.full_runner:FullRunner"  # runs steps in which not all is plain


class ModelRunner:
    """The model and its cache."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model = model
        self.cache = cache
        self.decoder: Decoder | None = None
        self.refresh()

    def refresh(self) -> None:
        """The weights changed: renew what was derived from them. No block of the cache is read
        again, and it may be asleep."""
        # The decoder reads weights and cache by their addresses, which go when either is replaced.
        self.decoder = None if self.cache.is_asleep else make_decoder(self.model, self.cache)

    def sleep(self) -> None:
        """Give the memory of the cache back, and of what reads it by address."""
        self.decoder = None
        self.cache.release()

    def wake(self) -> None:
        self.cache.allocate()
        self.decoder = make_decoder(self.model, self.cache)

    @torch.inference_mode()
    def run(self, step: StepInput) -> RunnerOutput:
        """Run one step; keys and values of its tokens are in the cache afterwards."""
        if step.options is not None:
            result: RunnerOutput = _full_runner().over(self).run(step)
            return result
        # Before the model runs: a sequence that starts in this step may read what it copies.
        if step.copies is not None:
            self.cache.copy_blocks(step.copies)
        hidden_TE = self.hidden(step)
        # The head is the largest matrix of a small model, and a chunk of a prompt needs one row.
        if step.sampled is not None:
            hidden_TE = hidden_TE.index_select(0, step.sampled)
        if not len(hidden_TE):
            return RunnerOutput([], [], [])
        drawn = sample(self.logits(hidden_TE), step.sampling)
        return RunnerOutput(
            drawn.tokens.tolist(), drawn.logps.tolist(), drawn.sampled_logps.tolist()
        )

    def hidden(self, step: StepInput) -> Tensor:
        """Hidden states [T, E] of the tokens of a step, after the last norm."""
        context = self.context(step)
        # The same bits either way. In Python each op would cost the interpreter's time between two
        # readings of weights, a third of the step of one sequence.
        if self.decoder is not None and context.native is not None:
            cos, sin = self.model.rope_of(step.positions_T)
            return self.decoder.run(self.model.embed(step.ids_T), cos, sin, *context.native)
        hidden_TE: Tensor = self.model(step.ids_T, step.positions_T, context)
        return hidden_TE

    def context(self, step: StepInput) -> PagedContext:
        """The attention of a step."""
        longest = max(b - a for a, b in pairwise(step.query_starts))
        where = (step.slots_T, step.query_starts, step.seq_lens, step.block_tables)
        return PagedContext(self.cache, *where, longest, max(step.seq_lens))

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Logits [S, V] of hidden states."""
        return self.model.logits(hidden_SE)


@cache
def _full_runner() -> Any:
    return resolve_name(_FULL)


def make_decoder(model: Transformer, cache: KVCache) -> Decoder | None:
    """The model's layers as one call; None where a layer needs more than the C++ functions do:
    experts, a split over ranks, fp8, scales of scores that differ, a switch of the family that they
    lack, a machine without a compiler, prepacked copies that the trainer has lent. Make another one
    when the weights, an adapter over them or the cache are replaced; what is written to them in
    place counts at once."""
    layers = [cast(DecoderLayer, layer) for layer in model.layers]
    is_plain = (
        model.split.size == 1
        and model.experts is None
        and cache.dtype == model.dtype
        and len({layer.scale for layer in layers}) == 1
        and all(layer.is_native for layer in layers)
        and can_decode(model.norm, is_int8=model.quantization == "int8")
    )
    if not is_plain:
        return None
    weights = [one for one in map(_weights, layers) if one is not None]
    if len(weights) < len(layers):
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
        scale=layers[0].scale,
        multiplier=layers[0].multiplier,
    )
    return Decoder(shape, weights, model.norm.detach(), cache.layers)


def _weights(layer: DecoderLayer) -> LayerWeights | None:
    """The weights of a layer by address; None where C++ cannot read a matrix where it lies."""
    qkv, out = layer.qkv.native(), layer.out.native()
    gate_up, down = layer.gate_up.native(), layer.down.native()
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    return LayerWeights(
        input_norm=layer.input_norm,
        qkv=qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        out=out,
        post_norm=layer.post_norm,
        gate_up=gate_up,
        down=down,
        window=layer.window,
        has_rope=layer.rotary_dim > 0,
    )
