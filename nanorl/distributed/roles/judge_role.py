"""A judge as an actor: an inference engine whose weights never change, which rewards ask.

It is a `Replica` to which nobody brings weights, with a limit on the time of a reply.
Left out: what is asked and what a reply means (nanorl/envs/rewards/judge.py).
"""

from __future__ import annotations

import asyncio

from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe


class JudgeRole(Replica):
    """An engine that answers questions, each in `timeout_s`."""

    def __init__(self, recipe: ReplicaRecipe, *, timeout_s: float) -> None:
        super().__init__(recipe)
        self._timeout_s = timeout_s

    async def generate(
        self,
        ids: list[int],
        params: SamplingParams,
        name: str | None = None,
        sampled: Output | None = None,
    ) -> Output:
        """As `Replica.generate`. TimeoutError for a reply that takes longer than the limit."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await super().generate(ids, params, name, sampled)
        except TimeoutError:
            # An engine that hangs is no slow one: it is silent here until its watch has it killed,
            # and then a successor answers the same try. Another try would give another verdict.
            await self._generator.beat()
            raise
