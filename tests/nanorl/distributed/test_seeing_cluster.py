"""A model that sees, wherever its roles are: log-probs of both engines are the same bits in every
step, and no machine keeps pictures for itself. Deaths: tests/nanorl/run/test_seeing_faults.py."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from forked_runs import ROOT, RunProcess, rows
from run_outcomes import differences
from seeing_options import NUM_ROLLOUTS, SEEING

from nanoengine.config import EngineConfig
from nanoengine.parallel.layout import Layout, SplitConfig
from nanorl.cli import main
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.distributed.roles.policy_role import PolicyRank, PolicyRecipe
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.store import RolloutStore
from nanorl.options.run_config import RunConfig

LIMIT_S = 600.0
"""For a whole run, on a machine that does other things."""
PROGRAM = Path(__file__).with_name("ray_machines_program.py")
LOCAL = ("--cluster.backend", "local", "--rollout.replicas", "2")
RAY = ("--cluster.backend", "ray", "--rollout.replicas", "2")
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Iterator[Train]:
    """Trains a run of that name, and returns its folder. None outlives the test."""
    started: list[RunProcess] = []

    def train(name: str, *more: str) -> Path:
        out = tmp_path / name
        run = RunProcess(
            tmp_path / f"{name}.log", *SEEING, *more, "--model", str(model), "--out", str(out)
        )
        started.append(run)
        assert run.wait(LIMIT_S) == 0, run.output()
        return out

    yield train
    for run in started:
        run.process.kill()
        run.process.join()


def check_gaps(run: Path, *, ahead: int, num_steps: int = 3) -> None:
    """In every step, over every token that the trainer's own version sampled: one step ahead there
    may be none after the first step."""
    steps = rows(run)
    seen = [row["logp_gap_max"] for row in steps if row["logp_gap_tokens"] > 0]
    assert seen == [0.0] * len(seen) and len(seen) >= (1 if ahead else num_steps)
    assert [row["staleness_max"] for row in steps] == [min(i, ahead) for i in range(num_steps)]
    assert all(row["num_rollouts"] == NUM_ROLLOUTS and row["grad_norm"] > 0 for row in steps)
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        shown = [len(rollout.images) for rollout in store.query()]
    assert len(shown) == num_steps * NUM_ROLLOUTS and max(shown) >= 3


# In bf16, in one process and on local ones, sync and one step ahead: run/test_seeing_run.py.
@pytest.mark.parametrize(
    ("ahead", "options"),
    [(0, ("--dtype", "fp32")), (1, ("--dtype", "bf16")), (1, ("--dtype", "fp32", *LOCAL))],
    ids=["one process, fp32", "one process, one ahead", "local, fp32, one ahead"],
)
def test_the_gap_is_zero_in_every_step(
    train: Train, ahead: int, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """And what an older version sampled is replayed to the bit by the engine of that version."""
    run = train("run", *options, "--rl.max-staleness", str(ahead), "--keep-start")
    check_gaps(run, ahead=ahead)
    if ahead:
        capsys.readouterr()
        assert main(["replay", str(run), "--phase", "rl", "--num", "0", "--as-json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert [one["difference"] for one in told["rollouts"]] == [None] * 3 * NUM_ROLLOUTS


@pytest.mark.rare
@pytest.mark.timeout(1300)
@pytest.mark.xdist_group("ray")
def test_a_run_on_ray_ends_with_the_bits_of_one_process(train: Train) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    far = train("ray", "--dtype", "bf16", *RAY)
    check_gaps(far, ahead=0)
    assert differences(far, train("inline", "--dtype", "bf16")) == []


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.xdist_group("ray")
def test_machines_of_a_cluster_that_was_started_elsewhere_find_the_pictures(
    model: Path, tmp_path: Path
) -> None:
    """The run's folder is named as seen from the driver's working directory, and is not there from
    that of Ray's processes. A trainer of two ranks, one on each of two machines."""
    pytest.importorskip("ray", reason="needs the extra `ray`")
    options = ("--dtype", "fp32", "--learner.dp", "2", "--cluster.transport", "dist")
    options = (*options, "--rl.max-staleness", "1")
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(  # pytest's own folders have too long names for a socket
            [
                *(sys.executable, str(PROGRAM), folder, *SEEING, *RAY, *options),
                *("--model", str(model), "--out", "run"),
            ],
            env={**os.environ, "RAY_AUTH_TOKEN": "0" * 64, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["status"] == 0 and max(said["machines"]) == 2, done.stdout[-4000:]
        check_gaps(Path(folder) / "run", ahead=1)
        assert any((Path(folder) / "run" / "checkpoints").iterdir())
        assert any((Path(folder) / "run" / "pictures").iterdir())
    assert list(tmp_path.iterdir()) == [], "nothing lies where Ray was started"


def test_a_machine_without_the_runs_pictures_is_named_before_work_is_done(
    model: Path, tmp_path: Path
) -> None:
    """By each role that reads or keeps pictures."""
    missing = tmp_path / "run" / "pictures"
    config = RunConfig(out=tmp_path / "run")
    message = f"{missing} is not a folder on .*each machine of a cluster reads it"
    with pytest.raises(ValueError, match=message):
        Replica(ReplicaRecipe(folder=model, pictures=missing))
    recipe = PolicyRecipe(
        folder=model,
        config=EngineConfig(),
        layout=Layout(),
        split=SplitConfig(),
        device="cpu",
        threads=1,
        pictures=missing,
    )
    with pytest.raises(ValueError, match=message):
        asyncio.run(PolicyRank(recipe, 0).build(None))
    with pytest.raises(ValueError, match=message):
        CollectorRole(config, model)
    assert not missing.exists()
