"""A run of a model that sees: it trains on what it saw, goes on after a stop, and is replayed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import nanorl
from nanoengine.spans import ImageSpan
from nanoengine.vision.pictures import read_picture
from nanorl.cli import main
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.results import PHASES
from nanorl.observability.store import RolloutStore

OPTIONS: dict[str, Any] = {
    **{"env_args": ["size=4", "num_moves=3"]},  # three moves: who knows nothing finds some doors
    **{"dtype": "bf16", "threads": 1, "save_every": 1, "keep_start": True},
    **{"warm_start.steps": 3, "warm_start.traces_per_step": 12, "warm_start.lr": 2e-3},
    **{"warm_start.drill_fraction": 0.0, "warm_start.warmup_steps": 0},
    **{"rl.steps": 4, "rl.tasks_per_step": 4, "rl.group_size": 4, "rl.lr": 1e-3},
    **{"rl.temperature": 1.0, "agent.max_turns": 3, "agent.max_turn_tokens": 3},
    **{"agent.max_context_tokens": 128, "evaluation.num_tasks": 8},
    **{"evaluation.num_tasks_untrained": 0, "evaluation.num_tasks_hidden": 4},
}


def trained(folder: Path, out: Path, **more: Any) -> Path:
    nanorl.train(str(folder), env="look_back", out=out, options={**OPTIONS, **more})
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp("run") / "whole")


def test_rollouts_hold_their_pictures_and_the_gap_is_zero(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["logp_gap_max"] == 0.0
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        rollouts = list(store.query())
    assert len(rollouts) == 4 * 4 * 4
    files = {file.name for file in (run / "pictures").iterdir()}
    for rollout in rollouts:
        # a picture before each turn, of 48 x 48 pixels: three by three tokens of 2 x 2 patches
        assert len(rollout.images) in (rollout.num_turns, rollout.num_turns + 1)
        assert {span.length for span in rollout.images} == {9}
        assert {span.sha256 for span in rollout.images} <= files
        first, *others = (span.key for span in rollout.images)
        assert first not in others, "the door is in the first alone"


def test_success_without_pictures_is_told_beside_success(run: Path) -> None:
    """Each evaluation keeps its rollouts; where pictures are hidden they have seen grey."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["heldout_n_hidden"] == 4
    greys = {}
    with RolloutStore(run / "evaluations.sqlite", is_read_only=True) as store:
        for name in ("after", "blind", "first_hidden"):
            played = list(store.query(step=PHASES.index(name)))
            greys[name] = [[is_grey(run, span) for span in one.images] for one in played]
            success = sum(one.reward == 1.0 for one in played) / len(played)
            assert summary[f"heldout_success_{name}"] == success
    assert not any(any(one) for one in greys["after"])
    assert all(all(one) for one in greys["blind"])
    assert all(one[0] and not any(one[1:]) for one in greys["first_hidden"])


class Says(nanorl.Env):
    """Shows no picture."""

    def tasks(self, rng: random.Random) -> nanorl.Task:
        return nanorl.Task(f"say {rng.randint(0, 99)}", answer="x")


def test_nothing_is_hidden_where_nothing_is_shown(model: Path, tmp_path: Path) -> None:
    """A model that sees may read texts alone: then there is no success without pictures."""
    options = {**OPTIONS, "env_args": [], "warm_start.steps": 0, "rl.steps": 1}
    nanorl.train(str(model), env=Says, out=tmp_path / "run", options=options)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "heldout_success_after" in summary and "heldout_success_blind" not in summary


def is_grey(run: Path, span: ImageSpan) -> bool:
    return bool((read_picture((run / "pictures" / span.sha256).read_bytes()) == 128).all())


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
def test_exports_name_the_pictures(run: Path, tmp_path: Path, to: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet") if to == "parquet" else None
    out = tmp_path / f"rollouts.{to}"
    assert main(["export", str(run), "--to", to, "--out", str(out)]) == 0
    if parquet is None:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    else:
        rows = parquet.read_table(out).to_pylist()
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        stored = {one.rollout_id: one.images for one in store.query()}
    assert {
        row["rollout_id"]: [ImageSpan.from_json(one) for one in row["images"]] for row in rows
    } == stored


def test_the_tower_learns(run: Path, model: Path) -> None:
    before, after = (load_file(one / "model.safetensors") for one in (model, run / "model-trained"))
    names = [name for name in before if name.startswith("model.visual.")]
    assert len(names) > 20
    changed = [name for name in names if not before[name].equal(after[name].to(before[name].dtype))]
    assert len(changed) > len(names) * 0.9


def test_a_run_that_goes_on_ends_with_the_same_bits(run: Path, model: Path, tmp_path: Path) -> None:
    out = trained(model, tmp_path / "parts", **{"rl.steps": 2})
    assert main(["train", "--resume", "--out", str(out), "--rl.steps", "4"]) == 0
    whole, parts = (load_file(one / "model-trained" / "model.safetensors") for one in (run, out))
    assert all(whole[name].equal(parts[name]) for name in whole)


def test_every_rollout_is_replayed_to_the_bit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(run), "--phase", "rl", "--num", "0", "--as-json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["rollouts"]) == 4 * 4 * 4
    assert all(one["difference"] is None for one in told["rollouts"])


@pytest.mark.xdist_group("heavy")
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_roles_in_processes_of_their_own_see_the_same(
    run: Path, model: Path, tmp_path: Path, max_staleness: int
) -> None:
    """Two replicas and a trainer share a folder; names travel, and no pixels."""
    more = {"cluster.backend": "local", "rollout.replicas": 2, "rl.max_staleness": max_staleness}
    out = trained(model, tmp_path / "roles", **more)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["logp_gap_max"] == 0.0
    assert {file.name for file in (out / "pictures").iterdir()}
    if max_staleness == 0:
        whole, roles = (
            load_file(one / "model-trained" / "model.safetensors") for one in (run, out)
        )
        assert all(whole[name].equal(roles[name]) for name in whole), "as in one process"


@pytest.mark.xdist_group("heavy")
def test_two_trainer_ranks_see_what_was_rolled_out(model: Path, tmp_path: Path) -> None:
    """They share parameters, gradients and state; each looks at the pictures of its samples."""
    more = {"cluster.backend": "local", "learner.dp": 2, "learner.zero": 3, "rl.steps": 2}
    out = trained(model, tmp_path / "ranks", **more)
    assert json.loads((out / "summary.json").read_text())["logp_gap_max"] == 0.0
    before, after = (load_file(one / "model.safetensors") for one in (model, out / "model-trained"))
    name = "model.visual.merger.linear_fc2.weight"
    assert not before[name].equal(after[name].to(before[name].dtype))


@pytest.mark.xdist_group("heavy")
@pytest.mark.parametrize(
    ("split", "most"),
    [
        ({"learner.pp": 2, "rl.algorithm.kl_coef": 0.1, "cluster.transport": "shm"}, 0.0),
        ({"learner.pp": 2, "vision.train": "none", "cluster.transport": "shm"}, 0.0),
        ({"learner.dp": 2, "learner.zero": 3, "vision.train": "merger", "vision.lr": 0.01}, 0.0),
        ({"learner.tp": 2, "learner.sequence_parallel": True, "rollout.tp": 2}, 1e-4),
        ({"learner.cp": 2}, 1e-4),
    ],
)
def test_ranks_that_share_a_sample_see_what_was_rolled_out(
    model: Path, tmp_path: Path, split: dict[str, Any], most: float
) -> None:
    """Where matrices or attention are summed over ranks, sums are of another order."""
    more = {"cluster.backend": "local", "cluster.transport": "disk", "dtype": "fp32", "rl.steps": 2}
    out = trained(model, tmp_path / "ranks", **{**more, **split, "warm_start.steps": 1})
    gap = json.loads((out / "summary.json").read_text())["logp_gap_max"]
    assert gap <= most
    before, after = (load_file(one / "model.safetensors") for one in (model, out / "model-trained"))
    moved = {name for name, one in before.items() if not one.equal(after[name].to(one.dtype))}
    train = split.get("vision.train", "all")
    assert any("visual.blocks" in name for name in moved) == (train == "all")
    assert any("merger" in name for name in moved) == (train != "none")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lora.rank": 4, "vision.lr": 1e-4}, "an adapter leaves the tower frozen"),
        ({"vision.train": "none", "vision.lr": 1e-4}, "nothing of the tower is trained"),
    ],
)
def test_what_sees_no_pictures_yet_is_refused_by_name(
    model: Path, tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trained(model, tmp_path / "wrong", **wrong)
    assert not (tmp_path / "wrong").exists()


def test_a_model_that_reads_text_has_no_tower_to_train(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model reads text, and has no tower"):
        nanorl.train("tiny", out=tmp_path / "wrong", options={"vision.train": "none"})
