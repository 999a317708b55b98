"""The parts of a kit that a run in several environments has for each: processes, limits, a loop.

Left out: the names and arguments of the environments (env_mix.py), and their tasks (envs/mix.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nanorl.agents.loop import Agent
from nanorl.agents.mixed_agent import MixedAgent
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.mix import EnvMix
from nanorl.options.agent_kit import run_hosted, run_loop
from nanorl.options.env_mix import alone, member_limits, members_of
from nanorl.options.run_config import RunConfig

if TYPE_CHECKING:
    from nanorl.envs.http_record.record_access import HttpAccess


def hosted_members(
    kind: EnvKind, config: RunConfig, folder: Path, http: HttpAccess | None
) -> EnvKind:
    """The mix with the episodes of each environment where they would be if it were alone."""
    members = members_of(config)

    def hosted(name: str, one: EnvKind) -> EnvKind:
        return run_hosted(one, alone(config, members[name]), folder, http)

    return cast(EnvMix, kind).each(hosted)


def mixed_agent(config: RunConfig, kind: EnvKind) -> Callable[..., Agent]:
    """Make agents that play every task as its environment wants it. ValueError for limits that do
    not fit together, and for a loop that there is not."""
    players = {
        name: (
            member_limits(config, cast(EnvMix, kind).members[name], member),
            run_loop(config, cast(EnvMix, kind).members[name]),
        )
        for name, member in members_of(config).items()
    }
    return partial(MixedAgent, members=players)
