"""Observers of a run are told of everything, in the order on which going on depends."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from waiting import turns

import nanorl
from nanoengine.state.checkpoint import list_checkpoints, read_cursor
from nanoengine.stop_signals import Interrupted
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.distributed.roles.role import RoleLost
from nanorl.observability.report.metrics import MetricsWriter
from nanorl.observability.report.observer import Evaluated, PhaseBegun, RunObserver
from nanorl.observability.results import StepResult
from nanorl.run import state
from nanorl.run.kept_records import KeptWeights
from nanorl.run.observers import Observers, make_observers
from nanosched import WorkerDied

OPTIONS = {
    **{"dtype": "fp32", "threads": 1, "rl.tasks_per_step": 1, "save_every": 1},
    **{"warm_start.steps": 2, "warm_start.traces_per_step": 1},
    **{"rl.group_size": 2, "rl.algorithm.advantage": "reinforce_pp", "agent.max_turn_tokens": 4},
    "evaluation": {"num_tasks": 2, "num_tasks_untrained": 1, "num_tasks_no_tool": 1},
}
RL = "reinforcement learning"
pytestmark = pytest.mark.xdist_group("heavy")


class Say(nanorl.Env):
    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task(f"say {rng.randint(0, 99)}", answer="x")

    def teacher(self, observations: list[str], rng: Any) -> str:
        return "x"


class Witness(RunObserver):
    """Notes every event, and what of a step was on the disk when it was told of it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.events: list[str] = []
        self.warm_losses: list[float] = []
        self.kept: dict[str, dict[str, bool]] = {}

    async def __aenter__(self) -> Witness:
        self.events.append("begin")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.events.append("end")

    async def on_restore(self, first_step: int) -> None:
        self.events.append(f"restore {first_step}")

    async def on_phase(self, phase: PhaseBegun) -> None:
        self.events.append(f"phase {phase.phase}, {phase.num_done} of {phase.total}")

    def on_progress(self, title: str, metrics: Mapping[str, float]) -> None:
        self.events.append(f"progress of {title}")

    async def on_warm_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.events.append(f"warm step {step}")
        self.warm_losses.append(numbers["loss"])

    async def on_evaluation(self, evaluated: Evaluated) -> None:
        self.events.append(f"evaluated {evaluated.phase} at {evaluated.step}")

    async def on_step(self, step: StepResult) -> None:
        self._look(f"step {step.step}", step.step)

    async def on_step_kept(self, step: StepResult) -> None:
        self._look(f"step {step.step} kept", step.step)

    async def on_phase_end(self, title: str, *, is_whole: bool) -> None:
        self.events.append(f"end of {title}" if is_whole else f"{title} broken off")

    def _look(self, event: str, step: int) -> None:
        self.events.append(event)
        rows = (self.run / "metrics.jsonl").read_text().splitlines()
        with sqlite3.connect(self.run / "rollouts.sqlite") as store:
            [[stored]] = store.execute("select count(*) from rollouts where step = ?", [step])
            names = [name for (name,) in store.execute("select name from facts")]
        saved = [read_cursor(one) for one in list_checkpoints(self.run / "checkpoints")]
        self.kept[event] = {
            "rollouts": stored == 2,
            "row": any(json.loads(row)["step"] == step for row in rows),
            "weights": f"weights/{step + 1}" in names,
            "checkpoint": any((one["phase"], one["step"]) == ("rl", step + 1) for one in saved),
        }


@pytest.fixture
def witnesses(monkeypatch: pytest.MonkeyPatch) -> list[Witness]:
    """The first and the last line of the table of every run that is made from here on."""
    found: list[Witness] = []

    def with_witnesses(parts: Any, *others: Any) -> list[RunObserver]:
        first, last = (Witness(parts.config.run_dir) for _ in range(2))
        found.extend((first, last))
        return [first, *make_observers(parts, *others), last]

    monkeypatch.setattr(state, "make_observers", with_witnesses)
    return found


def test_a_step_is_stored_before_its_row_and_its_row_before_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed between two of them has never a row without rollouts, nor a checkpoint's
    weights without a row."""
    seen: dict[str, Witness] = {}

    def with_witnesses(parts: Any, *others: Any) -> list[RunObserver]:
        table: list[RunObserver] = []
        for one in make_observers(parts, *others):
            if isinstance(one, MetricsWriter | KeptWeights):
                seen[type(one).__name__] = Witness(parts.config.run_dir)
                table.append(seen[type(one).__name__])
            table.append(one)
        return table

    monkeypatch.setattr(state, "make_observers", with_witnesses)
    nanorl.train("tiny", env=Say, steps=1, out=tmp_path / "run", options=OPTIONS)
    nothing = {"rollouts": False, "row": False, "weights": False, "checkpoint": False}
    assert seen["MetricsWriter"].kept["step 0"] == nothing | {"rollouts": True}
    assert seen["KeptWeights"].kept["step 0"] == nothing | {"rollouts": True, "row": True}


def test_an_observer_of_the_table_is_told_of_every_event_of_a_run(
    tmp_path: Path, witnesses: list[Witness]
) -> None:
    nanorl.train("tiny", env=Say, steps=2, out=tmp_path / "run", options=OPTIONS)
    first, last = witnesses
    assert first.events == last.events == [
        "begin",
        *("phase untrained, 0 of 1", "progress of evaluation, untrained"),
        *("end of evaluation, untrained", "evaluated untrained at 0"),
        *("phase warm_start, 0 of 2", "warm step 0", "progress of warm start"),
        *("warm step 1", "progress of warm start", "end of warm start"),
        *("phase before, 0 of 2", *2 * ["progress of evaluation, before RL"]),
        *("end of evaluation, before RL", "evaluated before at 0"),
        *("phase rl, 0 of 2", "step 0", "step 0 kept", "step 1", "step 1 kept", f"end of {RL}"),
        *("phase after, 0 of 2", *2 * ["progress of evaluation, after RL"]),
        *("end of evaluation, after RL", "evaluated after at 2"),
        "end",
    ]  # fmt: skip
    nothing = dict.fromkeys(("rollouts", "row", "weights", "checkpoint"), False)
    recorded = dict.fromkeys(nothing, True) | {"checkpoint": False}
    assert first.kept["step 0"] == nothing
    assert last.kept["step 0"] == recorded
    assert first.kept["step 0 kept"] == dict.fromkeys(nothing, True)
    assert last.kept["step 1 kept"] == recorded  # the last step's is made at the end of the phase


@pytest.mark.parametrize(("stop_loss", "num_steps"), [(0.0, 2), (100.0, 1)])
def test_a_warm_start_ends_at_the_loss_that_is_asked_for(
    tmp_path: Path, witnesses: list[Witness], stop_loss: float, num_steps: int
) -> None:
    options = {**OPTIONS, "warm_start.stop_loss": stop_loss}
    nanorl.train("tiny", env=Say, steps=1, out=tmp_path / "run", options=options)
    events = witnesses[-1].events
    assert sum(event.startswith("warm step") for event in events) == num_steps
    assert "step 0" in events, "and RL begins"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["warm_start_steps"] == num_steps, "those that there were"


def test_a_warm_start_is_not_ended_by_one_lucky_batch(
    tmp_path: Path, witnesses: list[Witness]
) -> None:
    """What counts is a mean over some ten steps, which a checkpoint keeps."""
    options = {**OPTIONS, "warm_start.steps": 12, "warm_start.lr": 1e-2}
    nanorl.train("tiny", env=Say, steps=0, out=tmp_path / "whole", options=options)
    losses = witnesses[-1].warm_losses
    means = [losses[0]]
    for loss in losses[1:]:
        means.append(0.9 * means[-1] + 0.1 * loss)
    limit = (means[6] + means[7]) / 2
    lucky = next(i for i, loss in enumerate(losses) if loss <= limit)
    assert means[6] > limit > means[7] and lucky < 7, "the case"
    options["warm_start.stop_loss"] = limit
    nanorl.train("tiny", env=Say, steps=0, out=tmp_path / "ended", options=options)
    assert witnesses[-1].warm_losses == losses[:8]
    for run, mean in (("whole", means[11]), ("ended", means[7])):
        latest = read_cursor(list_checkpoints(tmp_path / run / "checkpoints")[-1])
        assert latest["totals"]["warm_start_loss"] == pytest.approx(mean, rel=1e-12)


def test_a_warm_start_that_is_interrupted_ends_at_the_same_step(
    tmp_path: Path, witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in which it is interrupted counts in the mean, and in where it ends."""
    options = {**OPTIONS, "warm_start.steps": 9, "warm_start.lr": 1e-2}
    nanorl.train("tiny", env=Say, steps=0, out=tmp_path / "whole", options=options)
    whole = totals_of(tmp_path / "whole")

    async def interrupted(self: Witness, step: int, numbers: Mapping[str, float]) -> None:
        if step == 4 and self is witnesses[-1]:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Witness, "on_warm_step", interrupted)
        nanorl.train("tiny", env=Say, steps=0, out=tmp_path / "run", options=options)
    nanorl.train(env=Say, out=tmp_path / "run", options={"resume": True})
    assert 0 < len(witnesses[-1].warm_losses) < 9, "it went on where it was"
    assert totals_of(tmp_path / "run") == whole


def test_a_run_that_fails_as_it_is_interrupted_does_not_begin_again(
    tmp_path: Path, witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(self: Witness, step: StepResult) -> None:
        signal.raise_signal(signal.SIGINT)
        raise WorkerDied("a role died")

    monkeypatch.setattr(Witness, "on_step", interrupted)
    with pytest.raises(RoleLost, match=r"a role died.* go on with --resume"):
        nanorl.train("tiny", env=Say, steps=1, out=tmp_path / "run", options=OPTIONS)
    assert len(witnesses) == 2, "of one attempt"


def test_a_run_that_is_interrupted_while_its_roles_close_closes_them_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, closed = InlineRoles.close_loop, []

    async def interrupted(self: InlineRoles) -> None:
        signal.raise_signal(signal.SIGINT)
        await turns(3)
        await close(self)
        closed.append(self)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(InlineRoles, "close_loop", interrupted)
        nanorl.train("tiny", env=Say, steps=0, out=tmp_path / "run", options=OPTIONS)
    assert closed
    nanorl.train(env=Say, out=tmp_path / "run", options={"resume": True})


def totals_of(run: Path) -> tuple[float, float]:
    totals = read_cursor(list_checkpoints(run / "checkpoints")[-1])["totals"]
    return totals["warm_start_loss"], totals["warm_start_steps"]


def test_a_run_that_goes_on_tells_from_where_before_its_phase_begins(
    tmp_path: Path, witnesses: list[Witness]
) -> None:
    nanorl.train("tiny", env=Say, steps=1, out=tmp_path / "run", options=OPTIONS)
    again = {"rl.steps": 2, "resume": True}
    nanorl.train(env=Say, out=tmp_path / "run", options=again)
    assert witnesses[-1].events[:4] == ["begin", "restore 1", "phase rl, 1 of 2", "step 1"]


def test_a_phase_that_fails_is_told_as_broken_off_and_the_run_as_ended(
    tmp_path: Path, witnesses: list[Witness], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: Witness, step: StepResult) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Witness, "on_step", full)
    with pytest.raises(OSError, match="No space left"):
        nanorl.train("tiny", env=Say, steps=1, out=tmp_path / "run", options=OPTIONS)
    for witness in witnesses:
        assert witness.events[-2:] == [f"{RL} broken off", "end"]


def test_observers_that_have_begun_end_where_another_refuses(tmp_path: Path) -> None:
    class Refuses(RunObserver):
        async def __aenter__(self) -> Refuses:
            raise ValueError("no")

    before, after = Witness(tmp_path), Witness(tmp_path)

    async def run() -> None:
        async with Observers([before, Refuses(), after]):
            pass

    with pytest.raises(ValueError, match="no"):
        asyncio.run(run())
    assert before.events == ["begin", "end"] and not after.events
