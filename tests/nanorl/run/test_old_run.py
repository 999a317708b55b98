"""A run that commit 1c88530 wrote is read, viewed, replayed, forked and trained on.

run_of_1c88530.tar.gz holds a toy model (one layer, 32 wide), a reward, a file of options and the
run that `nanorl train` of that commit made of them: four steps of RL, checkpoints after two and
four.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import viewed

from nanorl.observability.store import RolloutStore

pytestmark = pytest.mark.sandbox
ROOT = Path(__file__).resolve().parents[3]
KEPT = Path(__file__).with_name("run_of_1c88530.tar.gz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(KEPT) as kept:
        kept.extractall(tmp_path, filter="data")
    where = tmp_path / "old_run"
    nanorl(where, "trust", "run")  # it names a reward, which nobody has named on this machine
    return where


def nanorl(folder: Path, *arguments: str) -> str:
    """What the command prints; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "nanorl", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model-trained/model.safetensors").read_bytes()).hexdigest()


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_gives_the_model_that_it_gave(folder: Path) -> None:
    """The last checkpoint's weights are written as a folder again: the same bits."""
    run = folder / "run"
    before = weights(run)
    shutil.rmtree(run / "model-trained")
    nanorl(folder, "train", "--resume", "--out", "run")
    assert weights(run) == before


def test_it_trains_on(folder: Path) -> None:
    """Two more steps, and the engines still agree to the last bit."""
    run = folder / "run"
    before, old = weights(run), rows(run)
    nanorl(folder, "train", "--resume", "--out", "run", "--rl.steps", "6")
    new = rows(run)
    assert new[:4] == old and [row["step"] for row in new] == list(range(6))
    assert all(row["logp_gap_max"] == 0.0 for row in new) and weights(run) != before
    with RolloutStore(run / "rollouts.sqlite") as store:
        assert sorted(store.steps()) == list(range(6))


def test_it_is_forked_compared_and_exported(folder: Path) -> None:
    nanorl(folder, "train", "--fork", "run@2", "--out", "fork", "--rl.steps", "3")
    assert [row["step"] for row in rows(folder / "fork")] == [0, 1, 2]
    assert "2 tasks that both played" in nanorl(folder, "compare", "run:before", "run")
    nanorl(folder, "export", "run", "--to", "jsonl", "--out", "rollouts.jsonl")
    assert len((folder / "rollouts.jsonl").read_text().splitlines()) == 24


def test_it_is_replayed(folder: Path) -> None:
    """On the machine that sampled it every bit comes out; elsewhere a rollout may end otherwise,
    and then the command says so. What is held here is that it reads the run to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "nanorl", "replay", "run"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode in (0, 1) and "of 30 rollouts" in done.stdout, done.stdout + done.stderr


def test_the_viewer_shows_it(folder: Path) -> None:
    client = viewed(folder / "run")
    for phase, count in {"rl": 24, "before": 2, "after": 2}.items():
        query = {"run": "run", "phase": phase}
        listed = client.get("/api/rollouts", params=query).json()["rows"]
        assert len(listed) == count
        asked = client.get("/api/rollout", params=query | {"id": listed[0]["id"]})
        assert asked.json()["sequences"][0]["turns"]


def test_a_file_of_options_means_what_it_meant(folder: Path) -> None:
    nanorl(folder, "train", "--config", "options.toml", "--rl.steps", "1", "--out", "new")
    old = json.loads((folder / "run/config.json").read_text())
    new = json.loads((folder / "new/config.json").read_text())
    assert {name: new[name] for name in ("preset", "model", "reward", "threads")} == {
        name: old[name] for name in ("preset", "model", "reward", "threads")
    }
    missing = {name for name in old if name not in new}
    assert not missing


@pytest.mark.parametrize(
    "old", ["nanorl.rewards.math:MathReward", "nanorl.rewards.rule:RuleReward"]
)
def test_options_name_an_object_by_the_module_of_their_time(old: str) -> None:
    """`reward=nanorl.MathReward()` was written down so in config.json."""
    from nanorl.envs.rewards.load import is_reward
    from nanorl.plugins import load_object

    found = load_object(old, what="reward", known={}, fits=is_reward)
    assert found.__name__ == old.partition(":")[2]
