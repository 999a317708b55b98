"""Random vision towers and models that see, made by transformers, and pictures for them."""

import random

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from nanoengine.model.linear import Packed
from nanoengine.vision.tower import Grid, Tower
from nanoengine.vision.tower_names import tower_views
from nanoengine.vision.towers import VisionConfig, read_vision_config

SEEDS = range(6)
TEXT = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]},
}
IDS = {
    "image_token_id": 200,
    "video_token_id": 201,
    "vision_start_token_id": 202,
    "vision_end_token_id": 203,
}


def draw_vision_fields(seed: int, out_hidden_size: int = 48) -> dict:
    """The `vision_config` of a small tower, of many shapes."""
    rng = random.Random(seed)
    depth, num_heads = rng.randint(1, 4), rng.choice([1, 2, 3])
    num_deep = rng.randint(0, min(3, depth))
    return {
        "depth": depth,
        "num_heads": num_heads,
        "hidden_size": num_heads * rng.choice([8, 12, 16, 20]),
        "intermediate_size": rng.choice([24, 40, 70]),
        "patch_size": rng.choice([2, 3, 4]),
        "spatial_merge_size": rng.choice([1, 2, 2, 3]),
        "temporal_patch_size": rng.choice([1, 2]),
        "in_channels": 3,
        "out_hidden_size": out_hidden_size,
        "num_position_embeddings": rng.choice([2, 3, 5, 8]) ** 2,
        "deepstack_visual_indexes": sorted(rng.sample(range(depth), num_deep)),
    }


def draw_grids(seed: int, merge: int) -> list[Grid]:
    """One to three pictures of different sizes."""
    rng = random.Random(seed)
    return [
        (1, merge * rng.randint(1, 5), merge * rng.randint(1, 5)) for _ in range(rng.randint(1, 3))
    ]


def draw_pixels(config: VisionConfig, grids: list[Grid], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_patches = sum(rows * columns for _, rows, columns in grids)
    return torch.randn(num_patches, config.patch_width, generator=generator)


def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Other numbers everywhere: fresh norms and biases would hide what is not read."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            fresh = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(fresh + (1.0 if parameter.dim() == 1 else 0.0) * 0.5)


def their_tower(fields: dict, attention: str = "eager", seed: int = 0) -> Qwen3VLVisionModel:
    config = Qwen3VLVisionConfig(**fields)
    tower = Qwen3VLVisionModel._from_config(config, attn_implementation=attention)
    redraw(tower, seed)
    return tower.eval()


def our_tower(theirs: Qwen3VLVisionModel, fields: dict, dtype: torch.dtype) -> Tower:
    """The same tower, by the names of its tensors."""
    tower = Tower(read_vision_config("qwen3_vl", fields), dtype)
    views, state = tower_views(tower), theirs.state_dict()
    assert views.keys() == {f"model.visual.{name}" for name in state}
    for name, tensor in state.items():
        views[f"model.visual.{name}"].copy_(tensor)
    repack(tower)
    return tower


def repack(tower: Tower) -> None:
    for module in tower.modules():
        if isinstance(module, Packed):
            module.repack()


def run_theirs(theirs: Qwen3VLVisionModel, pixels: Tensor, grids: list[Grid]) -> list[Tensor]:
    """Features, then those of DeepStack."""
    out = theirs(pixels, grid_thw=torch.tensor(grids))
    return [out.pooler_output, *out.deepstack_features]


def run_ours(tower: Tower, pixels: Tensor, grids: list[Grid]) -> list[Tensor]:
    out = tower(pixels, grids)
    return [out.features_TE, *out.deep]


def their_model(
    seed: int = 0, *, tie: bool = False, text: dict | None = None, **vision: object
) -> Qwen3VLForConditionalGeneration:
    """A whole model; `vision` and `text` replace fields."""
    fields = draw_vision_fields(seed, TEXT["hidden_size"]) | vision
    config = Qwen3VLConfig(
        text_config={**TEXT, **(text or {}), "tie_word_embeddings": not tie},  # must not count
        vision_config=fields,
        tie_word_embeddings=tie,
        **IDS,
    )
    config._attn_implementation = "eager"
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    redraw(model, seed)
    if tie:
        model.tie_weights()
    return model.eval()
