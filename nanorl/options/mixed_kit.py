"""The parts of a kit that a run in several environments has for each: processes, limits, a loop.

Left out: the names and arguments of the environments (env_mix.py), and their tasks (envs/mix.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from nanorl.agents.loop import Agent, AgentLoop
from nanorl.agents.mixed_agent import MixedAgent
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.mix import EnvMix
from nanorl.options.env_mix import alone, member_limits, members_of
from nanorl.options.run_config import RunConfig

Host = Callable[[EnvKind, RunConfig], EnvKind]
"""Puts the episodes of one environment where they belong, in a run of these options."""


def hosted_members(kind: EnvKind, config: RunConfig, host: Host) -> EnvKind:
    """The mix with the episodes of each environment where they would be if it were alone."""
    members = members_of(config)
    return cast(EnvMix, kind).each(lambda name, one: host(one, alone(config, members[name])))


def mixed_agent(
    config: RunConfig, kind: EnvKind, loop_of: Callable[[RunConfig, EnvKind], AgentLoop]
) -> Callable[..., Agent]:
    """Make agents that play every task as its environment wants it. ValueError for limits that do
    not fit together, and for a loop that there is not."""
    kinds = cast(EnvMix, kind).members
    players = {
        name: (member_limits(config, kinds[name], member), loop_of(config, kinds[name]))
        for name, member in members_of(config).items()
    }
    return partial(MixedAgent, members=players)
