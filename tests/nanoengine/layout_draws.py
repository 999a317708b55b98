"""Draws a layout and a model at random; every draw is one that the engine promises to train.

Numbers of heads, widths and layers follow from the layout, and are otherwise as odd as can be. The
families come in turn, so that any 13 seeds in a row have them all.
"""

from __future__ import annotations

import random
from typing import Any

from parallel_cases import Case
from pipeline_engine_cases import Run

from nanoengine.architectures.rope import LinearRope, YarnRope
from nanoengine.formats.families import FAMILIES
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.schedules import SCHEDULES

IN_TURN = tuple(name for name, family in FAMILIES.items() if family.vision is None)
VOCABULARIES = (53, 97, 128, 211)
SCALINGS = (
    *(None, None, LinearRope(factor=3.0, max_position_embeddings=32)),
    YarnRope(factor=4.0, original_max_position_embeddings=32, beta_fast=8.0),
)


def draw_run(seed: int) -> Run:
    """The same seed gives the same run: two steps, the second on the weights of the first."""
    dice = random.Random(seed)
    family = IN_TURN[seed % len(IN_TURN)]
    axes = draw_axes(dice, family)
    schedule = dice.choice(list(SCHEDULES))
    chunks = dice.choice((1, 2)) if schedule == "interleaved" and axes.get("pp", 1) > 1 else 1
    lengths = (dice.randint(20, 60), *(dice.randint(2, 60) for _ in range(dice.randint(3, 9))))
    case = Case(
        layout=Layout(**axes),
        zero=dice.choice((0, 1, 2) if "pp" in axes else (0, 1, 2, 3)),
        sequence_parallel=dice.random() < 0.5,
        family=family,
        tied=dice.random() < 0.5,
        dtype=dice.choice(("fp64", "fp32")),
        budget=dice.choice((20, 60, 100, 1000)),
        deal=dice.choice(("round", "masked", "empty")),
        steps=2,
        max_grad_norm=dice.choice((0.0, 0.5)),
        bucket_bytes=dice.choice((1, 20_000, 1_000_000)),
        activation_checkpointing=dice.random() < 0.3,
        shape=tuple(draw_shape(dice, family, axes, chunks).items()),
        lengths=lengths,
    )
    return Run(case=case, schedule=schedule, chunks=chunks)


def draw_axes(dice: random.Random, family: str) -> dict[str, int]:
    """Two to four ranks, on one axis or on two."""
    if FAMILIES[family].experts and dice.random() < 0.7:
        return {"ep": 2, dice.choice(("pp", "dp", "cp")): 2}
    fourth = dice.choice(("tp", "ep")) if FAMILIES[family].experts else "tp"
    if dice.random() < 0.3:
        return {dice.choice(("pp", "dp", "cp", fourth)): dice.choice((2, 3, 4))}
    return dict.fromkeys(dice.sample(["pp", "dp", "cp", fourth], 2), 2)


def draw_shape(
    dice: random.Random, family: str, axes: dict[str, int], chunks: int
) -> dict[str, Any]:
    tp, ep = axes.get("tp", 1), axes.get("ep", 1)
    num_layers = max(2, axes.get("pp", 1) * chunks) + dice.randint(0, 2)
    kv_heads = tp * dice.randint(1, 2)
    shape: dict[str, Any] = {
        "vocab_size": dice.choice(VOCABULARIES),
        "hidden_size": dice.choice((20, 27, 48)),
        "intermediate_size": tp * dice.choice((7, 16, 33)),
        "num_layers": num_layers,
        "num_heads": kv_heads * dice.randint(1, 3),
        "num_kv_heads": kv_heads,
        "head_dim": dice.choice((4, 6, 8)),  # a norm of two numbers magnifies fp32's rounding
    }
    if FAMILIES[family].partial_rope:
        shape |= {"partial_rotary_factor": 0.5, "head_dim": dice.choice((4, 8))}
    shape["rope_scaling"] = dice.choice(SCALINGS)
    shape |= draw_windows(dice, family, num_layers)
    return shape | draw_experts(dice, family, num_layers, tp, ep)


def draw_windows(dice: random.Random, family: str, num_layers: int) -> dict[str, Any]:
    """Layers with a window, and layers without a rope, wherever the family may have some."""
    rule, size = FAMILIES[family].windows, dice.randint(1, 25)
    chosen = [tuple(layer for layer in range(num_layers) if dice.random() < 0.5) for _ in range(2)]
    if rule == "none":
        return {}
    if rule == "all" and chosen[0]:
        chosen[0] = tuple(range(num_layers))
    found: dict[str, Any] = {"sliding_window": size, "window_layers": chosen[0]}
    return found | ({"unroped_layers": chosen[1]} if rule == "no_rope" else {})


def draw_experts(
    dice: random.Random, family: str, num_layers: int, tp: int, ep: int
) -> dict[str, Any]:
    kind = FAMILIES[family].experts
    if kind is None:
        return {}
    width = tp * dice.choice((5, 16))
    found: dict[str, Any] = {
        "num_experts": ep * dice.randint(2, 4),
        "num_experts_per_token": dice.randint(1, 2 * ep),
        "moe_intermediate_size": width,
    }
    if kind == "stacked":  # its only MLPs
        return found | {"intermediate_size": width, "norm_topk_prob": True, "dense_layers": ()}
    num_dense = dice.randint(0, num_layers - 1)
    dense = tuple(sorted(dice.sample(range(num_layers), num_dense)))
    return found | {"norm_topk_prob": dice.random() < 0.5, "dense_layers": dense}
