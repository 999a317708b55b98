"""An asynchronous run of real processes, killed again and again: each task's group is trained on
once, and what had been played is not played again."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from forked_runs import ROOT
from paced_run import Pace
from test_faults import CLUSTER, LIMIT_S, await_steps, paced, strike

from nanorl.flow.journal import Journal
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.store import RolloutStore

sys.path.insert(0, str(ROOT / "scripts"))
try:
    from fault_run import SMALL, expected_ids
finally:
    sys.path.pop(0)

pytestmark = [pytest.mark.sandbox]
STEPS = 10
ASYNC = (
    *(*SMALL, "--rl.steps", str(STEPS), "--save-every", "3", "--rl.max-staleness", "2"),
    *("--rl.batch.order", "finish", "--engine.in-flight", "keep"),
)


def played(out: Path) -> set[int]:
    """The groups that the journal keeps."""
    journal = Journal(out / "journal.sqlite")
    try:
        return set(journal.indices())
    finally:
        journal.close()


def test_an_asynchronous_run_that_is_killed_trains_on_every_group_once(tmp_path: Path) -> None:
    out, pace = tmp_path / "run", Pace(tmp_path / "pace")
    resume = (*CLUSTER, "--resume")
    kept: list[set[int]] = []
    pace.allow(0)
    # No checkpoint has learnt from the last steps before each of these: the journal has them.
    for number, (step, arguments) in enumerate([(2, (*ASYNC, *CLUSTER)), (5, resume), (8, resume)]):
        with paced(out, pace, *arguments) as run:
            await_steps(run, pace, step)
            if number == 1:
                strike(run, "collector", signal.SIGKILL)
            run.driver.kill()
            run.wait(LIMIT_S)
            kept.append(played(out))
    pace.allow(STEPS)
    with paced(out, pace, *resume) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert not run.noise(), run.output()
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    with RolloutStore(out / "rollouts.sqlite") as store:
        entries = [entry for entry in store.entries() if "failed" not in entry.rollout_id]
        ages = [
            entry.step - min(v for v in rollout.versions if v >= 0)
            for entry, rollout in zip(store.entries(), store.query(), strict=True)
        ]
    assert sorted(entry.rollout_id for entry in entries) == sorted(expected_ids(STEPS))
    of_steps = [sum(entry.step == step for entry in entries) for step in range(STEPS)]
    assert of_steps == [row["num_rollouts"] for row in rows] == [4] * STEPS
    assert all(kept) and max(ages) >= 1  # it ran ahead, and what had run ahead was kept
    assert not played(out)  # the last checkpoint has learnt from all
