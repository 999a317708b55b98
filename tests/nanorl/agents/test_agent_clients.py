"""Clients and frameworks, unchanged, train through the endpoint: what the engine sampled is what is
trained on, token for token, and no log-prob moves a bit between the two.

The programs are those of examples/agents. The policy is a tiny random model: it talks nonsense, and
calls tools where the client forces it to.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import nanorl
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.command import QUIET
from nanorl.envs.tasks.tiny_model import ACTION_MARKERS, CHAT_MARKERS, VOCAB_SIZE, build_tiny_model
from nanorl.observability.store import RolloutStore
from nanorl.types import Rollout

AGENTS = Path(__file__).parents[3] / "examples" / "agents"
REWARD = '''
"""Something to learn from nonsense: the sum of its tokens."""

def score(rollout):
    pairs = [pair for one in rollout.sequences for pair in zip(one.tokens, one.loss_mask)]
    return sum(token for token, mask in pairs if mask) % 97 / 97
'''
# The turns that rollouts have, those in which the nonsense breaks no agent.
CLIENTS = {
    "sum_agent.py:agent": 2,
    "openai_stream.py:agent": 2,
    "openai_responses.py:agent": 2,
    "openai_agents.py:agent": 2,
    "anthropic_messages.py:agent": 2,
    "langgraph_react.py:agent": 1,
    "pydantic_ai_agent.py:agent": 1,
    "smolagents_tools.py:agent": 2,
    "openai_chat.py": 2,
    "mini_swe.py": 2,
}
Said = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # prompt, sampled, log-probs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads long prompts, with a tokenizer of bytes, as grammars need it."""
    folder = build_tiny_model(tmp_path_factory.mktemp("model") / "random")
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 16384}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    markers = [*CHAT_MARKERS, *ACTION_MARKERS]
    texts = [path.read_text() for path in AGENTS.glob("*.py")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=markers,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in CHAT_MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Counter[Said]:
    """All that the engine samples for rollouts that are trained on; evaluations are greedy."""
    said: Counter[Said] = Counter()
    generate = AsyncEngine.generate

    async def noted(self: AsyncEngine, ids: list[int], params: SamplingParams) -> Output:
        output = await generate(self, ids, params)
        if params.temperature > 0:
            said[(tuple(ids), tuple(output.ids), tuple(output.logps))] += 1
        return output

    monkeypatch.setattr(AsyncEngine, "generate", noted)
    return said


def trained(rollout: Rollout) -> Counter[Said]:
    """What a rollout trains on, a turn at a time; the masks of its sequences say the same."""
    said: Counter[Said] = Counter()
    for one in rollout.sequences:
        in_turns = set()
        for span in one.turn_spans:
            start, end = span.action_start, span.action_end
            in_turns |= set(range(start, end))
            said[
                (
                    tuple(one.tokens[:start]),
                    tuple(one.tokens[start:end]),
                    tuple(one.logps[start:end]),
                )
            ] += 1
        assert in_turns == {place for place, mask in enumerate(one.loss_mask) if mask}
    return said


def options_of(client: str, folder: Path) -> dict[str, Any]:
    tasks, reward = folder / "sums.jsonl", folder / "reward.py"
    lines = [
        {"prompt": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3),
         "split": "train" if a else "heldout"}
        for a in range(8)
    ]  # fmt: skip
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward.write_text(REWARD)
    path = str(AGENTS / client)
    own: dict[str, Any] = {"agent.loop": path}
    if ":" not in client:  # a process for each rollout, which imports its packages anew
        own = {"agent.command": f"python {path}", "rl.tasks_per_step": 1}
    return {
        "preset": "tiny",
        "tasks": str(tasks),
        "reward": str(reward),
        "env_workers": 0,
        "dtype": "fp32",
        "threads": 1,
        "deterministic": True,
        "save_every": 9,
        "warm_start.steps": 0,
        "rl.tasks_per_step": 2,
        "rl.group_size": 2,
        "agent.max_turns": 4,
        "agent.max_turn_tokens": 96,
        "agent.max_context_tokens": 8000,
        "evaluation.num_tasks": 1,
        "evaluation.num_tasks_untrained": 0,
        "evaluation.num_tasks_no_tool": 0,
        **own,
    }


@pytest.mark.xdist_group("runs")
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_trains_on_what_the_engine_sampled(
    client: str,
    model: Path,
    sampled: Counter[Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    run = nanorl.train(
        str(model),
        env="answer",
        steps=3,
        out=tmp_path / "run",
        options=options_of(client, tmp_path),
    )
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert [row["logp_gap_max"] for row in rows] == [0.0, 0.0, 0.0]
    assert all(row["logp_gap_tokens"] > 0 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows), "there was something to learn from"
    with RolloutStore(run.folder / "rollouts.sqlite") as store:
        rollouts = [store.get(entry.rollout_id) for entry in store.entries()]
    assert len(rollouts) == (12 if ":" in client else 6)
    assert sum((trained(rollout) for rollout in rollouts), Counter()) == sampled
    assert max(rollout.num_turns for rollout in rollouts) >= CLIENTS[client]
