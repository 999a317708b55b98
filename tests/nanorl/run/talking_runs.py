"""Small runs of an environment that only talks, for tests of what is trained and how it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nanorl

WEIGHTS = "model-trained/model.safetensors"
OPTIONS: dict[str, Any] = {
    **{"threads": 1, "rl.tasks_per_step": 2, "rl.group_size": 3, "rl.lr": 3e-3, "save_every": 1},
    **{"agent.max_turns": 2, "agent.max_turn_tokens": 12, "agent.max_context_tokens": 96},
    **{"warm_start.traces_per_step": 3, "warm_start.lr": 1e-2},
    **{"deterministic": True, "keep_checkpoints": 9},
    "evaluation": {"num_tasks": 2, "num_tasks_untrained": 0, "num_tasks_no_tool": 0},
}


class Talk(nanorl.Env):
    """Rewards many different letters."""

    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task(f"say {rng.randint(1, 999)}")

    def step(self, text: str) -> str:
        return "go on"

    def score(self, transcript: Any) -> float:
        return len(set(transcript.text)) / 100

    def teacher(self, observations: Any, rng: Any) -> str:
        return str(rng.randint(1, 999))


def talk(out: Path, steps: int, own: Mapping[str, Any], options: Mapping[str, Any]) -> Path:
    """The folder of a run with `own` options of a file of tests, then those of one test, in which
    two underscores stand for a dot."""
    given = {**OPTIONS, **own, **{name.replace("__", "."): x for name, x in options.items()}}
    return nanorl.train("tiny", env=Talk, steps=steps, out=out, options=given).folder
