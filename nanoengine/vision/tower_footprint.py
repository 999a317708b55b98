"""Counts the parameters of a vision tower and the bytes that it keeps for a backward pass.

P patches, C numbers of a patch, D hidden size, I MLP size, E the decoder's width, T tokens:

    a block       P (6D + I) elements and 4 fp32 statistics a patch, its input among them; on a
                  GPU another P (2D + I), what norms and GELU gave, which a CPU makes again
    a merger      P 2D elements: what its norm gave, and what GELU is of
    once          P (C + D) elements: the pixels, and what the last merger reads
    features      T E elements for the decoder, and as many for each of its layers with DeepStack
    work          P 2I elements while a block's gradient is computed, P (2I + 3D) in a pass that
                  keeps nothing

With checkpointing a block keeps its input alone, and one block at a time is there in full. A frozen
tower keeps features and no more, and works before the decoder does, on a CPU on `PASS_PATCHES` at
once: with few pictures the sum is more than is ever there.

Left out: a picture of more patches than that before a frozen tower; what the store of pictures
keeps ready, and the features that rollouts keep (sight.py), which have limits of their own.
"""

from __future__ import annotations

import torch

from nanoengine.config import VisionTrain
from nanoengine.vision.sight import PASS_PATCHES
from nanoengine.vision.tower import Tower
from nanoengine.vision.tower_adamw import freeze
from nanoengine.vision.towers import VisionConfig


def tower_params(config: VisionConfig, train: VisionTrain = "all") -> tuple[int, int]:
    """Parameters of a tower, and those of them that are trained."""
    tower = Tower(config, device="meta")
    freeze(tower, train)
    every = list(tower.parameters())
    return sum(x.numel() for x in every), sum(x.numel() for x in every if x.requires_grad)


def block_activation_bytes(
    config: VisionConfig, dtype: torch.dtype, num_patches: int, *, on_cpu: bool = False
) -> int:
    """Bytes that autograd keeps of one block, without checkpointing."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    elements = 6 * hidden + mlp + (0 if on_cpu else 2 * hidden + mlp)
    return num_patches * (elements * dtype.itemsize + 4 * max(dtype.itemsize, 4))


def merger_activation_bytes(config: VisionConfig, dtype: torch.dtype, num_patches: int) -> int:
    """Bytes that autograd keeps of one merger, beside the stream that it reads."""
    return num_patches * 2 * config.hidden_size * dtype.itemsize


def feature_bytes(config: VisionConfig, dtype: torch.dtype, num_patches: int) -> int:
    """Bytes of what the decoder reads of so many patches."""
    rows = num_patches // config.patches_per_token * (1 + len(config.deepstack_visual_indexes))
    return rows * config.out_hidden_size * dtype.itemsize


def tower_activation_bytes(
    config: VisionConfig,
    dtype: torch.dtype,
    num_patches: int,
    *,
    train: VisionTrain = "all",
    checkpointing: bool = False,
    on_cpu: bool = False,
) -> int:
    """Bytes of all that a pass over so many patches keeps until its backward pass, and of the work
    on one block."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    features = 2 * feature_bytes(config, dtype, num_patches)  # by picture, and by row
    if train == "none":
        at_once = min(num_patches, PASS_PATCHES) if on_cpu else num_patches
        return features + at_once * (2 * mlp + 3 * hidden) * dtype.itemsize
    entry = num_patches * hidden * dtype.itemsize
    work = num_patches * 2 * mlp * dtype.itemsize
    merger = merger_activation_bytes(config, dtype, num_patches)
    num_deep = len(config.deepstack_visual_indexes)
    if train == "merger":  # the last one is after all blocks
        return features + num_deep * (merger + entry) + max(merger + entry, work + 3 * entry)
    kept = features + (num_deep + 1) * merger
    pixels = num_patches * config.patch_width * dtype.itemsize
    block = block_activation_bytes(config, dtype, num_patches, on_cpu=on_cpu)
    blocks = config.depth * entry + block if checkpointing else config.depth * block
    return kept + pixels + blocks + entry + work
