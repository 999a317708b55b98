"""What the ranks do in test_split_pictures.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pool import Rank

from nanoengine.formats.hf import export_state, load_model
from nanoengine.model.config import ModelConfig
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import seeing_tokenizer
from nanoengine.vision.sight import Sight
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

ASKED = [(0,), (0, 1), (), (1, 1)]


def outputs(folder: Path, split: TensorParallel | None = None) -> list[Output]:
    """What an engine says of each prompt, and of the first again with another tower. Chunks of
    seven tokens end within pictures."""
    model = load_model(folder, split=split)
    tokenizer = seeing_tokenizer(folder, folder / "pictures")
    model.sight = Sight(model, tokenizer.store)
    noise = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    shas = [tokenizer.store.add(write_png(one)) for one in noise]
    config = InferConfig(num_blocks=100, block_size=4, max_batch_tokens=7, max_num_seqs=3)
    engine = LLMEngine(model, config, tokenizer=tokenizer)
    prompts = []
    for pictures in ASKED:
        parts = [{"type": "image", "sha256": shas[one]} for one in pictures]
        chat = [{"role": "user", "content": [*parts, {"type": "text", "text": "go"}]}]
        ids = tokenizer.encode_chat(chat, add_generation_prompt=True)
        images = tuple(tokenizer.images_in(ids, chat, 0))
        prompts.append((ids, SamplingParams(max_tokens=6, ignore_eos=True, seed=1, images=images)))
    found = engine.generate([ids for ids, _ in prompts], [params for _, params in prompts])
    engine.update_weights(turned(folder), version=1)
    return [*found, *engine.generate([prompts[0][0]], prompts[0][1])]


def turned(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Whole weights, with another tower."""
    state = export_state(load_model(folder))
    return [(name, -x if name.endswith("merger.linear_fc2.weight") else x) for name, x in state]


def on_rank(rank: Rank, folder: Path, sequence_parallel: bool) -> list[Output]:
    mesh = rank.mesh(Layout(tp=rank.world))
    shape = ModelConfig.from_folder(folder)
    return outputs(folder, TensorParallel.of(mesh, shape, sequence_parallel=sequence_parallel))
