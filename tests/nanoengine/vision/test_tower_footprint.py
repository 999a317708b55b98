"""The estimate of a tower's memory, beside transformers, autograd, an engine and a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peak_program import engine_of
from torch import Tensor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from vision_cases import draw_vision_fields, repack

from nanoengine.config import VisionTrain
from nanoengine.plan.footprint import Plan, num_params, rank_memory, training_bytes, weight_bytes
from nanoengine.vision.tower import Tower
from nanoengine.vision.tower_footprint import (
    block_activation_bytes,
    merger_activation_bytes,
    tower_activation_bytes,
    tower_params,
)
from nanoengine.vision.towers import VisionConfig, read_vision_config

PROGRAM = Path(__file__).parent / "peak_program.py"
TRAINED: tuple[VisionTrain, ...] = ("all", "merger", "none")


@pytest.mark.parametrize("seed", range(3))
def test_parameters_are_those_of_transformers(seed: int) -> None:
    fields = draw_vision_fields(seed)
    with torch.device("meta"):
        theirs = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**fields))
    sizes = {name: one.numel() for name, one in theirs.named_parameters()}
    config = read_vision_config("qwen3_vl", fields)
    mergers = sum(size for name, size in sizes.items() if "merger" in name)
    for train, trained in zip(TRAINED, (sum(sizes.values()), mergers, 0), strict=True):
        assert tower_params(config, train) == (sum(sizes.values()), trained)


def saved_bytes(depth: int, deep: tuple[int, ...], dtype: torch.dtype) -> tuple[VisionConfig, int]:
    """Bytes that autograd keeps for the backward pass, each storage once, weights left out."""
    config = VisionConfig(
        family="qwen3_vl", depth=depth, hidden_size=64, intermediate_size=160, num_heads=4,
        out_hidden_size=48, num_position_embeddings=16, patch_size=4, deepstack_visual_indexes=deep,
        spatial_merge_size=2, temporal_patch_size=2, in_channels=3,
    )  # fmt: skip
    tower = Tower(config, dtype)
    repack(tower)
    known = {one.untyped_storage().data_ptr() for one in tower.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tower(torch.randn(24, config.patch_width), [(1, 4, 6)])
    return config, sum(one.untyped_storage().nbytes() for one in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_bytes_are_those_autograd_keeps(native: None, dtype: torch.dtype) -> None:
    config, one = saved_bytes(1, (), dtype)
    _, two = saved_bytes(2, (), dtype)
    _, deep = saved_bytes(2, (0,), dtype)
    assert two - one == block_activation_bytes(config, dtype, 24, on_cpu=True)
    statistics = 6 * 2 * 4  # of a norm over whole tokens: left out of the estimate
    assert deep - two == merger_activation_bytes(config, dtype, 24) + statistics


@pytest.mark.parametrize("train", TRAINED)
def test_weights_gradients_and_optimizer_are_the_engines_buffers(train: VisionTrain) -> None:
    engine = engine_of(train, 64)
    config, optimizer = engine.model.config, engine.optimizer
    memory = rank_memory(config, Plan(dtype="fp32", on_cpu=True, vision_train=train), 0, 16, 1)
    states = optimizer.exp_avg.nbytes + optimizer.exp_avg_sq.nbytes
    grads = sum(bucket.grad.nbytes for bucket in optimizer.buckets)
    weights = sum(one.numel() for one in engine.model.parameters())
    assert num_params(config) == weights
    assert weight_bytes(config, torch.bfloat16) == 2 * weights
    assert memory.params == 4 * weights
    assert memory.grads == pytest.approx(grads, rel=0.04)  # buffers round each parameter up
    assert memory.optimizer == pytest.approx(states, rel=0.04)
    kept = memory.params + memory.grads + memory.optimizer
    assert training_bytes(config, "fp32", train) == kept


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("train", TRAINED)
def test_a_trainers_peak_is_within_15_percent_of_the_estimate(native: None, train: str) -> None:
    """In a process of its own, with checkpointing; glibc gives back what is freed, so that its
    memory is what is in use."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), train], env=env, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] == pytest.approx(found["estimate"], rel=0.15)


def test_a_frozen_tower_is_worked_by_hand() -> None:
    """Eight patches of 64 numbers, two tokens of 48 for the decoder and for one layer of it, twice;
    and the work on a block: 2 · 160 and 3 · 64 numbers a patch."""
    config = replace(saved_bytes(2, (0,), torch.float32)[0], depth=1)
    features, work = 2 * (2 * 2 * 48), 8 * (2 * 160 + 3 * 64)
    found = tower_activation_bytes(config, torch.bfloat16, 8, train="none")
    assert found == 2 * (features + work)
