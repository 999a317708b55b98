"""`StepMeasures`: what a run adds to the metrics of a step of RL, beside what trainer and learner
measured: how long roles were idle, how fast rollouts were played, the processor's time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nanorl.distributed.roles.base import Roles
from nanorl.distributed.roles.collector_role import CollectorRole


class StepMeasures:
    """Measures from one step to the next."""

    def __init__(self, roles: Roles, *, counts_http: bool, has_judges: bool) -> None:
        """`counts_http`: the collector has a recording proxy, which counts what it has done.
        `has_judges`: its rewards may ask LLM judges, which cost something."""
        self._roles, self._counts_http, self._has_judges = roles, counts_http, has_judges
        self._cpu_s = 0.0  # this process's, when the last step ended

    async def begin(self) -> None:
        """The first step begins here."""
        await self._roles.idle_shares()
        self._cpu_s = time.process_time()

    async def take(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The measures of the step that has these metrics."""
        collector = self._roles.collector
        found = dict[str, Any](await self._roles.idle_shares())
        found |= await collector.call(CollectorRole.take_playing)
        if self._counts_http:
            found |= await collector.call(CollectorRole.take_http_counts)
        if self._has_judges:
            found |= await collector.call(CollectorRole.take_judge_costs)
        return found | self._rollout_speed(metrics) | self._cpu_time()

    def _rollout_speed(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Say how fast rollouts were played, and by how many replicas."""
        busy_s, control = metrics["rollout_s"], self._roles.control
        speed = {"rollout_tokens_per_s": metrics["action_tokens"] / busy_s} if busy_s else {}
        if control is not None:
            speed["num_replicas"] = sum(
                role.kind == "replica" and role.state == "ready" for role in control.roles()
            )
        return speed

    def _cpu_time(self) -> dict[str, float]:
        """Measure this process alone: with the backend inline both engines and the agents; a
        sandbox's programs never."""
        before, self._cpu_s = self._cpu_s, time.process_time()
        return {"cpu_s": self._cpu_s - before}
