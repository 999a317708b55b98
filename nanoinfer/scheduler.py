"""Continuous batching: which sequences run how many tokens in the next step.

Running sequences come first (one token each while decoding), then chunked prefill of waiting ones,
within one token budget. When blocks run out, the sequence admitted last gives its blocks back and
waits (preemption by recomputation). A waiting sequence whose next block of prompt is just being
computed by another one waits for it: so a group's shared prompt is prefilled once.

Why this cannot deadlock: a request that would not fit into the empty pool is refused by `add`, and
the sequence that was admitted first is never preempted, so it always gets on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nanoinfer.block_manager import BlockManager, Key
from nanoinfer.sequence import Sequence, SequenceState


@dataclass(frozen=True)
class Scheduled:
    """Run tokens `start .. start + count` of a sequence; sample if that reaches its last token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_sampling(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """Owns the queues. The engine calls `schedule`, runs the result, then `complete`."""

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_num_seqs: int) -> None:
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        longest = sequence.num_prompt + sequence.params.max_tokens
        needed = self.blocks.blocks_for(longest)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"a request of {sequence.num_prompt} prompt tokens and "
                f"max_tokens={sequence.params.max_tokens} needs {needed} KV blocks, the pool has "
                f"{self.blocks.num_blocks}: give the cache more memory or ask for fewer tokens"
            )
        self.waiting.append(sequence)

    def schedule(self) -> list[Scheduled]:
        """The next step; empty only if there is nothing to do."""
        budget = self.max_batch_tokens
        batch: list[Scheduled] = []
        for sequence in list(self.running):
            if sequence.state is not SequenceState.RUNNING or budget == 0:
                continue
            count = min(sequence.num_uncomputed, budget)
            if self._grow(sequence, sequence.num_computed + count):
                batch.append(Scheduled(sequence, sequence.num_computed, count))
                budget -= count
        return batch + self._admit(budget)

    def complete(self, batch: list[Scheduled]) -> None:
        """The step has run: its tokens are in the cache, its full blocks can be shared."""
        size = self.blocks.block_size
        for item in batch:
            sequence = item.sequence
            sequence.num_computed = item.start + item.count
            while (sequence.num_registered + 1) * size <= sequence.num_computed:
                index = sequence.num_registered
                tokens = sequence.tokens[index * size : (index + 1) * size]
                block = sequence.block_table[index]
                sequence.chain = self.blocks.register(block, sequence.chain, tokens)
                sequence.num_registered += 1

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self.blocks.release(sequence.block_table)
            sequence.block_table = []
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def restart_all(self) -> None:
        """Drop the cache of every running sequence (after a weight update); tokens stay."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens`, taking them from later sequences if need be."""
        missing = self.blocks.blocks_for(num_tokens) - len(sequence.block_table)
        while missing > self.blocks.num_available:
            last = self.running[-1]
            self.num_preemptions += 1
            self._preempt(last)
            if last is sequence:
                return False
        sequence.block_table += self.blocks.allocate(max(missing, 0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.block_table)
        sequence.drop_cache()
        self.waiting.appendleft(sequence)

    def _admit(self, budget: int) -> list[Scheduled]:
        admitted: list[Scheduled] = []
        deferred: list[Sequence] = []
        in_flight = self._in_flight()
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            cached, chain = self.blocks.match(sequence.tokens)
            next_block = self._next_block(sequence.tokens, len(cached), chain)
            if next_block is not None and next_block in in_flight:
                deferred.append(sequence)
                continue
            item = self._start(sequence, cached, chain, budget)
            if item is None:
                self.waiting.appendleft(sequence)
                break
            if next_block is not None:
                in_flight.add(next_block)
            admitted.append(item)
            budget -= item.count
        self.waiting.extendleft(reversed(deferred))
        return admitted

    def _start(
        self, sequence: Sequence, cached: list[int], chain: int, budget: int
    ) -> Scheduled | None:
        """Hold the cached blocks and allocate the rest of the first chunk; None if that fails."""
        self.blocks.hold(cached)
        start = len(cached) * self.blocks.block_size
        count = min(len(sequence.tokens) - start, budget)
        missing = self.blocks.blocks_for(start + count) - len(cached)
        if missing > self.blocks.num_available:
            self.blocks.release(cached)
            return None
        sequence.block_table = cached + self.blocks.allocate(missing)
        sequence.num_computed = start
        sequence.num_registered = len(cached)
        sequence.chain = chain
        if not sequence.logps:
            sequence.num_cached = start
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)
        return Scheduled(sequence, start, count)

    def _in_flight(self) -> set[Key]:
        """The next blocks of prompt that running sequences are about to complete."""
        keys = set()
        for sequence in self.running:
            key = self._next_block(sequence.tokens, sequence.num_registered, sequence.chain)
            if key is not None and sequence.num_uncomputed > 1:
                keys.add(key)
        return keys

    def _next_block(self, tokens: list[int], index: int, chain: int) -> Key | None:
        """The name under which block `index` will be found; None if it never will (`match`)."""
        size = self.blocks.block_size
        if not self.blocks.prefix_caching or (index + 1) * size >= len(tokens):
            return None
        return chain, tuple(tokens[index * size : (index + 1) * size])
