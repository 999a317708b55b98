"""The engine's core: requests in, tokens with log-probs and policy versions out, step by step.

    step = schedule → run the model → sample → commit

The core has no thread and no globals; whoever owns it calls `step` (engine_loop.py does so from an
event loop). Weights change between steps only. A request that is in flight then keeps the tokens,
log-probs and versions it has; its cache is dropped and computed again by the new weights.
Of a model that is trained in this process there is no copy: the trainer writes into the very model
(and repacks it), and `adopt_weights` gives the new weights their version. Until then the engine
refuses to run a step, so no token is ever sampled by weights that have none. `sleep` gives the
cache's memory to somebody else (a trainer on the same device) until `wake`.

`LLMEngine` (engine.py) makes the parts, takes requests and has all that callers ask beside.
Next: sequence.py (a request), scheduler.py (who runs), model_runner.py (how).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kernels.memory import release_memory
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import Batch, RunnerOutput
from nanoinfer.block_manager import BlockManager
from nanoinfer.model_runner import ModelRunner
from nanoinfer.params import Output
from nanoinfer.scheduler import BatchScheduler, Step
from nanoinfer.sequence import Sequence


class EngineParts(NamedTuple):
    """The parts that an engine is made of."""

    blocks: BlockManager
    scheduler: BatchScheduler
    runner: ModelRunner
    keep: Callable[[BatchScheduler, int], None] | None = None
    """Called when new weights come after those of that version, where the cache of running requests
    stays; None: it is computed again."""


class EngineCore:
    """Continuous batching over a paged cache. `version` is the policy version of the weights.

    Of a model that is split over tensor-parallel ranks each rank has an engine, and all are called
    with the same requests in the same order: scheduling and sampling depend on nothing else, so
    they stay in step without a message and every rank has every token. variants/led_engine.py lets
    one rank lead the others.
    """

    def __init__(self, model: Transformer, parts: EngineParts, version: int = 0) -> None:
        self.model = model
        self.version = version
        self.is_paused = False
        self.is_asleep = False
        self._blocks, self._scheduler, self._runner, self._keep = parts
        self._blocks.flush(version)
        longest = self._runner.cache.blocks_per_seq
        self._batch = Batch(self._scheduler.max_num_seqs, longest, self._blocks.block_size)
        self._sequences: dict[int, Sequence] = {}
        self._ready: list[tuple[int, Output]] = []  # finished, not yet returned by `step`
        self._metrics = Metrics()
        self._num_repacks = model.num_repacks  # when `version` began

    def enqueue(self, seq: Sequence) -> None:
        """Take a request that `LLMEngine.add` has made and found possible."""
        self._scheduler.add(seq)
        self._sequences[seq.handle] = seq
        self._metrics.num_requests += 1
        self._metrics.prompt_tokens += seq.num_prompt

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

    def abort(self, handle: int) -> Output | None:
        """End a request now; what it has so far, finish_reason "abort". None if it is not in
        flight."""
        seq = self._sequences.get(handle)
        if seq is None:
            return None
        seq.finish_reason = "abort"
        self._metrics.num_aborted += 1
        return self._take_out(seq)

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
        if self._keep is None:
            self._scheduler.restart_all()
        else:
            self._keep(self._scheduler, self.version)
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
