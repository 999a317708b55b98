"""A whole run, phase by phase: untrained score, warm start, score, RL, score with tool and without.

    untrained -> warm_start -> before -> rl -> after -> no_tool -> done

In this file: `Run` with a method for every phase, and what a run leaves behind (`write_outcome`:
summary.json, report.html and the trained model's folder).

The cursor says which phase is next; it travels inside every checkpoint, so `--resume` enters the
loop where the last checkpoint was made. Metrics rows and stored rollouts that lie behind the
checkpoint are removed first: the resumed run writes them again, with the same content if it is
synchronous (trainer.py says why).
Next: trainer.py (the RL loop), continuation.py (what a resumed run may change), parts.py (how the
parts are made).
"""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from nanoengine.packing import Sample
from nanoengine.scoring import Policy
from nanoengine.sft import num_loss_tokens, sft_loss
from nanoengine.state.checkpoint import adopt_checkpoint, latest_checkpoint, open_checkpoint
from nanoengine.stop_signals import Interrupted, StopSignals
from nanoinfer.cancellation import to_the_end
from nanorl.cards.model_card import write_cards
from nanorl.cards.model_source import model_source
from nanorl.doctor.alarms import NO_SIGNAL, RunAlarms
from nanorl.envs.run_kind import runs_programs
from nanorl.flow.curriculum import TaskChooser, load_curriculum
from nanorl.flow.journal import Journal
from nanorl.flow.transfer_queue import QueueCursor
from nanorl.monitor.monitor import RunMonitor
from nanorl.report.chat_decode import ChatDecode
from nanorl.report.evaluation import Evaluation
from nanorl.report.examples import collect_examples, rates_by_stage
from nanorl.report.html import write_report
from nanorl.report.live import LiveView
from nanorl.report.metrics import MetricsWriter, read_metrics
from nanorl.report.summary import (
    EVALUATIONS,
    build_summary,
    git_commit,
    peak_rss_bytes,
    write_summary,
)
from nanorl.report.tensorboard import TensorBoardFolders
from nanorl.report.trace import Decode
from nanorl.report.transcript import transcript, verdict
from nanorl.roles.base import Roles, RunCritic
from nanorl.roles.collector import CollectorRole
from nanorl.roles.policy import TrainerLost
from nanorl.roles.role import RoleLost
from nanorl.run.continuation import computes, recorded
from nanorl.run.cursor import PHASES, START, WARMING_UP, Cursor, Phase
from nanorl.run.evaluation import EvaluationResult, evaluate
from nanorl.run.history import RunHistory
from nanorl.run.manifest import manifest_of, model_fingerprint
from nanorl.run.missing_records import is_fork, missing_records, passed_over
from nanorl.run.parts import Parts, num_threads
from nanorl.scorers.references import reference_folders
from nanorl.scorers.scored_learner import choose_learner
from nanorl.store import RolloutStore
from nanorl.trackers.rollout_rows import rollout_rows
from nanorl.trackers.run_spans import RunSpans
from nanorl.trackers.sending import Trackers
from nanorl.trackers.services import WARM_START
from nanorl.trainer import StepResult, Trainer
from nanorl.types import Rollout, Task
from nanosched import Scheduler

SHOWN = (
    *("success", "reward", "groups_with_signal", "grad_norm", "clip_fraction"),
    *("logp_gap_max", "step_s"),
)
ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
MOST_LOSSES = 2
"""So often the trainer may die without getting any further before the run ends."""
NUM_SAMPLES = 5  # rollouts of RL that the log shows


class Run:
    """One run directory, its files and its phases."""

    def __init__(self, parts: Parts, roles: Roles, live: LiveView) -> None:
        self.config = config = parts.config
        self.monitor = RunMonitor(config.monitor, config.run_dir, live, roles.control)
        self.parts, self.roles = parts, roles
        self.live = live
        roles.say = live.say
        self.dir = config.run_dir
        self.metrics = MetricsWriter(
            self.dir / "metrics.jsonl", tensorboard_dir=self.dir / "tensorboard"
        )
        self.board = TensorBoardFolders(self.dir / "tensorboard")
        self.cursor = Cursor(tasks=parts.tasks.fingerprint)
        self.critic: RunCritic | None = None
        self.num_starts = 0  # of its processes, that checkpoints know of; 0: this is the first
        self.saved_place: tuple[Phase, int] | None = None  # of the cursor in the last checkpoint
        self.history = RunHistory(self.dir)
        self.has_to_restore = config.resume or bool(config.fork)
        self.model_fingerprint = model_fingerprint(parts.folder)
        self.trackers = Trackers(config, say=live.say)
        self.spans = RunSpans(config, parts.folder, say=live.say)
        self.alarms = RunAlarms(config, parts.tokenizer, has_tools=parts.kind.has_tools)
        self.journal: Journal | None = None
        self.saved_queue: QueueCursor | None = None  # of the checkpoint that is being written
        self.has_model = False  # the trained model is in its folder: nothing is left to do
        self.has_started = False  # its roles are there: without them nothing can be saved
        self.has_published = False  # other weights than the model's own
        self.num_losses = 0
        self.furthest_loss = (-1, -1)  # the phase's number and step
        self.started = time.perf_counter()
        self.cpu_s = 0.0  # this process's, when the last step ended

    # -- life cycle ------------------------------------------------------------------------------

    async def execute(self) -> None:
        """All phases that are left. Raises `Interrupted` after saving on Ctrl-C, which cancels this
        task once; what must not be cut in two is awaited with `to_the_end`."""
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()
        assert current is not None
        with StopSignals(
            on_stop=lambda: loop.call_soon_threadsafe(current.cancel),
            say=lambda answer: loop.call_soon_threadsafe(self.live.say, answer),
        ):
            try:
                async with self.monitor, self.trackers, self.spans:
                    await self.roles.start()
                    self.has_started = True
                    await self._require_own_store()
                    await self._note_manifest()
                    while not self.has_model:
                        await self._run_phase()
            except asyncio.CancelledError:
                await to_the_end(self._save_and_stop())
                raise Interrupted from None
            finally:
                self.board.close()
                await self.roles.close_loop()

    async def _note_manifest(self) -> None:
        """Record what this process consists of, beside its line of history.jsonl."""
        manifest = await self._train(manifest_of, self.parts)
        name = f"start/{len(self.history.read()) - 1}"
        await self.roles.store.call(RolloutStore.put_fact, name, manifest)

    async def _run_phase(self) -> None:
        """What comes next. Where the trainer dies, the run goes back to the newest checkpoint and
        on from there, as `--resume` does."""
        try:
            if self.has_to_restore:
                await self.restore()
                self.has_to_restore = False
            elif self.cursor.phase == "done":
                await self._write_model()
                self.has_model = True
            else:
                await self._unless_trainer_dies(getattr(self, f"run_{self.cursor.phase}")())
        except TrainerLost as lost:
            self._count_loss(lost)
            self.live.say(f"{lost}: starting it again, from the newest checkpoint")
            await self.roles.restart_trainer()
            self.critic, self.has_to_restore = None, True

    async def _unless_trainer_dies(self, phase: Coroutine[Any, Any, None]) -> None:
        """A phase, which is given up as soon as it cannot go on: rollouts for a trainer that is
        dead would be played again."""
        work = asyncio.create_task(phase)
        death = asyncio.create_task(self.roles.trainer_death())
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

    async def _write_model(self) -> None:
        target = self.dir / "model-trained"
        await self._train(self.roles.engine.write_model, target, self.parts.folder)
        if self.config.lora.rank:
            base = model_source(self.config, self.parts.folder).name
            await self._train(self.roles.engine.write_adapter, self.dir / "adapter-trained", base)

    def _count_loss(self, lost: TrainerLost) -> None:
        """Ends the run where the trainer dies again and again without getting any further."""
        place = PHASES.index(self.cursor.phase), self.cursor.step
        self.num_losses = self.num_losses + 1 if place <= self.furthest_loss else 1
        self.furthest_loss = max(place, self.furthest_loss)
        if self.num_losses > MOST_LOSSES:
            raise RoleLost(
                f"{lost}; that happened {self.num_losses} times, and the run got no further than "
                f"step {self.cursor.step} of the phase {self.cursor.phase}. Look at the messages "
                "above (memory?), then go on with --resume"
            ) from lost

    async def restore(self) -> None:
        """Continue from the newest checkpoint, or from the start where none was made yet."""
        found = latest_checkpoint(self.checkpoints)
        if said := passed_over(self.checkpoints, found):
            self.live.say(said)
        if found is None:
            await self._require_nothing_done()
            self.live.say("no checkpoint was made yet: starting from the beginning")
            self.cursor = Cursor(tasks=self.parts.tasks.fingerprint)
            if self.has_published:  # a trainer that died
                await self.roles.publisher.publish(0)
            return
        rl = self.config.rl
        self.cursor = Cursor.from_json(
            open_checkpoint(found).meta["cursor"],
            rl_steps=self.history.original("rl.steps", rl.steps),
        )
        self.num_starts = self.cursor.num_starts = self.num_starts or self.cursor.num_starts + 1
        self._require_same_tasks()
        self._require_same_model()
        first = self.cursor.rl_steps_done
        self.cursor.reopen(rl.steps, is_changed=self.is_changed)
        if self.cursor.phase not in WARMING_UP:
            await self._train(self.roles.engine.restart, self.parts.rl_config())
        await self._train(self.roles.engine.load, found)
        self.saved_place = self.cursor.place
        await self.roles.store.call(RolloutStore.delete_from_step, first)
        self.metrics.truncate_from(first)
        for one in await self._missing_records():
            self.live.say(f"{one}. Training goes on as it would have: nothing is computed from it")
        self.board.begin_anew()
        await self.roles.publisher.publish(self.cursor.step)

    async def _train(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a method of the training engine in its thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.roles.optimizer_thread, partial(function, *args, **kwargs)
        )

    async def _require_nothing_done(self) -> None:
        """RL begins with a checkpoint: records of its steps without one mean that it was lost."""
        stored = await self.roles.store.call(RolloutStore.count)
        if stored or self.metrics.last_step is not None:
            raise ValueError(
                f"{self.checkpoints} holds no checkpoint, but {self.dir} has the records of "
                f"{stored} rollouts, which starting over would delete: put the folder "
                f"back, or start a new run (another --out, or rm -r {self.dir})"
            )

    async def _require_own_store(self) -> None:
        """A new run's store is empty, wherever it is: a resumed run forgets the steps after its
        checkpoint, and those would be another's."""
        if not self.config.store or self.config.resume:
            return
        stored = await self.roles.store.call(RolloutStore.count)
        if stored:
            raise ValueError(
                f"--store {self.config.store}: has {stored} rollouts of another run; name another "
                "file, or another run=NAME"
            )

    def _require_same_tasks(self) -> None:
        self.cursor.tasks = self.cursor.tasks or self.parts.tasks.fingerprint
        if self.cursor.tasks != self.parts.tasks.fingerprint:
            raise ValueError(
                f"--tasks {self.config.tasks}: its tasks are not those that this run began with, "
                "and a resumed run goes on with the same ones; put the file back, or start a new "
                "run with another --out"
            )

    def _require_same_model(self) -> None:
        if self.cursor.model not in ("", self.model_fingerprint):
            raise ValueError(
                f"{self.parts.folder}: its configuration or tokenizer is not what this run's "
                "newest checkpoint was made with, so the same weights would say something else; "
                "put the files back, or start a new run with another --out"
            )

    async def _missing_records(self) -> list[str]:
        """What the folder has lost of the steps so far: a sentence for each kind."""
        stored = await self.roles.store.call(RolloutStore.steps)
        return missing_records(self.dir, self.cursor, stored, first=self.first_step)

    @property
    def is_changed(self) -> bool:
        """Whether this process goes on with other options than the one before."""
        events = self.history.chosen()
        return bool(events) and any(computes(name) for name in events[-1]["changes"])

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    async def save(self, *, in_background: bool = False) -> None:
        """A checkpoint of the engine and the cursor; the critic's first, which the cursor names."""
        self.note_time()
        self.cursor.options = recorded(self.config)
        self.cursor.model = self.model_fingerprint
        self.cursor.num_starts = max(1, self.num_starts)
        await self._wait_saved()
        if self.critic is not None:
            self.cursor.critic = await self._train(self.critic.save, self.dir / "critic")
        await self._train(
            self.roles.engine.save,
            self.checkpoints,
            self.cursor.to_json(),
            in_background=in_background,
        )
        self.saved_place = self.cursor.place
        if self.cursor.flow:
            self.saved_queue = QueueCursor.from_json(self.cursor.flow["queue"])
        if not in_background:
            await self._wait_saved()

    async def _wait_saved(self) -> None:
        """Wait for the checkpoint that is being written. Then nobody will ask again for the groups
        that it has learnt from."""
        await self._train(self.roles.engine.wait_saved)
        had, self.saved_queue = self.saved_queue, None
        if self.journal is not None and had is not None:
            self.journal.forget([i for i in self.journal.indices() if had.has_had(i)])

    async def _save_and_stop(self) -> None:
        """On the way out: without a trainer the newest checkpoint is what there is."""
        if self.has_to_restore or not self.has_started:
            return
        try:
            if self.cursor.place == self.saved_place:
                await self._wait_saved()  # these weights are on the disk, or will be soon
            else:
                await self.save()
        except TrainerLost as lost:
            self.live.say(f"{lost}: the newest checkpoint is what --resume goes on from")

    def _keep_start(self) -> None:
        """Keep the checkpoint with which RL began, or goes on in a run that kept none: only names
        are new, until the checkpoint itself is deleted. What no warm start has changed is the
        model's folder."""
        config, kept = self.config, self.dir / START
        is_model = not (config.warm_start.steps or config.fork or self.cursor.step)
        newest = latest_checkpoint(self.checkpoints)
        if config.keep_start and not is_model and newest and latest_checkpoint(kept) is None:
            adopt_checkpoint(newest, kept, self.cursor.to_json())

    async def _note_weights(self) -> None:
        """Record what the policy's weights are at this step of RL."""
        found = await self._train(self.roles.engine.fingerprints)
        name = f"weights/{self.cursor.step}"
        await self.roles.store.call(RolloutStore.put_fact, name, found)

    def note_time(self) -> None:
        now = time.perf_counter()
        self.cursor.add("wall_s", now - self.started)
        self.started = now
        self.cursor.keep_max("peak_rss_bytes", float(peak_rss_bytes()))

    @contextmanager
    def _timed(self, name: str, total: int, done: int = 0, num_lines: int = 10) -> Iterator[str]:
        """Show a phase and count its seconds; yields the name."""
        start = time.perf_counter()
        self.monitor.begin_phase(name)
        if total:
            self.live.start_phase(name, total, num_done=done, num_lines=num_lines)
        try:
            with self.spans.phase(name):
                yield name
        finally:
            self.cursor.add(f"phase_s.{name}", time.perf_counter() - start)

    def _advance(self, phase: str, metrics: dict[str, float] | None = None) -> None:
        self.live.advance(phase, metrics=metrics)
        self.monitor.progress()

    # -- evaluation phases -----------------------------------------------------------------------

    async def run_untrained(self) -> None:
        has_warm_start = self.config.warm_start.steps  # without one RL begins with these weights
        count = self.config.evaluation.num_tasks_untrained if has_warm_start else 0
        await self._evaluate("untrained", count)

    async def run_before(self) -> None:
        await self._evaluate("before", self.config.evaluation.num_tasks)

    async def run_after(self) -> None:
        await self._evaluate("after", self.config.evaluation.num_tasks)

    async def run_no_tool(self) -> None:
        has_tools = self.parts.kind.has_tools  # without one there is nothing to take away
        count = self.config.evaluation.num_tasks_no_tool if has_tools else 0
        await self._evaluate("no_tool", count, is_tool_enabled=False)

    async def _evaluate(self, name: str, count: int, *, is_tool_enabled: bool = True) -> None:
        tasks = self.parts.tasks.heldout[:count]
        if tasks:
            play = partial(
                self.roles.collector.call, CollectorRole.play_task, is_tool_enabled=is_tool_enabled
            )
            title = f"evaluation, {EVALUATIONS[name]}"
            start = time.perf_counter()
            with self._timed(title, len(tasks), num_lines=4) as phase:
                result = await evaluate(
                    play, tasks, name=name, on_rollout=lambda _: self._advance(phase)
                )
            self._keep_evaluation(name, result, time.perf_counter() - start)
            await self._record(name, result)
        self.cursor.next_phase()

    def _keep_evaluation(self, name: str, result: EvaluationResult, seconds: float) -> None:
        """For `nanorl compare`. The rollouts go into a file of their own: whatever reads the
        training's by step, counts them or deletes them, never meets these."""
        with RolloutStore(self.dir / "evaluations.sqlite") as store:
            store.add_tasks([task for task, _ in result.played])
            store.add_group([rollout for _, rollout in result.played], step=PHASES.index(name))
        about = {
            "model": self.config.model or self.config.preset,
            "phase": name,
            "samples_per_task": 1,
            "temperature": 0.0,
        }
        title = f"{self.dir} ({EVALUATIONS[name]})"
        kept = Evaluation.of(result.played, title=title, about=about, seconds=seconds)
        kept.write(self.dir / f"eval-{name}.json")

    async def _record(self, name: str, result: EvaluationResult) -> None:
        self.cursor.results[name] = result.to_json()
        self.trackers.log(self.cursor.rl_steps_done, {"evaluation": {name: result.to_json()}})
        self.board.write_evaluation(name, self.cursor.rl_steps_done, result.to_json())
        self._log_rollouts(self.cursor.rl_steps_done, name, result.played)
        await self._span_rollouts([rollout for _, rollout in result.played], phase=name)
        self.live.say(
            f"{EVALUATIONS[name]}: {result.success:.1%} of {result.num_tasks} held-out tasks"
        )
        for is_right in (False, True):  # one of each, if there is one
            alike = (pair for pair in result.played if (pair[1].is_success) == is_right)
            for task, rollout in islice(alike, 1):
                title = f"a task of it, {EVALUATIONS[name]}"
                self._say_rollout(title, task, rollout, step=self.cursor.rl_steps_done)

    def _say_rollout(self, title: str, task: Task, rollout: Rollout, *, step: int) -> None:
        text = transcript(task, rollout, self._decode, title=title)
        self.live.say(text)
        self.board.write_text("rollouts", step, verdict(rollout), text)

    @property
    def _decode(self) -> Decode:
        return ChatDecode(self.parts.tokenizer)

    async def _span_rollouts(
        self, rollouts: Sequence[Rollout], *, step: int = 0, phase: str = "rl", parent: int = 0
    ) -> None:
        if self.spans.is_on:
            times = await self.roles.collector.call(CollectorRole.take_times)
            self.spans.rollouts(rollouts, times, step=step, phase=phase, parent=parent)

    def _log_rollouts(self, step: int, part: str, played: Sequence[tuple[Task, Rollout]]) -> None:
        if self.config.log:  # reading them takes a while
            most = self.config.log_rollouts
            self.trackers.log_rollouts(step, part, rollout_rows(played, self._decode, most=most))

    # -- warm start ------------------------------------------------------------------------------

    async def run_warm_start(self) -> None:
        warm = self.config.warm_start
        with self._timed("warm start", warm.steps, self.cursor.step) as phase:
            async with self.roles.publisher.lent():
                await self._warm_start_steps(phase)
        self.has_published = True
        await self.roles.publisher.publish(0)
        await self._train(self.roles.engine.restart, self.parts.rl_config())
        self.cursor.next_phase()
        await self.save()

    async def _warm_start_steps(self, phase: str) -> None:
        def samples(step: int) -> asyncio.Future[list[Sample]]:
            return asyncio.ensure_future(self.roles.collector.call(CollectorRole.teach, step))

        upcoming = samples(self.cursor.step)
        while self.cursor.step < self.config.warm_start.steps:
            step = self.cursor.step
            batch = await upcoming
            # The teacher plays in the sandbox while the optimizer runs in its thread.
            upcoming = samples(step + 1)

            async def finish_step(step: int = step, batch: list[Sample] = batch) -> None:
                result = await self._train(
                    self.roles.engine.train_step, batch, sft_loss, num_loss_tokens
                )
                self.cursor.step = step + 1
                self._log_warm_start(step, batch, result)
                self._advance(phase, {"loss": result["loss"]})

            await to_the_end(finish_step())
        upcoming.cancel()

    def _log_warm_start(
        self, step: int, batch: Sequence[Sample], result: Mapping[str, float]
    ) -> None:
        numbers = {**result, "tokens": sum(len(sample.tokens) for sample in batch)}
        self.board.write(WARM_START, step, numbers)
        self.trackers.log(step, {WARM_START: numbers})
        self.spans.step(f"step {step}", numbers)

    # -- reinforcement learning ------------------------------------------------------------------

    async def run_rl(self) -> None:
        rl = self.config.rl
        with self._timed(
            "reinforcement learning", rl.steps, self.cursor.step, num_lines=rl.steps
        ) as phase:

            async def on_step(result: StepResult) -> None:
                self.cursor.flow = trainer.state
                result.metrics.update(await self.roles.idle_shares())
                playing = await self.roles.collector.call(CollectorRole.take_playing)
                result.metrics.update(playing | await self._http_counts())
                await self._log_step(result)
                shown = {name: result.metrics[name] for name in SHOWN if name in result.metrics}
                self.live.advance(phase, metrics=shown)
                rollouts = (rollout for group in result.groups for rollout in group)
                self.monitor.observe_step(result.step, result.metrics, rollouts)
                self._say_step(result)

            self._keep_start()
            await self._note_weights()
            self._open_journal()
            self.critic = await self._open_critic()
            reference = await self._open_reference()
            chosen = choose_learner(
                self.config,
                engine=self.roles.engine,
                publisher=self.roles.publisher,
                thread=self.roles.optimizer_thread,
                reference=reference,
                critic=self.critic,
                scaffold=self.parts.scaffold,
            )
            with Scheduler(backend="inline") as scheduler:
                trainer = Trainer(
                    self.config,
                    learner=scheduler.actor(chosen.func).remote(*chosen.args, **chosen.keywords),
                    collector=self.roles.collector,
                    tasks=self._task_chooser(),
                    journal=self.journal,
                    scores_early=self._scores_early(reference),
                )
                trainer.load(self.cursor.flow)
                await self.roles.idle_shares()  # the first step's begin here
                self.cpu_s = time.process_time()
                await trainer.fit(self.cursor.step, on_step)
        if num_idle := int(self.cursor.totals.get("num_steps_without_signal", 0)):
            self.live.say(
                f"{num_idle} of {rl.steps} steps changed nothing: {NO_SIGNAL}. If they are many, "
                "raise --rl.group-size or --rl.temperature, or train longer before RL "
                "(--warm-start.steps)"
            )
        self.cursor.rl_steps = rl.steps
        self.cursor.next_phase()
        await self.save()
        self.critic = None
        if self.journal is not None:
            self.journal.close()
            self.journal = None  # later checkpoints have nothing to forget

    def _open_journal(self) -> None:
        """The groups that this run has played already. Those of other options are not its own."""
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.dir / "journal.sqlite")
        if self.is_changed or (not self.config.resume and not self.num_losses):
            self.journal.forget_all()

    def _task_chooser(self) -> TaskChooser:
        curriculum = load_curriculum(self.config.rl.curriculum)
        return TaskChooser(self.parts.tasks.train, curriculum, seed=self.config.seed)

    def _scores_early(self, reference: Policy | None) -> bool:
        """Whether models that score have processes of their own, which would else be idle."""
        return self.roles.control is not None and (reference is not None or self.critic is not None)

    async def _open_reference(self) -> Policy | None:
        if not self.config.rl.algorithm.needs_reference:
            return None
        folders = await self._train(
            reference_folders,
            self.config,
            self.dir / "reference",
            has_begun=self.cursor.step > self.first_step,
            write_policy=self.roles.engine.write_model,
        )
        return await self.roles.open_reference(folders)

    @property
    def first_step(self) -> int:
        """The RL step that this run began with: a fork's is not 0."""
        events = self.history.read()
        return events[0]["step"] if is_fork(events) else 0

    async def _open_critic(self) -> RunCritic | None:
        """The critic as it was at the last step, if the algorithm has one."""
        if not self.config.rl.algorithm.needs_critic:
            self.cursor.critic = ""  # should one be wanted again, this one's values would be stale
            return None
        critic = await self.roles.open_critic(self.dir / "critic-start")
        if self.cursor.critic:
            await self._train(critic.load, self.dir / "critic" / self.cursor.critic)
        return critic

    async def _http_counts(self) -> dict[str, float]:
        """What the recording proxy has done since the last step."""
        if self.config.http.mode == "off":
            return {}
        return await self.roles.collector.call(CollectorRole.take_http_counts)

    async def _log_step(self, result: StepResult) -> None:
        """Record a finished step, then move the cursor; every `save_every` steps, a checkpoint."""
        rollouts = [*(rollout for group in result.groups for rollout in group), *result.failed]
        store = self.roles.store
        await store.call(RolloutStore.add_tasks, list(result.tasks.values()))
        await store.call(RolloutStore.add_group, rollouts, step=result.step)
        await store.call(RolloutStore.add_token_stats, result.token_stats)
        await self._expire_rollouts()
        result.metrics.update(self._rollout_speed(result.metrics) | self._cpu_time())
        self.metrics.write(result.step, result.metrics)
        self.trackers.log(result.step, result.metrics)
        # An attempt that failed may be of a later step, where rollouts run ahead of the trainer.
        known = [rollout for rollout in rollouts if rollout.task_id in result.tasks]
        played = [(result.tasks[rollout.task_id], rollout) for rollout in known]
        self._log_rollouts(result.step, "rl", played)
        parent = self.spans.rl_step(result.step, result.metrics)
        await self._span_rollouts(rollouts, step=result.step, parent=parent)
        self._add_totals(result.metrics)
        self.cursor.add("num_failed_rollouts", len(result.failed))
        self.cursor.add("num_steps_without_signal", not result.metrics["num_trained_rollouts"])
        self.cursor.step = result.step + 1
        await self._note_weights()
        is_last = self.cursor.step == self.config.rl.steps  # then the phase saves at its end
        if self.cursor.step % self.config.save_every == 0 and not is_last:
            await self.save(in_background=self.config.saves_in_background)

    async def _expire_rollouts(self) -> None:
        steps = self.config.keep_rollout_steps
        days, mebibytes = self.config.keep_rollout_days, self.config.keep_rollout_mb
        if steps or days or mebibytes:
            await self.roles.store.call(
                RolloutStore.expire,
                steps or None,
                days=days or None,
                max_bytes=mebibytes << 20 or None,
            )

    def _rollout_speed(self, metrics: dict[str, Any]) -> dict[str, float]:
        """What a change of the number of replicas does, step by step."""
        busy_s, control = metrics["rollout_s"], self.roles.control
        speed = {"rollout_tokens_per_s": metrics["action_tokens"] / busy_s} if busy_s else {}
        if control is not None:
            speed["num_replicas"] = sum(
                role.kind == "replica" and role.state == "ready" for role in control.roles()
            )
        return speed

    def _cpu_time(self) -> dict[str, float]:
        """Of this process alone: with the backend inline both engines and the agents; a sandbox's
        programs never."""
        before, self.cpu_s = self.cpu_s, time.process_time()
        return {"cpu_s": self.cpu_s - before}

    def _say_step(self, result: StepResult) -> None:
        """Say what the numbers of the step do not: why nothing moved, and what the agent does."""
        for alarm in self.alarms.observe(result.step, result.metrics, result.groups, result.failed):
            self.live.say(alarm)
        every = max(1, self.config.rl.steps // NUM_SAMPLES)
        rollouts = [rollout for group in result.groups for rollout in group]
        if result.step % every == 0 and rollouts:
            rollout = rollouts[result.step % len(rollouts)]  # any: not the best of them
            task = result.tasks[rollout.task_id]
            title = f"a rollout of step {result.step}"
            self._say_rollout(title, task, rollout, step=result.step)

    def _add_totals(self, metrics: dict[str, Any]) -> None:
        self.cursor.add("num_rollouts", metrics["num_rollouts"])
        self.cursor.add("rollout_tokens", metrics["action_tokens"])
        self.cursor.add("rollout_s", metrics["rollout_s"])
        self.cursor.add("train_tokens", metrics["total_tokens"])
        self.cursor.add("train_s", metrics["train_s"])
        if measured := metrics.get("logp_gap_tokens"):
            if any("+" in address for address in self.config.rollout.addresses):
                from nanorl.roles.outside_replica import check_gap  # another project's engine

                check_gap(metrics["logp_gap_mean"])
            self.cursor.keep_max("logp_gap_max", metrics["logp_gap_max"])
            self.cursor.add("logp_gap_sum", metrics["logp_gap_mean"] * measured)
            self.cursor.add("logp_gap_tokens", measured)
            self.cursor.add("logp_gap_steps", 1)


def write_outcome(run: Run) -> dict[str, Any]:
    """Write everything; returns the summary."""
    run.note_time()
    with RolloutStore(run.config.store_address) as store:
        stored = store.steps()
        rates = rates_by_stage(store.entries())
        examples = collect_examples(run.dir, store)
    summary = summarise(run)
    if missing := missing_records(run.dir, run.cursor, stored, first=run.first_step):
        summary["missing"] = missing
    write_summary(run.dir / "summary.json", summary)
    write_cards(run.config, summary, model_source(run.config, run.parts.folder))
    write_report(
        run.dir / "report.html",
        config=run.config.to_json(),
        summary=summary,
        metrics_rows=read_metrics(run.metrics.path),
        examples=examples,
        training_rates=rates,
        decode=run.parts.tokenizer.decode,
    )
    return summary


def summarise(run: Run) -> dict[str, Any]:
    """The fields of the contract (DESIGN: summary.json) and where they come from."""
    config, cursor = run.config, run.cursor
    totals, results = cursor.totals, cursor.results
    first = "untrained" if config.warm_start.steps else "before"

    def success(name: str) -> float | None:
        return results[name]["success"] if name in results else None

    def ratio(numerator: str, denominator: str) -> float | None:
        below = totals.get(denominator, 0.0)
        return totals.get(numerator, 0.0) / below if below else None

    return build_summary(
        {
            "preset": config.preset,
            "seed": config.seed,
            "steps": config.rl.steps,
            "wall_s": totals.get("wall_s", 0.0),
            "heldout_success_before": success("before"),
            "heldout_success_after": success("after"),
            "heldout_n": results["after"]["num_tasks"] if "after" in results else 0,
            "heldout_success_untrained": success(first),
            "heldout_success_no_tool": success("no_tool"),
            "dtype": config.dtype,
            "logp_gap_max": totals.get("logp_gap_max"),
            "logp_gap_mean": ratio("logp_gap_sum", "logp_gap_tokens"),
            "tokens_per_s_rollout": ratio("rollout_tokens", "rollout_s"),
            "tokens_per_s_train": ratio("train_tokens", "train_s"),
            "num_rollouts": int(totals.get("num_rollouts", 0)),
            "num_failed_rollouts": int(totals.get("num_failed_rollouts", 0)),
            "peak_rss_bytes": int(totals.get("peak_rss_bytes", 0)),
            "git_commit": git_commit(ROOT) or "unknown",
        },
        {
            "per_type": per_type(results),
            "phase_wall_s": {
                name.removeprefix("phase_s."): value
                for name, value in totals.items()
                if name.startswith("phase_s.")
            },
            "logp_gap_steps": int(totals.get("logp_gap_steps", 0)),
            "logp_gap_share": ratio("logp_gap_tokens", "rollout_tokens") or 0.0,
            "warm_start_steps": config.warm_start.steps,
            "heldout_n_before": results.get("before", {}).get("num_tasks", 0),
            "heldout_n_untrained": results.get(first, {}).get("num_tasks", 0),
            "heldout_n_no_tool": results.get("no_tool", {}).get("num_tasks", 0),
            "model": config.model or config.preset,
            "model_source": model_source(config, run.parts.folder).text,
            "num_parameters": run.parts.num_parameters,
            "date": datetime.date.today().isoformat(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "threads": num_threads(config),
            "command": " ".join(sys.argv),
            "torch_version": str(torch.__version__),
            "sandbox": config.tool.sandbox if runs_programs(config, run.parts.kind) else "none",
            "history": run.history.read(),
            "status": "finished" if cursor.phase == "done" else f"stopped in phase {cursor.phase}",
        },
    )


def per_type(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Success by task type in every evaluation, and of how many tasks; `n` is of the one after
    RL."""
    table: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        for kind, (solved, played) in result["per_kind"].items():
            row = table.setdefault(kind, {})
            row[name] = solved / played
            row[f"n_{name}"] = played
            if name == "after" or "n" not in row:
                row["n"] = played
    return dict(sorted(table.items()))
