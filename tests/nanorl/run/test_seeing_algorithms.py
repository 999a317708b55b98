"""Every way to train a model that sees: two RL steps, a gap of 0, the same bits after a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from graded_look_back import Graded
from safetensors.torch import load_file

import nanorl
from nanorl.cli import main
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

FILE = Path(__file__).parent / "graded_look_back.py"
OPTIONS: dict[str, Any] = {
    **{"env_args": ["size=4", "num_moves=2"], "env_workers": 0, "threads": 1, "save_every": 1},
    **{"warm_start.steps": 1, "warm_start.traces_per_step": 2, "warm_start.lr": 2e-3},
    **{"warm_start.warmup_steps": 0, "rl.steps": 2, "rl.tasks_per_step": 2, "rl.group_size": 4},
    **{"rl.lr": 1e-3, "agent.max_turns": 2, "agent.max_turn_tokens": 2, "rl.weight_decay": 0.1},
    **{"agent.max_context_tokens": 128, "evaluation.num_tasks": 1},
    **{"evaluation.num_tasks_untrained": 0, "evaluation.num_tasks_no_tool": 0},
}
TEACHER = "a model of its own"
LOCAL = {"cluster.backend": "local"}
KL = {"rl.algorithm.kl_coef": 0.1}
DISTIL = {"rl.algorithm.loss": "opd", "rl.algorithm.advantage": "none", "rl.reference": TEACHER}
SDPO = {"algorithm": "sdpo", "rl.algorithm.top_k": 8, "rl.algorithm.hindsight_tokens": 16}
LORA = {"lora.rank": 4, "rl.lr": 1e-2}
WAYS: dict[str, dict[str, Any]] = {
    "frozen": {"vision.train": "none"},
    "merger": {"vision.train": "merger", "vision.lr": 1e-2},
    "frozen, roles": {"vision.train": "none", **LOCAL},
    "reference": KL,
    "reference, roles": {**KL, **LOCAL},
    "teacher": DISTIL,
    "critic": {"algorithm": "ppo"},
    "critic, roles": {"algorithm": "ppo", **LOCAL},
    "sdpo": SDPO,
    "sdpo, averaged": {**SDPO, "rl.algorithm.hindsight_teacher": "average"},
    "lora": LORA,
    "lora, int8": {**LORA, "lora.base_dtype": "int8"},
    "lora, reference": {**LORA, **KL},
}
HIDES_NOTHING = {"evaluation.num_tasks_hidden": 0}
WITHOUT_TOWER = {name for name in WAYS if "lora" in name or "frozen" in name}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("seeing")
    return {
        "model": build_tiny_vision_model(folder / "model"),
        TEACHER: build_tiny_vision_model(folder / "teacher", seed=3),
    }


def trained(models: dict[str, Path], out: Path, more: dict[str, Any], steps: int = 2) -> Path:
    given = {key: str(models[one]) if one == TEACHER else one for key, one in more.items()}
    options = {**OPTIONS, "dtype": "bf16", **given, "rl.steps": steps}
    nanorl.train(str(models["model"]), env=f"{FILE}:{Graded.__name__}", out=out, options=options)
    return out


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", WAYS)
def test_a_run_of_two_steps_keeps_its_gap_and_its_bits(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    more = WAYS[name]
    whole = trained(models, tmp_path / "whole", more)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["logp_gap_max"] == 0.0
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "logp_gap_max" in row]
    assert len(steps) == 2
    norms = [row.get("value_grad_norm", row.get("grad_norm", 0.0)) for row in steps]
    assert all(math.isfinite(one) for one in norms) and max(norms) > 0
    if "kl_coef" in str(more):  # as RL begins the reference is the policy, to the bit
        assert steps[0]["ref_kl"] == 0.0 < steps[1]["ref_kl"]
    before, after = weights(models["model"]), weights(whole / "model-trained")
    moved = {key for key, one in before.items() if not after[key].equal(one.to(after[key].dtype))}
    assert any("layers" in key for key in moved)
    assert any("visual" in key for key in moved) == (name not in WITHOUT_TOWER)
    parts = trained(models, tmp_path / "parts", more, steps=1)
    assert main(["train", "--resume", "--out", str(parts), "--rl.steps", "2"]) == 0
    again = weights(parts / "model-trained")
    assert all(one.equal(again[key]) for key, one in after.items())


def test_a_teacher_that_reads_text_or_sees_otherwise_is_refused_by_name(
    models: dict[str, Path], tmp_path: Path
) -> None:
    other = build_tiny_vision_model(tmp_path / "other")
    file = other / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4, 0.5, 0.5]}))
    with pytest.raises(ValueError, match=r"--rl.reference .*other: it is shown pictures otherwise"):
        trained({**models, TEACHER: other}, tmp_path / "out", DISTIL)
    assert not (tmp_path / "out").exists()


def test_a_fork_trains_again_on_what_its_origin_was_shown(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Groups that are trained on again come with the checkpoint, and their pictures with them."""
    more = {"rl.replay.share": 0.5, "warm_start.steps": 0, "keep_checkpoints": 9}
    whole = trained(models, tmp_path / "whole", {**more, **HIDES_NOTHING}, steps=4)
    before = {file.name for file in (whole / "pictures").iterdir()}
    fork = tmp_path / "fork"
    assert main(["train", "--fork", f"{whole}@2", "--out", str(fork)]) == 0
    ours, theirs = weights(fork / "model-trained"), weights(whole / "model-trained")
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert {file.name for file in (fork / "pictures").iterdir()} == before
