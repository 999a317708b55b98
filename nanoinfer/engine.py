"""`LLMEngine`: requests in, completions out, one step at a time.

    add -> [scheduler] -> step: make_batch -> [model runner] -> sample -> append -> finished?

Several engines live in one process: there are no globals. Weights are replaced in place between
two steps: `pause`, `update_weights`, `resume`; requests in flight keep their tokens, log-probs and
versions and rebuild their KV cache under the new weights.
Left out: asyncio (async_engine.py), CUDA graphs, speculation.
Next: scheduler.py, block_manager.py, sampler.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

from torch import Tensor

from nanoengine.model.hf import load_state
from nanoengine.model.transformer import Transformer
from nanoinfer.attention_backends import KVCache
from nanoinfer.batch import make_batch
from nanoinfer.block_manager import BlockManager
from nanoinfer.model_runner import ModelRunner
from nanoinfer.sampler import sample
from nanoinfer.sampling import Output, SamplingParams
from nanoinfer.scheduler import Scheduler
from nanoinfer.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class InferConfig:
    """Sizes of the engine."""

    cache_bytes: int = 512 << 20
    """Memory of the KV cache; it decides the number of blocks unless `num_blocks` does."""
    num_blocks: int | None = None
    block_size: int = 16
    """Tokens in a block."""
    max_batch_tokens: int = 1024
    """Token budget of one step."""
    max_num_seqs: int = 64
    """Sequences running together."""
    prefix_caching: bool = True
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a completion."""

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "block_size", "max_batch_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


class LLMEngine:
    """Continuous batching over one model. Not thread-safe: one caller at a time."""

    def __init__(self, model: Transformer, config: InferConfig) -> None:
        self.model = model
        self.config = config
        self.version = 0
        num_blocks = config.num_blocks or self._blocks_in(config.cache_bytes)
        self.blocks = BlockManager(
            num_blocks, config.block_size, prefix_caching=config.prefix_caching
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self.runner = ModelRunner(model, num_blocks=num_blocks, block_size=config.block_size)
        self._eos_ids = frozenset(config.eos_ids)
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._is_paused = False
        self._counts = dict.fromkeys(
            ("steps", "prefill_tokens", "sampled_tokens", "cached_tokens", "finished"), 0
        )

    def _blocks_in(self, cache_bytes: int) -> int:
        config = self.model.config
        size = KVCache.block_bytes(
            config.num_layers,
            self.config.block_size,
            config.num_kv_heads,
            config.head_dim,
            self.model.dtype,
        )
        if cache_bytes < size:
            raise ValueError(f"cache_bytes={cache_bytes}: one KV block of this model takes {size}")
        return cache_bytes // size

    # -- requests --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, ids: list[int], params: SamplingParams) -> int:
        """Queue a prompt; returns its handle. `ValueError` for what can never be served."""
        vocab = self.model.config.vocab_size
        if not ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"token ids must lie in [0, {vocab}); got {min(ids)} to {max(ids)}")
        longest, limit = len(ids) + params.max_tokens, self.model.config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} exceed the model's "
                f"{limit} positions"
            )
        sequence = Sequence(self._next_id, ids, params)
        self.scheduler.add(sequence)
        self._sequences[sequence.request_id] = sequence
        self._next_id += 1
        return sequence.request_id

    def abort(self, handle: int) -> Output:
        """End a request now; returns what it has, with finish_reason "abort"."""
        sequence = self._sequences.pop(handle, None)
        if sequence is None:
            raise ValueError(f"handle {handle}: no such request is running")
        self.scheduler.finish(sequence)
        return sequence.output()

    def step(self) -> list[tuple[int, Output]]:
        """Run one step; returns the requests that it finished."""
        if self._is_paused:
            raise RuntimeError("the engine is paused: call resume() first")
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        logits = self.runner.run(make_batch(scheduled, self.config.block_size))
        self.scheduler.complete(scheduled)
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += sum(i.count for i in scheduled if i.count > 1)
        sampling = [item.sequence for item in scheduled if item.is_sampling]
        return self._append(sampling, logits) if logits is not None else []

    def _append(self, sequences: list[Sequence], logits: Tensor) -> list[tuple[int, Output]]:
        tokens, logps = sample(
            logits, [s.params for s in sequences], [len(s.tokens) for s in sequences]
        )
        self._counts["sampled_tokens"] += len(tokens)
        finished = []
        for sequence, token, logp in zip(sequences, tokens, logps, strict=True):
            sequence.append(token, logp, self.version, self._eos_ids)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
                del self._sequences[sequence.request_id]
                self._counts["finished"] += 1
                self._counts["cached_tokens"] += sequence.num_cached
                finished.append((sequence.request_id, sequence.output()))
        return finished

    def generate(
        self, prompts: Sequence_[list[int]], params: SamplingParams | Sequence_[SamplingParams]
    ) -> list[Output]:
        """Complete every prompt; outputs in the order of the prompts."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        handles = [self.add(ids, p) for ids, p in zip(prompts, each, strict=True)]
        outputs: dict[int, Output] = {}
        while len(outputs) < len(handles):
            outputs.update(self.step())
        return [outputs[handle] for handle in handles]

    # -- weights ---------------------------------------------------------------------------------

    def pause(self) -> None:
        """No step runs until `resume`; requests may still be added."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def update_weights(self, state: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace every weight in place. `ValueError` names a missing, unknown or wrong-shaped
        tensor; then nothing was written and the old version keeps serving."""
        if not self._is_paused:
            raise RuntimeError("update_weights() needs pause() first")
        load_state(self.model, state)
        self.version = version
        self.scheduler.restart_all()
        self.blocks.flush()

    def metrics(self) -> dict[str, float]:
        """Counters since the start and the state of queues and cache."""
        return {
            **{name: float(count) for name, count in self._counts.items()},
            "waiting": float(len(self.scheduler.waiting)),
            "running": float(len(self.scheduler.running)),
            "preemptions": float(self.scheduler.num_preemptions),
            "cache_use": 1 - self.blocks.num_available / self.blocks.num_blocks,
            "version": float(self.version),
        }
