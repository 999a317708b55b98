"""Simulated rollouts: an agent whose answers have a drawn length and whose tools take a given time.

`SimulatedAgent` is what the real collector (agents/collector.py) plays groups with: it asks the
real router turn by turn and sleeps where a tool would run.
Left out: failures, and agents whose number of turns depends on what they read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace

from nanoinfer.params import SamplingParams
from nanorl.distributed.roles.router import Router
from nanorl.inspection.simulate.lengths import draw_length
from nanorl.inspection.simulate.simulated_replica import RequestSize
from nanorl.inspection.simulate.simulation_config import RolloutLoad
from nanorl.task import Task, derive_seed, derive_turn_seed
from nanorl.types import Rollout

BEGIN_S, END_S, ANSWER = "begin_s", "end_s", "answer_tokens"
"""Metrics of a simulated rollout: when it began and ended, and the real tokens of its answer."""


class SimulatedAgent:
    """Plays one rollout; a `PlayRollout`."""

    def __init__(
        self,
        workload: RolloutLoad,
        router: Router,
        sizes: dict[int, RequestSize],
        *,
        quantum: int,
        seed: int,
    ) -> None:
        """`sizes` is where the replicas look up what a request really holds."""
        self.workload, self.router, self.sizes = workload, router, sizes
        self.quantum, self.seed = quantum, seed
        self._own_work = asyncio.Lock()

    async def __call__(
        self, task: Task, *, group_id: str, rollout_id: str, sampling: SamplingParams
    ) -> Rollout:
        loop, work = asyncio.get_running_loop(), self.workload
        begin_s = loop.time()
        if work.agent_s:
            async with self._own_work:
                await asyncio.sleep(work.agent_s)
        answer = draw_length(work.answer, self.seed, task.task_id, rollout_id)
        ids, versions = self._prompt(task), [-1] * self._num_quanta(work.prompt)
        num_read = work.prompt  # real tokens
        for number, (num_tokens, ends_turn) in enumerate(self._requests(answer)):
            seed = derive_turn_seed(sampling.seed, number)
            self.sizes[seed] = RequestSize(num_read, num_tokens)
            most = max(1, round(num_tokens / self.quantum))
            params = replace(sampling, seed=seed, max_tokens=most)
            output = await self.router.generate(ids, params)
            del self.sizes[seed]
            ids, versions = ids + output.ids, versions + output.versions
            num_read += num_tokens
            if ends_turn:
                await asyncio.sleep(work.tool_s)
                observation = _tokens(math.ceil(work.observation / self.quantum), seed, "tool")
                ids, versions = ids + observation, versions + [-1] * len(observation)
                num_read += work.observation
        return Rollout(
            task_id=task.task_id,
            group_id=group_id,
            rollout_id=rollout_id,
            tokens=ids,
            loss_mask=[int(version >= 0) for version in versions],
            logps=[0.0] * len(ids),
            versions=versions,
            metrics={BEGIN_S: begin_s, END_S: loop.time(), ANSWER: answer},
        )

    def _requests(self, answer: int) -> Iterator[tuple[int, bool]]:
        """The tokens of each request, and whether a tool answers it."""
        num_turns = min(self.workload.turns, answer)
        for turn in range(num_turns):
            left = answer * (turn + 1) // num_turns - answer * turn // num_turns
            while left:
                num_tokens = min(left, self.workload.chunk or left)
                left -= num_tokens
                yield num_tokens, left == 0 and turn + 1 < num_turns

    def _prompt(self, task: Task) -> list[int]:
        return _tokens(self._num_quanta(self.workload.prompt), "prompt", task.task_id)

    def _num_quanta(self, prompt: int) -> int:
        """The last token stands alone: it is what a request computes whose prompt is cached."""
        return math.ceil((prompt - 1) / self.quantum) + 1


def _tokens(count: int, *names: object) -> list[int]:
    """Token ids that nobody else has."""
    first = derive_seed(*names) >> 16
    return list(range(first, first + count))


class SimulatedTasks:
    """Tasks without content; number n is simulated-n."""

    def batch(self, step: int, n: int) -> list[Task]:
        """The `n` tasks of a step."""
        numbers = range(step * n, step * n + n)
        return [
            Task("", task_id=f"simulated-{i}", split="train", kind="simulated") for i in numbers
        ]
