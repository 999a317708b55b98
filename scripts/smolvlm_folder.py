"""A model folder in the shape of SmolVLM-256M, with random weights, and the pictures to show it.

    folder = build_folder(Path("model"), text="SmolLM2-135M-Instruct")

The decoder is SmolLM2-135M's with 128 tokens more and a head of its own; the tower has 12 blocks of
768 over patches of 16 x 16 pixels, of which 4 x 4 are a token: a picture of 512 x 512 is 1,024
patches and 64 tokens. Together 256 million parameters. The processor shows a picture as one whole
tile. Its model_type is idefics3, as the published one's. With no `text` folder all is tiny, to try
the benchmark out.

Left out: the weights, which cannot be had here. Whoever looks sees noise, in the same time.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer
from vision_workload import Workload

from nanoengine.formats.hf import save_model
from nanoengine.model.config import ModelConfig
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_config import SeeingConfig
from nanoengine.vision.seeing_transformer import SeeingTransformer
from nanorl.envs.tasks.tiny_model import build_tiny_model

MARKS = ("<fake_token_around_image>", "<image>", "<global-img>")
ADDED = 128
"""Tokens that the model has more than the text model."""
TOWER = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072}
TINY_TOWER = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_folder(folder: Path, text: str | None, *, num_layers: int | None = None) -> Path:
    """Write the folder, weights in bf16; `text` is that of SmolLM2-135M. With `num_layers` decoder
    and tower have so many."""
    folder.mkdir(parents=True, exist_ok=True)
    base = Path(text) if text else build_tiny_model(folder / "text")
    shutil.copyfile(base / "generation_config.json", folder / "generation_config.json")
    named = json.loads((base / "tokenizer_config.json").read_text())
    named.pop("chat_template")  # of texts alone
    _write(folder / "tokenizer_config.json", named)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    num_texts = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = dict(
        zip(
            ("around_id", "placeholder_id", "whole_id"),
            range(num_texts, num_texts + 3),
            strict=True,
        )
    )
    workload = _workload(num_texts, ids, is_tiny=text is None)
    config = _config(base, workload, TOWER if text else TINY_TOWER)
    if num_layers is not None:
        config["text_config"]["num_hidden_layers"] = num_layers
        config["vision_config"]["num_hidden_layers"] = num_layers
    _write(folder / "workload.json", asdict(workload))
    _write(folder / "preprocessor_config.json", _processor(workload.side))
    _write(folder / "processor_config.json", _around(workload))
    template = TEMPLATE.replace("<|im_end|>", named["eos_token"])
    (folder / "chat_template.jinja").write_text(template)
    model = SeeingTransformer(cast(SeeingConfig, ModelConfig.from_hf_dict(config)))
    model.init_weights(0)
    save_model(model, folder, dtype=torch.bfloat16)
    (folder / "pictures").mkdir(exist_ok=True)
    for number in range(workload.num_pictures):
        workload.file(folder, number).write_bytes(write_png(workload.picture(number)))
    return folder


def _workload(num_texts: int, ids: dict[str, int], *, is_tiny: bool) -> Workload:
    if not is_tiny:
        return Workload(side=512, picture_tokens=64, num_texts=num_texts, **ids)
    sizes = {"rollouts": 2, "turns": 2, "turn": 4, "text": 8, "completion": 4, "members": 2}
    return Workload(side=64, picture_tokens=1, num_texts=num_texts, seen=2, **sizes, **ids)


def _config(base: Path, workload: Workload, tower: dict[str, int]) -> dict[str, Any]:
    """The content of its config.json."""
    text = json.loads((base / "config.json").read_text())
    theta = text.get("rope_theta", 10000.0)
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared = {name: text[name] for name in (*kept, "num_key_value_heads", "head_dim")}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": {
            "model_type": "llama",
            **shared,
            "vocab_size": workload.num_texts + ADDED,
            "max_position_embeddings": 8192,
            "rms_norm_eps": text["rms_norm_eps"],
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            **tower,
            "num_attention_heads": tower["hidden_size"] // 64 or 2,
            "image_size": workload.side,
            "patch_size": 16,
            "num_channels": 3,
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh",
        },
        "scale_factor": 4,
        "image_token_id": workload.placeholder_id,
        "tie_word_embeddings": False,
    }


def _processor(side: int) -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": side},
        "max_image_size": {"longest_edge": side},
        "do_image_splitting": False,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _around(workload: Workload) -> dict[str, Any]:
    return {"processor_class": "Idefics3Processor", "image_seq_len": workload.picture_tokens}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
