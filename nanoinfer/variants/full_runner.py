"""Steps of every kind on every device: `ModelRunner` with all that its plain steps do without.

Every way of running the layers gives the hidden states of `Transformer.forward`:
* on a GPU a step in which every sequence decodes replays a CUDA graph of it (gpu/cuda_graph.py);
* a step of requests that name LoRA adapters (adapters.py) calls it;
* everything else goes the way of `ModelRunner`.

Only the tokens that are the last of their sequence, and drafts, go through the output head.
Where the model is split over tensor-parallel ranks, all run the same step and each has all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor

from kernels import linear, linear_logprob, logits_logprob, pack_weight
from kernels.memory import to_device, to_host
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.tensor_parallel import TensorParallel, vocab_parallel_logprob
from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.gpu.cuda_graph import StaticDecode, StaticRows
from nanoinfer.gpu.device_sampler import (
    DeviceSampling,
    device_sampling,
    likeliest_on_device,
    sample_on_device,
    top_on_device,
)
from nanoinfer.kv_cache import KVCache, PagedContext
from nanoinfer.model_runner import ModelRunner
from nanoinfer.options.full_sampling import FullSamplingBatch, likeliest, sample, top_logps
from nanoinfer.options.full_step import FullOutput, FullStepOptions, Scored
from nanoinfer.variants.fp8_cache import Fp8Cache, calibrated_scales

_HIDDEN = "nanoinfer.vision.step_pictures:hidden"
_READ = "nanoinfer.vision.step_pictures:read_by"
_SCORED_ROWS = 64
"""Rows whose logits are in memory at a time where they are needed as a whole."""
_NOTHING = FullStepOptions()


@dataclass(frozen=True)
class FullStep(StepInput):
    """A step with what only a GPU needs. As it is built its tensors are the CPU's; they are sent to
    a GPU all at once."""

    starts: Tensor | None = None  # `query_starts` and `seq_lens` again, int32, for kernels to read
    lens: Tensor | None = None
    static: StaticRows | None = None
    drawing: DeviceSampling | None = None

    @property
    def asked(self) -> FullStepOptions:
        """The options that its requests ask for; nothing in a plain step."""
        return _NOTHING if self.options is None else cast(FullStepOptions, self.options)


class FullRunner(ModelRunner):
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
        if calibration_ids and not isinstance(cache, Fp8Cache):
            raise ValueError("kv_calibration_ids: chooses scales; set kv_cache_dtype='fp8' too")
        self.decode = decode
        self._is_invariant = model.batch_invariant
        # a model that it shares with a trainer may have that head already
        self._wants_fp32_head = lm_head_fp32 and model.head_dtype != torch.float32
        self._calibration_ids = calibration_ids
        self._head: Tensor | None = None
        super().__init__(model, cache)

    @classmethod
    def over(cls, plain: ModelRunner) -> FullRunner:
        """The same model, cache and decoder, for one step."""
        full = cls.__new__(cls)
        full.model, full.cache, full.decoder = plain.model, plain.cache, plain.decoder
        full.decode = full._head = None
        full._is_invariant, full._wants_fp32_head = plain.model.batch_invariant, False
        full._calibration_ids = ()
        return full

    def refresh(self) -> None:
        """The weights changed: renew what was derived from them."""
        if self.decode is not None:
            self.decode.refresh()
        super().refresh()
        if isinstance(self.cache, Fp8Cache) and self._calibration_ids:
            self.cache.scales.copy_(calibrated_scales(self.model, self._calibration_ids))
        self._head = None
        if self._wants_fp32_head:
            self._head = self.model.lm_head_weight.detach().float()
            self._head_packed = pack_weight(self._head)

    def sleep(self) -> None:
        """Give the memory of the cache back, and of what reads it by address."""
        if self.decode is not None:
            self.decode.drop()
        super().sleep()

    @torch.inference_mode()
    def run(self, step: StepInput) -> RunnerOutput:
        """Run one step; keys and values of its tokens are in the cache afterwards. A GPU gets the
        step in one copy, and its result comes back in one, the only point where the host waits."""
        full = self.sent(step)
        scored = full.asked.scored
        if full.copies is not None:
            self.cache.copy_blocks(full.copies)
        hidden_TE = self.hidden(full)
        scores = self._score(hidden_TE, scored)
        ranked = self._rank(hidden_TE, scored)
        if full.sampled is not None:
            hidden_TE = hidden_TE.index_select(0, full.sampled)
        if not len(hidden_TE):
            return FullOutput([], [], [], **_prompt_scores(to_host(scores + ranked), scored))
        logits_SV = self.logits(hidden_TE)
        if full.drawing is not None:
            return self._draw_on_device(logits_SV, scores + ranked, full)
        sampling = FullSamplingBatch.of(full.sampling)
        kept: dict[int, list[tuple[int, float]]] = {}
        if sampling.kept_rows:
            from nanoinfer.options.kept_sampling import keep_rows  # here: few requests need it

            logits_SV, sampling, kept = keep_rows(logits_SV, sampling)
        drawn = sample(logits_SV, sampling)
        return FullOutput(
            drawn.tokens.tolist(),
            drawn.logps.tolist(),
            drawn.sampled_logps.tolist(),
            top=top_logps(logits_SV, sampling) | kept,
            **_prompt_scores(scores + ranked, scored),
        )

    def sent(self, step: StepInput) -> FullStep:
        """The step on the model's device, with what only some devices need."""
        full = FullStep(**vars(step))
        if self.model.device.type != "cpu":
            sampling = FullSamplingBatch.of(step.sampling)
            vocab = self.model.config.vocab_size
            full = replace(
                full,
                starts=torch.tensor(step.query_starts, dtype=torch.int32),
                lens=torch.tensor(step.seq_lens, dtype=torch.int32),
                sampling=sampling,
                drawing=device_sampling(sampling, vocab, rescores_all=self._is_invariant),
            )
        is_alike = not full.asked.adapter_rows and full.asked.pictures is None
        if self.decode is not None and is_alike:
            full = replace(full, static=self.decode.padded(step))
        return to_device(full, self.model.device)

    def hidden(self, step: StepInput) -> Tensor:
        """Hidden states [T, E] of the tokens of a step, by a graph where there is one."""
        assert isinstance(step, FullStep), "`run` makes them"
        if self.decode is not None and step.static is not None:
            return self.decode.run(step.static, len(step.seq_lens))
        asked = step.asked
        if asked.adapter_rows:
            assert asked.adapters is not None, "they are of a pool"
            with asked.adapters.applied(asked.adapter_rows):
                return self._defined(step)
        if asked.pictures is not None:
            found: Tensor = resolve_name(_HIDDEN)(self, step)
            return found
        return super().hidden(step)

    def _defined(self, step: FullStep) -> Tensor:
        """Hidden states by the definition of the model, which asks after adapters."""
        positions_T, seen = step.positions_T, {}
        if step.asked.pictures is not None:
            positions_T, seen = resolve_name(_READ)(self.model, step)
        hidden_TE: Tensor = self.model(step.ids_T, positions_T, self.context(step), **seen)
        return hidden_TE

    def context(self, step: StepInput) -> PagedContext:
        """The attention of a step. Kernels of a GPU read lengths where it has them."""
        assert isinstance(step, FullStep), "`run` makes them"
        starts: Tensor | list[int] = step.query_starts if step.starts is None else step.starts
        lens: Tensor | list[int] = step.seq_lens if step.lens is None else step.lens
        return PagedContext(
            self.cache,
            step.slots_T,
            starts,
            lens,
            step.block_tables,
            max(b - a for a, b in pairwise(step.query_starts)),
            max(step.seq_lens),
            batch_invariant=self._is_invariant,
        )

    def _draw_on_device(
        self, logits_SV: Tensor, scores: list[Tensor], step: FullStep
    ) -> FullOutput:
        assert step.drawing is not None, "the caller has seen it"
        drawn = sample_on_device(logits_SV, step.drawing)
        top = top_on_device(logits_SV, step.drawing) or ()
        tokens, logps, sampled_logps, *more = to_host([*drawn, *top, *scores])
        found = {}
        num_top = FullSamplingBatch.of(step.sampling).num_top
        for i, (row, count) in enumerate(num_top.items()):
            ids, their_logps = (column[i, :count].tolist() for column in more[:2])
            found[row] = list(zip(ids, their_logps, strict=True))
        return FullOutput(
            tokens.tolist(),
            logps.tolist(),
            sampled_logps.tolist(),
            top=found,
            **_prompt_scores(more[len(top) :], step.asked.scored),
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
        logits = ((self.logits(hidden_TE.index_select(0, rows)), ids) for rows, ids in parts)
        return torch.cat([logits_logprob(one, ids, temperature) for one, ids in logits])

    def _rank(self, hidden_TE: Tensor, scored: Scored | None) -> list[Tensor]:
        """Ids and log-probs of the likeliest tokens where they were asked for, two tensors for each
        span: [entries, the largest count among them]."""
        if scored is None or scored.ranked is None:
            return []
        found: list[Tensor] = []
        for temperature, lo, hi in scored.ranked.spans:
            logits = self.logits(hidden_TE.index_select(0, scored.ranked.rows[lo:hi]))
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

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """Logits [S, V] of hidden states, in fp32 where the engine was asked for that."""
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
