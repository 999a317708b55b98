"""The groups that a run trains on again, as a checkpoint and the run's store have them.

Left out: which are kept and drawn (flow/replay_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanorl.distributed.roles.role import Role
from nanorl.flow.replay_groups import ReplayGroups, stored_ids, with_contents
from nanorl.observability.store import RolloutStore
from nanorl.options.run_config import RunConfig
from nanorl.options.store_address import training_store
from nanorl.types import Rollout

REPLAY = "replay"
"""Its name in `Cursor.flow`."""


async def open_replay(
    config: RunConfig, flow: Mapping[str, Any], store: Role[RolloutStore]
) -> ReplayGroups:
    """The groups as they were where the run's cursor has `flow`; none at the beginning. ValueError
    where the store lacks rollouts of them."""
    state, stored = flow.get(REPLAY, {}), dict[str, Rollout]()
    for rollout_id in stored_ids(state):
        with suppress(KeyError):  # all that are missing are said together
            stored[rollout_id] = await store.call(RolloutStore.get, rollout_id)
    return restored(config, state, stored)


def replay_of(
    config: RunConfig, flow: Mapping[str, Any], get: Callable[[str], Rollout]
) -> ReplayGroups:
    """The same, where `get` reads a rollout of the run and raises KeyError where there is none."""
    state = flow.get(REPLAY, {})
    return restored(config, state, _stored(state, get))


def restored(
    config: RunConfig, state: Mapping[str, Any], stored: Mapping[str, Rollout]
) -> ReplayGroups:
    """The groups of a state and of what the store has of them."""
    rl = config.rl
    lets_go = config.keep_rollout_steps or config.keep_rollout_days or config.keep_rollout_mb
    replay = ReplayGroups(
        rl.replay,
        rl.algorithm,
        seed=config.seed,
        num_fresh=rl.tasks_per_step,
        store_keeps=not lets_go,
    )
    replay.load(state, stored)
    return replay


def flow_of_fork(flow: Mapping[str, Any], run: Path, config: RunConfig) -> dict[str, Any]:
    """The flow of a checkpoint of the run in that folder, for a run whose store has none of its
    rollouts: they are in it. ValueError where the store lacks any."""
    state = flow.get(REPLAY, {})
    if not stored_ids(state):
        return dict(flow)
    with RolloutStore(training_store(run, config.store), is_read_only=True) as store:
        stored = _stored(state, store.get)
    restored(config, state, stored)  # refuses what is missing
    return {**flow, REPLAY: with_contents(state, stored)}


def _stored(state: Mapping[str, Any], get: Callable[[str], Rollout]) -> dict[str, Rollout]:
    found = {}
    for rollout_id in stored_ids(state):
        with suppress(KeyError):
            found[rollout_id] = get(rollout_id)
    return found
