"""What each step of the warm start trains on: copy drills first, then a sloppy teacher's traces.

A function of (seed, step), so a resumed run trains on the same; the traces of an earlier epoch,
which it does not have any more, it plays again with the same result.
Left out: the steps themselves (run.py), what a trace is (sft.py, data/teachers.py).
"""

from __future__ import annotations

import asyncio
import math
import random

from nanoengine.packing import Sample
from nanorl.assembly import Parts
from nanorl.config import RunConfig
from nanorl.data.drills import copy_drill
from nanorl.seeds import derive_seed
from nanorl.sft import drill_samples, sft_samples


class WarmStart:
    """The samples of a run's supervised steps."""

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self._played: dict[int, list[Sample]] = {}  # while a later epoch needs them again

    async def samples(self, step: int) -> list[Sample]:
        """May be called ahead of time: the teacher plays in the sandbox while an optimizer runs."""
        warm = self.config.warm_start
        num_drills = math.ceil(warm.drill_fraction * warm.steps)
        if step < num_drills:
            return self._drills(step)
        an_epoch = max(1, math.ceil((warm.steps - num_drills) / warm.epochs))
        number = num_drills + (step - num_drills) % an_epoch
        samples = self._played.get(number)
        if samples is None:
            samples = await self._play(number)
            if warm.epochs > 1:
                self._played[number] = samples
        return samples

    def _drills(self, step: int) -> list[Sample]:
        rng = random.Random(derive_seed(self.config.seed, "drill", step))
        vocab, count = self.parts.tokenizer.vocab_size, self.config.warm_start.traces_per_step
        return drill_samples([copy_drill(rng, vocab) for _ in range(count)])

    async def _play(self, number: int) -> list[Sample]:
        tasks = self.parts.tasks.warm_start.batch(number, self.config.warm_start.traces_per_step)
        plays = [
            self.parts.play_teacher(task, rollout_id=f"teacher-{number}-{i}")
            for i, task in enumerate(tasks)
        ]
        return sft_samples(await asyncio.gather(*plays))
