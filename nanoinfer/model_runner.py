"""One step on the device: copy blocks, run the model over the new tokens, sample.

Only the tokens that are the last of their sequence, and drafts, go through the output head.
Where the model is split over tensor-parallel ranks, all run the same step and each has all logits.
Next: attention_backends.py (the cache), cuda_graph.py (decode steps of a fixed shape).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import linear, linear_logprob, pack_weight
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.tensor_parallel import TensorParallel, vocab_parallel_logprob
from nanoinfer.attention_backends import KVCache, PagedContext, cache_dtype
from nanoinfer.batch import Scored, StepInput
from nanoinfer.cuda_graph import CudaCapture, StaticDecode, can_capture
from nanoinfer.kv_scales import calibrated_scales
from nanoinfer.sampler import sample, top_logps

if TYPE_CHECKING:
    from nanoinfer.engine import InferConfig


@dataclass(frozen=True)
class StepResult:
    """One entry for each sampled position, in the order of the step: the last token of a sequence,
    then its drafts; and one for each prompt token to be scored."""

    tokens: list[int]
    logps: list[float]
    sampled_logps: list[float]
    top: Mapping[int, list[tuple[int, float]]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)


class ModelRunner:
    """The model and its cache. `lm_head_fp32` computes logits in fp32 from a bf16 model, as a
    trainer with `logits_dtype=torch.float32` does; `decode` takes the steps that fit it, and
    `calibration_ids` choose the scales of an fp8 cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        lm_head_fp32: bool = False,
        decode: StaticDecode | None = None,
        calibration_ids: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.cache = cache
        self.decode = decode
        self._wants_fp32_head = lm_head_fp32 and model.dtype != torch.float32
        self._calibration_ids = calibration_ids
        if calibration_ids and cache.scales is None:
            raise ValueError("kv_calibration_ids: chooses scales; set kv_cache_dtype='fp8' too")
        self.refresh()

    def refresh(self) -> None:
        """The weights changed: renew what was derived from them. No block of the cache is read
        again."""
        if self.decode is not None:
            self.decode.refresh()
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
        self.cache.release()

    def wake(self) -> None:
        self.cache.allocate()

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepResult:
        """Run one step; keys and values of its tokens are in the cache afterwards."""
        self.cache.copy_blocks(step.copies)
        hidden_TE = self._hidden(step)
        scores = self._score(hidden_TE, step.scored)
        if step.sampled is not None:
            if len(step.sampled) == 0:
                return StepResult([], [], [], scores=scores)
            hidden_TE = hidden_TE.index_select(0, step.sampled.to(hidden_TE.device))
        logits_SV = self._logits(hidden_TE)
        drawn = sample(logits_SV, step.sampling)
        return StepResult(
            drawn.tokens.tolist(),
            drawn.logps.tolist(),
            drawn.sampled_logps.tolist(),
            top=top_logps(logits_SV, step.sampling),
            scores=scores,
        )

    def _hidden(self, step: StepInput) -> Tensor:
        if self.decode is not None and self.decode.fits(step):
            return self.decode.run(step)
        context, device = PagedContext.of_step(self.cache, step), self.model.device
        hidden_TE: Tensor = self.model(step.ids_T.to(device), step.positions_T.to(device), context)
        return hidden_TE

    def _score(self, hidden_TE: Tensor, scored: Scored | None) -> list[float]:
        """Log-probs of given tokens by the trainer's own function."""
        if scored is None:
            return []
        logps = torch.empty(len(scored.ids))
        of_row = torch.tensor(scored.temperatures, dtype=torch.float64)
        weight: Tensor = self.model.lm_head_weight
        packed = self.model.lm_head_packed
        dtype = self.model.head_dtype
        if self._head is not None:
            weight, packed, dtype = self._head, self._head_packed, torch.float32
        score = self._score_fn()
        for temperature in sorted(set(scored.temperatures)):
            chosen = of_row == temperature
            found = score(
                hidden_TE[scored.rows[chosen].to(hidden_TE.device)],
                weight,
                scored.ids[chosen].to(hidden_TE.device),
                temperature=temperature,
                packed=packed,
                logits_dtype=dtype,
            )
            assert isinstance(found, Tensor), "no entropy was asked for"
            logps[chosen] = found.cpu()
        return logps.tolist()

    def _score_fn(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        split = self.model.split
        if split is None:
            return linear_logprob
        assert isinstance(split, TensorParallel), "there is no other split"
        return partial(vocab_parallel_logprob, split=split, vocab_size=self.model.config.vocab_size)

    def _logits(self, hidden_SE: Tensor) -> Tensor:
        if self._head is None:
            return self.model.logits(hidden_SE)
        logits = linear(hidden_SE.float(), self._head, packed=self._head_packed)
        split, vocab = self.model.split, self.model.config.vocab_size
        return logits if split is None else split.gather_columns(logits, vocab)


def count_blocks(model: Transformer, config: InferConfig) -> int:
    """The blocks of an engine's cache: as asked for, or as many as its memory holds."""
    if config.num_blocks is not None:
        return config.num_blocks
    dtype = cache_dtype(config.kv_cache_dtype, model.dtype)
    tp = 1 if model.split is None else model.split.size
    return KVCache.blocks_in(config.cache_bytes, model.config, config.block_size, dtype, tp=tp)


def make_runner(model: Transformer, config: InferConfig, num_blocks: int) -> ModelRunner:
    """The runner of an engine: a cache of that many blocks and, where decode steps can be graphs,
    one block more for their rows of padding."""
    is_static = config.cuda_graphs and can_capture(model)
    cache = KVCache(
        model.config,
        num_blocks,
        config.block_size,
        model.dtype,
        str(model.device),
        tp=1 if model.split is None else model.split.size,
        kind=config.kv_cache_dtype,
        has_padding_block=is_static,
        populate=config.populate_cache,
    )
    decode = None
    if is_static:
        capture = CudaCapture(model.device)
        decode = StaticDecode(model, cache, config.max_num_seqs, capture)
    return ModelRunner(model, cache, config.lm_head_fp32, decode, config.kv_calibration_ids)
