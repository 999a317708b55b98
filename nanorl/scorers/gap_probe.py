"""Measures the log-prob gap of a run whose batches hold few tokens of the policy they update.

The gap is between what the rollout engine said of a token as it sampled it and what the trainer
says of it with the same weights. A synchronous step gives it for nothing. Where rollouts go on
beside training, the tokens of a batch are often all of earlier policies, whose weights are gone by
then; those of the present policy wait in groups for later batches, and when it is their turn that
policy is gone as well. So the trainer scores a few of these before it updates (`gap_on`), about a
fiftieth of a step's work.

Where the trainer is the bottleneck, no such group is complete when it is about to update. Then it
may wait for one (`GapProbe`), so seldom that waiting takes a twentieth of the time at most.

Left out: every step of every run. `logp_gap_tokens` says of a step, `logp_gap_share` and
`logp_gap_steps` of a run, on how much the gap was measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from nanoengine.heads.scorer import Policy
from nanoengine.packing import Sample
from nanorl.batch_metrics import action_mask, logp_gap
from nanorl.batching import TrainBatch, samples_of
from nanorl.flow.group import FinishedGroup
from nanorl.flow.transfer_queue import TransferQueue
from nanorl.grpo import Field
from nanorl.types import Rollout

WAIT_SHARE = 0.05
"""Of the time of the steps, what may be spent on waiting for a group to measure on."""
NUM_ROLLOUTS = 2
"""So many are scored: thousands of tokens would say no more."""


class GapProbe:
    """Finds rollouts of the present policy among those that wait for a later batch."""

    def __init__(self, queue: TransferQueue) -> None:
        self._queue = queue
        self._saved_s = 0.0
        self._group_s = 0.0  # that the last group took; 0: none has come yet

    async def find(
        self, version: int, batch: Sequence[FinishedGroup], *, is_playing: bool
    ) -> list[Rollout]:
        """A few rollouts with tokens of `version`, of `batch` if it has any; none where nobody has
        such tokens yet. `is_playing`: more groups are on their way."""
        found = _of(version, batch) or self._waiting(version)
        if not found and is_playing and self._saved_s >= self._group_s > 0:
            await self._wait(version)
            found = self._waiting(version)
        return found

    def note_group(self, seconds: float) -> None:
        """Another group took so long to play."""
        self._group_s = seconds

    def note_step(self, seconds: float) -> None:
        """Another step took so long."""
        self._saved_s += WAIT_SHARE * seconds

    def _waiting(self, version: int) -> list[Rollout]:
        return _of(version, [row.group for row in self._queue.rows])

    async def _wait(self, version: int) -> None:
        clock = asyncio.get_running_loop().time
        start = clock()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._group_s):
                await self._queue.until(lambda: bool(self._waiting(version)))
        self._saved_s -= clock() - start


def gap_on(
    rollouts: Sequence[Rollout],
    version: int,
    engine: Policy,
    batch: TrainBatch,
    *,
    temperature: float,
) -> dict[str, float]:
    """The gap between these rollouts and `engine`, which has the weights of `version`, on the
    tokens that `version` sampled. Nothing where `batch`, which is about to be trained on, has
    such tokens: its first step measures it."""
    if any(_is_present(batch.samples[i]) for places in batch.minibatches()[:1] for i in places):
        return {}
    samples = [one for one in samples_of(rollouts, version) if _is_present(one)]
    found = logp_gap(samples, engine.forward_logprobs(samples, temperature=temperature))
    return {name: value for name, value in found.items() if name.startswith("logp_gap")}


def _is_present(sample: Sample) -> bool:
    """Say whether the policy that is about to be updated sampled a token of it."""
    ages = sample.fields[Field.STALENESS]
    return any(m and not age for m, age in zip(action_mask(sample), ages, strict=True))


def _of(version: int, groups: Sequence[FinishedGroup]) -> list[Rollout]:
    """The first few rollouts with tokens of `version`, all of one group."""
    for group in groups:
        if group.newest_version == version:
            return [one for one in group.rollouts if _has_token_of(version, one)][:NUM_ROLLOUTS]
    return []


def _has_token_of(version: int, rollout: Rollout) -> bool:
    return any(version in sequence.versions for sequence in rollout.sequences)
