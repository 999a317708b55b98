"""Every template of the gallery trains: what an environment answers is in every rollout's tokens,
and nothing else than what was sampled is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gallery import FAMILIES, tokenizer_of

import nanorl
from nanoengine.formats.hf import save_model
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.observability.store import RolloutStore

NO_TOOLS = {"gemma2"}
"""Their templates have no place for a word about tools: a run with tools is refused."""
SOON = ("phi3", "phi4_mini", "glm4", "glm4_5", "gpt_oss", "mistral_v3", "llama3_2", "deepseek_v3")
"""Those whose borders are of a kind of their own; the others are trained where time is no matter.
"""
ENV = '''
import zlib

import nanorl


def look(word: str) -> str:
    """Look a word up."""
    return word


class Talk(nanorl.Env):
    {tools}

    def tasks(self, rng):
        return nanorl.Task(f"say {{rng.randint(1, 999)}}")

    def step(self, text):
        return "unused"

    def score(self, transcript):
        return zlib.crc32(transcript.text.encode()) / 2**32


async def loop(episode):
    """Answer every turn, whatever was sampled: by a user, by one result, by two."""
    await episode.start()
    parser = episode.opening.parser
    for number in range(3):
        await episode.turn()
        answer = [{{"role": "user", "content": f"The answer is {{number}}."}}]
        if parser is not None and number:
            texts = [f"The answer is {{number}}.", "The other is 7."][:number]
            answer = parser.observation(texts)
        if not episode.observe(answer):
            return
    await episode.turn()
'''
OPTIONS: dict[str, Any] = {
    "preset": "tiny",
    "env_workers": 0,
    "dtype": "fp32",
    "threads": 1,
    "save_every": 9,
    "warm_start.steps": 0,
    "rl.tasks_per_step": 1,
    "rl.group_size": 2,
    "agent.max_turns": 4,
    "agent.max_turn_tokens": 4,
    "agent.max_observation_tokens": 600,
    "agent.max_context_tokens": 6000,
    "evaluation.num_tasks": 1,
    "evaluation.num_tasks_untrained": 0,
    "evaluation.num_tasks_no_tool": 0,
}


def model_with(tokenizer: ChatTokenizer, folder: Path) -> Path:
    """A random model of a few thousand weights that has these tokens."""
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size + 3, hidden_size=16, intermediate_size=16, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=8, max_position_embeddings=8192,
        tie_word_embeddings=True, eos_ids=tuple(sorted(tokenizer.eos_ids)),
    )  # fmt: skip
    model = Transformer(shape, torch.float32)
    model.init_weights(0, std=0.2)
    save_model(model, folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.xdist_group("runs")
@pytest.mark.parametrize(
    "name",
    [
        *SOON,
        *(pytest.param(one, marks=pytest.mark.rare) for one in FAMILIES if one not in SOON),
    ],
)
def test_the_answer_of_every_turn_is_in_the_rollouts_that_are_trained(
    name: str, tmp_path: Path
) -> None:
    env = tmp_path / "talk.py"
    env.write_text(ENV.format(tools="" if name in NO_TOOLS else "tools = (look,)"))
    folder = model_with(tokenizer_of(name), tmp_path / "model")
    run = nanorl.train(
        str(folder),
        env=str(env),
        steps=2,
        out=tmp_path / "run",
        options={**OPTIONS, "agent.loop": f"{env}:loop"},
    )
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert [row["logp_gap_max"] for row in rows] == [0.0, 0.0]
    assert all(row["grad_norm"] > 0 for row in rows)
    tokenizer = ChatTokenizer.from_folder(run.folder / "model-trained")
    with RolloutStore(run.folder / "rollouts.sqlite") as store:
        rollouts = [store.get(entry.rollout_id) for entry in store.entries()]
    assert len(rollouts) >= 4
    for rollout in rollouts:
        text = tokenizer.decode(rollout.tokens)
        places = [text.find(f"The answer is {number}.") for number in range(3)]
        assert -1 < places[0] < places[1] < places[2], text
        assert name in NO_TOOLS or text.find("The other is 7.") > places[2]
        spans = [n for one in rollout.turn_spans for n in range(one.action_start, one.action_end)]
        assert spans == [n for n, mask in enumerate(rollout.loss_mask) if mask]
        assert len(rollout.turn_spans) == 4
