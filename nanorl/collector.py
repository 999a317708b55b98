"""Runs the rollouts of one task as a group: coroutines that share the engine and the sandbox.

While one rollout waits for its tool the others decode. A rollout whose status is FAILED
(infrastructure, never the program's doing) is run again with the same seed, so a retry changes
nothing but time; if it keeps failing the group goes on without it, and it is kept for the record.
Left out: when a group may start (trainer.py) and what is done with it (trainer.py).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Protocol

from nanoinfer.params import SamplingParams
from nanorl.types import Rollout, Status, Task, derive_seed


class PlayRollout(Protocol):
    """Plays one task to its end and scores it (see agents/loop.py)."""

    async def __call__(
        self, task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout: ...


class RolloutCollector:
    """Plays groups, and keeps the attempts that failed until `take_failed`."""

    def __init__(
        self,
        play: PlayRollout,
        *,
        run_seed: int,
        max_retries: int = 2,
    ) -> None:
        self.play = play
        self.run_seed = run_seed
        self.max_retries = max_retries
        self._failed: list[Rollout] = []
        self._running: set[asyncio.Future[list[Rollout]]] = set()
        self._busy_s = 0.0
        self._taken_s = 0.0
        self._busy_since = 0.0  # while a group is being played

    async def stop(self) -> None:
        """Cancel the groups that are being played, and wait until they have let go."""
        for group in self._running:
            group.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def take_failed(self) -> list[Rollout]:
        """The failed attempts since the last call, under ids of their own."""
        failed, self._failed = self._failed, []
        return failed

    def take_busy_s(self) -> float:
        """Seconds since the last call in which at least one group was being played."""
        if self._running:
            self._pass_time()
        busy_s, self._busy_s = self._busy_s, 0.0
        self._taken_s += busy_s
        return busy_s

    def total_busy_s(self) -> float:
        """The same since it was made."""
        if self._running:
            self._pass_time()
        return self._taken_s + self._busy_s

    def _pass_time(self) -> None:
        now = time.perf_counter()
        self._busy_s += now - self._busy_since
        self._busy_since = now

    async def run_group(
        self, task: Task, *, group_id: str, size: int, sampling: SamplingParams
    ) -> list[Rollout]:
        """`size` rollouts of one task, ordered by member; without those that kept failing."""
        members = [
            self._run_member(task, group_id, f"{group_id}-m{member}", sampling)
            for member in range(size)
        ]
        group = asyncio.gather(*members)
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running.add(group)
        try:
            rollouts = await group
        finally:
            self._pass_time()
            self._running.discard(group)
        return [rollout for rollout in rollouts if rollout.status != Status.FAILED]

    async def _run_member(
        self, task: Task, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout:
        seed = derive_seed(self.run_seed, "rollout", rollout_id)
        params = replace(sampling, seed=seed)
        for attempt in range(self.max_retries + 1):
            rollout = await self.play(
                task, group_id=group_id, rollout_id=rollout_id, sampling=params
            )
            if rollout.status != Status.FAILED:
                break
            self._failed.append(replace(rollout, rollout_id=f"{rollout_id}-failed{attempt}"))
        return rollout
