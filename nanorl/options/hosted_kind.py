"""The environment of a run whose episodes are played in worker processes.

Tasks and demonstrators stay in the run's own process. A worker makes everything that an episode
needs from the options alone: the user's class, a tokenizer, a sandbox of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.base import Environment, Services
from nanorl.envs.env_kind import Demonstrator, EnvKind, TaskSet
from nanorl.envs.hosting.environment import EpisodeHost, HostedEnvironment
from nanorl.envs.hosting.host_pool import HostingLimits, WorkerPool
from nanorl.envs.http_record.record_config import HttpConfig
from nanorl.envs.judged import JudgedKind, judges_of
from nanorl.envs.rewards.load import REWARDS
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind, run_sandbox, run_tokenizer
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.task import Task

if TYPE_CHECKING:
    from nanorl.envs.http_record.record_access import HttpAccess


def host_kind(
    kind: EnvKind, config: RunConfig, folder: Path, num_workers: int, http: HttpAccess | None = None
) -> EnvKind:
    """`kind` with its episodes in worker processes. `--reward judge` is asked in this process all
    the same: one engine reads the answers of all workers, instead of a copy in each. So is any
    judge of groups, whose episodes are played by several workers."""
    if isinstance(kind, JudgedKind) and _is_asked_here(kind, config):
        alone = replace(config, reward="", reward_args=())
        return type(kind)(HostedKind(kind.kind, alone, folder, num_workers, http), kind.reward)
    return HostedKind(kind, config, folder, num_workers, http)


def _is_asked_here(kind: JudgedKind, config: RunConfig) -> bool:
    is_ours = bool(judges_of(kind)) and config.reward in REWARDS
    return is_ours or callable(getattr(kind.reward, "score_group", None))


class HostedKind:
    """`kind`, with its episodes in `num_workers` processes."""

    def __init__(
        self,
        kind: EnvKind,
        config: RunConfig,
        folder: Path,
        num_workers: int,
        http: HttpAccess | None = None,
    ) -> None:
        """`folder` is the model's, for its tokenizer; `http` is the way to the recording proxy, all
        that the workers then reach."""
        self.kind = kind
        self.name, self.loop, self.defaults = kind.name, kind.loop, kind.defaults
        self.has_tools, self.has_teacher = kind.has_tools, kind.has_teacher
        self.needs_sandbox = False  # each worker has its own
        one = replace(config.tool, workers=1)
        alone = replace(config, env_workers=0, tool=one, http=HttpConfig())
        self._pool = WorkerPool(
            EpisodeHost,
            (WorkerSide, alone, folder, http),
            num_workers=num_workers,
            limits=HostingLimits(deadline_s=config.env_deadline_s),
            preload=(__name__,),
        )

    def tasks(self, seed: int) -> TaskSet:
        return self.kind.tasks(seed)

    def open(self, services: Services) -> Environment:
        return HostedEnvironment(self._pool, services.is_tool_enabled)

    def demonstrator(
        self, task: Task, rng: random.Random, tokenizer: ChatTokenizer, episode: Environment
    ) -> Demonstrator:
        return self.kind.demonstrator(task, rng, tokenizer, episode)

    def close(self) -> None:
        self._pool.close()
        self.kind.close()


class WorkerSide:
    """The worker's side of a hosted environment, which opens its episodes."""

    def __init__(self, config: RunConfig, folder: Path, http: HttpAccess | None) -> None:
        if http is not None:
            http.enter()  # before any of the user's code
        self._config = config
        self._kind = run_kind(config)
        if judges_of(self._kind):
            from nanorl.options.run_judges import settle_judges  # here: few runs have judges

            settle_judges(config, self._kind)
        self._tokenizer = run_tokenizer(config, folder)
        self._sandbox: WorkspaceSandbox | None = None
        if self._kind.needs_sandbox:
            self._sandbox = run_sandbox(config)

    def open(self, is_tool_enabled: bool) -> Environment:
        """An episode in this process."""
        return self._kind.open(
            Services(
                tokenizer=self._tokenizer,
                sandbox=self._sandbox,
                timeout_s=self._config.tool.timeout_s,
                is_tool_enabled=is_tool_enabled,
            )
        )
