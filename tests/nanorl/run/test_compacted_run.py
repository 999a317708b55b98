"""A whole run whose rollouts have several token sequences: training, storage, resuming, reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked_runs import RunProcess

from nanorl.observability.store import RolloutStore
from nanorl.types import Rollout

ENV = """
import nanorl

class Talk(nanorl.Env):
    def tasks(self, rng):
        return nanorl.Task(f"say {rng.randint(1, 999)}")

    def step(self, text):
        self.reward(len(set(text)) / 100)
        return "go on"

    def score(self, transcript):
        return len(set(transcript.text)) / 100

    def teacher(self, observations, rng):
        return str(rng.randint(1, 999))
"""
SMALL = (
    *("--preset", "tiny", "--dtype", "fp32", "--threads", "1", "--env-workers", "0"),
    *("--agent", "compact", "--agent-args", "share=0.5", "request=sum", "heading=so:"),
    *("--agent.max-turns", "6", "--agent.max-turn-tokens", "12"),
    *("--agent.max-context-tokens", "64", "--rl.tasks-per-step", "2", "--rl.group-size", "3"),
    *("--evaluation.num-tasks", "2", "--evaluation.num-tasks-untrained", "0", "--save-every", "1"),
    *("--evaluation.num-tasks-no-tool", "0", "--deterministic", "--rl.lr", "1e-3"),
    # Until turns end by themselves.
    *("--warm-start.steps", "20", "--warm-start.traces-per-step", "4", "--warm-start.lr", "3e-3"),
)


def rollouts_of(run: Path) -> dict[str, Rollout]:
    with RolloutStore(run / "rollouts.sqlite") as store:
        return {one.rollout_id: store.get(one.rollout_id) for one in store.entries()}


@pytest.mark.xdist_group("runs")
def test_a_run_with_compacted_histories_has_no_gap_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    env = tmp_path / "talk.py"
    env.write_text(ENV)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    arguments = ("--env", str(env), *SMALL)

    def play(name: str, *words: str) -> None:
        process = RunProcess(tmp_path / name, *words)
        assert process.wait() == 0, (tmp_path / name).read_text()

    play("a", *arguments, "--rl.steps", "2", "--out", str(whole))
    play("b", *arguments, "--rl.steps", "1", "--out", str(resumed))
    play("c", "--resume", "--rl.steps", "2", "--out", str(resumed))

    rows = [json.loads(line) for line in (whole / "metrics.jsonl").open()]
    assert [row["logp_gap_max"] for row in rows] == [0.0, 0.0]
    assert all(row["grad_norm"] > 0 and row["logp_gap_tokens"] > 0 for row in rows)
    played = rollouts_of(whole)
    assert sum(len(one.branches) for one in played.values()) >= 3
    assert all(branch.is_history for one in played.values() for branch in one.branches)
    assert any(branch.turn_rewards for one in played.values() for branch in one.branches)
    assert rollouts_of(resumed) == played
    weights = "model-trained/model.safetensors"
    assert (resumed / weights).read_bytes() == (whole / weights).read_bytes()
    assert "before the history was compacted" in (whole / "report.html").read_text()
