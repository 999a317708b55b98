"""`RunCheckpoints`: where a run is saved, and how it goes on from there.

A checkpoint holds the engine's state and the cursor. Two things stand beside it: the critic, whose
own checkpoint the cursor names and which is therefore written first, and the journal of finished
groups, which forgets those that a checkpoint on the disk has learnt from.
Left out: what the files look like (nanoengine/state), what a resumed run may change
(continuation.py).
"""

from __future__ import annotations

from nanoengine.state.checkpoint import (
    adopt_checkpoint,
    delete_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
)
from nanorl.distributed.roles.base import RunCritic
from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.flow.journal import Journal
from nanorl.flow.transfer_queue import QueueCursor
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.results import Phase
from nanorl.observability.store import RolloutStore
from nanorl.run.continuation import recorded
from nanorl.run.cursor import BEST, CHECKPOINTS, START, WARMING_UP, Cursor
from nanorl.run.manifest import model_fingerprint
from nanorl.run.missing_records import METRICS, missing_records, passed_over
from nanorl.run.state import RunState


class RunCheckpoints:
    """The checkpoints in the folder of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.folder = state.dir / CHECKPOINTS
        self.critic: RunCritic | None = None  # while RL goes on, where the algorithm has one
        self.journal: Journal | None = None  # while RL goes on
        self._num_starts = 0  # of its processes, that checkpoints know of; 0: this is the first
        self._saved_place: tuple[Phase, int] | None = None  # of the cursor in the last checkpoint
        self._saved_queue: QueueCursor | None = None  # of the checkpoint that is being written
        self._model_fingerprint = model_fingerprint(state.parts.folder)

    # -- saving ----------------------------------------------------------------------------------

    async def save(self, *, in_background: bool = False) -> None:
        """Write a checkpoint of engine and cursor; the critic's first, which the cursor names."""
        state, cursor = self._state, self._state.cursor
        state.note_time()
        cursor.options = recorded(state.config)
        cursor.model = self._model_fingerprint
        cursor.num_starts = max(1, self._num_starts)
        await self._wait_saved()
        if self.critic is not None:
            cursor.critic = await state.train(self.critic.save, state.dir / "critic")
        await state.train(
            state.roles.engine.save, self.folder, cursor.to_json(), in_background=in_background
        )
        self._saved_place = cursor.place
        if cursor.flow:
            self._saved_queue = QueueCursor.from_json(cursor.flow["queue"])
        if not in_background:
            await self._wait_saved()

    async def _wait_saved(self) -> None:
        """Wait for the checkpoint that is being written. Then nobody will ask again for the groups
        that it has learnt from."""
        await self._state.train(self._state.roles.engine.wait_saved)
        had, self._saved_queue = self._saved_queue, None
        if self.journal is not None and had is not None:
            self.journal.forget([i for i in self.journal.indices() if had.has_had(i)])

    async def save_last(self) -> None:
        """Save on the way out; without a trainer the newest checkpoint is what there is."""
        try:
            if self._state.cursor.place == self._saved_place:
                await self._wait_saved()  # these weights are on the disk, or will be soon
            else:
                await self.save()
        except TrainerLost as lost:
            self._state.live.say(f"{lost}: the newest checkpoint is what --resume goes on from")

    async def keep_average(self) -> None:
        """Have the engine keep an average of the weights, where that is the teacher."""
        state, spec = self._state, self._state.config.rl.algorithm
        if spec.has_average:
            await state.train(state.roles.engine.keep_average, spec.hindsight_rate)

    def keep_start(self) -> None:
        """Keep the checkpoint with which RL began, or goes on in a run that kept none: only names
        are new, until the checkpoint itself is deleted. What no warm start has changed is the
        model's folder."""
        state, config, kept = self._state, self._state.config, self._state.dir / START
        is_model = not (config.warm_start.steps or config.fork or state.cursor.step)
        newest = latest_checkpoint(self.folder)
        if config.keep_start and not is_model and newest and latest_checkpoint(kept) is None:
            adopt_checkpoint(newest, kept, state.cursor.to_json())

    async def save_these(self) -> None:
        """Save, unless these weights are on the disk already."""
        if self._state.cursor.place == self._saved_place:
            await self._wait_saved()
        else:
            await self.save()

    def keep_best(self) -> None:
        """Keep the newest checkpoint as the best one, in place of the one before."""
        newest, kept = latest_checkpoint(self.folder), self._state.dir / BEST
        assert newest is not None, "it has just been saved, or restored"
        adopt_checkpoint(newest, kept, self._state.cursor.to_json())
        for older in list_checkpoints(kept)[:-1]:
            delete_checkpoint(older)

    # -- the journal -----------------------------------------------------------------------------

    def open_journal(self) -> Journal:
        """Open the groups that this run has played. Those of other options are not its own."""
        state = self._state
        self.close_journal()
        self.journal = Journal(state.dir / "journal.sqlite")
        if state.is_changed or (not state.config.resume and not state.num_losses):
            self.journal.forget_all()
        return self.journal

    def close_journal(self) -> None:
        """Close it: later checkpoints have nothing to forget."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None

    # -- going on --------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Continue from the newest checkpoint, or from the start where none was made yet. Records
        of later steps go: the run writes them again."""
        state, roles, rl = self._state, self._state.roles, self._state.config.rl
        found = latest_checkpoint(self.folder)
        if said := passed_over(self.folder, found):
            state.live.say(said)
        if found is None:
            await self._begin_anew()
            return
        state.cursor = cursor = Cursor.from_json(
            open_checkpoint(found).meta["cursor"],
            rl_steps=state.history.original("rl.steps", rl.steps),
        )
        self._num_starts = cursor.num_starts = self._num_starts or cursor.num_starts + 1
        self._require_same_tasks()
        self._require_same_model()
        first = cursor.rl_steps_done
        cursor.reopen(rl.steps, is_changed=state.is_changed)
        if cursor.phase not in WARMING_UP:
            await state.train(roles.engine.restart, state.parts.rl_config())
            await self.keep_average()  # first, for the checkpoint may have one
        await state.train(roles.engine.load, found)
        self._saved_place = cursor.place
        if cursor.phase == "rl" and cursor.best.get("step") == cursor.step:
            self.keep_best()  # killed between the two, only the checkpoint was written
        await state.observers.on_restore(first)
        stored = await roles.store.call(RolloutStore.steps)
        for one in missing_records(state.dir, cursor, stored, first=state.history.first_step):
            state.live.say(f"{one}. Training goes on as it would have: nothing is computed from it")
        await roles.publisher.publish(cursor.step)

    async def _begin_anew(self) -> None:
        state = self._state
        await self._require_nothing_done()
        state.live.say("no checkpoint was made yet: starting from the beginning")
        state.cursor = Cursor(tasks=state.parts.tasks.fingerprint)
        if state.has_published:  # a trainer that died
            await state.roles.publisher.publish(0)

    async def _require_nothing_done(self) -> None:
        """RL begins with a checkpoint: records of its steps without one mean that it was lost."""
        folder = self._state.dir
        stored = await self._state.roles.store.call(RolloutStore.count)
        if stored or read_metrics(folder / METRICS):
            raise ValueError(
                f"{self.folder} holds no checkpoint, but {folder} has the records of "
                f"{stored} rollouts, which starting over would delete: put the folder "
                f"back, or start a new run (another --out, or rm -r {folder})"
            )

    def _require_same_tasks(self) -> None:
        cursor, tasks = self._state.cursor, self._state.parts.tasks
        cursor.tasks = cursor.tasks or tasks.fingerprint
        if cursor.tasks != tasks.fingerprint:
            raise ValueError(
                f"--tasks {self._state.config.tasks}: its tasks are not those that this run began "
                "with, and a resumed run goes on with the same ones; put the file back, or start a "
                "new run with another --out"
            )

    def _require_same_model(self) -> None:
        if self._state.cursor.model not in ("", self._model_fingerprint):
            raise ValueError(
                f"{self._state.parts.folder}: its configuration or tokenizer is not what this "
                "run's newest checkpoint was made with, so the same weights would say something "
                "else; put the files back, or start a new run with another --out"
            )
