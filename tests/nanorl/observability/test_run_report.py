"""The report, the log and a full disk, on real runs: charts ask for what is written."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
from forked_runs import SMALL, RunProcess, rows

from nanoengine.state.checkpoint import latest_checkpoint
from nanorl.observability.report.charts import RULES, build_charts, is_flat
from nanorl.observability.report.ways import TAUGHT, read_taught

pytestmark = pytest.mark.sandbox
# Two runs that write everything there is to chart: with critic and reference, and with staleness.
VARIANTS = {
    "critic": (
        *("--rl.algorithm.advantage", "gae", "--rl.algorithm.kl-coef", "0.1"),
        *("--rl.steps", "2"),
    ),
    "stale": (
        *("--rl.max-staleness", "2", "--rl.algorithm.correction", "tis", "--rl.steps", "4"),
        *("--rl.tasks-per-step", "1", "--rl.algorithm.entropy-coef", "0"),
    ),
}
OTHERS = {"num_rollouts", "num_trained_rollouts"}  # among "more curves"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    processes = {
        name: RunProcess(folder / f"{name}.log", *SMALL, *more, "--out", str(folder / name))
        for name, more in VARIANTS.items()
    }
    for process in processes.values():
        assert process.wait() == 0, process.output()
    return {name: folder / name for name in VARIANTS}


def test_a_run_says_first_what_its_model_is_a_copy_of(runs: dict[str, Path]) -> None:
    for run in runs.values():
        first = run.with_suffix(".log").read_text().splitlines()[0]
        source = json.loads((run / "summary.json").read_text())["model_source"]
        assert first == f"model: {source}" and "random weights" in source


def test_a_run_notes_which_ways_its_teacher_showed(runs: dict[str, Path]) -> None:
    """Three supervised steps, in which a way is noted once."""
    for run in runs.values():
        noted = [way for _, ways in read_taught(run / TAUGHT) for way in ways]
        assert len(noted) == len(set(noted)) > 0
        assert any("(" in turn for way in noted for turn in way), "a program"


OF_OTHERS = {"idle_replicas", "num_replicas", "replayed_groups", "replay_kept"}
"""Charts of runs with several processes (test_cluster_runs.py), or with replay."""


def test_every_chart_finds_its_metrics_in_a_real_run_and_appears(runs: dict[str, Path]) -> None:
    written = {name for run in runs.values() for row in rows(run) for name in row}
    asked = [name for rule in RULES for name in rule.names]
    assert set(asked) - OF_OTHERS <= written
    assert len(asked) == len(set(asked))
    assert written - set(asked) >= OTHERS
    page = "".join((run / "report.html").read_text() for run in runs.values())
    for rule in RULES:
        is_there = not OF_OTHERS.issuperset(rule.names)
        is_shared = rule.title == "Reward"  # of these tasks it is the success
        assert (rule.title in page) == (is_there and not is_shared), rule.title
    for run in runs.values():
        main, _ = build_charts(rows(run))
        drawn = [chart for _, chart in main if not is_flat(chart)]
        assert (run / "report.html").read_text().count("<figcaption>") >= len(drawn) > 5


def test_the_log_says_everything_once_and_shows_the_agent(runs: dict[str, Path]) -> None:
    log = (runs["stale"].parent / "stale.log").read_text()
    lines = [line.split("] ", 1)[-1].split(",")[0] for line in log.splitlines()]
    for expected in ("reinforcement learning 1/4", "warm start 3/3: loss"):
        assert sum(line.startswith(expected) for line in lines) == 1, log
    for expected in ("before RL: ", "after RL: ", "after RL, tool off: "):
        assert expected in log
    assert log.count("a rollout of step") == 4
    assert "    wanted  " in log and "    task    " in log
    assert "no_tool" not in log and "before:" not in log


def test_batches_without_signal_are_named(runs: dict[str, Path]) -> None:
    log = (runs["stale"].parent / "stale.log").read_text()
    assert log.count("changed nothing: the rollouts of each group got equal rewards") == 1 + 1
    assert "4 of 4 steps changed nothing" in log
    assert "changed nothing" not in (runs["critic"].parent / "critic.log").read_text()


def test_the_trained_model_can_be_read_by_others(runs: dict[str, Path]) -> None:
    (runs["stale"].parent / "plain").touch()
    usual = stat.S_IMODE((runs["stale"].parent / "plain").stat().st_mode)
    folder = runs["stale"] / "model-trained"
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {usual}
    assert not list(runs["stale"].glob(".model*"))


def test_a_full_disk_is_one_message_and_the_last_checkpoint_stays(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["critic"], run, ignore=shutil.ignore_patterns("model-trained"))
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    before = latest_checkpoint(run / "checkpoints")
    assert before is not None and before.name == "step_00000000"
    resume = ("--resume", "--out", str(run))
    # Models fit (2.6 MB), checkpoints (7.9 MB) do not; then only small files fit.
    for limit, message in ((5_000_000, "cannot save a checkpoint"), (1000, "cannot ")):
        process = RunProcess(tmp_path / str(limit), *resume, RLIMIT_FSIZE=limit)
        assert process.wait() == 2, process.output()
        assert process.output().count("error: ") == 1 and "Traceback" not in process.output()
        assert message in process.output()
        assert latest_checkpoint(run / "checkpoints") == before
    process = RunProcess(tmp_path / "log", *resume)
    assert process.wait() == 0, process.output()
    for file in ("model-trained/model.safetensors", "reference/model.safetensors"):
        assert (run / file).read_bytes() == (runs["critic"] / file).read_bytes()
    losses = [[row["loss"] for row in rows(folder)] for folder in (run, runs["critic"])]
    assert losses[0] == losses[1]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
