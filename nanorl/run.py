"""A whole run, phase by phase: untrained score, warm start, score, RL, score with tool and without.

    untrained -> warm_start -> before -> rl -> after -> no_tool -> done

`Cursor` says which phase is next; it travels inside every checkpoint, so `--resume` enters the loop
where the last checkpoint was made. Metrics rows and stored rollouts that lie behind the checkpoint
are removed first: the resumed run writes them again, with the same content.
Next: trainer.py (the RL loop), assembly.py (how the parts are made).
"""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoengine.checkpoint import latest_checkpoint, open_checkpoint
from nanoengine.engine import Engine
from nanoengine.packing import Sample
from nanoengine.sft import num_loss_tokens, sft_loss
from nanorl.assembly import Parts
from nanorl.collector import RolloutCollector
from nanorl.config import RunConfig
from nanorl.critic import Critic
from nanorl.data.store import RolloutStore
from nanorl.evaluate import EvaluationResult, evaluate
from nanorl.learner import Learner
from nanorl.reference import open_reference
from nanorl.report.live import LiveView
from nanorl.report.metrics import MetricsWriter
from nanorl.run_state import Cursor
from nanorl.trainer import StepResult, Trainer, to_the_end
from nanorl.types import Rollout
from nanorl.warm_start import WarmStart
from nanorl.weight_sync import sync_weights
from nanosched import Scheduler

SHOWN = ("success", "reward", "logp_gap_max", "clip_fraction", "grad_norm", "step_s")


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """Ctrl-C: the run was saved and can be resumed."""


class Run:
    """One run directory, its files and its phases."""

    def __init__(self, config: RunConfig, parts: Parts, live: LiveView) -> None:
        self.config = config
        self.parts = parts
        self.live = live
        self.dir = config.run_dir
        self.store = RolloutStore(self.dir / "rollouts.sqlite")
        self.metrics = MetricsWriter(
            self.dir / "metrics.jsonl", tensorboard_dir=self.dir / "tensorboard"
        )
        self.cursor = Cursor()
        self.engine: Engine = parts.trainer_engine
        self.critic: Critic | None = None
        self.is_restored = False
        self.started = time.perf_counter()
        self.examples: dict[str, Sequence[Rollout]] = {}

    # -- life cycle ------------------------------------------------------------------------------

    async def execute(self) -> None:
        """All phases that are left. Raises `Interrupted` after saving on Ctrl-C."""
        loop = asyncio.get_running_loop()
        current = asyncio.current_task()
        assert current is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, current.cancel)
        try:
            if self.is_restored:
                await sync_weights(self.engine, self.parts.generator, self.cursor.step)
            while self.cursor.phase != "done":
                await getattr(self, f"run_{self.cursor.phase}")()
        except asyncio.CancelledError:
            self.save()
            raise Interrupted from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await self.parts.generator.close()

    def restore(self) -> None:
        """Continue from the newest checkpoint, or from the start where there is none."""
        found = latest_checkpoint(self.checkpoints)
        if found is None:
            self.store.delete_from_step(0)
            self.metrics.truncate_from(0)
            return
        self.cursor = Cursor.from_json(open_checkpoint(found).meta["cursor"])
        if self.cursor.phase not in ("untrained", "warm_start"):
            self.engine.restart(self.parts.rl_config())
        self.engine.load(found)
        self.is_restored = True
        first = self.cursor.step if self.cursor.phase == "rl" else self.rl_steps_done
        self.store.delete_from_step(first)
        self.metrics.truncate_from(first)

    @property
    def rl_steps_done(self) -> int:
        return self.config.rl.steps if self.cursor.phase in ("after", "no_tool", "done") else 0

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def save(self) -> None:
        """A checkpoint of the engine and the cursor; the critic's first, which the cursor names."""
        self.note_time()
        if self.critic is not None:
            folder = self.critic.engine.save(self.dir / "critic")
            assert folder is not None, "it is not saved in the background"
            self.cursor.critic = folder.name
        self.engine.save(self.checkpoints, self.cursor.to_json())

    def note_time(self) -> None:
        now = time.perf_counter()
        self.cursor.add("wall_s", now - self.started)
        self.started = now
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.cursor.keep_max("peak_rss_bytes", float(peak))

    @contextmanager
    def _timed(self, name: str, total: int, done: int = 0) -> Iterator[str]:
        """Show a phase and count its seconds; yields the name."""
        start = time.perf_counter()
        if total:
            self.live.start_phase(name, total)
            self.live.advance(name, done)
        try:
            yield name
        finally:
            self.cursor.add(f"phase_s.{name}", time.perf_counter() - start)

    # -- evaluation phases -----------------------------------------------------------------------

    async def run_untrained(self) -> None:
        await self._evaluate("untrained", self.config.evaluation.num_tasks_untrained)

    async def run_before(self) -> None:
        await self._evaluate("before", self.config.evaluation.num_tasks)

    async def run_after(self) -> None:
        await self._evaluate("after", self.config.evaluation.num_tasks)

    async def run_no_tool(self) -> None:
        count = self.config.evaluation.num_tasks_no_tool
        await self._evaluate("no_tool", count, is_tool_enabled=False)

    async def _evaluate(self, name: str, count: int, *, is_tool_enabled: bool = True) -> None:
        tasks = self.parts.tasks.heldout[:count]
        if tasks:
            play = self.parts.play if is_tool_enabled else self.parts.play_without_tool
            with self._timed(f"evaluation, {name.replace('_', ' ')}", len(tasks)) as phase:
                result = await evaluate(
                    play, tasks, name=name, on_rollout=lambda _: self.live.advance(phase)
                )
            self._record(name, result)
        self.cursor.next_phase()

    def _record(self, name: str, result: EvaluationResult) -> None:
        self.cursor.results[name] = result.to_json()
        self.examples[name] = result.examples
        self.live.say(
            f"{name.replace('_', ' ')}: {result.success:.1%} of {result.num_tasks} held-out tasks"
        )

    # -- warm start ------------------------------------------------------------------------------

    async def run_warm_start(self) -> None:
        warm = self.config.warm_start
        source = WarmStart(self.config, self.parts)
        with self._timed("warm start", warm.steps, self.cursor.step) as phase:
            upcoming = asyncio.ensure_future(source.samples(self.cursor.step))
            while self.cursor.step < warm.steps:
                step = self.cursor.step
                samples = await upcoming
                # The teacher plays in the sandbox while the optimizer runs in its thread.
                upcoming = asyncio.ensure_future(source.samples(step + 1))

                async def finish_step(step: int = step, samples: list[Sample] = samples) -> None:
                    result = await asyncio.get_running_loop().run_in_executor(
                        self.parts.optimizer_thread,
                        self.engine.train_step,
                        samples,
                        sft_loss,
                        num_loss_tokens,
                    )
                    self.cursor.step = step + 1
                    self.live.advance(phase)
                    self.live.show(phase, {"loss": result["loss"]})

                await to_the_end(finish_step())
            upcoming.cancel()
        await sync_weights(self.engine, self.parts.generator, 0)
        self.engine.restart(self.parts.rl_config())
        self.cursor.next_phase()
        self.save()

    # -- reinforcement learning ------------------------------------------------------------------

    async def run_rl(self) -> None:
        rl = self.config.rl
        with self._timed("reinforcement learning", rl.steps, self.cursor.step) as phase:

            def on_step(result: StepResult) -> None:
                self._log_step(result)
                self.live.advance(phase)
                self.live.show(phase, {name: result.metrics.get(name) for name in SHOWN})

            with Scheduler(backend="inline") as scheduler:
                trainer = Trainer(
                    self.config,
                    learner=scheduler.actor(Learner).remote(
                        self.config,
                        engine=self.engine,
                        generator=self.parts.generator,
                        thread=self.parts.optimizer_thread,
                        num_batches=self.cursor.step,
                        **self._rl_models(),
                    ),
                    collector=scheduler.actor(RolloutCollector).remote(
                        self.parts.play, run_seed=self.config.seed, max_retries=rl.max_retries
                    ),
                    task_batch=lambda step: self.parts.tasks.train.batch(step, rl.tasks_per_step),
                )
                await trainer.fit(self.cursor.step, on_step)
        self.cursor.next_phase()
        self.save()
        self.critic = None

    def _rl_models(self) -> dict[str, Any]:
        """The models that the algorithm has beside the policy, as they were at the last step."""
        spec, models = self.config.rl.algorithm, dict[str, Any]()
        has_begun = self.cursor.step > 0
        if spec.needs_reference:
            models["reference"] = open_reference(
                self.config, self.engine.model, self.dir / "reference", has_begun=has_begun
            )
        if spec.needs_critic:
            models["critic"] = self.critic = Critic(
                self.engine.model,
                self.parts.critic_config(),
                value_clip=self.config.rl.value_clip,
            )
            if has_begun:
                self.critic.engine.load(self.dir / "critic" / self.cursor.critic)
        return models

    def _log_step(self, result: StepResult) -> None:
        """Record a finished step, then move the cursor; every `save_every` steps, a checkpoint."""
        self.store.add_group(
            [*(rollout for group in result.groups for rollout in group), *result.failed],
            step=result.step,
            version=result.step,
        )
        self.metrics.write(result.step, result.metrics)
        self._add_totals(result.metrics)
        self.cursor.add("num_failed_rollouts", len(result.failed))
        self.cursor.step = result.step + 1
        if self.cursor.step % self.config.save_every == 0:
            self.save()

    def _add_totals(self, metrics: dict[str, Any]) -> None:
        self.cursor.add("num_rollouts", metrics["num_rollouts"])
        self.cursor.add("rollout_tokens", metrics["action_tokens"])
        self.cursor.add("rollout_s", metrics["rollout_s"])
        self.cursor.add("train_tokens", metrics["total_tokens"])
        self.cursor.add("train_s", metrics["train_s"])
        self.cursor.keep_max("logp_gap_max", metrics["logp_gap_max"])
        self.cursor.add("logp_gap_sum", metrics["logp_gap_mean"] * metrics["action_tokens"])
