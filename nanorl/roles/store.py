"""The store role: the run's rollouts, in a process of its own or this one.

Storing a group replaces what an earlier attempt stored of it, so a call that was cut off is simply
made again and each rollout is there once.
"""

from __future__ import annotations

from pathlib import Path

from nanorl.roles.role import OnRestart, Role, getting_ready
from nanorl.store import RolloutStore
from nanosched import ActorHandle, Scheduler


def store_role(
    scheduler: Scheduler, path: Path, *, start_s: float, on_restart: OnRestart | None = None
) -> Role[RolloutStore]:
    """The store of the run whose file is `path`."""

    async def start() -> ActorHandle[RolloutStore]:
        actor = scheduler.actor(RolloutStore, num_cpus=0).remote(path)
        async with getting_ready(scheduler, actor, "store", start_s) as handle:
            await handle.call(RolloutStore.heartbeat)
        return handle

    return Role("store", "store", scheduler, start, on_restart=on_restart)
