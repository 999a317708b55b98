"""`JudgeRouters`: how the rewards of a collector reach the judges, which are roles of their own.

A question goes to an engine of its model, waits where there is none, and is asked again from the
beginning where one dies: the reply depends on weights, prompt and attempt alone, so a death changes
no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nanorl.distributed.roles.replica_clients import ReplicaClient
from nanorl.distributed.roles.router import Router
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.rewards.judge_models import JudgeModel
from nanorl.options.run_judges import folder_judges

JudgeClients = Mapping[JudgeModel, Mapping[str, ReplicaClient]]
"""The engines that take questions, by their model and their name."""


class JudgeRouters:
    """A router for each model that rewards ask."""

    def __init__(self, kind: EnvKind) -> None:
        self._routers: dict[JudgeModel, Router] = {}
        for judge in folder_judges(kind):
            # Who cannot be started again ends the run, so a question waits as long as it takes.
            router = self._routers.setdefault(judge.model, Router(wait_s=math.inf))
            judge.ask(router)

    def set_judges(self, clients: JudgeClients) -> None:
        """From now on there are these."""
        for model, router in self._routers.items():
            router.set_replicas(clients.get(model, {}))
