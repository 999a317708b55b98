"""A run whose roles cannot be started again begins anew from its newest checkpoint, by itself."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_runs import ROOT, RunProcess
from paced_run import Pace
from test_faults import CLUSTER, LIMIT_S, await_steps, await_true, paced

from nanorl.distributed.roles.policy_role import TrainerLost
from nanorl.distributed.roles.role import RoleLost
from nanorl.options.run_config import RunConfig
from nanorl.run.cursor import Cursor
from nanorl.run.history import RunHistory
from nanorl.run.restarts import MOST_IN_VAIN, Restarts
from nanosched import WorkerDied

sys.path.insert(0, str(ROOT / "scripts"))
try:
    from fault_run import SMALL, DisturbedRun, check, descendants, weights_digest
finally:
    sys.path.pop(0)

STEPS = 6
OPTIONS = (*SMALL, "--rl.steps", str(STEPS))
AGAIN = "begins again from its newest checkpoint"
sandboxed = pytest.mark.sandbox


def run_at(phase: str, step: int) -> Any:
    return SimpleNamespace(cursor=Cursor(phase=phase, step=step))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [RoleLost("a"), TrainerLost("b"), WorkerDied("c"), ConnectionResetError("d"), EOFError("e")],
    ids=lambda error: type(error).__name__,
)
def test_faults_of_processes_restart_a_run(error: Exception) -> None:
    assert Restarts(1).allow(error, run_at("rl", 3))
    assert not Restarts(0).allow(error, run_at("rl", 3))


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("a wrong option"), OSError(errno.ENOSPC, "disk full"), MemoryError()),
        *(KeyboardInterrupt(), AssertionError("ours"), RuntimeError("an environment's")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_fail_again_ends_a_run(error: BaseException) -> None:
    assert not Restarts(10).allow(error, run_at("rl", 3))


def restarts_until_refused(most: int, places: list[tuple[str, int]], folder: Path) -> int:
    """How many of these failures a run goes on after."""
    restarts = Restarts(most)
    config = SimpleNamespace(rl=SimpleNamespace(steps=9))
    for number, (phase, step) in enumerate(places):
        run = run_at(phase, step)
        run.history, run.dir, run.config = RunHistory(folder), folder / "no", config
        if not restarts.allow(RoleLost("again"), run):
            return number
        parts: Any = SimpleNamespace(config=RunConfig())
        restarts.note(parts, run, "RoleLost: again")
        assert parts.config.resume
    return len(places)


def test_a_run_that_gets_no_further_ends_and_one_that_does_goes_on(tmp_path: Path) -> None:
    stuck = [("rl", 3)] * 9
    assert restarts_until_refused(10, stuck, tmp_path) == MOST_IN_VAIN - 1
    # Behind where it was counts as no progress, too: it failed on its way back.
    behind = [("rl", 3), ("untrained", 0), ("rl", 2), ("rl", 3)]
    assert restarts_until_refused(10, behind, tmp_path) == MOST_IN_VAIN - 1
    moving = [("rl", step) for step in range(9)]
    assert restarts_until_refused(10, moving, tmp_path) == 9
    assert restarts_until_refused(4, moving, tmp_path) == 4


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    run = RunProcess(folder / "log", *OPTIONS, "--out", str(folder / "run"))
    assert run.wait() == 0, run.output()
    return folder / "run"


def kill_collectors_until(run: DisturbedRun, said: str) -> None:
    """Each as soon as it is there, the starting ones, too: more often than a role is restarted.
    The run makes no step meanwhile, so there is time for those that were ready before they were
    seen."""
    seen: set[int] = set()

    def has_said() -> bool:
        for process in run.roles():
            if process.kind == "collector" and process.pid not in seen:
                seen.add(process.pid)
                run.strike(process, signal.SIGKILL)
        return said in run.output()

    await_true(run, has_said)


@sandboxed
def test_a_run_that_lost_a_role_for_good_begins_again_and_ends_with_the_same_bits(
    calm: Path, tmp_path: Path
) -> None:
    out, pace = tmp_path / "run", Pace(tmp_path / "pace")
    pace.allow(0)
    with paced(out, pace, *OPTIONS, *CLUSTER) as run:
        await_steps(run, pace, 2)
        kill_collectors_until(run, AGAIN)
        before = {process.pid for process in run.roles()}
        pace.allow(STEPS)
        checks = check(run, run.wait(LIMIT_S), calm, STEPS)
    wrong = {name: what for name, (passed, what) in checks.items() if not passed}
    assert not wrong, (wrong, run.output())
    assert len(before) <= 5, "trainer, two replicas, store, collector: of one attempt"
    events = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["begun", "restarted"]
    assert "collector died 2 times" in events[1]["reason"] and events[1]["step"] >= 2
    summary = json.loads((out / "summary.json").read_text())
    assert summary["history"] == events
    assert "collector died 2 times" in (out / "report.html").read_text()


@sandboxed
def test_without_restarts_such_a_run_ends_and_says_how_to_go_on(tmp_path: Path) -> None:
    out, pace = tmp_path / "run", Pace(tmp_path / "pace")
    pace.allow(0)
    with paced(out, pace, *OPTIONS, *CLUSTER, "--monitor.restarts", "0") as run:
        await_steps(run, pace, 1)
        kill_collectors_until(run, "go on with --resume")
        assert run.wait(LIMIT_S) != 0
        assert AGAIN not in run.output()
        assert not any(run.leftovers().values()), run.leftovers()


@sandboxed
@pytest.mark.timeout(900)  # Ray starts eight times
@pytest.mark.rare
def test_a_run_on_ray_begins_again_too_with_a_ray_of_its_own(calm: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    out = tmp_path / "run"
    ray = ("--cluster.backend", "ray", "--rollout.replicas", "1")
    seen: set[int] = set()
    with DisturbedRun(out, [*OPTIONS, *ray, "--out", str(out)]) as run:

        def has_begun_again() -> bool:
            for process in descendants(run.driver.pid) if run.step() >= 1 else ():
                if process.name.startswith("ray::Async") and process.pid not in seen:
                    seen.add(process.pid)
                    os.kill(process.pid, signal.SIGKILL)
            return AGAIN in run.output()

        await_true(run, has_begun_again)
        assert run.wait(LIMIT_S) == 0, run.output()
        assert not run.noise(), run.output()
    assert weights_digest(out) == weights_digest(calm)
