"""A run on a file of tasks with pictures: what it stores, and that it is replayed to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from seer import png

import nanorl
from nanorl.cli import main
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.store import RolloutStore

OPTIONS: dict[str, Any] = {
    **{"dtype": "fp32", "threads": 1, "save_every": 1, "keep_start": True},
    **{"rl.steps": 2, "rl.tasks_per_step": 2, "rl.group_size": 2, "rl.lr": 1e-3},
    **{"agent.max_turn_tokens": 3, "agent.max_context_tokens": 128, "evaluation.num_tasks": 2},
    **{"evaluation.num_tasks_untrained": 0, "evaluation.num_tasks_no_tool": 0},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rows = []
    for level in range(0, 120, 10):
        (folder / f"{level}.png").write_bytes(png(level))
        split = "test" if level % 40 == 0 else "train"
        rows.append({"prompt": "<image>How dark?", "images": [f"{level}.png"], "answer": level})
        rows[-1]["split"] = split
    (folder / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    model = build_tiny_vision_model(folder / "model")
    options = {**OPTIONS, "tasks": str(folder / "tasks.jsonl")}
    nanorl.train(str(model), env="answer", out=folder / "run", options=options)
    return folder / "run"


def test_rollouts_and_tasks_name_the_pictures_which_the_run_keeps(run: Path) -> None:
    assert json.loads((run / "summary.json").read_text())["logp_gap_max"] == 0.0
    kept = {file.name for file in (run / "pictures").iterdir()}
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        rollouts, tasks = list(store.query()), {one.task_id: one for one in store.tasks()}
    assert len(rollouts) == 2 * 2 * 2
    for rollout in rollouts:
        (span,), task = rollout.images, tasks[rollout.task_id]
        assert {"type": "image", "sha256": span.sha256} == task.messages()[0]["content"][0]
        assert span.sha256 in kept and not task.pictures


def test_a_model_that_reads_text_alone_begins_no_run_on_pictures(run: Path, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    options = {**OPTIONS, "tasks": str(run.parent / "tasks.jsonl")}
    with pytest.raises(ValueError, match=r"the task user-.* shows pictures"):
        nanorl.train(str(model), env="answer", out=tmp_path / "run", options=options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["--stored-tasks"]])
def test_every_rollout_is_replayed_to_the_bit(
    run: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main(["replay", str(run), "--phase", "rl", "--num", "0", "--as-json", *more]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["difference"] for one in told["rollouts"]] == [None] * 8
