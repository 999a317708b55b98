"""Real signals to a run of several processes: it ends with the bits of one that nobody disturbed,
and leaves nothing behind. scripts/fault_run.py does it fifty times at random moments."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_runs import ROOT, RunProcess
from host_processes import signal_group
from paced_run import Pace
from waiting import wait_until

sys.path.insert(0, str(ROOT / "scripts"))
try:
    from fault_run import (
        SCORERS,
        SMALL,
        DisturbedRun,
        check,
        descendants,
        stored_rollouts,
        weights_digest,
    )
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.sandbox]
STEPS = 9
OPTIONS = (*SMALL, "--rl.steps", str(STEPS), *SCORERS["both"])
CLUSTER = (
    *("--cluster.backend", "local", "--rollout.replicas", "2"),
    *("--cluster.heartbeat-s", "0.3", "--cluster.hang-s", "4", "--cluster.start-s", "60"),
)
# Processes that send weights to each other meet within half the time after which one hangs.
DIST = ("--cluster.transport", "dist", "--cluster.hang-s", "60")
PLAN = (
    *(("collector", signal.SIGKILL), ("store", signal.SIGKILL), ("reference", signal.SIGKILL)),
    *(("replica", signal.SIGSTOP), ("trainer", signal.SIGKILL), ("critic", signal.SIGKILL)),
    ("replica", signal.SIGKILL),
)
EXPECTED = Counter(trainer=1, replica=2, collector=1, store=1, reference=1, critic=1)
LIMIT_S = 240.0  # for all of a run, on a machine that does other things


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    run = RunProcess(folder / "log", *OPTIONS, "--out", str(folder / "run"))
    assert run.wait() == 0, run.output()
    return folder / "run"


def paced(out: Path, pace: Pace, *arguments: str) -> DisturbedRun:
    """A run in the folder `out`, which makes no more steps than it is allowed."""
    return DisturbedRun(out, [str(pace.file), *arguments, "--out", str(out)], pace.program)


def await_true(run: DisturbedRun, is_true: Callable[[], object]) -> None:
    wait_until(is_true, LIMIT_S, alive=lambda: run.is_alive, told=run.output)


def await_steps(run: DisturbedRun, pace: Pace, num_steps: int) -> None:
    """Until it has made so many; it waits there until it may make more."""
    pace.allow(num_steps)
    await_true(run, lambda: run.step() >= num_steps)


def strike(run: DisturbedRun, role: str, number: signal.Signals) -> None:
    """Send the signal as soon as there is such a role."""

    def has_struck() -> bool:
        living = [process for process in run.roles() if process.kind == role]
        return any(run.strike(process, number) for process in living[:1])

    await_true(run, has_struck)


def test_any_role_may_die_or_hang(calm: Path, tmp_path: Path) -> None:
    out, pace = tmp_path / "run", Pace(tmp_path / "pace")
    pace.allow(1)
    with paced(out, pace, *OPTIONS, *CLUSTER) as run:
        for count, (role, number) in enumerate(PLAN, 1):
            step = run.step()
            strike(run, role, number)
            pace.allow(count + 1)  # one more than it had made at most
            await_true(run, lambda step=step: run.step() > step)  # type: ignore[misc]
        pace.allow(STEPS)
        excess = Counter(process.kind for process in run.roles()) - EXPECTED
        assert not excess, f"predecessors that nobody ended: {excess}"
        checks = check(run, run.wait(LIMIT_S), calm, STEPS)
    assert all(passed for passed, _ in checks.values()), (checks, run.output())
    lines = [line for line in run.output().splitlines() if "starting it again" in line]
    for name in ("store", "collector", "reference", "replica-", "the trainer", "the critic"):
        assert any(name in line for line in lines), (name, lines)
    assert "no answer for 4 s" in run.output()


def test_a_driver_that_is_told_to_end_while_roles_start_ends_as_ever(
    calm: Path, tmp_path: Path
) -> None:
    """And goes on from the beginning, also where weights are sent by rank (dist), which sends those
    of one version once."""
    out = tmp_path / "run"
    with DisturbedRun(out, [*OPTIONS, *CLUSTER, "--out", str(out)]) as run:
        await_true(run, lambda: run.roles())
        run.driver.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130, run.output()
        assert "go on with" in run.output() and not run.noise(), run.output()
        assert not any(run.leftovers().values()), run.leftovers()
    again = (*CLUSTER, *DIST, "--resume", "--out", str(out))
    with DisturbedRun(out, again) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert "was not published" not in run.output()
    assert weights_digest(out) == weights_digest(calm)


def test_a_driver_that_is_stopped_or_killed_leaves_nothing_and_can_go_on(
    calm: Path, tmp_path: Path
) -> None:
    out, pace = tmp_path / "run", Pace(tmp_path / "pace")

    # Ctrl-C, and SIGTERM before it has ended: to the whole group of processes, as a terminal does
    pace.allow(0)
    with paced(out, pace, *OPTIONS, *CLUSTER) as run:
        await_steps(run, pace, 2)
        signal_group(run.driver.pid, signal.SIGINT, signal.SIGTERM)
        assert run.wait(LIMIT_S) == 130, run.output()
        assert "stopped and saved" in run.output()
        assert not any(run.leftovers().values()), run.leftovers()
        assert not run.noise(), run.output()

    with paced(out, pace, *CLUSTER, "--resume") as run:
        await_steps(run, pace, 4)
        strike(run, "replica", signal.SIGSTOP)  # not even this one stays
        run.driver.kill()
        run.wait(LIMIT_S)
        assert not any(run.leftovers().values()), run.leftovers()

    # To the end, with another transport: trainer and replicas meet, and a new trainer meets them
    # anew. Where it did not, the publication would fail.
    with paced(out, pace, *CLUSTER, *DIST, "--resume") as run:
        before = run.output().count("the trainer died")
        await_steps(run, pace, 6)
        strike(run, "trainer", signal.SIGKILL)
        pace.allow(STEPS)
        assert run.wait(LIMIT_S) == 0, run.output()
        assert run.output().count("the trainer died") == before + 1, run.output()
        assert "was not published" not in run.output()
    assert weights_digest(out) == weights_digest(calm)


@pytest.mark.parametrize("name", [pytest.param("gcs_server", marks=pytest.mark.rare), "raylet"])
def test_a_run_whose_ray_ends_says_so_once_and_goes_on_with_the_same_bits(
    calm: Path, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    out, pace = tmp_path / "run", Pace(tmp_path / "pace")
    ray = ("--cluster.backend", "ray", "--rollout.replicas", "1")
    pace.allow(0)
    with paced(out, pace, *OPTIONS, *ray) as run:
        await_steps(run, pace, 2)
        (victim,) = [one for one in descendants(run.driver.pid) if one.name == name]
        os.kill(victim.pid, signal.SIGKILL)
        assert run.wait(LIMIT_S) not in (0, -signal.SIGKILL), run.output()
        errors = [line for line in run.output().splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and f"Ray's {name} has ended" in errors[0], run.output()
        assert "go on with --resume" in errors[0] and not run.noise(), run.output()
    with DisturbedRun(out, [*ray, "--resume", "--out", str(out)]) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    assert weights_digest(out) == weights_digest(calm)
    assert stored_rollouts(out) == stored_rollouts(calm)
