"""Runs the rollouts of one task as a group: coroutines that share the engine and the sandbox.

While one rollout waits for its tool the others decode. A rollout whose status is FAILED
(infrastructure, never the program's doing) is run again with the same seed, so a retry changes
nothing but time; if it keeps failing the group goes on without it, and it is kept for the record.
Where nothing but failures comes any more, the run ends: `RolloutsFailed` says what they died of.
Left out: when a group may start (trainer.py) and what is done with it (trainer.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nanoinfer.params import SamplingParams
from nanorl.agents.concurrency import ConcurrencyLimit
from nanorl.agents.context import Generator
from nanorl.agents.kit import Kit
from nanorl.envs.base import Opening
from nanorl.task import Task, derive_seed
from nanorl.types import Rollout, Status, Withheld

MOST_LOST = 8
"""So many rollouts in a row, of at least two tasks, that failed for good end the run."""


class RolloutsFailed(RuntimeError):  # noqa: N818 - named as what happened
    """Rollouts failed again and again; the message has what the last one died of."""


class PlayRollout(Protocol):
    """Plays one task to its end and scores it (see agents/loop.py)."""

    async def __call__(
        self, task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout: ...


class GroupHindsight(Protocol):
    """Writes what a teacher reads of a group that has been played (algorithms/hindsight.py)."""

    def write(self, task: Task, rollouts: Sequence[Rollout]) -> None: ...

    def forget(self, group_id: str) -> None: ...


class RolloutCollector:
    """Plays groups, and keeps the attempts that failed until `take_failed`."""

    def __init__(
        self,
        play: PlayRollout,
        *,
        run_seed: int,
        max_retries: int = 2,
        most_lost: int = MOST_LOST,
        hindsight: GroupHindsight | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most_lost` is the number of rollouts that may fail for good in a row. `hindsight` writes
        what a teacher reads of a group that has been played, `clock` tells the time in seconds."""
        self.play = play
        self._hindsight = hindsight
        self.most_lost = most_lost
        self._clock = clock
        self.run_seed = run_seed
        self.max_retries = max_retries
        self._failed: list[Rollout] = []
        self._lost: list[Rollout] = []  # those that failed for good since one succeeded
        self._running: dict[str, asyncio.Future[list[Rollout]]] = {}  # by group_id
        self._cut: set[str] = set()
        self._busy_s = 0.0
        self._taken_s = 0.0
        self._busy_since = 0.0  # while a group is being played

    async def stop(self) -> None:
        """Cancel the groups that are being played, and wait until they have let go."""
        running = list(self._running.values())
        for group in running:
            group.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def cut(self, group_ids: Collection[str]) -> None:
        """Give up these groups, and wait until they have let go: their callers get no rollout."""
        running = [self._running[name] for name in group_ids if name in self._running]
        self._cut |= self._running.keys() & set(group_ids)
        for group in running:
            group.cancel()
        await asyncio.gather(*running, return_exceptions=True)

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
        now = self._clock()
        self._busy_s += now - self._busy_since
        self._busy_since = now

    async def run_group(
        self, task: Task, *, group_id: str, size: int, sampling: SamplingParams
    ) -> list[Rollout]:
        """`size` rollouts of one task, ordered by member; without those that kept failing, none if
        the group was cut.

        RolloutsFailed once there have been `most_lost` of these in a row.
        """
        members = [
            self._run_member(task, group_id, f"{group_id}-m{member}", sampling)
            for member in range(size)
        ]
        # Members share their prompt, so they start together: the engine then reads it once.
        group = asyncio.gather(*members)
        if not self._running:
            self._busy_since = self._clock()
        self._running[group_id] = group
        try:
            rollouts = await group
        except asyncio.CancelledError:
            # Cut groups are given up on purpose; any other cancellation is the caller's own.
            if group_id not in self._cut:
                raise
            rollouts = []
        finally:
            self._pass_time()
            self._cut.discard(group_id)
            del self._running[group_id]
        self._check_lost()
        # A member that kept failing says nothing of the policy, so the advantages go without it.
        played = [rollout for rollout in rollouts if rollout.status != Status.FAILED]
        if self._hindsight is not None:
            self._hindsight.write(task, played)
            self._hindsight.forget(group_id)
        return played

    async def _run_member(
        self, task: Task, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout:
        # Of names alone: the same member gets the same seed when a resumed run plays it again.
        seed = derive_seed(self.run_seed, "rollout", rollout_id)
        params = replace(sampling, seed=seed)
        for attempt in range(self.max_retries + 1):
            rollout = await self.play(
                task, group_id=group_id, rollout_id=rollout_id, sampling=params
            )
            if rollout.status != Status.FAILED:
                self._lost.clear()
                return rollout
            # Under an id of its own, for the retry is stored under the member's.
            self._failed.append(replace(rollout, rollout_id=f"{rollout_id}-failed{attempt}"))
        self._lost.append(rollout)
        return rollout

    def _check_lost(self) -> None:
        """One task that nobody can play costs its group; when no other can be played either, there
        is nothing left to train on."""
        num_tasks = len({rollout.task_id for rollout in self._lost})
        if len(self._lost) >= self.most_lost and num_tasks > 1:
            raise RolloutsFailed(
                f"{len(self._lost)} rollouts in a row failed, each {self.max_retries + 1} times, "
                f"the last one of: {self._lost[-1].error or 'an unknown cause'}. Mend that, and go "
                "on with --resume"
            )


class AgentCollector(RolloutCollector):
    """Plays the rollouts of a kit, as many at a time as the engine's cache has room for."""

    def __init__(
        self, kit: Kit, generator: Generator, concurrency: ConcurrencyLimit, **options: Any
    ) -> None:
        """`options` are those of `RolloutCollector`."""
        super().__init__(self.play_task, **options)
        self.kit, self.generator, self.concurrency = kit, generator, concurrency

    async def play_task(
        self,
        task: Task,
        *,
        group_id: str,
        rollout_id: str,
        sampling: SamplingParams,
        withheld: Withheld = "",
        openings: dict[str, Opening] | None = None,
    ) -> Rollout:
        """One rollout of the policy, as soon as there is room for it; what it reads first is noted
        in `openings`."""
        # Held for the whole rollout: one that waits for its tool still has its blocks in the cache.
        async with self.concurrency.place() as place:
            return await self.kit.play(
                task,
                place.watch(self.generator),
                group_id=group_id,
                rollout_id=rollout_id,
                sampling=sampling,
                withheld=withheld,
                openings=openings,
            )
