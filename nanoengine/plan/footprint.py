"""Counts the parameters, bytes and floating-point operations that a layout gives one rank.

Every formula counts what this engine allocates and computes; the tests compare them with the
tensors that really exist. P parameters of the rank, d the data-parallel size, T tokens of the
micro-batch on the rank, E hidden, F MLP, Q and K widths of queries and keys, t the tensor-parallel
size, s = t with sequence parallel, else 1.

    bytes of parameters     2P (bf16) or 4P (fp32, which is its own master)   / d with ZeRO-3
    bytes of gradients      4P                                                / d with ZeRO-2, 3
    bytes of optimizer      8P, and 4P masters over bf16, 2P on a CPU         / d with ZeRO-1 to 3
    activations of a layer  T (4E/s + (2Q + 2K + 2F)/t) elements and the norms' fp32 statistics;
                            another T (Q + 2K)/t where queries and keys are normalised, another
                            T · 2E/s where there are norms before and after attention and MLP;
                            2E less on a CPU, which makes what a norm gave again if t is 1
    with checkpointing      T · 2E/s elements a layer, and one layer in full
    FLOPs of a token        6N + 6·L·Q·length       N matmul weights with the head, L layers; causal
    MFU                     those FLOPs · tokens/s / (GPUs · peak)

Checkpointing recomputes a forward pass, which costs time and does not count as useful work. In a
pipeline the micro-batches overlap, so ZeRO-2 cuts the gradients only after the step.
Left out: the allocator's fragmentation, communication buffers, experts (refused).
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import NamedTuple

import torch

from nanoengine.config import VisionTrain
from nanoengine.formats.families import family_of
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.stage import split_layers

WIDTH = {"bf16": 2, "fp32": 4, "fp64": 8}
CHECKPOINT_WIDTH = 3 * WIDTH["fp32"]
"""Bytes a parameter of a checkpoint: fp32 masters and two moments."""
AVERAGE_WIDTH = WIDTH["fp32"]
"""Bytes a parameter of an average of the weights, in memory and in a checkpoint."""
_TOWER_PARAMS = "nanoengine.vision.tower_footprint:tower_params"
_TOWER_BYTES = "nanoengine.vision.tower_footprint:tower_activation_bytes"
_FEWEST_ROWS = 512
"""That a pass is filled with, whatever they take: each pass adds to all gradients and lays all
weights out, which fewer rows do not make up for."""
_CHUNK_ELEMENTS = 256 * 49152  # logits of linear_logprob at a time


@dataclass(frozen=True, kw_only=True)
class Plan(Layout):
    """A layout and how it is used. `chunks` is layer groups a pipeline rank (interleaved)."""

    zero: int = 0
    sequence_parallel: bool = True
    checkpointing: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    dtype: str = "bf16"
    on_cpu: bool = False
    vision_train: VisionTrain = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1:
            raise ValueError(f"chunks={self.chunks}: must be at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={self.zero}: must be 0, 1, 2 or 3")
        if self.zero == 3 and self.pp > 1:
            raise ValueError("zero=3 with pp > 1: not supported; use zero=2, or more dp and no pp")
        if self.dtype not in WIDTH:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(WIDTH)}")


def check_plan(config: ModelConfig, plan: Plan) -> None:
    """`ValueError` with the rule, where a plan cannot split the model."""
    if config.num_experts:
        raise ValueError(
            f"num_experts={config.num_experts}: experts are not counted, so the estimate would be "
            "of another model; give a dense one"
        )
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
        value = getattr(config, name)
        if value % plan.tp:
            raise ValueError(f"tp={plan.tp}: must divide {name}={value} of this model")
    if plan.pp * plan.chunks > config.num_layers:
        raise ValueError(
            f"pp={plan.pp} x chunks={plan.chunks}: more stages than the {config.num_layers} "
            "layers of this model"
        )


def layer_matmul_params(config: ModelConfig) -> int:
    """Weights of one layer that multiply."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    return hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config.intermediate_size


def layer_params(config: ModelConfig, tp: int = 1) -> int:
    """Parameters of one layer on one tensor-parallel rank; norms are on every one."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    whole = len(family_of(config.model_type).norms) * config.hidden_size
    whole += config.hidden_size if config.attention_output_bias else 0
    split = layer_matmul_params(config) + (q + 2 * kv if config.attention_bias else 0)
    if family_of(config.model_type).qk_norm == "width":
        split += q + kv
    elif config.qk_norm:
        whole += 2 * config.head_dim
    split += config.num_heads if family_of(config.model_type).sinks else 0
    return whole + split // tp


def num_params(config: ModelConfig) -> int:
    """Parameters of the whole model, all experts included; a tied head counts once."""
    hidden = config.hidden_size
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    total = tables + hidden + config.num_layers * layer_params(config)
    num_moe = sum(config.is_moe_layer(index) for index in range(config.num_layers))
    width = config.moe_intermediate_size
    experts = config.num_experts * hidden * (3 * width + 1)  # and the router
    if family_of(config.model_type).experts == "stacked":  # all with biases
        experts += config.num_experts * (2 * width + hidden + 1)
    total += num_moe * (experts - 3 * hidden * config.intermediate_size)
    return total + _tower_params(config)[0]


def _tower_params(config: ModelConfig, train: VisionTrain = "all") -> tuple[int, int]:
    """Parameters of a vision tower, and those that are trained; a text model has none."""
    vision = getattr(config, "vision", None)
    if vision is None:
        return 0, 0
    found: tuple[int, int] = resolve_name(_TOWER_PARAMS)(vision, train)
    return found


def tower_bytes(config: ModelConfig, plan: Plan, num_tokens: int) -> float:
    """Count what a vision tower keeps for the backward pass where so many tokens are of pictures;
    of a text model nothing."""
    vision = getattr(config, "vision", None)
    if vision is None:
        return 0.0
    patches = num_tokens * vision.patches_per_token
    kept: float = resolve_name(_TOWER_BYTES)(
        *(vision, DTYPES[plan.dtype], patches),
        train=plan.vision_train,
        checkpointing=plan.checkpointing,
        on_cpu=plan.on_cpu,
    )
    return kept


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """The size of all tensors of a model."""
    return num_params(config) * dtype.itemsize


class Widths(NamedTuple):
    """Bytes that a parameter takes while it is trained."""

    weight: int
    gradient: int
    optimizer: int


def training_widths(dtype: str, *, on_cpu: bool = False) -> Widths:
    """Gradients and moments are at least fp32; bf16 has masters beside it, of which a CPU keeps
    the half that the weight lacks."""
    width = WIDTH[dtype]
    wide = max(WIDTH["fp32"], width)
    master = 0 if width == wide else wide - width if on_cpu else wide
    return Widths(width, wide, 2 * wide + master)


def training_bytes(config: ModelConfig, dtype: str, vision_train: VisionTrain = "all") -> int:
    """Weights, gradients and optimizer of a model that is trained on one GPU; of a vision tower
    what is frozen has weights alone."""
    width = training_widths(dtype)
    every = num_params(config)
    tower, trained = _tower_params(config, vision_train)
    return every * width.weight + (every - tower + trained) * (width.gradient + width.optimizer)


def rank_params(config: ModelConfig, plan: Plan, rank: int) -> int:
    """Parameters on pipeline rank `rank`. A tied embedding is on the first and the last."""
    table = config.vocab_size * config.hidden_size // plan.tp
    num_stages = plan.pp * plan.chunks
    layers = split_layers(config.num_layers, num_stages)
    total = sum(len(layers[rank + c * plan.pp]) for c in range(plan.chunks))
    total *= layer_params(config, plan.tp)
    is_first, is_last = rank == 0, rank == plan.pp - 1
    total += table if is_first else 0
    total += config.hidden_size if is_last else 0
    if is_last and not (is_first and config.tie_word_embeddings):
        total += table
    return total


def layer_activation_bytes(config: ModelConfig, plan: Plan, num_tokens: int) -> float:
    """Count what autograd keeps of one layer for the rank's tokens, without checkpointing."""
    family, hidden = family_of(config.model_type), config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    split = plan.tp if plan.sequence_parallel else 1
    width = WIDTH[plan.dtype]
    wide = max(4, width)
    is_widened = bool(family.norm_offset) and wide > width  # the input of a norm, to fp32
    num_norms = len(family.norms)
    is_remade = plan.on_cpu and plan.tp == 1 and not family.norm_offset
    num_inputs = 2 - is_remade * len({"input_norm", "post_norm"} & set(family.norms))  # of products
    size = (num_inputs * width + num_norms * (wide if is_widened else width)) * hidden / split
    size += (2 * q + 2 * kv + 2 * config.intermediate_size) / plan.tp * width
    statistics = num_norms / split
    if config.qk_norm:  # keeps q and k as they were before, and v beside them
        size += ((q + kv) * wide if is_widened else (q + 2 * kv) * width) / plan.tp
        heads = config.num_heads + config.num_kv_heads
        statistics += 2 if family.qk_norm == "width" else heads / plan.tp
    weights = num_norms * hidden + 2 * config.head_dim if family.norm_offset else 0
    return num_tokens * (size + statistics * wide) + weights * wide


def rows_of_a_pass(model: Transformer, num_bytes: int) -> int:
    """Return how many rows keep so much for the backward pass on a CPU; at least 512."""
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(model.dtype, "fp64")
    plan = Plan(dtype=dtype, on_cpu=True)
    row_bytes = layer_activation_bytes(model.config, plan, 1) * model.config.num_layers
    row_bytes += tower_bytes(model.config, plan, 1)  # each may be a picture's
    return max(_FEWEST_ROWS, int(num_bytes / row_bytes))


def head_activation_bytes(config: ModelConfig, plan: Plan, num_tokens: int) -> float:
    """Final norm and output head: two hidden states kept, one chunk of logits while it computes."""
    kept = 2 * num_tokens * config.hidden_size * WIDTH[plan.dtype]
    chunk = min(num_tokens, max(64, _CHUNK_ELEMENTS // config.vocab_size))
    return kept + 2 * chunk * config.vocab_size / plan.tp * 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    params: float
    grads: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.params + self.grads + self.optimizer + self.activations


def rank_memory(
    config: ModelConfig,
    plan: Plan,
    rank: int,
    micro_tokens: int,
    peak_live: int,
    picture_tokens: int | None = None,
) -> Memory:
    """Memory of pipeline rank `rank` with `peak_live` activations of a chunk alive at once. Of the
    tokens `picture_tokens` are different pictures' (None: all may be), where the model sees."""
    params = rank_params(config, plan, rank)
    shards = plan.dp * plan.cp
    width = training_widths(plan.dtype, on_cpu=plan.on_cpu)
    tokens = micro_tokens // plan.cp
    num_layers = len(split_layers(config.num_layers, plan.pp * plan.chunks)[rank])
    layer = layer_activation_bytes(config, plan, tokens)
    pictures = micro_tokens if picture_tokens is None else picture_tokens
    if plan.checkpointing:
        split = plan.tp if plan.sequence_parallel else 1
        entry = tokens * 2 * config.hidden_size / split * WIDTH[plan.dtype]
        activations = peak_live * num_layers * entry + layer
    else:
        activations = peak_live * num_layers * layer
    if rank == plan.pp - 1:
        activations += head_activation_bytes(config, plan, tokens)
    tower, trained = _tower_params(config, plan.vision_train) if rank == 0 else (0, 0)
    if rank == 0:
        activations += tower_bytes(config, plan, pictures)
    trained += params
    return Memory(
        params=(params + tower) * width.weight / (shards if plan.zero == 3 else 1),
        grads=trained * width.gradient / (shards if plan.zero >= 2 and plan.pp == 1 else 1),
        optimizer=trained * width.optimizer / (shards if plan.zero else 1),
        activations=activations,
    )


def forward_flops(config: ModelConfig, num_tokens: int, seq_len: int) -> tuple[float, float]:
    """(of one layer, of the output head) in one forward pass over `num_tokens`."""
    q = config.num_heads * config.head_dim
    layer = 2.0 * layer_matmul_params(config) + 2.0 * q * seq_len  # 4·Q·length/2: causal
    head = 2.0 * config.vocab_size * config.hidden_size
    return layer * num_tokens, head * num_tokens


def train_flops(config: ModelConfig, num_tokens: int, seq_len: int) -> float:
    """Useful work of a training step: forward and twice that for backward."""
    layer, head = forward_flops(config, num_tokens, seq_len)
    return 3 * (config.num_layers * layer + head)


def mfu(
    config: ModelConfig, tokens_per_s: float, seq_len: int, peak_flops: float, num_gpus: int = 1
) -> float:
    """Model FLOPs utilisation: useful work a second over the peak of all GPUs."""
    return train_flops(config, 1, seq_len) * tokens_per_s / (peak_flops * num_gpus)
