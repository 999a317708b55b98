"""Chooses the sequences of the next step, and how many tokens of each: reserve, then fill.

A step has a budget of tokens. First what runs is served, and reserves its blocks: every sequence
that decodes (one token each), then unfinished prefills in the order of rank, cut into chunks where
the budget ends. What is left is filled with requests that wait.
A request whose prefix a running sequence is computing right now waits for it instead of computing
it again: so the shared prompt of a group is prefilled once.

Nothing can deadlock: `add` refuses what could never fit, a request without blocks takes those of
the last in rank (which starts over later, its tokens kept), and the first is never a victim. Rank
is priority, then arrival; a waiting request also takes the place of a running one whose priority
is strictly lower, so a stream of urgent requests can starve the others.

Left out: fairness between users, deadlines. Steps with guessed tokens are variants/speculative.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanoinfer.block_manager import BlockManager, Match
from nanoinfer.sequence import Sequence


@dataclass
class Step:
    """The work of one forward pass, decodes first.

    `Step([a, b], num_scheduled_tokens=[1, 40], copies=[(2, 3)])` copies block 2 to block 3, then
    computes one token of `a` and a chunk of 40 tokens of `b`'s prompt."""

    seqs: list[Sequence] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)  # of each
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to), before it
    is_plain: bool = True  # no request asks for more than tokens, and none is guessed

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.seqs.append(seq)
        self.num_scheduled_tokens.append(num_tokens)
        self.is_plain &= seq.is_plain

    def drop_preempted(self) -> None:
        """Take out sequences that have lost their row since they were added."""
        if all(seq.row >= 0 for seq in self.seqs):
            return
        pairs = zip(self.seqs, self.num_scheduled_tokens, strict=True)
        kept = [(seq, num_tokens) for seq, num_tokens in pairs if seq.row >= 0]
        self.seqs = [seq for seq, _ in kept]
        self.num_scheduled_tokens = [num_tokens for _, num_tokens in kept]


def _by_rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


class BatchScheduler:
    """Queues of one engine. `rows` of the batch are given out here, one a running sequence."""

    def __init__(self, blocks: BlockManager, max_batch_tokens: int, max_num_seqs: int) -> None:
        if not 1 <= max_num_seqs <= max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens}: must be at least max_num_seqs="
                f"{max_num_seqs} (each decoding sequence takes one token a step), and that at "
                "least 1"
            )
        self.blocks = blocks
        self.max_batch_tokens, self.max_num_seqs = max_batch_tokens, max_num_seqs
        self.waiting: list[Sequence] = []  # both by rank
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._pending: dict[bytes, int] = {}  # blocks being computed -> handle
        self._prefilling: set[int] = set()  # handles of their sequences

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """`ValueError` for a request that could never run."""
        needed = self.blocks.blocks_for(num_prompt + max_tokens)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"prompt of {num_prompt} tokens with max_tokens={max_tokens} needs {needed} cache "
                f"blocks of {self.blocks.block_size} tokens, but there are "
                f"{self.blocks.num_blocks}: raise num_blocks (or cache_bytes) or shorten the "
                "request"
            )

    def add(self, seq: Sequence) -> None:
        self.check_fits(seq.num_prompt, seq.params.max_tokens)
        insort(self.waiting, seq, key=_by_rank)

    def schedule(self) -> Step:
        """Choose the next step and reserve its blocks and rows. Empty if there is nothing to do."""
        step = Step()
        self._make_way()
        # Reserve: what runs goes on, and takes the blocks of the last in rank if it must.
        self._reserve_decodes(step)
        self._reserve_prefills(step)
        # Fill the rest of the budget and of the idle blocks; from here on nobody is preempted.
        self._admit(step)
        return step

    def _make_way(self) -> None:
        """Preempt what runs for a waiting request of strictly higher priority."""
        while self.waiting and self.running:
            first, last = self.waiting[0], self.running[-1]
            if first.priority >= last.priority or self._is_deferred(first):
                return
            match = self.blocks.match(first)
            num_tokens = min(len(first.ids), match.num_tokens(self.blocks.block_size) + 1)
            if self._free_rows and self.blocks.can_allocate(match, num_tokens, len(self.running)):
                return
            self.preempt(last)

    def _reserve_decodes(self, step: Step) -> None:
        # By rank: whoever loses its blocks here comes later, so it is not in the step yet.
        for seq in [s for s in self.running if s.num_uncomputed_tokens == 1]:
            if seq.row >= 0 and self._make_room(seq, len(seq.ids)):
                step.add(seq, 1)

    def _reserve_prefills(self, step: Step) -> None:
        budget = self.max_batch_tokens - step.num_tokens
        for seq in [s for s in self.running if s.num_uncomputed_tokens > 1]:
            if budget == 0:
                break
            num_new = min(budget, seq.num_uncomputed_tokens)
            if seq.row >= 0 and self._make_room(seq, seq.num_computed_tokens + num_new):
                step.add(seq, num_new)
                budget -= num_new
        step.drop_preempted()  # decodes of lower rank, which made room for a prefill

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` of `seq`, if need be those of sequences after it. False: `seq`
        was the last, and is preempted itself."""
        while not self.blocks.extend(seq, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, step: Step) -> None:
        budget = self.max_batch_tokens - step.num_tokens
        admitted: list[int] = []  # places in the queue
        for place, seq in enumerate(self.waiting):
            if budget == 0 or not self._free_rows:
                break
            if self._is_deferred(seq):
                continue
            match = self.blocks.match(seq)
            num_cached = match.num_tokens(self.blocks.block_size)
            if self._defer(seq, match):
                continue
            num_new = min(budget, len(seq.ids) - num_cached)
            num_spare = len(self.running)  # a block each, or admission would preempt at once
            if not self.blocks.can_allocate(match, num_cached + num_new, num_spare):
                break
            self._start(seq, match, num_cached + num_new, step)
            step.add(seq, num_new)
            budget -= num_new
            admitted.append(place)
        for place in reversed(admitted):  # the queue may be long, and these are its first
            del self.waiting[place]

    def _start(self, seq: Sequence, match: Match, num_tokens: int, step: Step) -> None:
        copy = self.blocks.take_match(seq, match)
        if copy is not None:
            step.copies.append(copy)
        has_room = self.blocks.extend(seq, num_tokens)
        assert has_room, "can_allocate promised blocks"
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt)
        seq.row = self._free_rows.pop()
        insort(self.running, seq, key=_by_rank)
        if self.blocks.prefix_caching and seq.num_uncomputed_tokens > 1:
            seq.pending_keys = self.blocks.prompt_keys(seq)[len(match.block_table) :]
            self._prefilling.add(seq.handle)
            for key in seq.pending_keys:
                self._pending.setdefault(key, seq.handle)

    def _is_deferred(self, seq: Sequence) -> bool:
        """True while the sequence that it waits for still prefills."""
        return seq.waits_for in self._prefilling

    def _defer(self, seq: Sequence, match: Match) -> bool:
        """Let `seq` wait, and return True, if a running sequence is computing the block it needs
        next."""
        if not self._pending or seq.cache_limit < len(seq.ids) - 1:
            return False
        keys = self.blocks.prompt_keys(seq)
        num_matched = len(match.block_table)
        seq.waits_for = self._pending.get(keys[num_matched], -1)
        return seq.waits_for >= 0

    def end_prefill(self, seq: Sequence) -> None:
        """Nobody has to wait for `seq` any more: its tokens are computed, or it stops running."""
        for key in seq.pending_keys:
            if self._pending.get(key) == seq.handle:
                del self._pending[key]
        seq.pending_keys = []
        self._prefilling.discard(seq.handle)

    def preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence but its tokens; it will be prefilled again."""
        self.num_preemptions += 1
        self.stop(seq)
        insort(self.waiting, seq, key=_by_rank)

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out."""
        if seq.row >= 0:
            self.stop(seq)
        else:
            del self.waiting[bisect_left(self.waiting, seq.rank, key=_by_rank)]

    def restart_all(self) -> None:
        """Send every running sequence back to the queue (the weights changed, or a step failed)."""
        self.restart(self.running)

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Send these sequences back to the queue, those of them that run."""
        for seq in [seq for seq in sequences if seq.row >= 0]:
            self.stop(seq)
            insort(self.waiting, seq, key=_by_rank)

    def stop(self, seq: Sequence) -> None:
        """Take its row and its blocks from a running sequence."""
        self.end_prefill(seq)
        self.running.remove(seq)
        self._free_rows.append(seq.row)
        self.blocks.commit(seq)
        self.blocks.release(seq)

    def commit(self, step: Step) -> None:
        """The step ran: its tokens are in the cache. Call before sampled tokens are appended."""
        size = self.blocks.block_size
        for seq, num_new in zip(step.seqs, step.num_scheduled_tokens, strict=True):
            seq.num_computed_tokens += num_new
            # A decode changes what can be shared only where it fills a block.
            if num_new > 1 or seq.pending_keys or seq.num_computed_tokens % size == 0:
                self.blocks.commit(seq)
                if seq.num_uncomputed_tokens == 0:
                    self.end_prefill(seq)
