"""Sizes of a run's engines where the user gave none: on a CPU the preset's, on a GPU its memory's.

One GPU holds the trainer's weights, gradients and moments, the rollout engine's weights, what a
training step keeps for its backward pass, and the cache. In a synchronous run the last two take
turns (weights/in_process.py), so each may have all the room there is; with staleness they share it.

    room      GPU_SHARE of the free memory − everything that stays
    training  the largest micro-batch whose activations take half the room
    cache     the room − one inference step (− the activations, with staleness), but no more than
              all sequences need that can wait for a turn at a time

The constants are chosen, not measured. Formulas: nanoengine/plan/footprint.py,
nanoinfer/engine_memory.py.
Left out: a GPU for each of the two engines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nanoengine.adapters.lora import choose_targets
from nanoengine.formats.families import sees
from nanoengine.formats.matrices import adaptable
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.parallel.device import free_bytes
from nanoengine.plan.footprint import (
    AVERAGE_WIDTH,
    Plan,
    num_params,
    rank_memory,
    tower_bytes,
    training_bytes,
    training_widths,
    weight_bytes,
)
from nanoinfer.engine_memory import bytes_per_block, step_bytes
from nanoinfer.gpu.sizes import GPU_BATCH_TOKENS, GPU_NUM_SEQS
from nanorl.options.presets import get_preset
from nanorl.options.reference_names import parse_references
from nanorl.options.run_config import RunConfig

GPU_SHARE = 0.85
"""The share of the free memory that a run takes; CUDA's libraries, graphs and the allocator's
fragments need the rest."""
_MICRO_BATCHES = (32768, 16384, 8192, 4096, 2048, 1024)
SIZES = ("micro_batch_tokens", "max_num_seqs", "max_batch_tokens", "cache_mb")
_BLOCK = 16  # tokens; InferConfig's default


def sized(config: RunConfig, shape: ModelConfig, device: torch.device) -> RunConfig:
    """`config` for that device: what is 0 in `config.engine` chosen, what the user gave kept.
    `ValueError` where the model does not fit."""
    limits = config.engine
    if all(getattr(limits, name) for name in SIZES):
        return replace(config, device=str(device))
    if device.type == "cpu":
        chosen = dict(get_preset(config.preset).cpu_sizes)
    else:
        chosen = gpu_sizes(config, shape, free_bytes(device))
    if limits.max_num_seqs:
        chosen["max_batch_tokens"] = max(chosen["max_batch_tokens"], limits.max_num_seqs)
    if limits.max_batch_tokens:
        chosen["max_num_seqs"] = min(chosen["max_num_seqs"], limits.max_batch_tokens)
    missing: dict[str, Any] = {
        name: size for name, size in chosen.items() if not getattr(limits, name)
    }
    return replace(config, device=str(device), engine=replace(limits, **missing))


def gpu_sizes(config: RunConfig, shape: ModelConfig, free: int) -> dict[str, int]:
    """All sizes for a GPU with so many free bytes."""
    limits = config.engine
    resident = resident_bytes(config, shape)
    room = GPU_SHARE * free - resident
    micro = limits.micro_batch_tokens or _largest_micro_batch(config, shape, room / 2)
    num_seqs = limits.max_num_seqs or GPU_NUM_SEQS
    batch_tokens = limits.max_batch_tokens or GPU_BATCH_TOKENS
    room -= step_bytes(shape, DTYPES[config.dtype], num_seqs, batch_tokens)
    room -= sight_bytes(config, shape, batch_tokens)
    if config.rl.max_staleness > 0:
        room -= activation_bytes(config, shape, micro)
    block = bytes_per_block(shape, _BLOCK, DTYPES[config.dtype])
    longest = -(-config.agent.max_context_tokens // _BLOCK)
    if room < longest * block:
        raise ValueError(
            f"--device {config.device}: {resident / 2**30:.1f} GiB for weights, gradients and "
            f"moments leave no room for the cache of one rollout in the {free / 2**30:.1f} GiB "
            "that are free; choose a smaller --model or --engine.micro-batch-tokens, end what "
            "else uses the GPU, or take --device cpu"
        )
    groups = config.rl.tasks_per_step * (config.rl.max_staleness + 1) + config.rl.batch.oversample
    rollouts = groups * config.rl.group_size
    num_waiting = max(rollouts, config.evaluation.num_tasks, num_seqs)
    cache = min(room, num_waiting * longest * block)
    return {
        "micro_batch_tokens": micro,
        "max_num_seqs": num_seqs,
        "max_batch_tokens": batch_tokens,
        "cache_mb": max(1, int(cache) >> 20),
    }


def resident_bytes(config: RunConfig, shape: ModelConfig) -> float:
    """Add up what stays on the GPU: trainer, rollout engine, and the algorithm's other models."""
    weights = weight_bytes(shape, DTYPES[config.dtype])
    training = training_bytes(shape, config.dtype, config.vision.train)
    spec = config.rl.algorithm
    trainer = lora_bytes(config, shape) if config.lora.rank else training
    total = trainer + weights
    total += training if spec.needs_critic else 0
    if spec.has_average and not config.lora.rank:  # as wide as the masters
        total += AVERAGE_WIDTH * num_params(shape)
    num_references = max(len(parse_references(config.rl.reference)), 1)
    return total + (num_references * weights if spec.needs_reference else 0)


def lora_bytes(config: RunConfig, shape: ModelConfig) -> float:
    """Add up what stays of a trainer of an adapter: the weights, the adapted ones frozen once more,
    and master, gradient and moments of A and B."""
    model = Transformer(shape, device="meta")
    places = adaptable(model)
    shapes = [places[name].weight.shape for name in choose_targets(model, config.lora.targets)]
    frozen = sum(shape.numel() for shape in shapes)
    factors = config.lora.rank * sum(sum(shape) for shape in shapes)
    dtype = DTYPES[config.dtype]
    kept = weight_bytes(shape, dtype) + frozen * dtype.itemsize
    return kept + factors * sum(training_widths("fp32"))


def sight_bytes(config: RunConfig, shape: ModelConfig, num_tokens: int) -> float:
    """Bytes of a step of rollouts over so many tokens of new pictures, and of all that was seen and
    is kept; 0 for a model that reads text."""
    if not sees(shape.model_type):
        return 0.0
    from nanoengine.vision.sight import KEPT_BYTES  # here: few models see

    looks = Plan(dtype=config.dtype, vision_train="none")
    return KEPT_BYTES + tower_bytes(shape, looks, num_tokens)


def activation_bytes(config: RunConfig, shape: ModelConfig, num_tokens: int) -> float:
    """Estimate what a micro-batch keeps for its backward pass."""
    plan = Plan(
        dtype=config.dtype,
        checkpointing=config.engine.activation_checkpointing,
        vision_train="none" if config.lora.rank else config.vision.train,
    )
    return rank_memory(shape, plan, 0, num_tokens, 1).activations


def _largest_micro_batch(config: RunConfig, shape: ModelConfig, room: float) -> int:
    fitting = [n for n in _MICRO_BATCHES if activation_bytes(config, shape, n) <= room]
    return fitting[0] if fitting else _MICRO_BATCHES[-1]
