"""One step on the device: copy blocks, run the model over the new tokens, sample.

`Transformer.forward` is the definition of the layers, and every way of running them gives its
hidden states:
* on a CPU one call of C++ (`kernels/cpp/decoder.h`) runs a transcript of it, held to the same bits
  by `tests/nanoinfer/test_native_decoder.py`; `make_decoder` says for which models;
* on a GPU a step in which every sequence decodes replays a CUDA graph of it (cuda_graph.py);
* everything else calls it, steps with LoRA adapters (adapters.py) among them.

Only the tokens that are the last of their sequence, and drafts, go through the output head.
Where the model is split over tensor-parallel ranks, all run the same step and each has all logits.
Next: kv_cache.py (the cache), cuda_graph.py (decode steps of a fixed shape), sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import kernels
from kernels import linear, linear_logprob, pack_weight
from kernels.cpp.decoder import (
    Decoder,
    DecoderMatrix,
    DecoderShape,
    LayerWeights,
    can_decode,
)
from kernels.memory import to_device, to_host
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.tensor_parallel import TensorParallel, vocab_parallel_logprob
from nanoinfer.adapters import AdapterPool
from nanoinfer.batch import Scored, StepInput
from nanoinfer.config import InferConfig
from nanoinfer.cuda_graph import CudaCapture, StaticDecode, can_capture
from nanoinfer.device_sampler import (
    device_sampling,
    likeliest_on_device,
    sample_on_device,
    top_on_device,
)
from nanoinfer.kv_cache import CacheLayout, KVCache, PagedContext, cache_dtype, calibrated_scales
from nanoinfer.sampler import likeliest, sample, top_logps

_SCORED_ROWS = 64
"""Rows whose logits are in memory at a time where they are needed as a whole."""


@dataclass(frozen=True)
class RunnerOutput:
    """One entry for each sampled position, in the order of the step: the last token of a sequence,
    then its drafts; and one for each prompt token to be scored.

    Of a step with a decode and a decode with one draft: `RunnerOutput(tokens=[7, 4, 9],
    logps=[-0.1, -2.3, -0.7], sampled_logps=[-0.1, -2.3, -0.7])`."""

    tokens: list[int]
    logps: list[float]
    sampled_logps: list[float]
    top: Mapping[int, list[tuple[int, float]]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    score_tops: list[list[tuple[int, float]]] = field(default_factory=list)  # where asked for


class ModelRunner:
    """The model and its cache. `lm_head_fp32` computes logits in fp32 from a bf16 model, as a
    trainer with `logits_dtype=torch.float32` does; `decode` takes the steps that fit it,
    `calibration_ids` choose the scales of an fp8 cache, and `adapters` are those that steps name.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        lm_head_fp32: bool = False,
        decode: StaticDecode | None = None,
        calibration_ids: Sequence[int] = (),
        adapters: AdapterPool | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.adapters = AdapterPool(model) if adapters is None else adapters
        self.decode = decode
        self._is_invariant = model.batch_invariant
        # a model that it shares with a trainer may have that head already
        self._wants_fp32_head = lm_head_fp32 and model.head_dtype != torch.float32
        self._calibration_ids = calibration_ids
        if calibration_ids and cache.scales is None:
            raise ValueError("kv_calibration_ids: chooses scales; set kv_cache_dtype='fp8' too")
        self.refresh()

    def refresh(self) -> None:
        """The weights changed: renew what was derived from them. No block of the cache is read
        again, and it may be asleep."""
        if self.decode is not None:
            self.decode.refresh()
        self._decoder = None if self.cache.is_asleep else make_decoder(self.model, self.cache)
        if self.cache.scales is not None and self._calibration_ids:
            self.cache.scales.copy_(calibrated_scales(self.model, self._calibration_ids))
        self._head: Tensor | None = None
        if self._wants_fp32_head:
            self._head = self.model.lm_head_weight.detach().float()
            self._head_packed = pack_weight(self._head)

    def sleep(self) -> None:
        """Give the memory of the cache back, and of what reads it by address."""
        if self.decode is not None:
            self.decode.drop()
        self._decoder = None
        self.cache.release()

    def wake(self) -> None:
        self.cache.allocate()
        self._decoder = make_decoder(self.model, self.cache)

    @torch.inference_mode()
    def run(self, step: StepInput) -> RunnerOutput:
        """Run one step; keys and values of its tokens are in the cache afterwards. A GPU gets the
        step in one copy, and its result comes back in one, the only point where the host waits."""
        step = self._sent(step)
        if step.copies is not None:
            self.cache.copy_blocks(step.copies)
        hidden_TE = self._hidden(step)
        scores = self._score(hidden_TE, step.scored)
        ranked = self._rank(hidden_TE, step.scored)
        if step.sampled is not None:
            hidden_TE = hidden_TE.index_select(0, step.sampled)
        if not len(hidden_TE):
            return RunnerOutput([], [], [], **_prompt_scores(to_host(scores + ranked), step.scored))
        logits_SV = self._logits(hidden_TE)
        if step.drawing is not None:
            return self._draw_on_device(logits_SV, scores + ranked, step)
        drawn = sample(logits_SV, step.sampling)
        return RunnerOutput(
            drawn.tokens.tolist(),
            drawn.logps.tolist(),
            drawn.sampled_logps.tolist(),
            top=top_logps(logits_SV, step.sampling),
            **_prompt_scores(scores + ranked, step.scored),
        )

    def _sent(self, step: StepInput) -> StepInput:
        """The step on the model's device, with what only some devices need."""
        if self.decode is not None and not step.adapter_rows:
            step = replace(step, static=self.decode.padded(step))
        if self.model.device.type != "cpu":
            vocab = self.model.config.vocab_size
            drawing = device_sampling(step.sampling, vocab, rescores_all=self._is_invariant)
            step = replace(step, drawing=drawing)
        return to_device(step, self.model.device)

    def _hidden(self, step: StepInput) -> Tensor:
        if self.decode is not None and step.static is not None:
            return self.decode.run(step.static, len(step.seq_lens))
        context = PagedContext.of_step(self.cache, step, batch_invariant=self._is_invariant)
        ids_T, positions_T = step.ids_T, step.positions_T
        if step.adapter_rows:
            with self.adapters.applied(step.adapter_rows):
                adapted_TE: Tensor = self.model(ids_T, positions_T, context)
            return adapted_TE
        if self._decoder is not None and context.native is not None:
            cos, sin = self.model.rope_of(positions_T)
            return self._decoder.run(self.model.embed(ids_T), cos, sin, *context.native)
        hidden_TE: Tensor = self.model(ids_T, positions_T, context)
        return hidden_TE

    def _draw_on_device(
        self, logits_SV: Tensor, scores: list[Tensor], step: StepInput
    ) -> RunnerOutput:
        assert step.drawing is not None, "the caller has seen it"
        drawn = sample_on_device(logits_SV, step.drawing)
        top = top_on_device(logits_SV, step.drawing) or ()
        tokens, logps, sampled_logps, *more = to_host([*drawn, *top, *scores])
        found = {}
        for i, (row, count) in enumerate(step.sampling.num_top.items()):
            ids, their_logps = (column[i, :count].tolist() for column in more[:2])
            found[row] = list(zip(ids, their_logps, strict=True))
        return RunnerOutput(
            tokens.tolist(),
            logps.tolist(),
            sampled_logps.tolist(),
            top=found,
            **_prompt_scores(more[len(top) :], step.scored),
        )

    def _score(self, hidden_TE: Tensor, scored: Scored | None) -> list[Tensor]:
        """Log-probs of given tokens by the trainer's own function, a tensor for each span."""
        if scored is None:
            return []
        if self.model.int8_head is not None:
            return [
                self._score_logits(hidden_TE, scored.rows[lo:hi], scored.ids[lo:hi], temperature)
                for temperature, lo, hi in scored.spans
            ]
        weight: Tensor = self.model.lm_head_weight
        packed = self.model.lm_head_packed
        dtype = self.model.head_dtype
        if self._head is not None:
            weight, packed, dtype = self._head, self._head_packed, torch.float32
        score = self._score_fn()
        invariant = {"batch_invariant": True} if self._is_invariant else {}
        found = []
        for temperature, lo, hi in scored.spans:
            logps = score(
                self.model.scale_for_head(hidden_TE[scored.rows[lo:hi]]),
                weight,
                scored.ids[lo:hi],
                temperature=temperature,
                packed=packed,
                logits_dtype=dtype,
                **invariant,
            )
            assert isinstance(logps, Tensor), "no entropy was asked for"
            found.append(logps.float())
        return found

    def _score_logits(
        self, hidden_TE: Tensor, rows_P: Tensor, ids_P: Tensor, temperature: float
    ) -> Tensor:
        """Log-probs of ids from the logits that tokens are drawn from, some rows at a time."""
        parts = zip(rows_P.split(_SCORED_ROWS), ids_P.split(_SCORED_ROWS), strict=True)
        logits = ((self._logits(hidden_TE.index_select(0, rows)), ids) for rows, ids in parts)
        return torch.cat([kernels.logits_logprob(one, ids, temperature) for one, ids in logits])

    def _rank(self, hidden_TE: Tensor, scored: Scored | None) -> list[Tensor]:
        """Ids and log-probs of the likeliest tokens where they were asked for, two tensors for each
        span: [entries, the largest count among them]."""
        if scored is None or scored.ranked is None:
            return []
        found: list[Tensor] = []
        for temperature, lo, hi in scored.ranked.spans:
            logits = self._logits(hidden_TE.index_select(0, scored.ranked.rows[lo:hi]))
            count = max(scored.ranked.counts[lo:hi])
            rank = likeliest if logits.device.type == "cpu" else likeliest_on_device
            found += rank(logits, temperature, count)
        return found

    def _score_fn(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        split = self.model.split
        if split.size == 1:
            return linear_logprob
        assert isinstance(split, TensorParallel), "there is no other split"
        return partial(vocab_parallel_logprob, split=split, vocab_size=self.model.config.vocab_size)

    def _logits(self, hidden_SE: Tensor) -> Tensor:
        if self._head is None:
            return self.model.logits(hidden_SE)
        logits = linear(
            self.model.scale_for_head(hidden_SE).float(),
            self._head,
            packed=self._head_packed,
            batch_invariant=self._is_invariant,
        )
        split, vocab = self.model.split, self.model.config.vocab_size
        return split.gather_columns(logits, vocab)


def _prompt_scores(tensors: Sequence[Tensor], scored: Scored | None) -> dict[str, Any]:
    """The fields of a `RunnerOutput` that `_score` and `_rank` gave, in the order of the step."""
    if scored is None:
        return {}
    scores = torch.empty(len(scored.order))
    scores[torch.tensor(scored.order)] = torch.cat(list(tensors[: len(scored.spans)]))
    fields: dict[str, Any] = {"scores": scores.tolist()}
    if scored.ranked is not None:
        tops: list[list[tuple[int, float]]] = [[] for _ in scored.order]
        pairs = tensors[len(scored.spans) :]
        rows = [row for ids, logps in zip(pairs[::2], pairs[1::2], strict=True)
                for row in zip(ids.tolist(), logps.tolist(), strict=True)]  # fmt: skip
        for place, count, row in zip(scored.ranked.order, scored.ranked.counts, rows, strict=True):
            tops[place] = list(zip(*row, strict=True))[:count]
        fields["score_tops"] = tops
    return fields


def count_blocks(model: Transformer, config: InferConfig) -> int:
    """The blocks of an engine's cache: as asked for, or as many as its memory holds."""
    if config.num_blocks is not None:
        return config.num_blocks
    dtype = cache_dtype(config.kv_cache_dtype, model.dtype)
    tp = model.split.size
    return KVCache.blocks_in(config.cache_bytes, model.config, config.block_size, dtype, tp=tp)


def make_runner(
    model: Transformer, config: InferConfig, num_blocks: int, adapters: AdapterPool | None = None
) -> ModelRunner:
    """The runner of an engine: a cache of that many blocks and, where decode steps can be graphs,
    one block more for their rows of padding."""
    model.batch_invariant = model.batch_invariant or config.deterministic
    kind = config.quantization
    if kind != "none" and kind != model.quantization:
        model.quantize(kind)
    if kind == "int8":
        model.head_dtype = torch.float32 if config.lm_head_fp32 else model.head_dtype
        model.quantize_head()
    is_static = config.cuda_graphs and can_capture(model)
    layout = CacheLayout(
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
        device=str(model.device),
        tp=model.split.size,
        kind=config.kv_cache_dtype,
        has_padding_block=is_static,
        populate=config.populate_cache,
    )
    cache = KVCache(model.config, layout)
    decode = None
    if is_static:
        capture = CudaCapture(model.device)
        decode = StaticDecode(model, cache, config.max_num_seqs, capture)
    calibration = config.kv_calibration_ids
    return ModelRunner(model, cache, config.lm_head_fp32, decode, calibration, adapters)


def make_decoder(model: Transformer, cache: KVCache) -> Decoder | None:
    """The model's layers as one call; None where a layer needs more than the C++ functions do:
    experts, a split over ranks, fp8, scales of scores that differ, a switch of the family that they
    lack, a machine without a compiler, prepacked copies that the trainer has lent. Make another one
    when the weights, an adapter over them or the cache are replaced; what is written to them in
    place counts at once."""
    layers = [cast(DecoderLayer, layer) for layer in model.layers]
    is_plain = (
        model.quantization != "fp8"
        and model.split.size == 1
        and model.experts is None
        and cache.dtype == model.dtype
        and len({layer.scale for layer in layers}) == 1
        and all(_is_plain(layer) for layer in layers)
    )
    is_int8 = model.quantization == "int8"
    if not is_plain or any(layer.moe is not None for layer in layers):
        return None
    if not can_decode(model.norm, is_int8=is_int8):
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
    weights = [_weights(layer) for layer in layers]
    return Decoder(shape, weights, model.norm.detach(), cache.layers)


def _is_plain(layer: DecoderLayer) -> bool:
    """True for a layer whose switches (nanoengine/model/families.py) the C++ functions have."""
    family = layer.family
    has_whole_rope = layer.rotary_dim == layer.head_dim
    has_no_rope = layer.rotary_dim == 0 and layer.q_norm is None
    return (
        set(family.norms) == {"input_norm", "post_norm"}
        and not family.norm_offset
        and family.qk_norm != "width"
        and family.activation == "silu"
        and family.rope_pairs == "halves"
        and (has_whole_rope or has_no_rope)
        and not layer.has_local_rope
        and all(_is_readable(one) for one in layer.modules() if isinstance(one, PackedLinear))
        and not family.sinks
    )


def _is_readable(matrix: PackedLinear) -> bool:
    """True for a matrix that the C++ functions can read where it lies."""
    has_panels = matrix.packed is not None or matrix.int8 is not None
    return has_panels and (matrix.change is None or matrix.change.table is not None)


def _weights(layer: DecoderLayer) -> LayerWeights:
    return LayerWeights(
        input_norm=cast(Tensor, layer.input_norm),
        qkv=_matrix(layer.qkv),
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        out=_matrix(layer.out),
        post_norm=cast(Tensor, layer.post_norm),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        window=layer.window,
        has_rope=layer.rotary_dim > 0,
    )


def _matrix(matrix: PackedLinear) -> DecoderMatrix:
    if matrix.int8 is not None:
        change = None if matrix.change is None else matrix.change.table
        return DecoderMatrix(matrix.int8.values, matrix.int8.scale_O, matrix.bias, change)
    # `can_decode`: all have this form
    return DecoderMatrix(cast(Tensor, matrix.packed), None, matrix.bias)
