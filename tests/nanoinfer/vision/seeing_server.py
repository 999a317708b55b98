"""A server of the tiny model that sees, and pictures to show it.

The model's weights are four times as large as it begins with, so that what it says depends on what
it sees. Pictures are noise of one size: only their bytes tell them apart.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving import Served, serve

from nanoengine.formats.hf import load_model
from nanoengine.vision.png import write_png
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.vision.served_pictures import let_see
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

TOKENS = 9  # of each picture


def png(seed: int, side: int = 48) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return write_png(noise)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(data)}"


def louder(model: Any) -> Any:
    """The model with weights four times as large."""
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.mul_(4.0)
    model.repack()
    return model


@contextlib.contextmanager
def serve_sight(tmp_path: Path, **options: Any) -> Iterator[Served]:
    folder = build_tiny_vision_model(tmp_path / "model")
    model = louder(load_model(folder))
    tokenizer = let_see(model, folder)
    config = InferConfig(num_blocks=400, block_size=4, max_batch_tokens=64, max_num_seqs=8)
    with serve(LLMEngine(model, config, tokenizer=tokenizer), tokenizer, **options) as served:
        yield served


def num_looks(served: Served) -> int:
    """Pictures that went through the tower so far."""
    return int(served.engine.model.sight.num_looks)
