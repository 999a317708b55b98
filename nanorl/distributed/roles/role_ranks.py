"""Starts the ranks of a mesh and waits for them, for supervised and for reinforcement learning.

    group = sched.group(SftRank, [((config, rank), {}) for rank in range(layout.world)])
    await start_ranks(group)
    await results(group, group.call(SftRank.take_steps))

Rank 0 opens the store that introduces them in its own process, so no port is agreed on beforehand
and the store lives as long as the mesh.

Left out: restarting. A mesh that lost a rank is gone; whoever holds the run makes another group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from nanoengine.parallel.meeting_store import MeetingPoint
from nanosched import Future, TaskError, WorkerDied, WorkerGroup

R = TypeVar("R")

DEATH_S, REFUSAL_S = 10.0, 0.5
"""A rank's death may be told after the errors that it causes in the others' collectives, the later
the busier the machine. What a rank refuses (ValueError) is no such error."""


class Rank(Protocol):
    """The interface of an actor that runs one rank."""

    async def open_store(self) -> MeetingPoint:
        """For rank 0: where the others find it, whichever machines they are on."""
        ...

    async def build(self, meeting: MeetingPoint | None) -> None:
        """Take this rank's place in the mesh, None for a single rank, and make what it needs."""
        ...


async def start_ranks(group: WorkerGroup[Any]) -> None:
    """Introduce the ranks to each other and have them build; raises what `results` does."""
    meeting = None
    if len(group) > 1:
        (meeting,) = await results(group, [group.handles[0].call(Rank.open_store)])
    await results(group, group.call(Rank.build, meeting))


async def results(group: WorkerGroup[Any], futures: Sequence[Future[R]]) -> list[R]:
    """Return the ranks' results, in order. Raises WorkerDied if a rank died, although its
    neighbours may have failed first because of it; else the error of the first rank that failed,
    without waiting for the others, which may never leave a collective that it left out."""
    try:
        return await asyncio.gather(*futures)
    except (TaskError, WorkerDied) as error:
        cause = error.cause if isinstance(error, TaskError) else error
        died = await _first_death(group, REFUSAL_S if isinstance(cause, ValueError) else DEATH_S)
        if died is not None:
            raise WorkerDied(died) from error
        raise cause from None


async def _first_death(group: WorkerGroup[Any], limit_s: float) -> str | None:
    """Say which rank died and how, if one did; waits a little for the news."""
    waiter = asyncio.ensure_future(_value(group.death))
    done, _ = await asyncio.wait([waiter], timeout=limit_s)
    if not done:
        waiter.cancel()
    return waiter.result() if done else None


async def _value(future: Future[R]) -> R:
    return await future
