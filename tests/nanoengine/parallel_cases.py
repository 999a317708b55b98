"""One training run, on one process or on a mesh, and what the ranks do in the parallel tests.

A rank returns what it owns (`Owned`); the test puts the parts together and compares them with the
run of a single process. Planted bugs are patches that a rank applies to itself for one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from pool import Rank
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.formats.families import FAMILIES
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample
from nanoengine.parallel import data_parallel, expert_parallel, tensor_parallel, zero
from nanoengine.parallel.expert_parallel import ExpertParallel
from nanoengine.parallel.layout import DATA_AXES, REPLICA_AXES, Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import Slice, record_of
from nanoengine.parallel.sharded_adamw import ShardedAdamW
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.sft.chats import num_loss_tokens
from nanoengine.state.kept_adamw import AdamW
from nanoengine.state.whole_engine import Engine

VOCAB = 211  # a prime: no number of ranks divides it
EXPERTS: Any = {
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "dense_layers": (1,),
}
LENGTHS = (37, 23, 9, 50, 2, 17, 3, 31, 12, 26)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and everything that may differ beside it."""

    layout: Layout = field(default_factory=Layout)
    zero: int = 0
    sequence_parallel: bool = False
    family: str = "llama"
    tied: bool = True
    dtype: str = "fp64"
    budget: int = 90
    deal: str = "round"  # how samples go to the data ranks: see `deal`
    steps: int = 1
    max_grad_norm: float = 0.0
    bucket_bytes: int = 40_000
    activation_checkpointing: bool = False
    shape: tuple[tuple[str, Any], ...] = ()  # what the model's config has otherwise than here
    lengths: tuple[int, ...] = LENGTHS
    bug: str = ""


@dataclass
class Owned:
    """Values of the elements lo:hi of this rank's (flattened) part of a parameter."""

    name: str
    shape: tuple[int, ...]
    where: Slice | None
    lo: int
    hi: int
    gradient: Tensor
    master: Tensor


@dataclass
class Result:
    steps: list[dict[str, float]]
    owned: list[Owned]
    logps: dict[int, Tensor]  # by the sample's index in the whole batch
    traffic: dict[tuple[str, str], tuple[int, int]]
    num_early: int


_WINDOWS: Any = {"sliding_window": 6, "window_layers": (0, 2)}
SWITCHES: Any = {
    "smollm3": {**_WINDOWS, "unroped_layers": (0, 2)},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 1.5,
    },
    "olmo3": {**_WINDOWS, "local_rope_theta": 100.0},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3_text": {**_WINDOWS, "local_rope_theta": 100.0, "query_pre_attn_scalar": 17},
    "glm4": {"partial_rotary_factor": 0.5},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, **_WINDOWS, "moe_intermediate_size": 80, "dense_layers": ()},
}
"""Fields of the families that set them."""


def model_config(case: Case) -> ModelConfig:
    usual = ModelConfig(
        model_type=case.family,
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        tie_word_embeddings=case.tied,
        attention_bias=case.family in ("qwen2", "llama", "glm4", "olmo2", "gpt_oss"),
        attention_output_bias=case.family in ("llama", "olmo2", "gpt_oss"),
        qk_norm=FAMILIES[case.family].qk_norm != "none",
        max_position_embeddings=128,
        **SWITCHES.get(case.family, {}),
    )
    return replace(usual, **dict(case.shape))


def make_model(
    case: Case, split: TensorParallel | None = None, experts: ExpertParallel | None = None
) -> Transformer:
    model = Transformer(model_config(case), DTYPES[case.dtype], split=split, experts=experts)
    model.init_weights(seed=0, std=0.15)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms and biases that a rank could not guess
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                part = record_of(parameter).slice
                shape = parameter.shape if part is None else part.whole_shape(parameter.shape)
                noise = 0.2 * torch.randn(shape, generator=generator)
                parameter.add_(noise if part is None else part.take(noise))
    return model


def make_samples(
    seed: int = 0, lengths: Sequence[int] = LENGTHS, vocab_size: int = VOCAB
) -> list[Sample]:
    """Ragged, with observations inside some; two too short for a ring to share; one of them, and
    the last, without any trained token."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        mask = [0, *(int(t % (i + 2) != 1) for t in range(1, length))]
        if i in (6, 9):
            mask = [0] * length
        advantage = [1.5 - 0.25 * i] * length
        samples.append(Sample(tokens=tokens, loss_mask=mask, fields={"advantage": advantage}))
    return samples


def deal(samples: Sequence[Sample], num_ranks: int, how: str) -> list[list[int]]:
    """Indices for each data rank. `round`: in turn; `masked`: the last rank gets exactly the
    samples without a trained token; `empty`: the last rank gets none."""
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for i, sample in enumerate(samples):
        is_trained = any(sample.loss_mask)
        if how == "round" or num_ranks == 1:
            hands[i % num_ranks].append(i)
        elif how == "masked" and not is_trained:
            hands[-1].append(i)
        else:
            hands[i % (num_ranks - 1)].append(i)
    return hands


def policy_loss(
    logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    assert entropy_T is not None
    mask_T = micro.loss_mask_T
    loss = -(micro.fields_T["advantage"] * logp_T * mask_T).sum()
    sums = {"logp": (logp_T.detach().double() * mask_T).sum(), "tokens": mask_T.sum()}
    return loss - 0.05 * (entropy_T * mask_T).sum(), sums


def run(case: Case, mesh: Mesh | None = None) -> Result:
    """Train `case.steps` steps; gradients are those of the last, unclipped with max_grad_norm 0."""
    split = experts = None
    if mesh is not None:
        config = model_config(case)
        split = TensorParallel.of(mesh, config, sequence_parallel=case.sequence_parallel)
        experts = ExpertParallel.of(mesh, config)
    with planted(case.bug):
        engine = Engine(make_model(case, split, experts), engine_config(case), mesh)
        return _train(case, engine)


def engine_config(case: Case) -> EngineConfig:
    return EngineConfig(
        dtype=case.dtype,  # type: ignore[arg-type]
        lr=3e-3,
        eps=1e-4,  # a gradient that is all rounding must not become a step of random sign
        weight_decay=0.1,
        max_grad_norm=case.max_grad_norm,
        micro_batch_tokens=case.budget,
        zero=case.zero,
        bucket_bytes=case.bucket_bytes,
        activation_checkpointing=case.activation_checkpointing,
    )


def _train(case: Case, engine: Engine) -> Result:
    mesh = engine.mesh
    mesh.traffic.clear()
    steps = []
    traffic: dict[tuple[str, str], tuple[int, int]] = {}
    num_early = 0
    for step in range(case.steps):
        samples = make_samples(step, case.lengths, engine.model.config.vocab_size)
        mine = deal(samples, mesh.size(DATA_AXES), case.deal)[mesh.rank(DATA_AXES)]
        hand = [samples[i] for i in mine]
        loss_fn: Any = policy_loss
        if case.bug == "no division by the accumulation":
            loss_fn = mean_of_each_micro_batch(num_loss_tokens(samples))
        steps.append(
            engine.train_step(hand, loss_fn, num_loss_tokens, temperature=0.7, entropy=True)
        )
        if isinstance(engine.optimizer, ShardedAdamW):
            num_early = engine.optimizer.reducer.num_early
        if step == 0:
            traffic = {key: (t.calls, t.bytes) for key, t in mesh.traffic.items()}
    logps = dict(zip(mine, engine.last_logps, strict=True))
    return Result(steps, list(owned(engine)), logps, traffic, num_early)


def owned(engine: Engine) -> Iterator[Owned]:
    masters = engine.optimizer.entries("master")
    for (entry, grad), (_, master) in zip(engine.optimizer.entries("grad"), masters, strict=True):
        param = entry.slot.param
        values = grad.clone(), master.clone()
        yield Owned(
            entry.slot.name, param.shape, record_of(param).slice, entry.lo, entry.hi, *values
        )


def on_rank(rank: Rank, cases: list[Case]) -> list[Result]:
    return [run(case, rank.mesh(case.layout)) for case in cases]


# -- bugs planted on purpose -------------------------------------------------------------------


def mean_of_each_micro_batch(weight: float) -> Callable[..., Any]:
    """Cancels the division by the whole batch's weight and divides by the micro-batch's."""

    def loss_fn(logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch) -> Any:
        loss, sums = policy_loss(logp_T, entropy_T, micro)
        return loss * weight / micro.loss_mask_T.sum().clamp(min=1), sums

    return loss_fn


def _unreduced(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
    return dx, None


def _not_sent_back(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
    return dx.new_zeros(sum(ctx.sent), *dx.shape[1:]), None, None, None


def _local_weight(mesh: Mesh, axis: Any, *values: float) -> list[float]:
    return [value * mesh.size(axis) for value in values]


def _local_norm(optimizer: AdamW) -> float:
    squares = [float(b.grad_shard.double().square().sum()) for b in optimizer.buckets]
    return float(sum(squares)) ** 0.5


@contextmanager
def planted(bug: str) -> Iterator[None]:
    patches = {
        "no all-reduce in the tensor-parallel backward": lambda: mock.patch.object(
            tensor_parallel._Enter, "backward", staticmethod(_unreduced)
        ),
        "mean of means": lambda: mock.patch.object(Mesh, "sum_float", _local_weight),
        "clipping by the local norm": lambda: mock.patch.object(AdamW, "grad_norm", _local_norm),
        "norms not summed over tensor-parallel ranks": lambda: mock.patch.object(
            data_parallel.GradientReducer, "_sum_partials", lambda self, bucket: None
        ),
        "experts summed with other experts": lambda: mock.patch.object(
            zero, "replica_axes", lambda parameter: REPLICA_AXES
        ),
        "no gradient to the ranks that sent the tokens": lambda: mock.patch.object(
            expert_parallel._AllToAll, "backward", staticmethod(_not_sent_back)
        ),
        "gradients not summed over data ranks": lambda: mock.patch.object(
            Mesh, "all_reduce", _skip_data_axes(Mesh.all_reduce)
        ),
    }
    if bug in patches:
        with patches[bug]():
            yield
    else:
        yield


def _skip_data_axes(original: Any) -> Any:
    def all_reduce(mesh: Mesh, axis: Any, tensor: Tensor, *args: Any, **options: Any) -> Any:
        if axis == ("dp", "ep", "cp"):
            return data_parallel.Handle()
        return original(mesh, axis, tensor, *args, **options)

    return all_reduce
