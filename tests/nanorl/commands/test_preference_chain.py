"""examples/preferences: SFT, DPO, a reward model, GRPO on its scores, a server; on a tiny model."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from nanoengine.heads.sequence_classifier import (
    load_sequence_classifier,
    rated_chat,
    score_sequences,
)
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.observability.store.store import RolloutStore

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "preferences"
PROGRAMS = {
    "bash scripts/train_sft.sh": f"{sys.executable} scripts/train_sft.py",
    ".venv/bin/nanorl": f"{sys.executable} -m nanorl",
}
SMALL = ["--steps", "3", "--batch-size", "4", "--lr", "1e-3", "--warmup-steps", "0"]


def words(name: str, runs: Path) -> list[str]:
    """The command of a script, without its set-up, with its runs elsewhere."""
    text = (FOLDER / name).read_text().split('/../.."\n')[1].replace('"$@"', "")
    for program, ours in PROGRAMS.items():
        text = text.replace(program, ours)
    return shlex.split(text.replace("runs/preferences", str(runs)).replace("\\\n", " "))


def ran(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_commands_lead_from_chats_to_a_server(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="needs the extra `serve`")
    model = build_tiny_model(tmp_path / "tiny")
    ran([*words("1_sft.sh", tmp_path), "--model", str(model), *SMALL])
    for name in ("2_dpo.sh", "3_reward_model.sh"):
        ran([*words(name, tmp_path), *SMALL])
    for run in ("dpo", "reward_model"):
        found = losses(tmp_path / run)
        assert found[0] == pytest.approx(math.log(2), abs=1e-4) and found[-1] < found[0]
    sizes = [
        "--rl.steps",
        "1",
        "--rl.tasks-per-step",
        "2",
        "--rl.group-size",
        "2",
        "--threads",
        "1",
    ]
    limits = ["--agent.max-turn-tokens", "12", "--evaluation.num-tasks", "2"]
    ran([*words("4_grpo.sh", tmp_path), *sizes, *limits, "--agent.max-context-tokens", "128"])
    scored_by_the_reward_model(tmp_path)

    command = [*words("5_serve.sh", tmp_path), "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = next(line.split()[2] for line in server.stdout if line.startswith("chat at http"))
        said = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 3,
            "model": "grpo",
        }
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(
            f"{address}v1/chat/completions", json.dumps(said).encode(), headers
        )
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
    finally:
        server.kill()
        server.wait()


def scored_by_the_reward_model(runs: Path) -> None:
    """The rewards of the run are what the folder says of the chats that were played."""
    folder = runs / "reward_model" / "model"
    tokenizer, judge = ChatTokenizer.from_folder(folder), load_sequence_classifier(folder)
    policy = ChatTokenizer.from_folder(runs / "sft" / "model")
    with RolloutStore(runs / "grpo" / "rollouts.sqlite") as store:
        played = store.query(step=0)
    assert len(played) == 4
    for one in played:
        span = one.turn_spans[0]
        prompt = policy.decode(one.tokens[: span.action_start], skip_special=True)
        turn = policy.decode(one.tokens[span.action_start : span.action_end], skip_special=True)
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": turn}]
        (score,) = score_sequences(judge, [rated_chat(tokenizer, chat)])
        assert one.reward == pytest.approx(score, abs=1e-4)
