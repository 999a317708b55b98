"""`EvaluationBeside`: an evaluation that plays while the trainer makes its next step.

Where trainer and replicas have processes of their own, nobody has to wait for an evaluation but the
next publication: until it is over the replicas keep the weights that it is about. The rollouts of
the next step are of the same weights, and play beside it.

    after 8 steps    their weights are saved, the replicas have them; the evaluation begins
    the next step    its rollouts, the optimizer's step; its publication waits for the evaluation,
                     after which that checkpoint, still the newest, is kept if it is the best

Left out: where trainer and replicas take turns (in one process, or on one device): there the
evaluation is a pause (rl_phase.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from nanorl.learner import Publisher
from nanorl.options.run_config import RunConfig
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.running_evaluation import RunningEvaluation


def has_free_replicas(config: RunConfig) -> bool:
    """Say whether replicas may sample while the trainer trains."""
    return config.cluster.backend != "inline" and config.cluster.placement != "colocated"


class EvaluationBeside:
    """The evaluation that is under way, if there is one."""

    def __init__(self, evaluation: RunningEvaluation, checkpoints: RunCheckpoints) -> None:
        self._evaluation, self._checkpoints = evaluation, checkpoints
        self._playing: asyncio.Task[bool] | None = None

    async def begin(self) -> None:
        """Save these weights, for they may be the best, and start to play."""
        await self._checkpoints.save_these()
        self._playing = asyncio.create_task(self._evaluation.play())

    async def ended(self) -> None:
        """Wait for its end, and keep the checkpoint of the best one. Raises what it failed of."""
        if self._playing is None:
            return
        is_best = await self._playing
        self._playing = None
        if is_best:
            self._checkpoints.keep_best()

    async def close(self) -> None:
        """Break it off: a run that goes on makes it anew."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
            self._playing = None


class WaitingPublisher:
    """A publisher that waits before it changes the replicas' weights."""

    def __init__(self, publisher: Publisher, ended: Callable[[], Awaitable[None]]) -> None:
        self._publisher, self._ended = publisher, ended

    async def publish(self, version: int) -> float:
        """Publish as soon as nobody needs the old weights; returns the seconds of that alone."""
        await self._ended()
        return await self._publisher.publish(version)

    def lent(self) -> AbstractAsyncContextManager[None]:
        """As the publisher's own: the trainer has devices of its own."""
        return self._publisher.lent()
