"""A drafter that knows what will be sampled and errs at random: drafts of any quality."""

import random
from collections.abc import Callable

from nanoinfer.engine import LLMEngine
from nanoinfer.sequence import Sequence
from nanoinfer.variants.speculative import Drafter, DraftingScheduler


class PlantedDrafter(Drafter):
    """`future(seq, n)` are up to n tokens that follow `seq.ids`; each draft is one of them with
    chance `is_right`, else any token."""

    def __init__(
        self,
        future: Callable[[Sequence, int], list[int]],
        vocab: int,
        *,
        is_right: float,
        max_drafts: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__(max_drafts)
        self._future = future
        self._vocab = vocab
        self._is_right = is_right
        self._draw = random.Random(seed)

    def draft(self, seq: Sequence, limit: int, num_seqs: int) -> list[int]:
        super().draft(seq, 0, num_seqs)  # its tables grow and are released as ever
        num_drafts = self._draw.randint(0, min(limit, self.max_drafts))
        known = self._future(seq, num_drafts)
        known += [0] * (num_drafts - len(known))  # beyond the end of the request
        return [
            t if self._draw.random() < self._is_right else self._draw.randrange(self._vocab)
            for t in known
        ]


def plant(engine: LLMEngine, drafter: Drafter) -> None:
    sizes = engine.config.max_batch_tokens, engine.config.max_num_seqs
    engine._scheduler = DraftingScheduler(engine._blocks, *sizes, drafter)
