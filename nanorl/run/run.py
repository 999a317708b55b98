"""A whole run, phase by phase: untrained score, warm start, score, RL, score with tool and without.

    untrained -> warm_start -> before -> rl -> after -> no_tool -> blind -> first_hidden -> done

The cursor says which phase is next; it travels inside every checkpoint, so `--resume` enters the
loop where the last checkpoint was made. Metrics rows and stored rollouts that lie behind the
checkpoint are removed first: the resumed run writes them again, with the same content if it is
synchronous (trainer.py says why).
Next: phases.py (what is done), observers.py (who is told), run_checkpoints.py (saving and going
on), trainer.py (the RL loop), continuation.py (what a resumed run may change).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nanoengine.stop_signals import Interrupted, StopSignals
from nanoinfer.cancellation import to_the_end
from nanorl.distributed.roles.base import Roles
from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.distributed.roles.role import RoleLost
from nanorl.observability.report.live import LiveView
from nanorl.observability.results import PHASES
from nanorl.observability.store import RolloutStore
from nanorl.options.parts import Parts
from nanorl.run.cards.model_source import model_source
from nanorl.run.manifest import manifest_of
from nanorl.run.phases import RunPhase, make_phases
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.state import RunState

MOST_LOSSES = 2
"""So often the trainer may die without getting any further before the run ends."""


class Run:
    """The loop over the phases of one run."""

    def __init__(
        self,
        parts: Parts,
        roles: Roles,
        live: LiveView,
        goes_on: Callable[[BaseException, RunState], bool] = lambda *_: False,
        *,
        is_program: bool = False,
    ) -> None:
        """`goes_on` says whether a run that ends with an error begins again by itself; `is_program`
        whether its process ends with it (StopSignals)."""
        self.is_asked_to_stop = False
        self.state = RunState(
            parts,
            roles,
            live,
            lambda error: not self.is_asked_to_stop and goes_on(error, self.state),
        )
        self.checkpoints = RunCheckpoints(self.state)
        self._phases = make_phases(self.state, self.checkpoints)
        roles.say = live.say
        self._has_to_restore = parts.config.resume or bool(parts.config.fork)
        self._is_program = is_program
        self._has_model = False  # the trained model is in its folder: nothing is left to do
        self._has_started = False  # its roles are there: without them nothing can be saved
        self._furthest_loss = (-1, -1)  # the phase's number and step

    async def execute(self) -> None:
        """Play all phases that are left. Raises `Interrupted` after saving on Ctrl-C, which cancels
        this task once; what must not be cut in two is awaited with `to_the_end`."""
        loop, roles = asyncio.get_running_loop(), self.state.roles
        current = asyncio.current_task()
        assert current is not None

        def stop() -> None:
            self.is_asked_to_stop = True
            loop.call_soon_threadsafe(current.cancel)

        with StopSignals(
            on_stop=stop,
            say=lambda answer: loop.call_soon_threadsafe(self.state.live.say, answer),
            is_program=self._is_program,
        ):
            try:
                async with self.state.observers:
                    await roles.start()
                    self._has_started = True
                    await self._require_own_store()
                    await self._note_manifest()
                    while not self._has_model:
                        await self._go_on()
            except asyncio.CancelledError:
                await to_the_end(self._save_and_stop())
                raise Interrupted from None
            finally:
                await self._close_loop()

    async def _close_loop(self) -> None:
        """Give back what the roles hold of the loop, all of it; Ctrl-C that comes only now stops a
        run, too."""
        try:
            await to_the_end(self.state.roles.close_loop())
        except asyncio.CancelledError:
            raise Interrupted from None

    async def _require_own_store(self) -> None:
        """A new run's store is empty, wherever it is: a resumed run forgets the steps after its
        checkpoint, and those would be another's."""
        config = self.state.config
        if not config.store or config.resume:
            return
        stored = await self.state.roles.store.call(RolloutStore.count)
        if stored:
            raise ValueError(
                f"--store {config.store}: has {stored} rollouts of another run; name another "
                "file, or another run=NAME"
            )

    async def _note_manifest(self) -> None:
        """Record what this process consists of, beside its line of history.jsonl."""
        state = self.state
        manifest = await state.train(manifest_of, state.parts)
        name = f"start/{len(state.history.read()) - 1}"
        await state.roles.store.call(RolloutStore.put_fact, name, manifest)

    async def _save_and_stop(self) -> None:
        if self._has_started and not self._has_to_restore:
            await self.checkpoints.save_last()

    # -- the loop --------------------------------------------------------------------------------

    async def _go_on(self) -> None:
        """Do what comes next. Where the trainer dies, the run goes back to the newest checkpoint
        and on from there, as `--resume` does."""
        state = self.state
        try:
            if self._has_to_restore:
                await self.checkpoints.restore()
                self._has_to_restore = False
            elif state.cursor.phase == "done":
                await self._write_model()
                self._has_model = True
            else:
                await self._unless_trainer_dies(self._phases[state.cursor.phase])
        except TrainerLost as lost:
            self._count_loss(lost)
            state.live.say(f"{lost}: starting it again, from the newest checkpoint")
            await state.roles.restart_trainer()
            self.checkpoints.critic, self._has_to_restore = None, True

    async def _unless_trainer_dies(self, phase: RunPhase) -> None:
        """Play a phase, and give it up as soon as it cannot go on: rollouts for a trainer that is
        dead would be played again."""
        work = asyncio.create_task(phase.play())
        death = asyncio.create_task(self.state.roles.trainer_death())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise TrainerLost(f"the trainer died ({death.result()})")
        finally:
            death.cancel()
            work.cancel()
            await asyncio.wait({work, death})
            if not work.cancelled() and (error := work.exception()) is not None:
                raise error

    def _count_loss(self, lost: TrainerLost) -> None:
        """Ends the run where the trainer dies again and again without getting any further."""
        state, cursor = self.state, self.state.cursor
        place = PHASES.index(cursor.phase), cursor.step
        state.num_losses = state.num_losses + 1 if place <= self._furthest_loss else 1
        self._furthest_loss = max(place, self._furthest_loss)
        if state.num_losses > MOST_LOSSES:
            raise RoleLost(
                f"{lost}; that happened {state.num_losses} times, and the run got no further than "
                f"step {cursor.step} of the phase {cursor.phase}. Look at the messages "
                "above (memory?), then go on with --resume"
            ) from lost

    async def _write_model(self) -> None:
        state, engine = self.state, self.state.roles.engine
        folder = state.parts.folder
        await state.train(engine.write_model, state.dir / "model-trained", folder)
        if state.config.lora.rank:
            base = model_source(state.config, folder).name
            await state.train(engine.write_adapter, state.dir / "adapter-trained", base)
