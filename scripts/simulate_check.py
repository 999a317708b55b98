"""Compares the simulator with real runs of this machine: the tiny preset on 1, 2 and 3 replicas.

    python scripts/simulate_check.py [--json FILE] [--steps 5] [--rounds 2] [--replicas 1 2 3]

Each run trains a few steps with `--cluster.backend local` from random weights, so that every answer
has nearly the same length, the limit; the counts take turns, so that what else the machine does
meets them all. From metrics.jsonl come the times of the trainer's phases and how long the engines
worked. What metrics.jsonl does not tell is what an agent costs beside the engine (environment,
messages between processes); the run with one replica gives it, as what is left of its wait. So of
that run only the sum is checked, and the others are predictions:

    same-run     phases and engine times are those of the run itself, so they hold what processes
                 take from each other here; the agents' are from the run with one replica
    from-one     phases, engine and agents are those of the run with one replica; that the cores are
                 shared is left to the simulator
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_output import ROOT, print_rows, write_json

from nanorl.inspection.simulate.simulation import simulate
from nanorl.inspection.simulate.simulation_config import (
    AnswerLengths,
    EngineTimes,
    GpuLayout,
    PhaseTimes,
    RolloutLoad,
    SimulationConfig,
)
from nanorl.inspection.simulate.simulation_result import SimulationResult

TASKS, GROUP, TURN_TOKENS = 8, 4, 192
NUM_CORES = 2.0
TRAIN = (
    "--preset", "tiny", "--cluster.backend", "local", "--threads", "2",
    "--warm-start.steps", "0", "--rl.tasks-per-step", str(TASKS), "--rl.group-size", str(GROUP),
    "--agent.max-turn-tokens", str(TURN_TOKENS), "--evaluation.num-tasks", "1",
    "--evaluation.num-tasks-untrained", "0", "--evaluation.num-tasks-no-tool", "0",
    "--no-keep-start",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means over the steps of a real run, the first one left out: seconds a step."""

    num_replicas: int
    step_s: float
    wait_s: float
    train_s: float
    sync_s: float
    replica_s: float  # each worked, on average
    prompt: float  # tokens of a rollout
    answer: float
    num_steps: int

    @property
    def phases(self) -> PhaseTimes:
        other = self.step_s - self.wait_s - self.train_s - self.sync_s
        return PhaseTimes(update_s=self.train_s, other_s=max(0.0, other), sync_s=self.sync_s)


def run_real(num_replicas: int, num_steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train; the rows of metrics.jsonl but the first, whose processes are still warming up."""
    words = ["--rollout.replicas", str(num_replicas), "--rl.steps", str(num_steps + 1)]
    subprocess.run(
        [sys.executable, "-m", "nanorl", "train", *TRAIN, *words, "--out", str(folder)],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


def measured(num_replicas: int, steps: Sequence[Mapping[str, Any]]) -> Measured:
    """The means of rows of metrics.jsonl."""

    def mean(name: str) -> float:
        return fmean(row[name] for row in steps)

    rollouts = mean("num_rollouts")
    return Measured(
        num_replicas=num_replicas,
        **{name: mean(name) for name in ("step_s", "wait_s", "train_s", "sync_s")},
        replica_s=fmean((1 - row["idle_replicas"]) * row["step_s"] for row in steps),
        prompt=(mean("total_tokens") - mean("action_tokens")) / rollouts,
        answer=mean("action_tokens") / rollouts,
        num_steps=len(steps),
    )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the simulator is told of engine and agents: seconds of an engine's step, and of an
    agent's own work for a rollout."""

    step_s: float
    agent_s: float
    cores: float = 0.0


def simulated(run: Measured, phases: PhaseTimes, costs: Costs) -> SimulationResult:
    """The simulated counterpart of a run."""
    config = SimulationConfig(
        cluster=GpuLayout(replicas=run.num_replicas, trainer_gpus=1, shared_cores=costs.cores),
        workload=RolloutLoad(
            tasks_per_step=TASKS,
            group_size=GROUP,
            prompt=max(1, round(run.prompt)),
            answer=AnswerLengths(kind="constant", mean=run.answer),
            agent_s=costs.agent_s,
        ),
        engine=EngineTimes(
            step_s=costs.step_s, seq_s=0.0, kv_s=0.0, prefill_s=0.0, max_batch_tokens=4096
        ),
        phases=phases,
        quantum=1,
        warmup_steps=1,
        measured_steps=2,
    )
    return simulate(config)


def with_step(run: Measured, agent_s: float) -> Costs:
    """The engine's step with which simulated replicas work as long as the real ones."""
    step_s = run.replica_s / run.answer
    for _ in range(5):
        result = simulated(run, run.phases, Costs(step_s=step_s, agent_s=agent_s))
        step_s *= run.replica_s / ((1 - result.idle_replicas) * result.step_s)
    return Costs(step_s=step_s, agent_s=agent_s)


def with_agents(run: Measured) -> Costs:
    """Both costs, of a run with one replica: agents take what is left of its wait."""
    agent_s = 0.0
    for _ in range(5):
        costs = with_step(run, agent_s)
        wait_s = simulated(run, run.phases, costs).mean("wait_s")
        agent_s = max(0.0, agent_s + (run.wait_s - wait_s) / (TASKS * GROUP))
    return with_step(run, agent_s)


def make_rows(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row for each run and prediction; `peer` is the real run."""
    first = runs[0]
    alone = with_agents(first)
    rows = [make_row("calibrated", first, simulated(first, first.phases, alone))]
    for run in runs[1:]:
        own = simulated(run, run.phases, with_step(run, alone.agent_s))
        shared = simulated(run, first.phases, replace(alone, cores=NUM_CORES))
        rows += [make_row("same-run", run, own), make_row("from-one", run, shared)]
    return rows


def make_row(kind: str, run: Measured, result: SimulationResult) -> dict[str, Any]:
    seconds = result.step_s
    return {
        "name": f"step-{run.num_replicas}-replicas-{kind}", "dtype": "bf16", "threads": 2,
        "value": seconds, "unit": "s, SIMULATED",
        "peer": "real run", "peer_value": run.step_s, "ratio": seconds / run.step_s,
        "bound": None, "bound_ratio": None, "runs": {"measured": vars(run)},
        "total": {"simulated": seconds * run.num_steps, "real": run.step_s * run.num_steps},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=5, help="of each run and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    if options.replicas[0] != 1:
        raise SystemExit(
            f"--replicas {options.replicas}: must begin with 1, which is calibrated on"
        )
    steps: dict[int, list[dict[str, Any]]] = {count: [] for count in options.replicas}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for count, found in steps.items():
                found += run_real(count, options.steps, Path(folder) / f"r{count}-{turn}")
    runs = [measured(count, found) for count, found in steps.items()]
    rows = make_rows(runs)
    print_rows(rows)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
