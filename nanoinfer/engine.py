"""The inference engine of one model: requests in, tokens with log-probs and policy versions out.

    step = schedule → run the model → sample → commit

The engine has no thread and no globals; whoever owns it calls `step` (async_engine.py does so from
an event loop). Weights change between steps only. A request that is in flight then keeps the
tokens, log-probs and versions it has; its cache is dropped and computed again by the new weights.
Of a model that is trained in this process there is no copy: the trainer writes into the very model
(and repacks it), and `adopt_weights` gives the new weights their version. Until then the engine
refuses to run a step, so no token is ever sampled by weights that have none. `update_weights`
copies tensors that somebody brings. `sleep` gives the cache's memory to somebody else (a trainer on
the same device) until `wake`.

What few requests ask is in nanoinfer/options/, engines of other kinds in nanoinfer/variants/: both
come in by the names below.
Next: sequence.py (a request), scheduler.py (who runs), model_runner.py (how).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torch import Tensor

from kernels.memory import release_memory
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import Batch, RunnerOutput
from nanoinfer.block_manager import BlockManager
from nanoinfer.config import InferConfig
from nanoinfer.kv_cache import CacheLayout, KVCache
from nanoinfer.model_runner import ModelRunner
from nanoinfer.params import Output, SamplingParams
from nanoinfer.scheduler import BatchScheduler, Step
from nanoinfer.sequence import Sequence

_PARTS = "nanoinfer.variants.parts:make_parts"  # of an engine that is not plain
_DESK = "nanoinfer.options.desk:RequestDesk"  # for requests that are not plain
_LOAD = "nanoinfer.variants.weight_updates:load_weights"
_KEEP = "nanoinfer.variants.in_flight:keep_all"
_CHECK = "nanoinfer.variants.invariants:check"


class EngineParts(NamedTuple):
    """The parts that an engine is made of; `config` has all its sizes."""

    config: InferConfig
    blocks: BlockManager
    scheduler: BatchScheduler
    runner: ModelRunner


class LLMEngine:
    """Continuous batching over a paged cache. `version` is the policy version of the weights.

    Of a model that is split over tensor-parallel ranks each rank has an engine, and all are called
    with the same requests in the same order: scheduling and sampling depend on nothing else, so
    they stay in step without a message and every rank has every token. variants/led_engine.py lets
    one rank lead the others.
    """

    def __init__(
        self,
        model: Transformer,
        config: InferConfig,
        version: int = 0,
        tokenizer: Any = None,
    ) -> None:
        """`tokenizer`, a `ChatTokenizer`, is for requests that name texts: stop texts, grammars,
        `detokenize`."""
        self.model = model
        self.version = version
        self.tokenizer = tokenizer
        self.is_paused = False
        self.is_asleep = False
        self._eos_ids = model.config.eos_ids if config.eos_ids is None else config.eos_ids
        is_plain = config.is_plain and model.device.type == "cpu"
        is_whole = model.split.size == 1 and not model.batch_invariant
        make_parts = _plain_parts if is_plain and is_whole else resolve_name(_PARTS)
        parts: EngineParts = make_parts(model, config)
        self.config, self._blocks, self._scheduler, self._runner = parts
        self._blocks.flush(version)
        longest = self._runner.cache.blocks_per_seq
        self._batch = Batch(parts.config.max_num_seqs, longest, parts.config.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._ready: list[tuple[int, Output]] = []  # finished, not yet returned by `step`
        self._next_handle = 0
        self._metrics = Metrics()
        self._num_repacks = model.num_repacks  # when `version` began

    def step(self) -> list[tuple[int, Output]]:
        """Run one step; returns the requests that finished, with their handles. Does nothing
        while paused or asleep. `RuntimeError` where the model's owner has changed the weights and
        `adopt_weights` was not called."""
        if not (self.is_paused or self.is_asleep):
            self._require_current()
            start = time.perf_counter()
            try:
                step = self._scheduler.schedule()
                if step.seqs:
                    self._run(step)
            except BaseException:  # Ctrl-C too, which may come at any line
                self._scheduler.restart_all()  # block copies of this step may not have been made
                raise
            self._metrics.step_s += time.perf_counter() - start
        ready, self._ready = self._ready, []
        return ready

    def _run(self, step: Step) -> None:
        inputs = self._batch.build(step)
        # The only line that computes; a GPU is waited for at its end, once.
        result = self._runner.run(inputs)
        take = _take if inputs.options is None else inputs.options.take
        for seq, num_sampled, num_drafted in take(step, result, self._scheduler, self.version):
            self._metrics.sampled_tokens += num_sampled
            self._metrics.drafted_tokens += num_drafted
            self._metrics.accepted_tokens += num_sampled - 1
            if seq.finish_reason is not None:
                self._ready.append((seq.handle, self._take_out(seq)))
                self._metrics.num_finished += 1
        self._metrics.num_steps += 1
        self._metrics.computed_tokens += step.num_tokens

    def _take_out(self, seq: Sequence) -> Output:
        del self._sequences[seq.handle]
        self._scheduler.remove(seq)
        self._metrics.cached_tokens += seq.num_cached_tokens or 0
        return seq.output()

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
        self._scheduler.add(seq)
        self._sequences[seq.handle] = seq
        self._metrics.num_requests += 1
        self._metrics.prompt_tokens += len(ids)
        return seq.handle

    def _make_sequence(
        self, ids: Ids[int], params: SamplingParams, priority: int, sampled: Output | None
    ) -> Sequence:
        asked = (self._next_handle, _integers(ids), params, self._eos_ids, priority)
        seq: Sequence
        seq = Sequence(*asked) if params.is_plain else self._desk.sequence(*asked, self.tokenizer)
        if sampled is not None:
            self._check_tokens("sampled.ids", sampled.ids)
            self._desk.resume(seq, sampled)
        return seq

    @cached_property
    def _desk(self) -> Any:
        """Its type is nanoinfer/options/desk.py's, which is not imported here."""
        return resolve_name(_DESK)(self.model)

    def abort(self, handle: int) -> Output | None:
        """End a request now; what it has so far, finish_reason "abort". None if it is not in
        flight."""
        seq = self._sequences.get(handle)
        if seq is None:
            return None
        seq.finish_reason = "abort"
        self._metrics.num_aborted += 1
        return self._take_out(seq)

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
            self._desk.check(params, self._eos_ids, self.tokenizer)
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

    def adopt_weights(self, version: int) -> None:
        """The model's owner, a trainer of this process, has written new weights into it and
        repacked it: they are policy `version` from now on; otherwise as `update_weights`.
        `ValueError` names a tensor that is not finite. The old weights are gone then, so nothing is
        served until the owner brings better ones."""
        start = time.perf_counter()
        release_memory()  # what training needed and the cache will not: it takes pages of its own
        self._num_repacks = -1  # no weights are current until these have been looked at
        self.model.check_finite("no token is sampled by such weights")
        self._start_version(version)
        self._metrics.update_s += time.perf_counter() - start

    def _start_version(self, version: int) -> None:
        # What is cached are keys and values of the old weights: a request that goes on reads its
        # tokens again, unless its owner would rather have it quickly than have it right.
        if self.config.in_flight == "keep":
            resolve_name(_KEEP)(self._scheduler, self.version)
        else:
            self._scheduler.restart_all()
        for seq in self._sequences.values():
            seq.start_version()
        self._blocks.flush(version)
        self.version = version
        self._num_repacks = self.model.num_repacks
        self._metrics.num_weight_updates += 1
        self._runner.refresh()  # last: if it fails, the version and the cache are true

    @property
    def is_current(self) -> bool:
        """True if the model holds the weights of `version`: nobody has changed them since."""
        return self.model.num_repacks == self._num_repacks

    def _require_current(self) -> None:
        if not self.is_current:
            raise RuntimeError(
                f"version {self.version}: the model's owner has changed its weights since; call "
                "adopt_weights(version) when the change is complete"
            )

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
        names: list[str] = self._desk.adapters.names
        return names

    def load_adapter(self, name: str, source: str | Path | Mapping[str, Any]) -> None:
        """Serve a LoRA adapter under `name`: a folder in PEFT's format, or tensors as
        `LoraAdapter.changes` gives them, which are copied. A name that is taken stands for the new
        one from now on, also for its requests in flight, whose cache is computed again; no other
        request notices. `ValueError` for one that does not fit, and then nothing changes."""
        self._desk.load_adapter(name, source, self._sequences.values(), self._scheduler)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` if there is none of that name, or a request in flight
        still needs it."""
        self._desk.unload_adapter(name, self._sequences.values())

    # -- rest and figures ------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the cache's memory back. Requests keep their tokens and go on after `wake`; what
        they had cached is computed again."""
        self._scheduler.restart_all()
        self._blocks.flush(self.version)
        self._runner.sleep()
        release_memory()  # a process that keeps its large buffers would keep this one too
        self.is_asleep = True

    def wake(self) -> None:
        if self.is_asleep:
            release_memory()  # what the sleeper's neighbour has freed meanwhile
            self._runner.wake()
            self.is_asleep = False

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
        return self._metrics.to_dict() | {
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
    config, block_size = config.sized(), config.block_size
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = KVCache.blocks_in(config.cache_bytes, model.config, block_size, model.dtype)
    blocks = BlockManager(num_blocks, block_size, config.prefix_caching)
    scheduler = BatchScheduler(blocks, config.max_batch_tokens, config.max_num_seqs)
    layout = CacheLayout(
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=model.dtype,
        populate=config.populate_cache,
    )
    return EngineParts(config, blocks, scheduler, ModelRunner(model, KVCache(model.config, layout)))


def _take(
    step: Step, result: RunnerOutput, scheduler: BatchScheduler, version: int
) -> Iterator[tuple[Sequence, int, int]]:
    """Append the tokens of a plain step to their sequences, one by one: each with how many it got,
    and how many had been guessed."""
    scheduler.commit(step)
    sampled = [seq for seq in step.seqs if seq.num_uncomputed_tokens == 0]
    rows = zip(sampled, result.tokens, result.logps, result.sampled_logps, strict=True)
    for seq, token, logp, sampled_logp in rows:
        seq.append(token, logp, version, sampled_logp)
        yield seq, 1, 0


def _integers(ids: Ids[int]) -> list[int]:
    try:
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(f"ids: must be integers: {error}") from error


@dataclass
class Metrics:
    """Totals since the engine was made; rates are for the reader. A token counts each time it is
    computed."""

    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0  # asked for
    cached_tokens: int = 0  # of those, found in the prefix cache at first admission
    computed_tokens: int = 0  # forwarded: prefill, decode and recomputation
    sampled_tokens: int = 0
    drafted_tokens: int = 0  # guessed and computed
    accepted_tokens: int = 0  # of those, sampled too
    num_weight_updates: int = 0
    step_s: float = 0.0
    update_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}
