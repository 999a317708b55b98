"""Real runs that train on groups again: killed, forked, replayed, with a store that forgets."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from forked_runs import SMALL, RunProcess, Slow, rows

from nanoengine.state.checkpoint import list_checkpoints, read_cursor
from nanorl.cli import main
from nanorl.flow.replay_groups import stored_ids
from nanorl.observability.store import RolloutStore

ENV = '''
import nanorl

class Odd(nanorl.Env):
    """An untrained model's texts have an odd length or an even one."""
    def tasks(self, rng):
        return nanorl.Task(f"Say {rng.randint(1, 99)}.")

    def step(self, text):
        return self.done(reward=float(len(text) % 2))
'''
OPTIONS = (
    *SMALL,
    *("--warm-start.steps", "0", "--env-workers", "0", "--rl.steps", "6", "--save-every", "2"),
    *("--rl.group-size", "4", "--rl.replay.share", "0.5", "--keep-checkpoints", "9"),
)


def run(tmp_path: Path, name: str, *more: str) -> Path:
    folder = tmp_path / name
    process = RunProcess(tmp_path / f"{name}.log", "--out", str(folder), *more)
    assert process.wait(240) == 0, process.output()
    return folder


def options(folder: Path) -> tuple[str, ...]:
    file = folder / "odd.py"
    file.write_text(ENV)
    return (*OPTIONS, "--env", str(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    return run(folder, "run", *options(folder))


def outcome(folder: Path) -> tuple[Any, ...]:
    """The fingerprints of the last weights, and what was trained on again in each step."""
    names = ("replayed_groups", "replayed_tokens", "replayed_success", "replay_kept", "success")
    with RolloutStore(folder / "rollouts.sqlite", is_read_only=True) as store:
        weights = store.facts("weights/6")
    return weights, [[row.get(name) for name in names] for row in rows(folder)]


def test_a_run_trains_on_groups_again_and_stores_each_rollout_once(whole: Path) -> None:
    again = [row["replayed_groups"] for row in rows(whole)]
    assert again[0] == 0 and sum(again) >= 3
    with RolloutStore(whole / "rollouts.sqlite", is_read_only=True) as store:
        assert store.count() == 6 * 2 * 4 == sum(row["num_rollouts"] for row in rows(whole))
        for row in rows(whole):
            fresh = store.query(step=row["step"])
            assert row["success"] == sum(one.is_success for one in fresh) / len(fresh)
    flows = [read_cursor(one)["flow"] for one in list_checkpoints(whole / "checkpoints")]
    assert any(stored_ids(flow["replay"]) for flow in flows if flow)


@pytest.mark.parametrize("more", [(), ("--keep-rollout-steps", "1")])
def test_a_run_that_is_killed_ends_with_the_same_bits(
    whole: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The weights of step 4 have changed and nobody knows it; the checkpoint is of step 4's begin.
    Where the store forgets, the groups are in the checkpoint."""
    folder, marker = tmp_path / "run", tmp_path / "slow"
    slow = Slow(update=5, seconds=240, marker=marker)
    arguments = ("--out", str(folder), *options(tmp_path), *more)
    process = RunProcess(tmp_path / "log", *arguments, slow=slow)
    process.await_file(marker, 120)
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    flow = read_cursor(list_checkpoints(folder / "checkpoints")[-1])["flow"]
    assert flow["replay"]["groups"] and bool(stored_ids(flow["replay"])) == (not more)
    run(tmp_path, "run", "--resume")
    assert outcome(folder) == outcome(whole)


def test_a_store_that_has_lost_a_kept_group_stops_the_run_by_name(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for done in list_checkpoints(folder / "checkpoints")[-4:]:
        if read_cursor(done)["phase"] != "rl":
            shutil.rmtree(done)
    [*_, newest] = list_checkpoints(folder / "checkpoints")
    names = stored_ids(read_cursor(newest)["flow"]["replay"])
    with RolloutStore(folder / "rollouts.sqlite") as store:
        store.expire(1)
        lost = [name for name in names if not store.query(group_id=name.rpartition("-")[0])]
    assert lost, "the newest checkpoint keeps groups of earlier steps"
    process = RunProcess(tmp_path / "log", "--resume", "--out", str(folder))
    assert process.wait(240) == 2
    assert "--rl.replay.share would train on again" in process.output().replace("\n", " ")


def test_a_fork_of_the_same_options_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    folder = run(tmp_path, "fork", "--fork", f"{whole}@4")
    assert outcome(folder) == outcome(whole)


def test_a_replay_makes_the_weights_again_with_the_groups_of_each_step(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["replay", str(whole), "--from-step", "3", "--to-step", "5"])
    assert status == 0, capsys.readouterr().out
