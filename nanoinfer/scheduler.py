"""Which sequences run in the next step, and how many tokens of each.

One budget of tokens a step: first every sequence that decodes (one token each), then prefills in
the order of priority and arrival, cut into chunks where the budget ends. A request whose prefix a
running sequence is computing right now waits for it instead of computing it again: so the shared
prompt of a group is prefilled once.

Nothing can deadlock: `add` refuses what could never fit, a request without blocks takes those of
the last in rank (which starts over later, its tokens kept), and the first is never a victim. Rank
is priority, then arrival; a waiting request also takes the place of a running one whose priority
is strictly lower, so a stream of urgent requests can starve the others.

What is left of the budget and of the idle blocks may go to guesses at what decoding sequences will
sample (speculative.py); nobody waits or is preempted for a guess.

Left out: fairness between users, deadlines.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from nanoinfer.block_manager import BlockManager, Match
from nanoinfer.sequence import Sequence
from nanoinfer.speculative import Drafter


@dataclass
class Step:
    """The work of one forward pass: `num_new[i]` tokens of `seqs[i]`, its drafts included, decodes
    first."""

    seqs: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to), before it

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)


def _by_rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


class Scheduler:
    """Queues of one engine. `rows` of the batch are given out here, one a running sequence."""

    def __init__(
        self,
        blocks: BlockManager,
        max_batch_tokens: int,
        max_num_seqs: int,
        drafter: Drafter,
    ) -> None:
        if not 1 <= max_num_seqs <= max_batch_tokens:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens}: must be at least max_num_seqs="
                f"{max_num_seqs} (each decoding sequence takes one token a step), and that at "
                "least 1"
            )
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.drafter = drafter
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
        self._schedule_decodes(step)
        budget = self.max_batch_tokens - step.num_tokens
        budget = self._schedule_prefills(step, budget)
        self._admit(step, budget)
        self._draft(step)
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

    def _schedule_decodes(self, step: Step) -> None:
        for seq in [s for s in self.running if s.num_uncomputed == 1]:
            if seq.row >= 0 and self._make_room(seq, len(seq.ids)):
                step.seqs.append(seq)
                step.num_new.append(1)
        self._drop_preempted(step)

    def _schedule_prefills(self, step: Step, budget: int) -> int:
        for seq in [s for s in self.running if s.num_uncomputed > 1]:
            if budget == 0:
                break
            num_new = min(budget, seq.num_uncomputed)
            if seq.row >= 0 and self._make_room(seq, seq.num_computed + num_new):
                step.seqs.append(seq)
                step.num_new.append(num_new)
                budget -= num_new
        before = step.num_tokens
        self._drop_preempted(step)
        return budget + before - step.num_tokens

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` of `seq`, if need be those of sequences after it. False: `seq`
        was the last, and is preempted itself."""
        while not self.blocks.extend(seq, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _drop_preempted(self, step: Step) -> None:
        if all(seq.row >= 0 for seq in step.seqs):
            return
        kept = [(s, n) for s, n in zip(step.seqs, step.num_new, strict=True) if s.row >= 0]
        step.seqs = [s for s, _ in kept]
        step.num_new = [n for _, n in kept]

    def _admit(self, step: Step, budget: int) -> None:
        admitted: list[Sequence] = []
        for seq in self.waiting:
            if budget == 0 or not self._free_rows:
                break
            if self._is_deferred(seq):
                continue
            match = self.blocks.match(seq)
            num_cached = match.num_tokens(self.blocks.block_size)
            if self._defer(seq, match):
                continue
            num_new = min(budget, len(seq.ids) - num_cached)
            reserve = len(self.running)  # a block each, or admission would preempt at once
            if not self.blocks.can_allocate(match, num_cached + num_new, reserve):
                break
            self._start(seq, match, num_cached + num_new, step)
            step.seqs.append(seq)
            step.num_new.append(num_new)
            budget -= num_new
            admitted.append(seq)
        if admitted:
            self.waiting = [s for s in self.waiting if s.row < 0]

    def _draft(self, step: Step) -> None:
        """Lengthen decodes by guesses."""
        if self.drafter.max_drafts == 0:
            return
        budget = self.max_batch_tokens - step.num_tokens
        for i, seq in enumerate(step.seqs):
            if seq.num_uncomputed > 1 or seq.edits is not None:
                continue
            # the last token that may be sampled is never computed
            limit = min(budget, self._idle_room(seq), seq.max_len - len(seq.ids) - 1)
            seq.drafts = self.drafter.draft(seq, limit, len(step.seqs))
            has_room = self.blocks.extend(seq, len(seq.ids) + len(seq.drafts))
            assert has_room, "idle_room promised blocks"
            step.num_new[i] += len(seq.drafts)
            budget -= len(seq.drafts)

    def _idle_room(self, seq: Sequence) -> int:
        """Tokens after `seq.ids` for which there are blocks, one being left for each running
        sequence."""
        num_idle = max(0, self.blocks.num_free - len(self.running))
        return (len(seq.block_ids) + num_idle) * self.blocks.block_size - len(seq.ids)

    def _start(self, seq: Sequence, match: Match, num_tokens: int, step: Step) -> None:
        copy = self.blocks.take_match(seq, match)
        if copy is not None:
            step.copies.append(copy)
        has_room = self.blocks.extend(seq, num_tokens)
        assert has_room, "can_allocate promised blocks"
        if seq.num_cached is None:
            seq.num_cached = seq.num_computed
        seq.row = self._free_rows.pop()
        insort(self.running, seq, key=_by_rank)
        if self.blocks.prefix_caching and seq.num_uncomputed > 1:
            seq.pending_keys = self.blocks.prompt_keys(seq)[len(match.block_ids) :]
            self._prefilling.add(seq.handle)
            for key in seq.pending_keys:
                self._pending.setdefault(key, seq.handle)

    def _is_deferred(self, seq: Sequence) -> bool:
        """Whether the sequence it waits for still prefills."""
        return seq.waits_for in self._prefilling

    def _defer(self, seq: Sequence, match: Match) -> bool:
        """Whether a running sequence is computing the next block that `seq` would compute."""
        if not self._pending or seq.cache_limit < len(seq.ids) - 1:
            return False
        keys = self.blocks.prompt_keys(seq)
        num_matched = len(match.block_ids)
        seq.waits_for = self._pending.get(keys[num_matched], -1)
        return seq.waits_for >= 0

    def end_prefill(self, seq: Sequence) -> None:
        """All of the sequence's tokens are computed, or it stops running: nobody waits for it."""
        for key in seq.pending_keys:
            if self._pending.get(key) == seq.handle:
                del self._pending[key]
        seq.pending_keys = []
        self._prefilling.discard(seq.handle)

    def preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence but its tokens; it will be prefilled again."""
        self.num_preemptions += 1
        self._stop(seq)
        insort(self.waiting, seq, key=_by_rank)

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out."""
        if seq.row >= 0:
            self._stop(seq)
        else:
            self.waiting.remove(seq)

    def restart_all(self) -> None:
        """Send every running sequence back to the queue (the weights changed, or a step failed)."""
        for seq in list(self.running):
            self._stop(seq)
            insort(self.waiting, seq, key=_by_rank)

    def _stop(self, seq: Sequence) -> None:
        self.end_prefill(seq)
        self.drafter.forget(seq)
        self.running.remove(seq)
        self._free_rows.append(seq.row)
        self.blocks.commit(seq)
        self.blocks.release(seq)

    def commit(self, step: Step) -> None:
        """The step ran: its tokens are in the cache; whether the drafts are any of its own is not
        known yet. Call before sampled tokens are appended."""
        size = self.blocks.block_size
        for seq, num_new in zip(step.seqs, step.num_new, strict=True):
            num_known = num_new - len(seq.drafts)
            seq.num_computed += num_known
            if num_known > 1 or seq.pending_keys or seq.num_computed % size == 0:
                self.blocks.commit(seq)
                if seq.num_uncomputed == 0:
                    self.end_prefill(seq)

    def accept(self, seq: Sequence, num_accepted: int) -> None:
        """The first `num_accepted` drafts have become tokens of `seq`. What the cache holds of the
        others is overwritten when those positions are computed."""
        seq.drafts = []
        seq.num_computed += num_accepted
        size = self.blocks.block_size
        if seq.num_computed // size > seq.num_committed // size:
            self.blocks.commit(seq)

    def check(self) -> None:
        """Debug: assert every invariant of queues and blocks."""
        self.blocks.check([*self.running, *self.waiting])
        assert all(seq.row >= 0 for seq in self.running), "a running sequence has no row"
        assert all(s.row < 0 and not s.block_ids for s in self.waiting), "a waiting one holds some"
        rows = [seq.row for seq in self.running] + self._free_rows
        assert len(rows) == len(set(rows)), "a row was given out twice"
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_by_rank), "a queue is not in the order of rank"
            assert not any(seq.drafts for seq in queue), "a draft outlived its step"
        owners = {seq.handle for seq in self.running if seq.pending_keys}
        assert self._prefilling == owners, "prefilling sequences"
        assert set(self._pending.values()) <= owners, "a block is computed by nobody"
        self.drafter.check(self.running)
