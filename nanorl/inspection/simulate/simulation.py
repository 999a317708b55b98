"""Runs a configuration: the real trainer, queue, staleness control, collector, router and scheduler
on a virtual clock, with simulated agents, replicas and learner.

    result = simulate(read_config("verl-128-async"))
    print(result.step_s, result.idle_replicas)

Some steps are simulated until the pipeline is full, then some are measured; the whole run is
extrapolated from them.

The quantum q (real tokens for one simulated one) is the smallest power of two for which the run has
at most `MOST_QUANTA` of them, but a turn keeps `LEAST_QUANTA` on average: a larger q would no
longer tell short answers apart. `with_half_quantum` runs the same with q / 2, which says how far
off q is. Next: rollouts.py, simulated_replica.py, simulated_learner.py (what is simulated),
simulation_result.py (what is made of it).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from nanorl.agents.collector import RolloutCollector
from nanorl.distributed.roles.router import Router
from nanorl.flow.batch_policy import BatchPolicy
from nanorl.flow.curriculum import InOrder, TaskChooser
from nanorl.inspection.simulate.clock import run_virtually
from nanorl.inspection.simulate.lengths import mean_length
from nanorl.inspection.simulate.rollouts import ANSWER, END_S, SimulatedAgent, SimulatedTasks
from nanorl.inspection.simulate.simulated_learner import PhaseSpan, SimulatedLearner
from nanorl.inspection.simulate.simulated_replica import RequestSize, SharedCores, SimulatedReplica
from nanorl.inspection.simulate.simulation_config import SimulationConfig
from nanorl.inspection.simulate.simulation_result import SimulatedStep, SimulationResult
from nanorl.learner import Learner
from nanorl.observability.results import StepResult
from nanorl.options.phase_config import RLConfig
from nanorl.options.run_config import RunConfig
from nanorl.run.trainer import Trainer
from nanosched import ActorHandle, Scheduler

MOST_QUANTA, LEAST_QUANTA = 1 << 20, 16
TAIL_SHARE = 0.1
"""The tail is the time in which only so many of a step's requests are left (Seer)."""


class _EnoughSteps(Exception):  # noqa: N818 - named as what happened
    """All steps that count have been simulated."""


def simulate(config: SimulationConfig) -> SimulationResult:
    """Run it. Equal configurations have equal results."""
    simulation = _Simulation(config)
    run_virtually(simulation.run())
    return simulation.result()


def with_half_quantum(result: SimulationResult) -> SimulationResult | None:
    """The same run with half the quantum; None where that was one token."""
    if result.quantum == 1:
        return None
    return simulate(replace(result.config, quantum=result.quantum // 2))


def choose_quantum(config: SimulationConfig) -> int:
    """Real tokens for one simulated one, see above."""
    if config.quantum:
        return config.quantum
    work, mean = config.workload, mean_length(config.workload.answer)
    num_steps = config.warmup_steps + config.measured_steps + config.max_staleness
    num_tokens = work.tasks_per_step * work.group_size * mean * num_steps
    wanted = math.log2(max(1.0, num_tokens / MOST_QUANTA))
    most = math.log2(max(1.0, mean / work.turns / LEAST_QUANTA))
    return 1 << min(math.ceil(wanted), math.floor(most))


class _Simulation:
    """The parts of one simulated run, and what they have recorded."""

    def __init__(self, config: SimulationConfig) -> None:
        self.config = config
        self.quantum = choose_quantum(config)
        self.sizes: dict[int, RequestSize] = {}
        self.cores = SharedCores(config.cluster.shared_cores)
        self.replicas = [
            SimulatedReplica(config.engine, self.quantum, self.sizes, self.cores)
            for _ in range(config.cluster.replicas)
        ]
        self.spans: list[PhaseSpan] = []  # of the trainer
        self.ends_s: list[float] = []  # of each step
        self.steps: list[StepResult] = []

    async def run(self) -> None:
        with Scheduler(backend="inline") as scheduler:
            learner = scheduler.actor(SimulatedLearner).remote(
                self.config, self.replicas, self.spans
            )
            trainer = Trainer(
                self._run_config(),
                # It has the methods of a learner that the trainer calls.
                learner=cast("ActorHandle[Learner]", learner),
                collector=self._collector(scheduler),
                tasks=TaskChooser(SimulatedTasks(), InOrder(), seed=self.config.seed),
                measures_gap=False,  # no token has a log-prob
            )
            with suppress(_EnoughSteps):
                await trainer.fit(0, self._on_step)

    def _run_config(self) -> RunConfig:
        """The options that the trainer reads. Its rule of admission is linear in the staleness, so
        it holds for fractions of a batch as well, which the type does not say."""
        config, work = self.config, self.config.workload
        num_steps = config.warmup_steps + config.measured_steps + math.ceil(config.max_staleness)
        options: dict[str, Any] = {
            "steps": num_steps + 1,
            "tasks_per_step": work.tasks_per_step,
            "group_size": work.group_size,
            "max_staleness": config.max_staleness,
            "batch": BatchPolicy(order="task" if config.mode == "sync" else "finish"),
        }
        spec = replace(RLConfig().algorithm, advantage="reinforce_pp")  # goes with any group size
        return RunConfig(rl=RLConfig(**options, algorithm=spec))

    def _collector(self, scheduler: Scheduler) -> ActorHandle[RolloutCollector]:
        config = self.config
        # A block of the router is a token here: one stands for as many as a real block, or more.
        router = Router(gate=config.engine.router_gate, block_size=1)
        router.set_replicas({f"r{i}": replica for i, replica in enumerate(self.replicas)})
        agent = SimulatedAgent(
            config.workload, router, self.sizes, quantum=self.quantum, seed=config.seed
        )
        clock = asyncio.get_running_loop().time
        return scheduler.actor(RolloutCollector).remote(agent, run_seed=config.seed, clock=clock)

    async def _on_step(self, step: StepResult) -> None:
        self.steps.append(step)
        self.ends_s.append(asyncio.get_running_loop().time())
        if len(self.steps) == self.config.warmup_steps + self.config.measured_steps:
            raise _EnoughSteps

    # What was recorded

    def result(self) -> SimulationResult:
        first = self.config.warmup_steps
        start_s, end_s = (self.ends_s[first - 1] if first else 0.0), self.ends_s[-1]
        window_s = end_s - start_s
        busy_s = [_overlap(r.record.spans, start_s, end_s) for r in self.replicas]
        trainer = [(one.start_s, one.end_s) for one in self.spans]
        ages = Counter(age for step in self.steps[first:] for age in _ages(step))
        measured = range(first, len(self.steps))
        return SimulationResult(
            config=self.config,
            quantum=self.quantum,
            start_s=start_s,
            steps=[self._step(i) for i in measured],
            idle_trainer=1 - _overlap(trainer, start_s, end_s) / window_s,
            idle_replicas=1 - sum(busy_s) / len(busy_s) / window_s,
            staleness={age: count / ages.total() for age, count in sorted(ages.items())},
            num_preemptions=sum(r.scheduler.num_preemptions for r in self.replicas),
            phase_spans=self.spans,
            replica_spans=[r.record.spans for r in self.replicas],
            end_s=end_s,
        )

    def _step(self, index: int) -> SimulatedStep:
        metrics, end_s = self.steps[index].metrics, self.ends_s[index]
        start_s = end_s - metrics["step_s"]
        phases = {
            name: _overlap([(s.start_s, s.end_s) for s in self._phase(name)], start_s, end_s)
            for name in ("train", "other", "sync")
        }
        rollouts = [rollout for group in self.steps[index].groups for rollout in group]
        ends_s = sorted(rollout.metrics[END_S] for rollout in rollouts)
        at = math.ceil(len(ends_s) * (1 - TAIL_SHARE)) - 1
        return SimulatedStep(
            step_s=metrics["step_s"],
            wait_s=metrics["step_s"] - sum(phases.values()),
            rollout_s=metrics["rollout_s"],
            tail_s=ends_s[-1] - ends_s[at],
            num_tokens=sum(round(rollout.metrics[ANSWER]) for rollout in rollouts),
            **{f"{name}_s": seconds for name, seconds in phases.items()},
        )

    def _phase(self, name: str) -> list[PhaseSpan]:
        return [span for span in self.spans if span.phase == name]


def _ages(step: StepResult) -> list[int]:
    """Versions between the weights that sampled a token and those that it trains."""
    return [
        step.step - version
        for group in step.groups
        for rollout in group
        for version in rollout.versions
        if version >= 0
    ]


def _overlap(spans: Sequence[tuple[float, ...]], start_s: float, end_s: float) -> float:
    """Seconds of the spans inside a window."""
    return sum(max(0.0, min(span[1], end_s) - max(span[0], start_s)) for span in spans)
