"""Starts the ranks of a mesh as actors, for supervised and for reinforcement learning.

    group = await start_ranks(sched, SftRank, layout, (config,), device="cpu")
    await results(group, group.call(SftRank.build))

The ranks are one `WorkerGroup`: one actor for each, of a class that inherits from `MeshRank` and is
made from (layout, rank, *arguments). Rank 0 opens the store in its own process, so no port is
agreed on beforehand and the store lives as long as the mesh.

Left out: restarting. A mesh that lost a rank is gone; whoever holds the run makes another group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from nanoengine.parallel.mesh import Layout
from nanoengine.parallel.rendezvous import LOOPBACK, MeshRank
from nanosched.api import Scheduler
from nanosched.errors import TaskError, WorkerDied
from nanosched.future import Future
from nanosched.worker_group import WorkerGroup

A = TypeVar("A", bound=MeshRank)
R = TypeVar("R")

DEATH_S = 0.5
"""A rank's death may be told after the errors that it causes in the others' collectives."""


async def start_ranks(
    sched: Scheduler,
    cls: type[A],
    layout: Layout,
    arguments: Sequence[Any] = (),
    *,
    device: str = "cpu",
    host: str = LOOPBACK,
    **options: Any,
) -> WorkerGroup[A]:
    """A group whose ranks have met. `device` is "cpu", or "cuda": then each rank has a GPU of its
    own. `host` is where rank 0's store listens: an address that all ranks reach, where they are not
    all on this machine. `options` are those of the actors. Raises what a constructor raised, and
    then leaves no actor behind."""
    options = {"num_cpus": 0, "num_gpus": int(device == "cuda"), **options}
    places: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((layout, rank, *arguments), {}) for rank in range(layout.world)
    ]
    group = sched.group(cls, places, **options)
    try:
        (meeting,) = await results(group, [group.handles[0].call(MeshRank.open_store, host)])
        await results(group, group.call(MeshRank.join, meeting, device))
    except BaseException:
        group.kill()
        raise
    return group


async def results(group: WorkerGroup[Any], futures: Sequence[Future[R]]) -> list[R]:
    """What the ranks return, in order. Raises WorkerDied if a rank died, although its neighbours
    may have failed first because of it; else what the first rank raised that did, without waiting
    for the others, which may never leave a collective that it left out."""
    try:
        return await asyncio.gather(*futures)
    except TaskError as error:
        died = await _death(group)
        if died is not None:
            raise WorkerDied(died) from error
        raise error.cause from error
    except WorkerDied as error:
        raise WorkerDied(await _death(group) or str(error)) from error


async def _death(group: WorkerGroup[Any]) -> str | None:
    """Which rank died and how, if one has; waits a little for the news."""
    waiter = asyncio.ensure_future(_value(group.death))
    done, _ = await asyncio.wait([waiter], timeout=DEATH_S)
    if not done:
        waiter.cancel()
        return None
    return waiter.result()


async def _value(future: Future[R]) -> R:
    return await future
