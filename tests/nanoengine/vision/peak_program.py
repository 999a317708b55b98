"""Prints the peak memory of a trainer that sees, above what its process had, and the estimate.

`python peak_program.py all`: what of the tower is trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample
from nanoengine.plan.footprint import Plan, rank_memory
from nanoengine.spans import ImageSpan
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.seeing_transformer import SeeingTransformer
from nanoengine.vision.sight import Sight

SIDE, IMAGE, VOCAB = 32, 90, 96


class Noise:
    """Patches of noise."""

    def __init__(self, width: int) -> None:
        self._width = width

    def values(self, span: ImageSpan) -> torch.Tensor:
        return torch.randn(span.length * 4, self._width)


def engine_of(train: Any, width: int) -> Engine:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = {
        **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 512, "rope_parameters": rope},
    }
    vision = {
        **{"depth": 4, "hidden_size": width, "intermediate_size": 4 * width, "num_heads": 4},
        **{"out_hidden_size": 64, "num_position_embeddings": 256, "patch_size": 4},
        **{"deepstack_visual_indexes": [1]},
    }
    fields = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    config = ModelConfig.from_hf_dict({**fields, "image_token_id": IMAGE})
    model = SeeingTransformer(config)  # type: ignore[arg-type]
    model.init_weights(0)
    options = EngineConfig(
        activation_checkpointing=True, vision_train=train, micro_batch_tokens=1 << 16
    )
    engine = Engine(model, options)
    model.sight = Sight(model, Noise(config.vision.patch_width))  # type: ignore[attr-defined]
    return engine


def samples(count: int) -> list[Sample]:
    """A picture of 32 x 32 patches each, and four tokens of text."""
    found = []
    for i in range(count):
        length = SIDE * SIDE // 4
        span = ImageSpan(start=1, length=length, key=str(i), grid=(1, SIDE, SIDE), sha256="")
        tokens, mask = [1, *[IMAGE] * length, 2, 3, 4], [0] * (length + 2) + [1, 1]
        found.append(Sample(tokens=tokens, loss_mask=mask, images=(span,)))
    return found


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def loss(logp_T: Any, _: Any, micro: Any) -> Any:
    return -(logp_T * micro.loss_mask_T).sum(), {}


def main(train: Any, width: int = 192, num_pictures: int = 20) -> None:
    engine_of(train, 16).train_step(samples(1), loss)  # threads, kernels, arenas
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    engine = engine_of(train, width)
    batch = samples(num_pictures)
    for _ in range(2):
        engine.train_step(batch, loss)
    plan = Plan(dtype="fp32", checkpointing=True, on_cpu=True, vision_train=train)
    num_tokens = sum(len(one.tokens) - 1 for one in batch)
    pictures = sum(one.images[0].length for one in batch)
    estimate = rank_memory(engine.model.config, plan, 0, num_tokens, 1, pictures)
    found = {"peak": memory("VmHWM") - before, "estimate": estimate.total, **vars(estimate)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
