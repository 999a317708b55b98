"""Estimates on paper which layouts fit and how long a step takes: memory, messages, bubble.

    python -m nanoengine.plan.estimate --model qwen3-4b --gpus 8
    python -m nanoengine.plan.estimate --model qwen3-32b --gpus 64 --seq-len 8192 --pp 4 --zero 1

For every way to write --gpus as tp x cp x pp x dp it tries the ZeRO stages with and without
activation checkpointing and prints the fastest variant that fits, or the smallest that does not.

Memory and FLOPs: footprint.py. Time of a step = pipeline (the simulator of schedules.py, fed with
the slowest stage and its tensor-parallel messages) + what data-parallel reduction cannot hide
behind the last backward pass. Messages cost alpha + bytes / beta, a ring of n ranks

    all-reduce                     2 (n-1) (alpha + S / (n beta))
    all-gather, reduce-scatter       (n-1) (alpha + S / (n beta))       S bytes of the whole tensor
    point to point                          alpha + S / beta

Inputs that nobody measured for you: the peak and links below are data-sheet figures; efficiency
(share of the peak that matmuls reach) and alpha are guesses. Change them with the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nanoengine.model.config import ModelConfig
from nanoengine.parallel.mesh import wire_bytes
from nanoengine.parallel.schedules import SCHEDULES, Costs, make_schedule, simulate
from nanoengine.parallel.stage import split_layers
from nanoengine.plan.footprint import (
    WIDTH,
    Memory,
    Plan,
    check_plan,
    forward_flops,
    layer_params,
    mfu,
    rank_memory,
    rank_params,
)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU and how they are joined."""

    name: str
    memory_bytes: float
    peak_flops: float  # dense bf16
    beta_node: float  # bytes/s of one GPU in one direction, inside a node
    beta_net: float = 50e9  # between nodes: one 400 Gb/s adapter a GPU
    alpha_s: float = 10e-6
    efficiency: float = 0.6
    gpus_per_node: int = 8


HARDWARE = {  # NVIDIA data sheets; NVLink's figure is for both directions, halved here
    "a100": Hardware(name="a100", memory_bytes=80e9, peak_flops=312e12, beta_node=300e9),
    "h100": Hardware(name="h100", memory_bytes=80e9, peak_flops=989e12, beta_node=450e9),
    "h200": Hardware(name="h200", memory_bytes=141e9, peak_flops=989e12, beta_node=450e9),
}


# From each model's config.json; what does not change a size (rope, token ids) is left out.
# family, vocabulary, hidden, MLP, layers, heads, key heads, head dimension, tied
_SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "smollm2-135m": ("llama", 49152, 576, 1536, 30, 9, 3, 64, True),
    "llama3.1-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama3.1-70b": ("llama", 128256, 8192, 28672, 80, 64, 8, 128, False),
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
    "qwen3-14b": ("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, False),
    "qwen3-32b": ("qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False),
}


def model_shape(name: str | Path) -> ModelConfig:
    """The configuration of a model known by name, or of a Hugging Face folder."""
    key = str(name).lower()
    if key in _SHAPES:
        family, vocab, hidden, mlp, layers, heads, kv_heads, head_dim, tied = _SHAPES[key]
        return ModelConfig(
            model_type=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            tie_word_embeddings=tied,
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    if Path(name).is_dir():
        return ModelConfig.from_folder(name)
    raise ValueError(
        f"model={str(name)!r}: neither a folder nor a known name; known are {', '.join(_SHAPES)}"
    )


def all_reduce_s(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """Ring all-reduce among n ranks."""
    return 2 * all_gather_s(num_bytes, n, alpha, beta)


def all_gather_s(num_bytes: float, n: int, alpha: float, beta: float) -> float:
    """Ring all-gather or reduce-scatter; `num_bytes` of the whole tensor."""
    return (n - 1) * alpha + wire_bytes("all_gather", num_bytes, n) / beta


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model and the tokens of one training step."""

    model: ModelConfig
    seq_len: int
    batch_tokens: int
    micro_tokens: int

    def num_micro(self, plan: Plan) -> int:
        """Micro-batches of one data-parallel rank."""
        return -(-self.batch_tokens // (plan.dp * self.micro_tokens))


@dataclass(frozen=True)
class Estimate:
    plan: Plan
    memory: Memory  # of the fullest pipeline rank
    fits: bool
    step_s: float
    bubble: float
    mfu: float


def estimate(workload: Workload, plan: Plan, hardware: Hardware) -> Estimate:
    """One plan. `ValueError` where it cannot split this model."""
    check_plan(workload.model, plan)
    schedule = make_schedule(plan.schedule, plan.pp, workload.num_micro(plan), plan.chunks)
    costs = stage_costs(workload, plan, hardware)
    timeline = simulate(schedule, costs)
    ranks = [
        rank_memory(workload.model, plan, rank, workload.micro_tokens, timeline.peak_live[rank])
        for rank in range(plan.pp)
    ]
    fullest = max(ranks, key=lambda memory: memory.total)
    step_s = timeline.makespan + _exposed_reduction_s(workload, plan, hardware, costs)
    tokens = workload.num_micro(plan) * plan.dp * workload.micro_tokens
    return Estimate(
        plan,
        fullest,
        fullest.total <= 0.95 * hardware.memory_bytes,  # the rest: context, buffers, fragments
        step_s,
        timeline.bubble,
        mfu(workload.model, tokens / step_s, workload.seq_len, hardware.peak_flops, plan.world),
    )


def stage_costs(workload: Workload, plan: Plan, hardware: Hardware) -> Costs:
    """Seconds of one micro-batch on the slowest pipeline rank, its collectives included."""
    model, tokens = workload.model, workload.micro_tokens
    layer, head = forward_flops(model, tokens, workload.seq_len)
    speed = hardware.peak_flops * hardware.efficiency * plan.tp * plan.cp
    stages = split_layers(model.num_layers, plan.pp * plan.chunks)
    per_rank = [
        sum(len(stages[rank + c * plan.pp]) for c in range(plan.chunks)) for rank in range(plan.pp)
    ]
    work = [n * layer + (head if rank == plan.pp - 1 else 0) for rank, n in enumerate(per_rank)]
    forward = max(work) / speed
    local_bytes = tokens / plan.cp * model.hidden_size * WIDTH[plan.dtype]
    beta = _beta(hardware, plan.tp)
    # Two all-reduces a layer and direction; with sequence parallel the same bytes in two halves.
    tp_s = max(per_rank) * 2 * all_reduce_s(local_bytes, plan.tp, hardware.alpha_s, beta)
    keys = 2 * model.num_kv_heads * model.head_dim / plan.tp * tokens / plan.cp
    ring = keys * WIDTH[plan.dtype] / _beta(hardware, plan.tp * plan.cp) + hardware.alpha_s
    cp_s = max(per_rank) * (plan.cp - 1) * ring if plan.cp > 1 else 0.0
    weights_s = _gather_weights_s(workload, plan, hardware)
    again = forward + tp_s + cp_s if plan.checkpointing else 0.0
    hop = local_bytes / (plan.tp if plan.sequence_parallel else 1)
    return Costs(
        forward=forward + tp_s + cp_s + weights_s,
        input_grad=forward + tp_s + 2 * cp_s + again + weights_s,
        weight_grad=forward,
        send=hardware.alpha_s + hop / _beta(hardware, plan.tp * plan.cp * plan.pp),
    )


def _gather_weights_s(workload: Workload, plan: Plan, hardware: Hardware) -> float:
    """ZeRO-3 gathers a rank's parameters before each forward and each backward pass. Gathering
    one layer hides behind the computation of the one before, so only the excess would count; the
    first layer's is what always shows."""
    n = plan.dp * plan.cp
    if plan.zero < 3 or n == 1:
        return 0.0
    num_bytes = layer_params(workload.model, plan.tp) * WIDTH[plan.dtype]
    return all_gather_s(num_bytes, n, hardware.alpha_s, _beta(hardware, plan.world))


def _exposed_reduction_s(workload: Workload, plan: Plan, hardware: Hardware, costs: Costs) -> float:
    """Gradient reduction (fp32), minus the last backward pass that it overlaps with, plus the
    gathering of updated parameters with ZeRO-1 and 2."""
    n = plan.dp * plan.cp
    if n == 1:
        return 0.0
    params = max(rank_params(workload.model, plan, rank) for rank in range(plan.pp))
    alpha, beta = hardware.alpha_s, _beta(hardware, plan.world)
    whole = params * max(4, WIDTH[plan.dtype])
    reduce_s = all_gather_s(whole, n, alpha, beta) * (2 if plan.zero == 0 else 1)
    gather_s = 0.0
    if plan.zero in (1, 2):
        gather_s = all_gather_s(params * WIDTH[plan.dtype], n, alpha, beta)
    return max(0.0, reduce_s - costs.input_grad - costs.weight_grad) + gather_s


def _beta(hardware: Hardware, span: int) -> float:
    """Bandwidth of a group that spans so many consecutive GPUs."""
    return hardware.beta_node if span <= hardware.gpus_per_node else hardware.beta_net


def plans(num_gpus: int, fixed: Plan, given: Sequence[str]) -> Iterator[Plan]:
    """Every factorisation of `num_gpus`, keeping the axes that were given."""

    def sizes(name: str, left: int) -> list[int]:
        if name in given:
            return [getattr(fixed, name)]
        return [n for n in range(1, left + 1) if left % n == 0]

    for tp in sizes("tp", num_gpus):
        for cp in sizes("cp", 1):  # context parallel only when asked for
            for pp in sizes("pp", num_gpus // (tp * cp)):
                dp, rest = divmod(num_gpus, tp * cp * pp)
                if rest or ("dp" in given and dp != fixed.dp):
                    continue
                yield dataclasses.replace(fixed, tp=tp, cp=cp, pp=pp, dp=dp)


def best_variant(
    workload: Workload, plan: Plan, hardware: Hardware, given: Sequence[str]
) -> Estimate:
    """The fastest of the layout's ZeRO and checkpointing variants that fits, else the smallest."""
    shards = plan.dp * plan.cp
    useful = [0, 1, 2, 3] if plan.pp == 1 else [0, 1]
    zeros = [plan.zero] if "zero" in given else useful if shards > 1 else [0]
    recompute = [plan.checkpointing] if "checkpointing" in given else [False, True]
    tried = [
        estimate(
            workload,
            dataclasses.replace(plan, zero=zero, checkpointing=checkpointing),
            hardware,
        )
        for zero in zeros
        for checkpointing in recompute
    ]
    fitting = [one for one in tried if one.fits]
    if fitting:
        return min(fitting, key=lambda one: (one.step_s, one.memory.total))
    return min(tried, key=lambda one: one.memory.total)


def table(
    found: Sequence[Estimate], refused: Sequence[str], workload: Workload, hardware: Hardware
) -> Table:
    """The fastest fitting layout first."""
    fitting = sum(one.fits for one in found)
    out = Table(
        title=f"{fitting} of {len(found)} layouts fit {hardware.memory_bytes / 1e9:.0f} GB "
        f"({hardware.name}); GB of the fullest rank",
        caption="\n".join(refused) or None,
    )
    for name in ("layout", "zero", "ckpt", "fits", "params", "grads", "optim", "activ"):
        out.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for name in ("total", "micro", "bubble", "step s", "tokens/s", "MFU"):
        out.add_column(name, justify="right", no_wrap=True)
    for one in sorted(found, key=lambda one: (not one.fits, one.step_s)):
        m = one.memory
        parts = (m.params, m.grads, m.optimizer, m.activations, m.total)
        num_micro = workload.num_micro(one.plan)
        tokens = num_micro * one.plan.dp * workload.micro_tokens
        out.add_row(
            str(one.plan),
            str(one.plan.zero),
            "yes" if one.plan.checkpointing else "no",
            "yes" if one.fits else "NO",
            *(f"{part / 1e9:.1f}" for part in parts),
            str(num_micro),
            f"{one.bubble:.3f}",
            f"{one.step_s:.3g}",
            f"{tokens / one.step_s:.3g}",
            f"{one.mfu:.1%}",
        )
    return out


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags, and the names of the layout's flags that were given."""
    text = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m nanoengine.plan.estimate", description=text[0])
    parser.add_argument("--model", required=True, help="a known name or a Hugging Face folder")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--hardware", choices=HARDWARE, default="h100")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=1 << 19, help="of one optimizer step")
    parser.add_argument("--micro-tokens", type=int, help="of one micro-batch; default: --seq-len")
    for name in ("tp", "cp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=int, help="fix this axis")
    parser.add_argument("--zero", type=int, help="fix the ZeRO stage")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction)
    parser.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--chunks", type=int, help="a pipeline rank; default 2 for interleaved")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--efficiency", type=float, help="share of the peak that matmuls reach")
    parser.add_argument("--alpha-us", type=float, help="latency of one message")
    args = parser.parse_args(arguments)
    axes = ("tp", "cp", "pp", "dp", "zero", "checkpointing")
    return args, [name for name in axes if getattr(args, name) is not None]


def run(arguments: Sequence[str], console: Console) -> None:
    """Print the table. `ValueError` names what cannot be."""
    args, given = parse(arguments)
    for name in ("gpus", "seq_len", "batch_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name}={getattr(args, name)}: must be at least 1")
    hardware = HARDWARE[args.hardware]
    if args.efficiency is not None:
        if not 0 < args.efficiency <= 1:
            raise ValueError(f"efficiency={args.efficiency}: must be above 0 and at most 1")
        hardware = dataclasses.replace(hardware, efficiency=args.efficiency)
    if args.alpha_us is not None:
        hardware = dataclasses.replace(hardware, alpha_s=args.alpha_us * 1e-6)
    model = model_shape(args.model)
    micro_tokens = args.micro_tokens if args.micro_tokens is not None else args.seq_len
    if micro_tokens < args.seq_len:
        raise ValueError(
            f"micro_tokens={micro_tokens}: a sequence of {args.seq_len} tokens is never cut; give "
            "at least seq_len"
        )
    workload = Workload(
        model=model,
        seq_len=args.seq_len,
        batch_tokens=args.batch_tokens,
        micro_tokens=micro_tokens,
    )
    chunks = args.chunks or (2 if args.schedule == "interleaved" else 1)
    fixed = Plan(
        **{name: getattr(args, name) for name in given},
        sequence_parallel=args.sequence_parallel,
        schedule=args.schedule,
        chunks=chunks,
        dtype=args.dtype,
    )
    found, refused = [], []
    for plan in plans(args.gpus, fixed, given):
        try:
            found.append(best_variant(workload, plan, hardware, given))
        except ValueError as error:
            refused.append(f"{plan}: {error}")
    if not found:
        if not refused:
            sizes = ", ".join(f"{name}={getattr(fixed, name)}" for name in given)
            raise ValueError(f"gpus={args.gpus}: not a multiple of {sizes}; change one of them")
        raise ValueError("no layout is possible:\n  " + "\n  ".join(refused))
    console.print(
        f"{args.model}, {args.gpus} x {hardware.name}, {args.batch_tokens} tokens a step in "
        f"micro-batches of {micro_tokens}, sequences of {args.seq_len}, {args.dtype}, "
        f"{args.schedule}. Assumed: {hardware.peak_flops / 1e12:.0f} TFLOP/s peak, "
        f"{hardware.efficiency:.0%} of it in matmuls, alpha {hardware.alpha_s * 1e6:.0f} us, "
        f"{hardware.beta_node / 1e9:.0f} GB/s in a node, {hardware.beta_net / 1e9:.0f} GB/s "
        "between."
    )
    console.print(table(found, refused, workload, hardware))


def main() -> int:
    try:
        run(sys.argv[1:], Console(width=None if sys.stdout.isatty() else 140))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
