"""`WarmStartPhase`: supervised steps on a teacher's traces, before RL.

Left out: where the samples come from (warm_start.py).
"""

from __future__ import annotations

import asyncio

from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoinfer.cancellation import to_the_end
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.observability.report.observer import PhaseBegun
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.state import RunState

TITLE = "warm start"


class WarmStartPhase:
    """Ends with a checkpoint and an engine that is ready for RL, also where it has no steps."""

    def __init__(self, state: RunState, checkpoints: RunCheckpoints) -> None:
        self._state, self._checkpoints = state, checkpoints

    async def play(self) -> None:
        state, roles = self._state, self._state.roles
        begun = PhaseBegun(
            phase="warm_start",
            title=TITLE,
            total=state.config.warm_start.steps,
            num_done=state.cursor.step,
        )
        async with state.timed(begun), roles.publisher.lent():
            await self._steps()
        state.has_published = True
        await roles.publisher.publish(0)
        await state.train(roles.engine.restart, state.parts.rl_config())
        state.cursor.next_phase()
        await self._checkpoints.save()

    async def _steps(self) -> None:
        state = self._state
        upcoming = self._samples(state.cursor.step)
        while state.cursor.step < state.config.warm_start.steps and not self._is_learned():
            step = state.cursor.step
            batch = await upcoming
            upcoming = self._samples(step + 1)  # the teacher plays while the optimizer runs
            # Weights and cursor would disagree if it were cut in two.
            await to_the_end(self._step(step, batch))
        upcoming.cancel()
        state.cursor.totals["warm_start_steps"] = state.cursor.step

    def _is_learned(self) -> bool:
        loss = self._state.cursor.totals.get("warm_start_loss", 0.0)
        return 0.0 < loss <= self._state.config.warm_start.stop_loss

    def _samples(self, step: int) -> asyncio.Future[list[Sample]]:
        return asyncio.ensure_future(self._state.roles.collector.call(CollectorRole.teach, step))

    async def _step(self, step: int, batch: list[Sample]) -> None:
        state, totals = self._state, self._state.cursor.totals
        result = await state.train(state.roles.engine.train_step, batch, sft_loss, num_loss_tokens)
        state.cursor.step = step + 1
        loss: float = result["loss"]  # of about ten steps: one batch is luckier than another
        totals["warm_start_loss"] = 0.9 * totals.get("warm_start_loss", loss) + 0.1 * loss
        numbers = {**result, "tokens": sum(len(sample.tokens) for sample in batch)}
        await state.observers.on_warm_step(step, numbers)
        await state.observers.on_warm_batch(step, batch)
        state.observers.on_progress(TITLE, {"loss": loss})
