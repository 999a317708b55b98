"""Supervised runs on chats with pictures: what is read, and that the model looks at them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from nanoengine.sft.chats import read_chats
from nanoengine.sft.sft_config import SftConfig
from nanoengine.sft.sft_run import SftRun
from nanoengine.text.tokenizer import ChatTokenizer
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import seeing_tokenizer
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

ROOT = Path(__file__).parents[3]
LEFT, RIGHT = (np.zeros((48, 48, 3), np.uint8) for _ in range(2))
LEFT[:, :24], RIGHT[:, 24:] = 255, 255
FILES = {"left": write_png(LEFT), "right": write_png(RIGHT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    build_tiny_vision_model(folder / "model")
    for name, data in FILES.items():
        (folder / f"{name}.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(FILES["right"]).decode()
    rows: list[dict[str, Any]] = [
        chat({"type": "image", "image": "left.png"}, answer="7"),
        chat({"type": "image_url", "image_url": {"url": url}}, answer="3"),
        {**chat("<image>", answer="7"), "images": ["left.png"]},
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def chat(*parts: Any, answer: str) -> dict[str, Any]:
    content = parts[0] if isinstance(parts[0], str) else list(parts)
    user, bot = {"role": "user", "content": content}, {"role": "assistant", "content": answer}
    return {"messages": [user, bot]}


def test_pictures_of_chats_are_spans_of_their_samples(folder: Path, tmp_path: Path) -> None:
    tokenizer = seeing_tokenizer(folder / "model", tmp_path)
    samples, _ = read_chats(folder / "chats.jsonl", tokenizer, 100)
    shas = [hashlib.sha256(FILES[name]).hexdigest() for name in ("left", "right", "left")]
    assert [[span.sha256 for span in one.images] for one in samples] == [[sha] for sha in shas]
    assert samples[0].tokens == samples[2].tokens, "however it is named"
    (span,) = samples[0].images
    assert set(samples[0].loss_mask[: span.end + 1]) == {0}
    reads = ChatTokenizer.from_folder(folder / "model")
    with pytest.raises(ValueError, match=r"chats.jsonl, line 1: .*this model reads text alone"):
        read_chats(folder / "chats.jsonl", reads, 100)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ({"type": "image", "sha256": "0" * 64}, "the picture '0000.*named by its hash alone; give"),
        ({"type": "image", "sha256": 5}, "a part of type 'image' in a message of 'user'"),
        ({"type": "image", "image": "iVBORw0KGgo" * 900}, "begin a text in base64 with data:image"),
        ({"type": "image", "image": "."}, "does not exist, or is no file"),
    ],
)
def test_a_picture_that_is_not_there_is_named_with_its_line(
    folder: Path, tmp_path: Path, part: dict[str, Any], wrong: str
) -> None:
    """As an exported rollout names it, say, or somebody's base64 without a head."""
    chat = [{"role": "user", "content": [part, "hm"]}, {"role": "assistant", "content": "a"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}))
    sees = seeing_tokenizer(folder / "model", tmp_path / "pictures")
    with pytest.raises(ValueError, match=f"chats.jsonl, line 1: .*{wrong}"):
        read_chats(tmp_path / "chats.jsonl", sees, 100)


def test_a_run_learns_what_only_the_pictures_tell(folder: Path, tmp_path: Path) -> None:
    """The words are the same and the answers two, of one and of two chats in three: whoever does
    not look has the entropy of that choice at best, over an answer and the end of the turn."""
    config = SftConfig(
        data=folder / "chats.jsonl", model=str(folder / "model"), out=tmp_path / "run", steps=40,
        batch_size=3, max_tokens=100, micro_batch_tokens=200, lr=3e-3, warmup_steps=0,
        schedule_lr="constant", device="cpu", save_every=100,
    )  # fmt: skip
    SftRun(config).train()
    losses = [json.loads(row)["loss"] for row in (tmp_path / "run/metrics.jsonl").open()]
    blind = -(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3) / 2
    assert losses[-1] < blind / 4 < losses[0]
    assert len(list((tmp_path / "run" / "pictures").iterdir())) == 2
    trained = seeing_tokenizer(tmp_path / "run" / "model", tmp_path / "pictures")
    assert trained.store.processor == seeing_tokenizer(folder / "model", tmp_path).store.processor


def train(folder: Path, out: Path, *layout: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of six steps in the layout, and the weights then."""
    chats = ["--data", str(folder / "chats.jsonl"), "--model", str(folder / "model")]
    sizes = ["--steps", "6", "--batch-size", "3", "--max-tokens", "100", "--warmup-steps", "0"]
    words = [*chats, *sizes, "--lr", "3e-3", "--out", str(out), *layout]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/train_sft.py"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [json.loads(row)["loss"] for row in (out / "metrics.jsonl").open()]
    return losses, safetensors.torch.load_file(out / "model/model.safetensors")


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(folder, folder / "alone")


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    "layout",
    [("--dp", "2", "--zero", "3"), ("--pp", "2"), ("--cp", "2"), ("--tp", "2")],
    ids=" ".join,
)
def test_a_run_split_over_processes_sees_the_same(
    layout: tuple[str, ...], folder: Path, alone: Any, tmp_path: Path
) -> None:
    (one, expected), (split, found) = alone, train(folder, tmp_path / "split", *layout)
    assert split == pytest.approx(one, abs=1e-4) and one[0] - one[-1] > 0.5
    assert any("visual" in name for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-3, msg=name)
