"""Drafts: guesses at the next tokens, from text seen before.

A step computes a sequence's drafts after its last token, like a chunk of prompt, and samples at
every one of these positions. While the sampled token is the draft, the position after it was
computed on the right text and its sample counts too (options/full_step.py). Samples behind a wrong
draft were drawn on a text that is not the request's and are dropped, and so is everything behind
the token that ended the request. A token depends on its row of
logits, the request's seed and its position, and on a CPU a row of logits does not depend on its
batch: so a request's output has the same bits with drafts and without, greedy or sampled. On a
GPU a position's logits may differ in rounding between a decode and a chunk, as between any two
batches there; each token is drawn from its own distribution there too.

A guess is the token that followed the last time the same three tokens (else two) were seen: by the
sequence itself, prompt included, or by its siblings, the running requests whose prompts start
alike. Guesses follow one another, so a loop in the text is drafted round and round.

When it pays: a step over R rows takes about a + b·R, where a is reading the weights and starting
operations. With S sequences decoding a token costs (a + b·S) / S, and a draft costs b: it pays if
it is right with a chance above S / (S + a/b). With a/b = 16 that is 6 % for one sequence, 33 % for
8, 80 % for 64. (SmolLM2 on one core: 26 ms for one sequence, 1.2 ms for each more, so about 20.)
The chance of a draft is the product of the hit rates of all guesses up to it. Every sampled token
first tests what would have been guessed, drafted or not, so the rates cost nothing and a sequence
that stops drafting starts again when its text repeats itself. All of this depends on tokens alone,
never on time, so tensor-parallel ranks draft the same.

Left out: requests whose logits are edited (penalties, grammars: the edits of a position depend on
the tokens before it, drafts included), models that draft, trees of drafts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nanoinfer.block_manager import BlockManager
from nanoinfer.options.full_sequence import FullSequence
from nanoinfer.scheduler import BatchScheduler, Step
from nanoinfer.sequence import Sequence

_ORDERS = (3, 2)  # tokens that must match, the longest first
_START = 16  # prompt tokens that siblings have in common
_FIRST_RATE = 0.5  # hit rate of a source before its first test
_GAIN = 0.2  # weight of the latest test in a rate
_MAX_GRAMS = 1 << 17  # in each of a table's two generations


class _Table:
    """The token that followed each n-gram last. When a generation is full, the one before it is
    forgotten, so that a group which never ends does not grow without bound."""

    def __init__(self) -> None:
        self._new: dict[tuple[int, ...], int] = {}
        self._old: dict[tuple[int, ...], int] = {}

    def get(self, gram: tuple[int, ...]) -> int | None:
        token = self._new.get(gram)
        return self._old.get(gram) if token is None else token

    def put(self, gram: tuple[int, ...], token: int) -> None:
        if len(self._new) >= _MAX_GRAMS:
            self._old, self._new = self._new, {}
        self._new[gram] = token


class _Group:
    """The tokens that running siblings sampled, and how many siblings there are."""

    def __init__(self) -> None:
        self.table = _Table()
        self.num_members = 0


class _Reader:
    """The n-grams of one running sequence, and how often guesses at it were right."""

    def __init__(self, group: _Group | None) -> None:
        self._own = _Table()
        self._group = group
        self._tables = [self._own] if group is None else [self._own, group.table]
        self._num_read = 0
        self._rates = [_FIRST_RATE] * (len(_ORDERS) * len(self._tables))  # one a source

    def read(self, seq: Sequence) -> None:
        """Take the tokens since the last call; sampled ones first test the tables."""
        ids = seq.keys
        for at in range(self._num_read, len(ids)):
            is_sampled = at >= seq.num_prompt
            if is_sampled:
                self._test(ids[max(0, at - _ORDERS[0]) : at], ids[at])
            for order in _ORDERS:
                if at >= order:
                    gram = tuple(ids[at - order : at])
                    self._own.put(gram, ids[at])
                    if is_sampled and self._group is not None:
                        self._group.table.put(gram, ids[at])
        self._num_read = len(ids)

    def _test(self, before: list[int], token: int) -> None:
        guess, source = self._guess(before)
        if guess is not None:
            self._rates[source] += _GAIN * ((guess == token) - self._rates[source])

    def _guess(self, before: list[int]) -> tuple[int | None, int]:
        """The token that may follow, and which source says so."""
        source = 0
        for order in _ORDERS:
            gram = tuple(before[-order:])
            for table in self._tables:
                token = table.get(gram) if len(gram) == order else None
                if token is not None:
                    return token, source
                source += 1
        return None, source

    def draft(self, ids: list[int], limit: int, min_chance: float) -> list[int]:
        before, chance = ids[-_ORDERS[0] :], 1.0
        drafts: list[int] = []
        while len(drafts) < limit:
            token, source = self._guess(before)
            if token is None or token < 0:  # nobody samples a part of a picture
                break
            chance *= self._rates[source]
            if chance <= min_chance:
                break
            drafts.append(token)
            before = [*before, token][-_ORDERS[0] :]
        return drafts


class Drafter:
    """Guesses for all running sequences of one engine."""

    def __init__(self, max_drafts: int, free_rows: int = 16, use_siblings: bool = True) -> None:
        """`max_drafts` a sequence and step, 0 for none; `free_rows` is a/b, see above."""
        if max_drafts < 0 or free_rows < 0:
            raise ValueError(
                f"speculate={max_drafts}, speculate_free_rows={free_rows}: must be at least 0 both"
            )
        self.max_drafts = max_drafts
        self.free_rows = free_rows
        self.use_siblings = use_siblings
        self._readers: dict[int, _Reader] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}

    def draft(self, seq: Sequence, limit: int, num_seqs: int) -> list[int]:
        """At most `limit` tokens that may follow `seq.keys`, in a step of `num_seqs` sequences."""
        reader = self._readers.get(seq.handle)
        if reader is None:
            reader = self._readers[seq.handle] = _Reader(self._join(seq))
        reader.read(seq)
        min_chance = num_seqs / (num_seqs + self.free_rows)
        return reader.draft(seq.keys, min(limit, self.max_drafts), min_chance)

    def forget(self, seq: Sequence) -> None:
        """`seq` does not run any more."""
        if self._readers.pop(seq.handle, None) is None or not self.use_siblings:
            return
        group = self._groups[_start(seq)]
        group.num_members -= 1
        if group.num_members == 0:
            del self._groups[_start(seq)]

    def _join(self, seq: Sequence) -> _Group | None:
        if not self.use_siblings:
            return None
        group = self._groups.setdefault(_start(seq), _Group())
        group.num_members += 1
        return group

    def check(self, running: Collection[Sequence]) -> None:
        """Debug: assert that nothing is kept of sequences that do not run."""
        handles = {seq.handle for seq in running}
        assert self._readers.keys() <= handles, "drafts for a sequence that does not run"
        members = sum(group.num_members for group in self._groups.values())
        assert members == (len(self._readers) if self.use_siblings else 0), "members of groups"


def _start(seq: Sequence) -> tuple[int, ...]:
    return tuple(seq.keys[: min(seq.num_prompt, _START)])


@dataclass
class DraftedStep(Step):
    """A step in which `drafts` has the tokens that were guessed after those of a sequence, by its
    handle. `num_scheduled_tokens` includes them."""

    drafts: dict[int, list[int]] = field(default_factory=dict)


class DraftingScheduler(BatchScheduler):
    """Spends what is left of a step's budget on guesses at the tokens that decoding sequences will
    sample; nobody waits or is preempted for a guess."""

    def __init__(
        self, blocks: BlockManager, max_batch_tokens: int, max_num_seqs: int, drafter: Drafter
    ) -> None:
        super().__init__(blocks, max_batch_tokens, max_num_seqs)
        self.drafter = drafter

    def schedule(self) -> DraftedStep:
        """Choose the next step, and lengthen its decodes by guesses."""
        step = DraftedStep(**vars(super().schedule()))
        self._draft(step)
        step.is_plain = step.is_plain and not step.drafts
        return step

    def _draft(self, step: DraftedStep) -> None:
        if self.drafter.max_drafts == 0:
            return
        budget = self.max_batch_tokens - step.num_tokens
        for i, seq in enumerate(step.seqs):
            is_edited = isinstance(seq, FullSequence) and seq.edits is not None
            if seq.num_uncomputed_tokens > 1 or is_edited:
                continue
            # the last token that may be sampled is never computed
            num_left = seq.num_prompt + seq.params.max_tokens - len(seq.ids) - 1
            limit = min(budget, self._idle_room(seq), num_left)
            drafts = self.drafter.draft(seq, limit, len(step.seqs))
            has_room = self.blocks.extend(seq, len(seq.ids) + len(drafts))
            assert has_room, "idle_room promised blocks"
            if drafts:
                step.drafts[seq.handle] = drafts
            step.num_scheduled_tokens[i] += len(drafts)
            budget -= len(drafts)

    def _idle_room(self, seq: Sequence) -> int:
        """Tokens after `seq.ids` for which there are blocks, one being left for each running
        sequence."""
        num_idle = max(0, self.blocks.num_free - len(self.running))
        return (len(seq.block_table) + num_idle) * self.blocks.block_size - len(seq.ids)

    def stop(self, seq: Sequence) -> None:
        """Take its row and its blocks from a running sequence, and what was read of it."""
        self.drafter.forget(seq)
        super().stop(seq)

    def commit(self, step: Step) -> None:
        """The step ran; whether the drafts are any of a sequence's own is not known yet."""
        if isinstance(step, DraftedStep):
            pairs = zip(step.seqs, step.num_scheduled_tokens, strict=True)
            known = [count - len(step.drafts.get(seq.handle, ())) for seq, count in pairs]
            step = Step(step.seqs, known)
        super().commit(step)


def accept(blocks: BlockManager, seq: Sequence, num_accepted: int) -> None:
    """The first `num_accepted` drafts have become tokens of `seq`. What the cache holds of the
    others is overwritten when those positions are computed."""
    seq.num_computed_tokens += num_accepted
    size = blocks.block_size
    if seq.num_computed_tokens // size > seq.num_committed_tokens // size:
        blocks.commit(seq)
