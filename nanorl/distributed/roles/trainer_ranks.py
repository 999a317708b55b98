"""`TrainerRanks`: the processes that train, which die and are started again as one.

Each attempt is a new worker group with the weights that the run began with; whoever runs the
training goes back to a checkpoint then (nanorl/run/run.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from nanorl.distributed.roles.actor_role import (
    Attempts,
    Pulse,
    heard,
    limited_start,
    status_of,
    until_dead,
)
from nanorl.distributed.roles.device_turns import DeviceTurns
from nanorl.distributed.roles.policy_role import (
    PolicyRank,
    PolicyRecipe,
    RankedEngine,
    TrainerLost,
    settled,
    start_trainer,
)
from nanorl.distributed.roles.role import RoleLost
from nanorl.distributed.roles.role_starter import RoleStarter
from nanorl.distributed.weights.offer import Offer
from nanorl.distributed.weights.transport import Transport
from nanorl.observability.monitor.monitor_control import RoleState, RoleStatus
from nanorl.options.parts import num_threads
from nanosched import ActorHandle, SchedulerLost, WorkerDied, WorkerGroup


class TrainerRanks:
    """All ranks of the training engine of a run."""

    def __init__(self, starter: RoleStarter, turns: DeviceTurns) -> None:
        self._starter, self._turns = starter, turns
        self._group: WorkerGroup[PolicyRank] | None = None
        self._engine: RankedEngine | None = None
        self._num_restarts = 0
        self._watch: asyncio.Task[None] | None = None
        self._answers: list[Mapping[str, Any]] = []
        self._is_parked = False  # the optimizer's state

    @property
    def engine(self) -> RankedEngine:
        assert self._engine is not None, "`start` comes first"
        return self._engine

    @property
    def group(self) -> WorkerGroup[PolicyRank]:
        assert self._group is not None, "`start` comes first"
        return self._group

    # -- starting and ending -------------------------------------------------------------------

    async def start(self) -> None:
        """Start the ranks in their turn: what replicas on the same devices take is measured by what
        they leave."""
        self._is_parked = False
        async with self._turns.of_trainer():
            await self._start_again_and_again()

    def end(self) -> None:
        """Kill the ranks, for new ones to be started."""
        self._num_restarts += 1
        self.close()
        if self._group is not None:
            self._group.kill()

    def close(self) -> None:
        """End the watch; the processes end with the scheduler."""
        if self._watch is not None:
            self._watch.cancel()

    async def _start_again_and_again(self) -> None:
        attempts = Attempts(self._starter.scheduler)
        while True:
            try:
                await self._start_once()
                return
            except TrainerLost as lost:
                if not attempts.fail():
                    raise RoleLost(
                        f"{lost}, {attempts} while it started. Look at the messages "
                        "above (memory?), then go on with --resume"
                    ) from lost
                self._num_restarts += 1
                self._starter.say(f"{lost} while it started; starting it again")

    async def _start_once(self) -> None:
        starter, config, parts = self._starter, self._starter.config, self._starter.parts
        world = config.learner.layout.world
        recipe = PolicyRecipe(
            folder=parts.folder,
            config=parts.warm_start_config(),
            layout=config.learner.layout,
            split=config.learner,
            device=config.device,
            threads=config.learner.threads or max(1, num_threads(config) // world),
            pictures=parts.pictures,
        )
        ranks = [((recipe, rank), dict[str, Any]()) for rank in range(world)]
        group = starter.scheduler.group(PolicyRank, ranks, **starter.places.trainer.of_all)
        try:
            async with limited_start("the trainer", config.cluster.start_s):
                await start_trainer(group)
        except WorkerDied as died:
            group.kill()
            raise TrainerLost(f"the trainer died ({died})") from died
        except BaseException:  # a cancellation too: nobody has the group yet
            group.kill()
            raise
        self._group = group
        self._engine = RankedEngine(
            group, recipe, asyncio.get_running_loop(), turn=self._turns.of_trainer
        )
        self._watch = asyncio.create_task(self._watch_ranks(group), name="watch trainer")

    # -- supervision ---------------------------------------------------------------------------

    async def _watch_ranks(self, group: WorkerGroup[PolicyRank]) -> None:
        """Watch all ranks; if one does not answer, whoever waits for the trainer hears of that."""
        starter, cluster = self._starter, self._starter.config.cluster
        self._answers = [{} for _ in group.handles]

        async def watch(rank: int, handle: ActorHandle[PolicyRank]) -> None:
            pulse = Pulse(
                PolicyRank.heartbeat,
                cluster.heartbeat_s,
                cluster.hang_s,
                partial(self._answers.__setitem__, rank),
            )
            starter.say(f"trainer-{rank}: {await until_dead(starter.scheduler, handle, pulse)}")
            group.kill()

        with suppress(SchedulerLost):  # whoever waits for the trainer hears it
            await asyncio.gather(*(watch(*one) for one in enumerate(group.handles)))

    async def death(self) -> str:
        """Wait until the trainer dies; returns how. Raises RoleLost if another role is dead and
        cannot be started again."""
        lost = self._starter.lost
        death = asyncio.ensure_future(heard(self.group.death))
        try:
            await asyncio.wait({death, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()  # raises
            return str(death.result())
        finally:
            death.cancel()

    async def ask(self) -> None:
        """Have all ranks say now how they are."""
        if self._group is None:
            return
        answers = [heard(one) for one in self._group.call(PolicyRank.heartbeat)]
        for rank, answer in enumerate(await asyncio.gather(*answers)):
            if isinstance(answer, Mapping):
                self._answers[rank] = answer

    def statuses(self) -> list[RoleStatus]:
        """The statuses of the ranks, as they last said themselves."""
        is_alive = self._group is not None and not self._group.death.is_done()
        state: RoleState = "ready" if is_alive else "starting"
        return [
            status_of(f"trainer-{rank}", "policy", state, self._num_restarts, answer)
            for rank, answer in enumerate(self._answers)
        ]

    # -- weights and memory --------------------------------------------------------------------

    async def send_weights(self, transport: Transport, version: int) -> Offer:
        """All ranks hand their weights over together; the first says what they are."""
        group = self.group
        args = [(transport.sender(rank), version) for rank in range(len(group))]
        offers = await settled(group, group.call_each(PolicyRank.send_weights, args))
        return offers[0]

    async def fetch(self) -> None:
        """Bring the optimizer's state back, where it was parked."""
        if self._is_parked and self._group is not None:
            await settled(self._group, self._group.call(PolicyRank.reload))
        self._is_parked = False

    async def park(self) -> None:
        """Put the optimizer's state into host memory, on GPUs. Of a trainer that died, who needs it
        next hears."""
        if self._starter.parts.device.type != "cuda" or self._group is None:
            return
        with suppress(TrainerLost):
            await settled(self._group, self._group.call(PolicyRank.offload))
            self._is_parked = True
