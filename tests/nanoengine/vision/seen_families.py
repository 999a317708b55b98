"""Every family that sees, as transformers makes small models of it, and text among pictures."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from vision_cases import IDS, TEXT, draw_vision_fields, redraw

from nanoengine.spans import ImageSpan
from nanoengine.vision.tower import Grid

IMAGE = IDS["image_token_id"]


@dataclass(frozen=True)
class Case:
    """A family, and how transformers is asked about it."""

    kind: type[PreTrainedModel]
    config: Callable[[int], Any]
    """Of a seed."""
    inputs: Callable[[Any, Tensor, list[Grid], Tensor], dict[str, Any]]
    """What its model takes for ids, and the grids and patches of their pictures."""
    features: Callable[[Any, dict[str, Any]], list[Tensor]]
    """The rows of such inputs, and with DeepStack further ones."""
    positions: Callable[[Any, dict[str, Any]], Tensor]
    """By which the rope turns."""
    grids: Callable[[Any, int], list[Grid]]
    """Of one to three pictures of different sizes, for a `VisionConfig` and a seed."""

    def model(self, seed: int, *, tie: bool = False) -> Any:
        """Small, with other numbers than it begins with everywhere."""
        config = self.config(seed)
        config.tie_word_embeddings = tie
        config._experts_implementation = "eager"
        model = self.kind._from_config(config, attn_implementation="eager")
        redraw(model, seed)
        model.tie_weights()
        return model.eval()


def _text(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    drawn = {"num_hidden_layers": rng.randint(3, 4), "num_key_value_heads": rng.choice([1, 2, 4])}
    return {**TEXT, **drawn}


def _qwen3_vl(seed: int) -> Qwen3VLConfig:
    vision = draw_vision_fields(seed, TEXT["hidden_size"])
    return Qwen3VLConfig(text_config=_text(seed), vision_config=vision, **IDS)


def _qwen3_vl_moe(seed: int) -> Qwen3VLMoeConfig:
    rng = random.Random(seed)
    experts = {
        "num_experts": rng.choice([3, 5, 8]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "moe_intermediate_size": rng.choice([16, 20, 40]),
        "mlp_only_layers": rng.choice([[], [1]]),
    }
    vision = draw_vision_fields(seed, TEXT["hidden_size"])
    text = {**_text(seed), **experts}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **IDS)


def draw_window_fields(seed: int, out_hidden_size: int = 48) -> dict[str, Any]:
    """The `vision_config` of a small tower with windows."""
    rng = random.Random(seed)
    depth, num_heads = rng.randint(2, 4), rng.choice([1, 2, 3])
    patch, merge = rng.choice([2, 3, 4]), rng.choice([1, 2, 2])
    return {
        "depth": depth,
        "num_heads": num_heads,
        "hidden_size": num_heads * rng.choice([8, 12, 16]),
        "intermediate_size": rng.choice([24, 40, 70]),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": rng.choice([1, 2]),
        "window_size": patch * merge * rng.choice([1, 2, 3]) + rng.randrange(patch),
        "fullatt_block_indexes": sorted(rng.sample(range(depth), rng.randint(0, depth - 1))),
        "out_hidden_size": out_hidden_size,
        "tokens_per_second": 2,
    }


def _qwen2_5_vl(seed: int) -> Qwen2_5_VLConfig:
    rng = random.Random(seed)
    windows = {
        "use_sliding_window": rng.choice([False, True]),
        "sliding_window": 5,
        "max_window_layers": 1,
    }
    rope = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [1, 2, 3]}
    text = {**_text(seed), **windows, "rope_parameters": rope}
    del text["head_dim"]  # it is the hidden size's share, 12
    vision = draw_window_fields(seed)
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **IDS)


def _qwen_inputs(model: Any, ids: Tensor, grids: list[Grid], rows: Tensor) -> dict[str, Any]:
    return {
        "input_ids": ids[None],
        "mm_token_type_ids": (ids == IMAGE).int()[None],
        "image_grid_thw": torch.tensor(grids),
        "pixel_values": rows,
    }


def _qwen_features(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    out = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    return [out.pooler_output, *getattr(out, "deepstack_features", ())]


def _qwen_positions(model: Any, inputs: dict[str, Any]) -> Tensor:
    asked = {name: x for name, x in inputs.items() if name != "pixel_values"}
    found: Tensor = model.model.get_rope_index(**asked)[0][:, 0].T
    return found


def _qwen_grids(config: Any, seed: int) -> list[Grid]:
    rng, merge = random.Random(seed), config.spatial_merge_size
    return [
        (1, merge * rng.randint(1, 4), merge * rng.randint(1, 4)) for _ in range(rng.randint(1, 3))
    ]


def draw_tile_fields(seed: int) -> dict[str, Any]:
    """The `vision_config` of a small tower of tiles."""
    rng = random.Random(seed)
    num_heads, patch = rng.choice([1, 2, 3]), rng.choice([2, 3, 4])
    return {
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": num_heads,
        "hidden_size": num_heads * rng.choice([6, 8, 12, 20]),
        "intermediate_size": rng.choice([24, 40, 70]),
        "patch_size": patch,
        "image_size": patch * rng.choice([3, 4, 6, 7]) + rng.randrange(patch),
        "layer_norm_eps": rng.choice([1e-6, 1e-5]),
    }


def _tiled(kind: type[Any]) -> Callable[[int], Any]:
    def config(seed: int) -> Any:
        plain = {"rope_type": "default", "rope_theta": 5e4}
        text = {**_text(seed), "model_type": "llama", "rope_parameters": plain}
        scale = random.Random(seed).choice([1, 2, 2, 3])
        vision = draw_tile_fields(seed)
        return kind(
            text_config=text, vision_config=vision, scale_factor=scale, image_token_id=IMAGE
        )

    return config


def _tile_grids(config: Any, seed: int) -> list[Grid]:
    """Tiles of one size, some for each picture; rarely the one that the table was made for."""
    rng = random.Random(seed)
    side = config.spatial_merge_size * rng.randint(1, 3)
    return [(1, side, side)] * sum(rng.choice([1, 3, 5]) for _ in range(rng.randint(1, 3)))


def planes(model: Any, rows: Tensor, side: int) -> Tensor:
    """The pixels [tiles, 3, H, W] of tiles of `side` patches a side, from the patches in the order
    in which they are merged."""
    merge, patch = model.config.scale_factor, model.config.vision_config.patch_size
    squares = side // merge
    cut = rows.view(-1, squares, squares, merge, merge, 3, patch, patch)
    return cut.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, side * patch, side * patch)


def _tile_inputs(model: Any, ids: Tensor, grids: list[Grid], rows: Tensor) -> dict[str, Any]:
    return {"input_ids": ids[None], "pixel_values": planes(model, rows, grids[0][1])[None]}


def _tile_features(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    return [torch.cat(model.model.get_image_features(inputs["pixel_values"]).pooler_output)]


def _tile_positions(model: Any, inputs: dict[str, Any]) -> Tensor:
    return torch.arange(inputs["input_ids"].shape[1])


_QWEN: dict[str, Any] = {
    "inputs": _qwen_inputs,
    "features": _qwen_features,
    "positions": _qwen_positions,
    "grids": _qwen_grids,
}
_TILES: dict[str, Any] = {
    "inputs": _tile_inputs,
    "features": _tile_features,
    "positions": _tile_positions,
    "grids": _tile_grids,
}
CASES = {
    "qwen3_vl": Case(Qwen3VLForConditionalGeneration, _qwen3_vl, **_QWEN),
    "qwen3_vl_moe": Case(Qwen3VLMoeForConditionalGeneration, _qwen3_vl_moe, **_QWEN),
    "qwen2_5_vl": Case(Qwen2_5_VLForConditionalGeneration, _qwen2_5_vl, **_QWEN),
    "smolvlm": Case(SmolVLMForConditionalGeneration, _tiled(SmolVLMConfig), **_TILES),
    "idefics3": Case(Idefics3ForConditionalGeneration, _tiled(Idefics3Config), **_TILES),
}


def draw_text(
    grids: Sequence[Grid], merge: int, seed: int = 0
) -> tuple[Tensor, tuple[ImageSpan, ...]]:
    """Ids with a picture for each grid among them, between marks, and the spans."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(0, 190, rng.integers(1, 5)).tolist()
    spans = []
    for place, grid in enumerate(grids):
        ids.append(IDS["vision_start_token_id"])
        length = grid[1] * grid[2] // merge**2
        spans.append(
            ImageSpan(start=len(ids), length=length, key=f"k{place}", grid=grid, sha256="s")
        )
        ids += [*[IMAGE] * length, IDS["vision_end_token_id"]]
        ids += rng.integers(0, 190, rng.integers(1, 4)).tolist()
    return torch.tensor(ids), tuple(spans)


class Wide(TorchFunctionMode):
    """Keeps fp64 where transformers goes to fp32, in norms, softmaxes and ropes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.to and torch.float32 in args):
                return args[0]
            if func is torch.nn.functional.softmax:  # frequencies of ropes stay in fp32
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
