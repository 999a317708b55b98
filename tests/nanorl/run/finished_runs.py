"""The folder of a run as it lies there at its end, without the minutes that training takes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.observability.report.evaluation import Evaluation, TaskScore
from nanorl.observability.report.summary import build_summary, write_summary
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig

NUM_TASKS = 40
RIGHT = {"before": 10, "after": 30}
"""Held-out tasks that each evaluation solves."""


def finished_run(folder: Path, **options: Any) -> RunConfig:
    """A run of the preset tiny with these options, its model `trained` and evaluated twice."""
    config = replace(tiny(), out=folder, **options)
    build_tiny_model(folder / "model", seed=0)
    shutil.copytree(folder / "model", folder / "model-trained")
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    for name, num_right in RIGHT.items():
        evaluation(num_right).write(folder / f"eval-{name}.json")
    write_summary(folder / "summary.json", summary_of(config))
    return config


def evaluation(num_right: int) -> Evaluation:
    """One sample of each task, the first ones right."""
    scores = [
        TaskScore(
            task_id=f"t{i}",
            kind="sums",
            prompt="1+1",
            num_samples=1,
            num_successes=int(i < num_right),
            mean_reward=float(i < num_right),
        )
        for i in range(NUM_TASKS)
    ]
    return Evaluation(
        title="", about={}, scores=scores, mean_turns=1, mean_action_tokens=1, seconds=1
    )


def summary_of(config: RunConfig) -> dict[str, Any]:
    command = (
        f"/home/me/nanorl/cli.py train --preset tiny --out {config.run_dir} --env=/home/me/g.py"
    )
    event = {"event": "begun", "command": command, "changes": {}, "step": 0, "origin": ""}
    return build_summary(
        {
            "preset": "tiny",
            "seed": 0,
            "steps": 36,
            "wall_s": 120.0,
            "heldout_success_before": RIGHT["before"] / NUM_TASKS,
            "heldout_success_after": RIGHT["after"] / NUM_TASKS,
            "heldout_n": NUM_TASKS,
            "heldout_success_untrained": None,
            "heldout_success_no_tool": None,
            "dtype": "bf16",
            "logp_gap_max": 0.25,
            "logp_gap_mean": 0.0,
            "tokens_per_s_rollout": None,
            "tokens_per_s_train": None,
            "num_rollouts": 1,
            "num_failed_rollouts": 0,
            "peak_rss_bytes": 1,
            "git_commit": "abc",
        },
        {"history": [event], "hardware": "x86_64, 2 CPUs", "torch_version": "2.13"},
    )
