"""The update of a tree against that of separate rows, in fp64, on random trees of any shape."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from random_trees import make_model, random_tree

from nanoengine.config import EngineConfig
from nanoengine.packing import MicroBatch, Sample, make_micro_batches
from nanoengine.state.whole_engine import Engine

NUM_STEPS, TREES_A_STEP = 10, 20
BUDGETS = (10_000, 160, 40)  # whole trees, some cut, nearly all cut


def loss_of_tokens(
    logp_T: torch.Tensor, entropy_T: torch.Tensor | None, micro: MicroBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Not linear in a log-prob, so each copy of a shared one has a slope of its own."""
    assert entropy_T is not None
    advantage_T = micro.fields_T["advantage"]
    token_T = -advantage_T * (logp_T + 1).exp() - 0.05 * advantage_T.square() * entropy_T
    return (token_T * micro.loss_mask_T).sum(), {}


def gradients(
    samples: list[Sample], switches: Mapping[str, Any] | None = None, **options: object
) -> dict[str, torch.Tensor]:
    model = make_model(**(switches or {}))
    engine = Engine(model, EngineConfig(dtype="fp64", max_grad_norm=0.0, **options))  # type: ignore[arg-type]
    engine.train_step(samples, loss_of_tokens, temperature=0.8, entropy=True)
    return {name: p.main_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("step", range(NUM_STEPS))
def test_the_gradient_of_a_tree_is_that_of_separate_rows(step: int) -> None:
    chance = random.Random(step)
    trees = [random_tree(chance, f"{step}-{tree}") for tree in range(TREES_A_STEP)]
    samples = [sample for tree in trees for sample in tree]
    expected = gradients(samples, micro_batch_tokens=10_000)
    found = gradients(samples, share_prefix=True, micro_batch_tokens=BUDGETS[step % len(BUDGETS)])
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error < 1e-10, (name, error)


_WINDOWS = {"sliding_window": 4, "window_layers": (0,)}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5, "window_layers": (0, 1)},
    "smollm3": {**_WINDOWS, "unroped_layers": (0,)},
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 1.5},
    "olmo3": {**_WINDOWS, "qk_norm": True, "local_rope_theta": 100.0},
    "gemma3_text": {**_WINDOWS, "qk_norm": True, "local_rope_theta": 100.0},
    "glm4": {"partial_rotary_factor": 0.34},
    "gpt_oss": {
        **_WINDOWS,
        "attention_bias": True,
        "attention_output_bias": True,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_a_tree_is_that_of_separate_rows_in_every_family(family: str) -> None:
    chance = random.Random(0)
    samples = [sample for tree in range(6) for sample in random_tree(chance, str(tree))]
    switches = {"family": family, **FAMILIES[family]}
    expected = gradients(samples, switches, micro_batch_tokens=10_000)
    found = gradients(samples, switches, share_prefix=True, micro_batch_tokens=160)
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert error < 1e-10, (name, error)


def test_the_random_trees_have_every_shape() -> None:
    chance = random.Random(0)
    shapes = set()
    for _ in range(TREES_A_STEP):
        samples = random_tree(chance, "g")
        (micro,) = make_micro_batches(samples, 10_000, share_prefix=True)
        depth = []
        for parent in micro.prefix_of_S or [-1] * (len(micro.bounds) - 1):
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
        shapes.add(f"depth {min(max(depth), 3)}")
        shapes |= {"forest"} if depth.count(0) > 1 else set()
        for a in samples:
            for b in samples:
                is_before = a is not b and b.tokens[: len(a.tokens)] == a.tokens
                if is_before:
                    shapes.add("equal" if len(a.tokens) == len(b.tokens) else "chain")
                    shapes |= (
                        {"other mask"} if a.loss_mask != b.loss_mask[: len(a.tokens)] else set()
                    )
    assert shapes >= {"depth 0", "depth 1", "depth 2", "depth 3", "equal", "chain", "forest"}
    assert "other mask" in shapes
