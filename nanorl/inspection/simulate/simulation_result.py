"""What a simulation found, as numbers and as text. Everything printed says that it is SIMULATED.

Left out: the picture (picture.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from nanorl.inspection.simulate.simulated_learner import PhaseSpan
from nanorl.inspection.simulate.simulation_config import SimulationConfig

BUSY = 0.85
"""A role that works for this share of the time is what the run waits for."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Seconds of one step, from the end of the one before to its own."""

    step_s: float
    wait_s: float  # the trainer waited for rollouts
    train_s: float
    other_s: float
    sync_s: float
    rollout_s: float  # in which rollouts went on, of any step
    tail_s: float  # from the end of nine tenths of its own rollouts to that of the last
    num_tokens: int  # of the answers


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of a simulation. Shares and means are of the measured steps."""

    config: SimulationConfig
    quantum: int
    start_s: float  # when the first measured step began
    end_s: float
    steps: Sequence[SimulatedStep]
    idle_trainer: float  # share of the time
    idle_replicas: float
    staleness: dict[int, float]  # share of the trained tokens by their age in versions
    num_preemptions: int  # of all steps
    phase_spans: Sequence[PhaseSpan] = field(repr=False)
    replica_spans: Sequence[Sequence[tuple[float, float, int]]] = field(repr=False)

    def mean(self, name: str) -> float:
        """The mean of a field of the steps."""
        return fmean(getattr(step, name) for step in self.steps)

    @property
    def step_s(self) -> float:
        return self.mean("step_s")

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens that were trained on, for each second."""
        return self.mean("num_tokens") / self.step_s

    @property
    def total_s(self) -> float:
        """Seconds of the whole run: the first steps as simulated, the others at their mean."""
        return self.start_s + self.step_s * (self.config.workload.steps - self.config.warmup_steps)

    @property
    def gpu_hours(self) -> float:
        return self.total_s / 3600 * self.config.cluster.num_gpus

    def bottleneck(self) -> str:
        """A sentence on what the run waits for."""
        if 1 - self.idle_trainer >= BUSY:
            return (
                f"The trainer: it works {_percent(1 - self.idle_trainer)} of the time. More GPUs "
                "for it, or fewer for the engines, make steps shorter."
            )
        if 1 - self.idle_replicas >= BUSY:
            return (
                f"The engines: they work {_percent(1 - self.idle_replicas)} of the time. More "
                "replicas make steps shorter."
            )
        return self._bottleneck_of_waiting()

    def _bottleneck_of_waiting(self) -> str:
        wait, step = self.mean("wait_s"), self.step_s
        tail = min(self.mean("tail_s"), wait)
        if self.config.mode == "async":
            return (
                f"The staleness limit: engines are idle {_percent(self.idle_replicas)} and the "
                f"trainer {_percent(self.idle_trainer)} of the time. A larger --max-staleness lets "
                "rollouts go on."
            )
        if tail > wait / 2:
            return (
                f"The tail: {_percent(tail / step)} of a step only a tenth of its rollouts or less "
                "go on. Staleness, or a lower cap of the answers, would fill it."
            )
        if wait > step / 2:
            return (
                f"Generation: {_percent(wait / step)} of a step the trainer waits for it. More "
                "replicas shorten it, staleness hides it."
            )
        return (
            f"Taking turns: the trainer works {_percent(1 - wait / step)} of a step, in which the "
            "engines wait. Staleness would let both work."
        )

    def numbers(self) -> dict[str, Any]:
        """The figures for a JSON file."""
        names = ("step_s", "wait_s", "train_s", "other_s", "sync_s", "rollout_s", "tail_s")
        return {
            "is_simulated": True,
            "name": self.config.name,
            **{name: self.mean(name) for name in names},
            "idle_trainer": self.idle_trainer,
            "idle_replicas": self.idle_replicas,
            "staleness": self.staleness,
            "num_preemptions": self.num_preemptions,
            "tokens_per_s": self.tokens_per_s,
            "total_s": self.total_s,
            "gpu_hours": self.gpu_hours,
            "quantum": self.quantum,
            "bottleneck": self.bottleneck(),
        }

    def text(self, half: SimulationResult | None = None) -> str:
        """The report for people. `half` is the same run with half the quantum."""
        config, layout = self.config, self.config.cluster
        turns = " in turns" if layout.placement == "colocated" else ""
        ages = ", ".join(f"{age}: {_percent(share)}" for age, share in self.staleness.items())
        lines = [
            f"SIMULATED: {config.name}, {layout.num_gpus} GPUs ({layout.replicas} replicas of "
            f"{layout.gpus_per_replica}, {layout.trainer_gpus} train{turns}), mode {config.mode}",
            f"  step                {self.step_s:10.1f} s    = {self._phases()}",
            f"  whole run           {_duration(self.total_s):>10}      {config.workload.steps} "
            f"steps, {self.gpu_hours:,.0f} GPU-hours",
            f"  answer tokens       {self.tokens_per_s:10,.0f} /s",
            f"  idle                trainer {_percent(self.idle_trainer)}, "
            f"replicas {_percent(self.idle_replicas)}",
            f"  age of tokens       {ages} (versions)",
            f"  tail                {self.mean('tail_s'):10.1f} s    with a tenth of the rollouts",
            f"  preemptions         {self.num_preemptions:10,d}      in "
            f"{config.warmup_steps + config.measured_steps} steps",
            f"  bottleneck          {self.bottleneck()}",
            f"  quantum             {self.quantum:10d}      {self._quantum_error(half)}",
        ]
        return "\n".join(lines)

    def _phases(self) -> str:
        parts = {"wait": "wait_s", "train": "train_s", "other": "other_s", "sync": "sync_s"}
        return " + ".join(f"{word} {self.mean(name):.1f}" for word, name in parts.items())

    def _quantum_error(self, half: SimulationResult | None) -> str:
        if self.quantum == 1:
            return "tokens for one; exact"
        if half is None:
            return "tokens for one"
        change = half.step_s / self.step_s - 1
        return f"tokens for one; with {half.quantum} the step is {change:+.1%} longer"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    return f"{days}d {hours:02d}h{minutes % 60:02d}" if days else f"{hours}h{minutes % 60:02d}"
