"""The folder of the tiny model that sees, from nothing but a seed: nothing has to be downloaded.

The decoder is that of the tiny model, the tower has 0.3 million parameters: two blocks of 64 over
patches of 8 x 8 pixels, of which 2 x 2 are a token, and one DeepStack merger. The folder is that of
a Qwen3-VL under Hugging Face's names, so that any reader of such folders loads it. A picture of
48 x 48 pixels is nine tokens.

The tokenizer is the tiny one's, with the three marks of pictures more.
Left out: training it, as in tiny_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from tokenizers import AddedToken

from nanoengine.formats.hf import save_model
from nanoengine.model.config import ModelConfig
from nanoengine.vision.seeing_config import SeeingConfig
from nanoengine.vision.seeing_transformer import SeeingTransformer
from nanorl.envs.tasks.tiny_model import (
    VOCAB_SIZE,
    corpus,
    tiny_config,
    tokenizer_config,
    train_tokenizer,
    write_json,
)

PICTURE_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
FIRST_MARK = VOCAB_SIZE
SIDE = 48
"""Pixels of the pictures that it was made for; smaller and larger ones are resized."""
PATCH, MERGE = 8, 2
CHAT_TEMPLATE = (
    "{% macro said(content) %}"
    "{% if content is string %}{{ content }}"
    "{% else %}{% for part in content %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endmacro %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<bot>{{ said(m['content']) }}<eos>"
    "{% elif m['role'] == 'tool' %}<out>{{ said(m['content']) }}"
    "{% else %}<usr>{{ said(m['content']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def build_tiny_vision_model(folder: Path | str, seed: int = 0) -> Path:
    """Write the folder; the seed sets the weights, the tokenizer is the same for all seeds."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in PICTURE_MARKS])
    config = ModelConfig.from_hf_dict(tiny_vision_config())
    model = SeeingTransformer(cast(SeeingConfig, config))
    model.init_weights(seed)
    _widen(model)
    save_model(model, folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json", {**tokenizer_config(), "chat_template": CHAT_TEMPLATE}
    )
    write_json(folder / "generation_config.json", {"eos_token_id": 5, "pad_token_id": 0})
    write_json(folder / "preprocessor_config.json", processor_config())
    return folder


@torch.no_grad()
def _widen(model: SeeingTransformer) -> None:
    """Larger weights than a large model begins with: where a red square is, is learned in half as
    many steps, for places are as loud as colours from the beginning."""
    assert model.visual.positions is not None, "its family has a table of places"
    model.visual.positions.weight.mul_(40)  # to 0.8, of patches that are about 1
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and name not in ("visual.positions.weight", "embedding"):
            weight.mul_(2.5)


def tiny_vision_config() -> dict[str, object]:
    """The content of its config.json."""
    text = tiny_config()
    text["vocab_size"] = FIRST_MARK + len(PICTURE_MARKS)
    text["model_type"] = "qwen3_vl_text"
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": (SIDE // PATCH) ** 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        },
        **{name: FIRST_MARK + place for place, name in enumerate(names)},
        "tie_word_embeddings": True,
    }


def processor_config() -> dict[str, object]:
    """The content of its preprocessor_config.json: every picture becomes 48 x 48 pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
