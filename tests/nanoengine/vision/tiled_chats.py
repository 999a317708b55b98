"""A tokenizer of pictures in tiles, small enough to count by hand, and chats that show some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer

_PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": 32},
    "size": {"longest_edge": 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def tiling_tokenizer(folder: Path) -> SeeingTokenizer:
    """Tiles of 32 pixels, 4 x 4 patches, four tokens; two newlines are one token."""
    letters = ["\n", *"abcdefghijklmnopqrstuvwxyz<>_|-0123456789"]
    vocab = {piece: index for index, piece in enumerate([*letters, "\n\n"])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[("\n", "\n")]))
    plain.pre_tokenizer = pre_tokenizers.Split("x", "isolated")
    marks = ["<image>", "<fake_token_around_image>", "<global-img>"]
    marks += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    plain.add_tokens([AddedToken(one, special=True, normalized=False) for one in marks])
    (folder / "tokenizer.json").write_text(plain.to_str())
    for name, fields in {
        "preprocessor_config": _PROCESSOR,
        "processor_config": {"image_seq_len": 4},
        "config": {"scale_factor": 2, "vision_config": {"patch_size": 8}},
        "tokenizer_config": {"chat_template": _TEMPLATE},
        "generation_config": {"eos_token_id": 0},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return seeing_tokenizer(folder, folder / "pictures")


def chat_of(tokenizer: SeeingTokenizer, *shapes: tuple[int, int]) -> list[dict[str, Any]]:
    """A message: a picture of each shape, "ab" between."""
    rng = np.random.default_rng(0)
    parts: list[dict[str, str]] = []
    for shape in shapes:
        data = write_png(rng.integers(0, 256, (*shape, 3), dtype=np.uint8))
        parts += [{"type": "image", "sha256": tokenizer.store.add(data)}]
        parts += [{"type": "text", "text": "ab"}]
    return [{"role": "user", "content": parts}]
