"""Loops of the Tinker cookbook train against the service, over data that lie here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_text import save_folder
from training_service import KEY, serve

NEEDS = "needs the package tinker-cookbook[math-rl]"
sl_loop = pytest.importorskip("tinker_cookbook.recipes.sl_loop", reason=NEEDS)
rl_loop = pytest.importorskip("tinker_cookbook.recipes.rl_loop", reason=NEEDS)
datasets = pytest.importorskip("datasets", reason=NEEDS)

CHATS = [
    {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word * 2}]}
    for word in ("hello", "the", "lo", "he")
] * 4
QUESTIONS = [{"question": f"{i} plus 1?", "answer": f"#### {i + 1}"} for i in range(16)]


@pytest.mark.parametrize("name", ["sl_loop", "rl_loop"])
def test_a_recipe_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(source: str, *_: Any) -> Any:
        rows = CHATS if "no_robots" in source else QUESTIONS
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows))

    folder, log = tmp_path / "model", tmp_path / "log"
    save_folder(folder)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    # The cookbook knows renderers of published models alone.
    monkeypatch.setattr(sl_loop.model_info, "get_recommended_renderer_name", lambda _: "role_colon")
    # A model of random weights solves nothing: something else that differs.
    monkeypatch.setattr(rl_loop, "get_reward", lambda text, _: float(len(text) % 3))
    with serve(folder, tmp_path / "service") as served:
        given = {"base_url": served.url, "log_path": str(log), "model_name": str(folder)}
        given |= {"lora_rank": 4, "batch_size": 4, "max_steps": 3, "learning_rate": 1e-2}
        if name == "sl_loop":
            sl_loop.main(sl_loop.Config(save_every=2, **given))
        else:
            sizes = {"group_size": 4, "max_tokens": 8, "loss_fn": "importance_sampling"}
            rl_loop.main(rl_loop.Config(save_every=2, **sizes, **given))
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 3 and all(one["grad_norm"] > 0 for one in metrics)
    if name == "sl_loop":
        assert metrics[-1]["train_mean_nll"] < metrics[0]["train_mean_nll"]
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert [one["name"] for one in saved] == ["000002", "final"]
