"""An environment, a tool, a loop, a parser, a reward, an advantage and a loss: one file of the
user's and none of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanorl.cli import main

FILE = '''
import nanorl

class Bang:
    """Calls as !name."""
    name = "bang"
    def read(self, text):
        return [nanorl.ToolCall(text.strip()[1:])] if text.strip().startswith("!") else []
    def write(self, call):
        return "!" + call.name
    def describe(self, tools):
        return "write " + " ".join("!" + tool.name for tool in tools)
    def observation(self, results):
        return [{"role": "user", "content": " ".join(results)}]

def hint() -> str:
    """Tell the secret."""
    return "7"

class Secret(nanorl.Env):
    tools = (hint,)
    parser = Bang()
    defaults = {"agent.max_turns": 3, "agent.max_turn_tokens": 6, "warm_start.steps": 2}
    def tasks(self, rng):
        return nanorl.Task(f"secret {rng.randint(0, 99)}", answer="7")
    def step(self, text):
        return self.done(answer=text)
    def teacher(self, observations, rng):
        return observations[-1] if observations else nanorl.ToolCall("hint")

async def once_more(episode):
    await episode.start()
    for _ in range(2):
        text = await episode.turn()
        if text is None:
            return
        step = await episode.step(text)
        if step.is_done or not episode.observe("more"):
            return

def letters(text, environment):
    return nanorl.Score(len(set(text)) / 10, parts={"mine": 0.25})

def centred(reward_R, group_ids):
    return reward_R - reward_R.mean()

def plain(logp_T, batch):
    return -batch.advantage_T * (logp_T - batch.old_logp_T).exp()
'''


@pytest.mark.xdist_group("heavy")
def test_one_file_of_yours_holds_everything_that_can_be_yours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine, out = tmp_path / "mine.py", tmp_path / "run"
    mine.write_text(FILE)
    words = f"""train --preset tiny --dtype fp32 --threads 1 --out {out} --env {mine}
        --agent {mine}:once_more --reward {mine}:letters --rl.algorithm.advantage {mine}:centred
        --rl.algorithm.loss {mine}:plain --rl.steps 1 --rl.tasks-per-step 1 --rl.group-size 4
        --warm-start.traces-per-step 2 --evaluation.num-tasks 2
        --evaluation.num-tasks-untrained 0 --evaluation.num-tasks-no-tool 0"""
    assert main(words.split()) == 0, capfd.readouterr().err
    (step,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert step["reward/mine"] == 0.25
    assert step["grad_norm"] > 0, "rewards of different letters give the loss a gradient"
    assert step["turns"] <= 2, "the loop takes two turns at most"
    warm = json.loads((out / "config.json").read_text())["warm_start"]
    assert warm["steps"] == 2, "the environment's defaults and its teacher, with the parser's calls"
