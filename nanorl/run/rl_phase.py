"""`RLPhase`: the steps of reinforcement learning, each written down before the next one begins.

The order in which a step takes effect, which going on after a kill depends on:

    trainer.py        the optimizer has made its step, the replicas have the weights
    on_step           rollouts stored, then the row of metrics.jsonl, then copies for others
    the cursor        moves behind the step
    a checkpoint      every `save_every` steps; at the last step the phase saves at its end
    on_step_kept      the step is shown
    an evaluation     where one is due (running_evaluation.py); one that is broken off is made anew.
                      Where replicas are free it plays beside the next step (evaluation_beside.py)

Left out: the loop itself (trainer.py).
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from nanoengine.heads.scorer import Policy
from nanoengine.state.checkpoint import forget_newer
from nanorl.distributed.roles.base import RunCritic
from nanorl.envs.judged import judges_of
from nanorl.flow.curriculum import TaskChooser
from nanorl.observability.alarms.alarms import GOOD_SUCCESS, NO_SIGNAL
from nanorl.observability.report.observer import PhaseBegun
from nanorl.observability.results import StepResult
from nanorl.options.run_curriculum import run_curriculum
from nanorl.run.evaluation_beside import EvaluationBeside, WaitingPublisher, has_free_replicas
from nanorl.run.run_checkpoints import RunCheckpoints
from nanorl.run.running_evaluation import RunningEvaluation
from nanorl.run.state import RunState
from nanorl.run.step_measures import StepMeasures
from nanorl.run.trainer import Trainer
from nanorl.scorers.references import reference_folders
from nanorl.scorers.scored_learner import choose_learner
from nanosched import Scheduler

if TYPE_CHECKING:
    from nanorl.flow.replay_groups import ReplayGroups

TITLE = "reinforcement learning"


class RLPhase:
    """Opens what the algorithm needs, has the trainer make its steps, and saves at the end."""

    def __init__(self, state: RunState, checkpoints: RunCheckpoints) -> None:
        self._state, self._checkpoints = state, checkpoints
        counts_http = state.config.http.mode != "off"
        self._measures = StepMeasures(
            state.roles, counts_http=counts_http, has_judges=bool(judges_of(state.parts.kind))
        )
        self._evaluation = RunningEvaluation(state)
        self._beside = EvaluationBeside(self._evaluation, checkpoints)

    async def play(self) -> None:
        state, steps = self._state, self._state.config.rl.steps
        begun = PhaseBegun(
            phase="rl", title=TITLE, total=steps, num_done=state.cursor.step, num_lines=steps
        )
        async with state.timed(begun):
            await self._train()
        self._say_idle_steps()
        state.cursor.rl_steps = steps
        state.cursor.next_phase()
        await self._checkpoints.save()
        self._checkpoints.critic = None
        self._checkpoints.close_journal()

    async def _train(self) -> None:
        state, checkpoints = self._state, self._checkpoints
        checkpoints.keep_start()
        checkpoints.open_journal()
        checkpoints.critic = await self._open_critic()
        reference = await self._open_reference()
        await checkpoints.keep_average()
        with Scheduler(backend="inline") as scheduler:
            trainer = self._make_trainer(scheduler, reference, await self._open_replay())
            trainer.load(state.cursor.flow)
            await self._evaluate()
            await self._measures.begin()
            finish = partial(self._finish_step, trainer)
            try:
                await trainer.fit(state.cursor.step, finish, self._evaluate)
                await self._beside.ended()
            finally:
                await self._beside.close()

    async def _open_replay(self) -> ReplayGroups | None:
        """The groups that are trained on again, as they were at the last step."""
        state, config = self._state, self._state.config
        if not config.rl.replay.share:
            return None
        from nanorl.run.replay_state import open_replay  # few runs replay

        return await open_replay(config, state.cursor.flow, state.roles.store)

    def _make_trainer(
        self, scheduler: Scheduler, reference: Policy | None, replay: ReplayGroups | None
    ) -> Trainer:
        state, config, roles = self._state, self._state.config, self._state.roles
        critic = self._checkpoints.critic
        chosen = choose_learner(
            config,
            engine=roles.engine,
            publisher=WaitingPublisher(roles.publisher, self._beside.ended),
            thread=roles.optimizer_thread,
            reference=reference,
            critic=critic,
            scaffold=state.parts.scaffold,
        )
        learner = scheduler.actor(chosen.func).remote(*chosen.args, **chosen.keywords)
        # Models that score have processes of their own then, which would else be idle.
        # Nobody scores replayed groups early, and scores are of whole batches or of none.
        scores_early = roles.control is not None and replay is None
        scores_early = scores_early and (reference is not None or critic is not None)
        curriculum = run_curriculum(config)
        trainer = Trainer(
            config,
            learner=learner,
            collector=roles.collector,
            tasks=TaskChooser(state.parts.tasks.train, curriculum, seed=config.seed),
            journal=self._checkpoints.journal,
            scores_early=scores_early,
        )
        trainer.replay = replay
        return trainer

    # -- steps -----------------------------------------------------------------------------------

    async def _finish_step(self, trainer: Trainer, step: StepResult) -> None:
        state, config = self._state, self._state.config
        state.cursor.flow = trainer.state
        step.metrics.update(await self._measures.take(step.metrics))
        if isinstance(config.env, tuple):
            from nanorl.run.environment_metrics import environment_metrics  # few have several

            step.metrics.update(environment_metrics(chain.from_iterable(step.groups)))
        await state.observers.on_step(step)
        self._count(step)
        state.cursor.step = step.step + 1
        is_last = state.cursor.step == config.rl.steps  # then the phase saves at its end
        if state.cursor.step % config.save_every == 0 and not is_last:
            await self._checkpoints.save(in_background=config.saves_in_background)
        await state.observers.on_step_kept(step)

    async def _evaluate(self) -> None:
        """Evaluate the policy if that is due, and keep the checkpoint of the best one."""
        if not self._evaluation.is_due:
            return
        if has_free_replicas(self._state.config):
            await self._beside.begin()
            return
        if await self._evaluation.play():
            await self._checkpoints.save_these()
            self._checkpoints.keep_best()
        await self._measures.begin()  # its rollouts are of no step

    def _count(self, step: StepResult) -> None:
        """Add the step to the totals, which summary.json tells."""
        metrics, cursor = step.metrics, self._state.cursor
        cursor.add("num_rollouts", metrics["num_rollouts"])
        cursor.add("rollout_tokens", metrics["action_tokens"])
        cursor.add("rollout_s", metrics["rollout_s"])
        cursor.add("train_tokens", metrics["total_tokens"] + metrics.get("replayed_tokens", 0.0))
        cursor.add("train_s", metrics["train_s"])
        if metrics.get("logp_gap_tokens"):
            self._count_gap(metrics)
        cursor.add("num_failed_rollouts", len(step.failed))
        is_solved = metrics.get("success", 0.0) >= GOOD_SUCCESS
        has_learnt = metrics["num_trained_rollouts"] or metrics.get("replayed_groups")
        cursor.add("num_steps_without_signal", not has_learnt and not is_solved)

    def _count_gap(self, metrics: dict[str, Any]) -> None:
        cursor, measured = self._state.cursor, metrics["logp_gap_tokens"]
        if any("+" in address for address in self._state.config.rollout.addresses):
            from nanorl.distributed.roles.outside_replica import (
                check_gap,  # another project's engine
            )

            check_gap(metrics["logp_gap_mean"])
        cursor.keep_max("logp_gap_max", metrics["logp_gap_max"])
        cursor.add("logp_gap_sum", metrics["logp_gap_mean"] * measured)
        cursor.add("logp_gap_tokens", measured)
        cursor.add("logp_gap_steps", 1)

    def _say_idle_steps(self) -> None:
        if num_idle := int(self._state.cursor.totals.get("num_steps_without_signal", 0)):
            self._state.live.say(
                f"{num_idle} of {self._state.config.rl.steps} steps changed nothing: {NO_SIGNAL}. "
                "If they are many, raise --rl.group-size or --rl.temperature, or train longer "
                "before RL (--warm-start.steps)"
            )

    # -- models beside the policy ----------------------------------------------------------------

    async def _open_critic(self) -> RunCritic | None:
        """The critic as it was at the last step, if the algorithm has one."""
        state = self._state
        if not state.config.rl.algorithm.needs_critic:
            # Should one be wanted again, this one's values would be stale.
            state.cursor.critic = ""
            return None
        critic = await state.roles.open_critic(state.dir / "critic-start")
        if state.cursor.critic:
            folder = state.dir / "critic" / state.cursor.critic
            await state.train(critic.load, folder)
            await state.train(forget_newer, folder)
        return critic

    async def _open_reference(self) -> Policy | None:
        state = self._state
        if not state.config.rl.algorithm.needs_reference:
            return None
        folders = await state.train(
            reference_folders,
            state.config,
            state.dir / "reference",
            has_begun=state.cursor.step > state.history.first_step,
            write_policy=state.roles.engine.write_model,
        )
        return await state.roles.open_reference(folders)
