"""`LLMEngine`: the engine with all that its callers ask of it beside steps.

Requests come in as token ids and `SamplingParams`, are refused where they could never run, and
become sequences of the core (engine_core.py). `update_weights` copies tensors that somebody brings,
`load_adapter` serves LoRA beside the weights, `metrics` counts.

What few requests ask is in nanoinfer/options/, engines of other kinds in nanoinfer/variants/: both
come in by the names below.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoinfer.block_manager import BlockManager
from nanoinfer.config import InferConfig
from nanoinfer.engine_core import EngineCore, EngineParts
from nanoinfer.engine_memory import blocks_in
from nanoinfer.kv_cache import CacheLayout, KVCache
from nanoinfer.model_runner import ModelRunner
from nanoinfer.params import Output, SamplingParams
from nanoinfer.scheduler import BatchScheduler
from nanoinfer.sequence import Sequence

_PARTS = "nanoinfer.variants.parts:make_parts"  # of an engine that is not plain
_SIZES = "nanoinfer.gpu.sizes:sized"
_KEEP = "nanoinfer.variants.in_flight:keep_all"
_PROCESSOR = "nanoinfer.options.request_processor:RequestProcessor"  # for what is not plain
_LOAD = "nanoinfer.variants.weight_updates:load_weights"
_CHECK = "nanoinfer.variants.invariants:check"


class LLMEngine(EngineCore):
    """Continuous batching over a paged cache. `version` is the policy version of the weights."""

    def __init__(
        self,
        model: Transformer,
        config: InferConfig,
        version: int = 0,
        tokenizer: Any = None,
    ) -> None:
        """`tokenizer`, a `ChatTokenizer`, is for requests that name texts: stop texts, grammars,
        `detokenize`."""
        is_on_cpu = model.device.type == "cpu"
        self.config: InferConfig
        self.config = config.sized() if is_on_cpu else resolve_name(_SIZES)(config, model)
        is_whole = model.split.size == 1 and not model.batch_invariant
        is_plain = config.is_plain and is_on_cpu and is_whole
        make_parts = _plain_parts if is_plain else resolve_name(_PARTS)
        parts: EngineParts = make_parts(model, self.config)
        if config.in_flight == "keep":
            parts = parts._replace(keep=resolve_name(_KEEP))
        super().__init__(model, parts, version)
        self.tokenizer = tokenizer
        self._eos_ids = model.config.eos_ids if config.eos_ids is None else config.eos_ids
        self._next_handle = 0

    # -- requests --------------------------------------------------------------------------------

    def add(
        self,
        ids: Ids[int],
        params: SamplingParams,
        priority: int = 0,
        sampled: Output | None = None,
    ) -> int:
        """Queue a request; returns its handle. `ValueError` if it could never run. A lower
        `priority` goes first.

        `sampled` is what another engine, or this one, had of the same request when it was aborted.
        The request goes on as if its tokens had been sampled here: it says the same from there on,
        bit for bit on a CPU, and its `Output` is the whole. Prompt log-probs are taken again."""
        if params.n != 1:
            raise ValueError(f"n={params.n}: a handle is one completion; add params.members()")
        self.validate(ids, params)
        seq = self._make_sequence(ids, params, priority, sampled)
        self._next_handle += 1
        self.enqueue(seq)
        return seq.handle

    def _make_sequence(
        self, ids: Ids[int], params: SamplingParams, priority: int, sampled: Output | None
    ) -> Sequence:
        args = (self._next_handle, _integers(ids), params, self._eos_ids, priority)
        seq: Sequence
        seq = (
            Sequence(*args) if params.is_plain else self._processor.sequence(*args, self.tokenizer)
        )
        if sampled is not None:
            self._check_tokens("sampled.ids", sampled.ids)
            self._processor.resume(seq, sampled)
        return seq

    @cached_property
    def _processor(self) -> Any:
        """Its type is nanoinfer/options/request_processor.py's, which is not imported here."""
        return resolve_name(_PROCESSOR)(self.model)

    def peek(self, handle: int) -> Sequence | None:
        """A request in flight as it is now, to be read only; None if it is not in flight."""
        return self._sequences.get(handle)

    def generate(
        self, prompts: Iterable[Ids[int]], params: SamplingParams | Ids[SamplingParams]
    ) -> list[Output]:
        """Run prompts to their end, one `SamplingParams` for all or one each; a prompt with `n`
        above 1 has that many outputs, one after the other. Requests added before run along;
        `step` returns theirs later."""
        if self.is_paused or self.is_asleep:
            raise RuntimeError("the engine is paused or asleep: call resume() or wake() first")
        prompts = list(prompts)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: {len(each)} for {len(prompts)} prompts; must be one each")
        for ids, p in zip(prompts, each, strict=True):
            self.validate(ids, p)
        # No two members share a seed, or all rollouts of a group would be one.
        members = [(ids, p) for ids, q in zip(prompts, each, strict=True) for p in q.members()]
        first = self._next_handle
        mine = range(first, first + len(members))
        outputs: dict[int, Output] = {}
        others: list[tuple[int, Output]] = []
        try:
            for ids, p in members:
                self.add(ids, p)
            while len(outputs) < len(members):
                for handle, output in self.step():
                    if handle in mine:
                        outputs[handle] = output
                    else:
                        others.append((handle, output))
        finally:  # nobody will ask for what an error or Ctrl-C left behind
            for handle in mine:
                self.abort(handle)
            self._ready = others + [done for done in self._ready if done[0] not in mine]
        return [outputs[handle] for handle in mine]

    def room(self, num_prompt: int) -> int:
        """Tokens that can be sampled after a prompt of that length; 0 or less: none."""
        cache = self._blocks.num_blocks * self._blocks.block_size
        return min(self.model.config.max_position_embeddings, cache) - num_prompt

    def validate(
        self, ids: Ids[int], params: SamplingParams, sampled: Output | None = None
    ) -> None:
        """`ValueError` for a request that could never run, or go on from what is `sampled`, naming
        what and why."""
        if not params.is_plain or params.stop_token_ids:
            self._processor.check(ids, params, self._eos_ids, self.tokenizer)
        if len(ids) == 0:
            raise ValueError("ids: empty prompt; give at least one token")
        self._check_tokens("ids", ids)
        total, most = len(ids) + params.max_tokens, self.model.config.max_position_embeddings
        if total > most:
            raise ValueError(
                f"prompt of {len(ids)} tokens with max_tokens={params.max_tokens}: the model has "
                f"{most} positions; shorten one of them"
            )
        self._scheduler.check_fits(len(ids), params.max_tokens)
        if sampled is not None:
            self._make_sequence(ids, params, 0, sampled)

    def _check_tokens(self, name: str, ids: Ids[int]) -> None:
        vocab = self.model.config.vocab_size
        ids = _integers(ids)
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= vocab:
            raise ValueError(
                f"{name}: token {low if low < 0 else high} is outside the vocabulary of {vocab}"
            )

    # -- weights ---------------------------------------------------------------------------------

    def update_weights(
        self, state: Iterable[tuple[str, Tensor]], version: int, *, is_finite: bool = False
    ) -> None:
        """Replace all weights by Hugging Face tensors, and drop every cache, but that of requests
        in flight where `InferConfig.in_flight` keeps it; works asleep and paused, too. `ValueError`
        names a tensor that is missing, unknown, of the wrong shape or not
        finite, and then nothing was written: the old version goes on serving. With `is_finite` the
        caller has looked at the values, which are not read once more."""
        start = time.perf_counter()
        resolve_name(_LOAD)(self.model, state, is_finite=is_finite)
        self._start_version(version)
        self._metrics.update_s += time.perf_counter() - start

    @property
    def adapters(self) -> list[str]:
        """The names that `SamplingParams.adapter` may give."""
        names: list[str] = self._processor.adapters.names
        return names

    def load_adapter(self, name: str, source: str | Path | Mapping[str, Any]) -> None:
        """Serve a LoRA adapter under `name`: a folder in PEFT's format, or tensors as
        `LoraAdapter.changes` gives them, which are copied. A name that is taken stands for the new
        one from now on, also for its requests in flight, whose cache is computed again; no other
        request notices. `ValueError` for one that does not fit, and then nothing changes."""
        self._processor.load_adapter(name, source, self._sequences.values(), self._scheduler)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` if there is none of that name, or a request in flight
        still needs it."""
        self._processor.unload_adapter(name, self._sequences.values())

    # -- rest and figures ------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Forget the cached prompts, unless requests are in flight; how many of them are."""
        if not self.num_unfinished:
            self._blocks.flush(self.version)
        return self.num_unfinished

    def pause(self) -> None:
        """Stop between steps; requests stay where they are."""
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @property
    def num_unfinished(self) -> int:
        return self._scheduler.num_unfinished

    def metrics(self) -> dict[str, float]:
        """The totals of `Metrics`, and the state of queues and cache."""
        used = self._blocks.num_blocks - self._blocks.num_free
        totals = {name: float(value) for name, value in asdict(self._metrics).items()}
        return totals | {
            "num_running": float(len(self._scheduler.running)),
            "num_waiting": float(len(self._scheduler.waiting)),
            "num_preemptions": float(self._scheduler.num_preemptions),
            "num_evictions": float(self._blocks.num_evictions),
            "cache_use": used / self._blocks.num_blocks,
            "version": float(self.version),
        }

    def beat(self) -> dict[str, float]:
        """`metrics`, as a sign of life; an engine of several ranks tells them all."""
        return self.metrics()

    def check(self) -> None:
        """Debug: assert the invariants of scheduler and block manager."""
        resolve_name(_CHECK)(self._scheduler)


def _plain_parts(model: Transformer, config: InferConfig) -> EngineParts:
    """The parts for a dense model, whole, on a CPU."""
    num_blocks, block_size = config.num_blocks, config.block_size
    if num_blocks is None:
        num_blocks = blocks_in(config.cache_bytes, model.config, block_size, model.dtype)
    blocks = BlockManager(num_blocks, block_size, config.prefix_caching)
    scheduler = BatchScheduler(blocks, config.max_batch_tokens, config.max_num_seqs)
    layout = CacheLayout(
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=model.dtype,
        populate=config.populate_cache,
    )
    return EngineParts(blocks, scheduler, ModelRunner(model, KVCache(model.config, layout)))


def _integers(ids: Ids[int]) -> list[int]:
    try:
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"ids: must be integers: {error}") from error
