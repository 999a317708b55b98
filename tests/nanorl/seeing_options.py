"""The options of a small run of a model that sees, as a command line has them: a game of three
turns with a picture before each, in which every rollout is worth something else."""

from __future__ import annotations

from pathlib import Path

GAME = Path(__file__).parent / "run" / "graded_look_back.py"
NUM_ROLLOUTS = 8
"""Of a step."""
SEEING = (
    *("--env", f"{GAME}:Brief", "--env-workers", "0"),
    *("--threads", "1", "--save-every", "1", "--agent.max-turns", "3"),
    *("--agent.max-turn-tokens", "3", "--agent.max-context-tokens", "128"),
    *("--warm-start.steps", "30", "--warm-start.traces-per-step", "4", "--warm-start.lr", "3e-3"),
    *("--warm-start.warmup-steps", "0", "--warm-start.drill-fraction", "0"),
    *("--rl.steps", "3", "--rl.tasks-per-step", "2", "--rl.group-size", "4", "--rl.lr", "1e-3"),
    *("--rl.temperature", "1", "--evaluation.num-tasks", "1"),
    *("--evaluation.num-tasks-untrained", "0", "--evaluation.num-tasks-no-tool", "0"),
    *("--evaluation.num-tasks-hidden", "1"),
)
