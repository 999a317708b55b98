"""Draws a layout and a model at random; every draw is one that the engine promises to train.

Numbers of heads, widths and layers follow from the layout, and are otherwise as odd as can be.
"""

from __future__ import annotations

import random
from typing import Any

from parallel_cases import Case
from pipeline_engine_cases import Run

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.schedules import SCHEDULES

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe", "qwen3_moe")
VOCABULARIES = (53, 97, 128, 211)


def draw_run(seed: int) -> Run:
    """The same seed gives the same run: two steps, the second on the weights of the first."""
    dice = random.Random(seed)
    family = dice.choice(FAMILIES)
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
    fourth = dice.choice(("tp", "ep", "ep")) if family == "qwen3_moe" else "tp"
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
    if family == "qwen3_moe":
        num_dense = dice.randint(0, num_layers - 1)
        shape |= {
            "num_experts": ep * dice.randint(2, 4),
            "num_experts_per_token": dice.randint(1, 2 * ep),
            "moe_intermediate_size": tp * dice.choice((5, 16)),
            "norm_topk_prob": dice.random() < 0.5,
            "dense_layers": tuple(sorted(dice.sample(range(num_layers), num_dense))),
        }
    return shape
