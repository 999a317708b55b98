"""Qwen2.5-VL: windows of attention by hand and as transformers cuts them, the axes of its rope, and
the folders that there are of it: flat and nested, of two spellings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from seen_families import CASES, draw_window_fields
from torch import Tensor
from vision_cases import draw_pixels, repack

from nanoengine.formats.hf import SINGLE_FILE, hf_views, load_model
from nanoengine.model.config import ModelConfig
from nanoengine.vision.seeing_transformer import rope_axes
from nanoengine.vision.tower import Tower, window_order
from nanoengine.vision.towers import read_vision_config, write_vision_config


def test_windows_of_a_ragged_picture_by_hand() -> None:
    """3 x 5 tokens in windows of 2 x 2: three in the first rows, and what is left below."""
    order, sizes = window_order((1, 6, 10), 2, 2)
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert sizes == [4, 4, 2, 2, 2, 1]


def test_windows_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.vision_utils")
    rng = random.Random(0)
    for _ in range(100):
        merge, window, patch = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 4)
        grid = (1, merge * rng.randint(1, 9), merge * rng.randint(1, 9))
        wanted, bounds = utils.get_vision_window_index(
            torch.tensor([grid]), merge, window * merge * patch, patch
        )
        order, sizes = window_order(grid, merge, window)
        assert torch.equal(order, wanted)
        assert [size * merge**2 for size in sizes] == bounds.diff().tolist()


def test_a_window_sees_nothing_outside_and_a_full_block_all() -> None:
    """Of 4 x 4 tokens in windows of 2 x 2 another patch in the last window changes that one alone,
    unless one block has no windows."""
    fields = draw_window_fields(0) | {"depth": 2, "spatial_merge_size": 2, "patch_size": 2}
    fields |= {"window_size": 8}
    grid = (1, 8, 8)
    for full, changed in (([], [10, 11, 14, 15]), ([1], list(range(16)))):
        config = read_vision_config("qwen2_5_vl", fields | {"fullatt_block_indexes": full})
        tower = Tower(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for one in tower.parameters():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.3)
            repack(tower)
            pixels = draw_pixels(config, [grid])
            before = tower(pixels, [grid]).features_TE
            pixels[-1] += 1.0
            after = tower(pixels, [grid]).features_TE
        assert (before != after).any(1).nonzero().flatten().tolist() == changed


def test_axes_of_the_rope_lie_in_sections() -> None:
    assert rope_axes((1, 2, 3), "sections").tolist() == [0, 1, 1, 2, 2, 2]
    assert rope_axes((16, 24, 24), "sections").bincount().tolist() == [16, 24, 24]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CASES["qwen2_5_vl"].model(0).save_pretrained(tmp_path)
    return tmp_path


def test_tensors_are_read_in_either_spelling(folder: Path) -> None:
    wanted = {name: view.clone() for name, view in hf_views(load_model(folder)).items()}
    tensors = load_file(folder / SINGLE_FILE)
    assert {name.split(".")[0] for name in tensors} == {"model", "visual", "lm_head"}

    def nested(name: str) -> str:
        if name.startswith("visual."):
            return f"model.{name}"
        return name.replace("model.", "model.language_model.", 1)

    renamed: dict[str, Tensor] = {nested(name): x for name, x in tensors.items()}
    save_file(renamed, folder / SINGLE_FILE, metadata={"format": "pt"})
    for name, view in hf_views(load_model(folder)).items():
        assert torch.equal(view, wanted[name])


FLAT: dict[str, Any] = {  # published for 3B, what does not matter here left out
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def test_a_flat_config_is_read_and_written_nested() -> None:
    config = ModelConfig.from_hf_dict(FLAT)
    assert (config.hidden_size, config.num_layers, config.window_layers) == (2048, 36, ())
    assert (config.mrope_section, config.rope_scaling) == ((16, 24, 24), None)
    assert config.tie_word_embeddings and config.attention_bias
    assert (config.vision.window_tokens, config.vision.tokens_per_second) == (4, 2)
    written = config.to_hf_dict()
    assert written["text_config"]["model_type"] == "qwen2_5_vl_text"
    assert ModelConfig.from_hf_dict(written) == config
    theirs = pytest.importorskip("transformers").Qwen2_5_VLConfig(**FLAT)
    again = type(theirs)(**written)
    for name in ("hidden_size", "num_hidden_layers", "layer_types"):
        assert getattr(again.text_config, name) == getattr(theirs.text_config, name), name
    assert again.tie_word_embeddings and theirs.tie_word_embeddings
    ropes = [one.text_config.rope_parameters for one in (again, theirs)]
    assert ropes[0] == {name: value for name, value in ropes[1].items() if name != "type"}


@pytest.mark.parametrize("where", ["inner", "outer", "neither"])
def test_the_head_is_tied_if_either_field_says_so(folder: Path, where: str) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields["tie_word_embeddings"] = where == "outer"
    fields["text_config"]["tie_word_embeddings"] = where == "inner"
    assert ModelConfig.from_hf_dict(fields).tie_word_embeddings == (where != "neither")


def test_a_vision_config_is_read_back_as_it_was_written() -> None:
    for seed in range(50):
        config = read_vision_config("qwen2_5_vl", draw_window_fields(seed))
        assert read_vision_config("qwen2_5_vl", write_vision_config(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_size": 1}, "window_size=1: must be an integer of at least"),
        ({"fullatt_block_indexes": [99]}, "fullatt_block_indexes=.*indices of the"),
        ({"num_position_embeddings": 9}, "num_position_embeddings: not known here"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': not supported"),
    ],
)
def test_a_vision_config_that_says_something_else_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_vision_config("qwen2_5_vl", draw_window_fields(0) | change)
