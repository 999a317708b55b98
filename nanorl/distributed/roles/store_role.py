"""The store role: the run's rollouts, in a process of its own or this one.

Storing a group replaces what an earlier attempt stored of it, so a call that was cut off is simply
made again and each rollout is there once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from nanorl.distributed.roles.actor_role import ActorRole, OnRestart, getting_ready, heard
from nanorl.observability.store import RolloutStore
from nanosched import ActorHandle, Scheduler, SchedulerLost

CLOSE_S = 5.0


def store_role(
    scheduler: Scheduler, address: str, *, start_s: float, on_restart: OnRestart | None = None
) -> ActorRole[RolloutStore]:
    """The store at that address (nanorl/options/store_address.py)."""

    async def start() -> ActorHandle[RolloutStore]:
        actor = scheduler.actor(RolloutStore, num_cpus=0).remote(address)
        async with getting_ready(scheduler, actor, "store", start_s) as handle:
            await handle.call(RolloutStore.heartbeat)
        return handle

    return ActorRole("store", "store", scheduler, start, on_restart=on_restart)


async def close_store(role: ActorRole[RolloutStore]) -> None:
    """Have the file closed, which folds its write-ahead log back into it; a store that is dead or
    does not answer leaves the log beside it, and nothing is lost."""
    handle = role.current
    role.close()
    if handle is not None:
        with suppress(TimeoutError, SchedulerLost):
            async with asyncio.timeout(CLOSE_S):
                await heard(handle.call(RolloutStore.close))
