"""Whole runs of the command line: killed and resumed, interrupted, and given bad input."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_runs import RunProcess
from waiting import wait_until

from nanoengine.state.checkpoint import open_checkpoint
from nanorl.observability.store import RolloutStore

pytestmark = pytest.mark.sandbox
ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    *("--preset", "tiny", "--threads", "1", "--save-every", "1"),
    *("--warm-start.steps", "3", "--warm-start.traces-per-step", "4"),
    *("--rl.steps", "4", "--rl.tasks-per-step", "2", "--rl.group-size", "4"),
    *("--evaluation.num-tasks", "4", "--evaluation.num-tasks-untrained", "2"),
    *("--evaluation.num-tasks-no-tool", "2", "--tool.workers", "1"),
    # So short a warm start solves nothing: the entropy bonus makes every RL step move the weights.
    *("--rl.algorithm.entropy-coef", "0.01"),
)


def finish(process: RunProcess) -> str:
    """What it printed; the next one's log is empty again."""
    assert process.wait(240) is not None, process.output()
    output = process.output()
    process.log.unlink()
    return output


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program itself, in a process of its own."""
    return subprocess.run(
        [sys.executable, "scripts/train_agent.py", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=240,
    )


def content(run: Path) -> dict[str, str]:
    """rollout id -> content hash; the store itself refuses to hold an id twice."""
    with RolloutStore(run / "rollouts.sqlite") as store:
        return {entry.rollout_id: entry.content_hash for entry in store.entries()}


@pytest.mark.slow
def test_a_run_killed_five_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = RunProcess(tmp_path / "log", *SMALL, "--out", str(whole))
    process.await_file(process.log)
    begin = time.monotonic()
    output = finish(process)
    assert process.wait() == 0, output
    duration = time.monotonic() - begin

    rng = random.Random(0)
    arguments = [*SMALL, "--out", str(killed)]
    for _ in range(5):
        process = RunProcess(tmp_path / "log", *arguments)
        process.await_file(process.log)
        time.sleep(rng.uniform(0.25, 0.95) * duration)
        process.process.kill()
        finish(process)
        if (killed / "config.json").exists():
            arguments = ["--resume", "--out", str(killed)]
    process = RunProcess(tmp_path / "log", *arguments)
    output = finish(process)
    assert process.wait() == 0, output

    norms = [json.loads(line)["grad_norm"] for line in (whole / "metrics.jsonl").open()]
    assert len(norms) == 4 and all(norm > 0 for norm in norms)
    weights = "model-trained/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()
    assert content(killed) == content(whole)
    assert len(content(whole)) == 4 * 2 * 4
    steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").open()]
    assert steps == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_run_with_critic_and_reference_ends_with_the_same_bits(tmp_path: Path) -> None:
    # Nothing is solved, but long answers cost: the critic has something to learn.
    more = ("--rl.algorithm.advantage", "gae", "--rl.algorithm.kl-coef", "0.5")
    more += ("--rl.algorithm.overlong-buffer", "250")
    more += ("--rl.critic-lr", "1e-3", "--rl.lr", "1e-3", "--rl.epochs", "2")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = RunProcess(tmp_path / "log", *SMALL, *more, "--out", str(whole))
    output = finish(process)
    assert process.wait() == 0, output
    process = RunProcess(tmp_path / "log", *SMALL, *more, "--out", str(killed))
    metrics = killed / "metrics.jsonl"  # two rows: the first step's checkpoint is complete
    await_rows(process, metrics, 2)
    process.signal(signal.SIGKILL)
    finish(process)
    process = RunProcess(tmp_path / "log", "--resume", "--out", str(killed))
    output = finish(process)
    assert process.wait() == 0, output
    for name in ("model-trained/model.safetensors", "reference/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    rows = [lines(run / "metrics.jsonl") for run in (whole, killed)]
    for name in ("ref_kl", "value_loss", "explained_variance", "grad_norm"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]], name
    assert rows[0][1]["ref_kl"] > 0  # the policy has left the reference
    assert all(row["value_grad_norm"] > 0 for row in rows[0])


def await_rows(process: RunProcess, metrics: Path, count: int) -> None:
    """Until the run has written so many steps."""
    wait_until(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= count,
        limit_s=120,
        alive=process.process.is_alive,
    )


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = RunProcess(tmp_path / "log", *SMALL, "--rl.steps", "400", "--out", str(run))
    metrics = run / "metrics.jsonl"
    await_rows(process, metrics, 2)
    process.signal(signal.SIGINT)
    output = finish(process)
    assert process.wait() == 130, output
    assert f"--resume --out {run}" in output
    done = metrics.read_text().count("\n")
    cursor = open_checkpoint(run / "checkpoints").meta["cursor"]
    assert (cursor["phase"], cursor["step"]) == ("rl", done)
    for steps, message in ((done - 1, f"--rl.steps {done - 1}: {done} are done"), (done, "next:")):
        process = RunProcess(
            tmp_path / "log", "--resume", "--out", str(run), "--rl.steps", str(steps)
        )
        assert message in finish(process)


@pytest.mark.slow
def test_ctrl_c_in_the_last_evaluation_saves_too(tmp_path: Path) -> None:
    """What RL kept for itself is closed by then."""
    run = tmp_path / "run"
    many = ["--evaluation.num-tasks", "200", "--evaluation.num-tasks-no-tool", "2000"]
    process = RunProcess(tmp_path / "log", *SMALL, *many, "--rl.steps", "1", "--out", str(run))
    wait_until((run / "eval-after.json").exists, 120, alive=process.process.is_alive)
    process.signal(signal.SIGINT)
    output = finish(process)
    assert process.wait() == 130, output
    assert "Traceback" not in output
    assert open_checkpoint(run / "checkpoints").meta["cursor"]["phase"] == "no_tool"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "no such preset; choose one of smollm2, tiny"),
        (["--preset", "tiny", "--rl.group-size", "0"], "--rl.group-size 0: must be 1 or more"),
        (["--preset", "tiny", "--flag-that-is-not"], "--flag-that-is-not"),
        (["--preset", "tiny", "--model", "/nowhere"], "no such folder"),
        (["--preset", "tiny", "--tasks", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--resume", "--out", "/nowhere"], "there is no run to go on with"),
        (["--preset", "tiny", "--engine.cache-mb", "-1"], "cache"),
        (["--preset", "tiny", "--rl.reference", "/nowhere"], "nothing reads it"),
        (["--preset", "tiny", "--rl.critic-warmup-steps", "3"], "there is no critic with"),
    ],
)
def test_bad_input_ends_with_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    if "--out" not in arguments:
        arguments = [*arguments, "--out", str(tmp_path / "run")]
    process = RunProcess(tmp_path / "log", *arguments)
    output = finish(process)
    assert process.wait() != 0
    assert message in output
    assert "Traceback" not in output


def test_a_run_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = run_program("--preset", "tiny", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "already holds a run" in done.stdout


def test_a_wrong_architecture_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "mamba", "architectures": ["Mamba"]}')
    process = RunProcess(
        tmp_path / "log", "--preset", "tiny", "--model", str(model), "--out", str(tmp_path / "run")
    )
    output = finish(process)
    assert process.wait() == 2
    assert "Traceback" not in output
