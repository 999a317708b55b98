"""Times the inference engine on a GPU: a model of Qwen3-0.6B's shape with random weights in bf16.

    python scripts/bench_infer_gpu.py [--json FILE] [--budget-s N] [--shape qwen3-0.6b|tiny]
                                       [--device auto|cpu|cuda|cuda:N]

Rows (`-fp8`: with keys and values in fp8):
    nano-vllm     sampled tokens/s, prefill included, of nano-vllm's bench.py: 256 requests at once,
                  inputs and outputs uniform in 100..1024, temperature 0.6
    decode-step   ms of a step of a batch with about `context` tokens each, schedule and sampling
                  included; the peer is the same engine without CUDA graphs
    logp-gap-max, -mean    nats between the log-probs of the engine and of the training forward pass
    logp-gap-max-exact     the same with `deterministic` on both sides, where it is to be 0

The bound is memory alone: every decode step reads all weights once (the embedding only as the tied
output head) and the keys and values of all tokens before each sequence's new one,

    seconds = Σ over decode steps (weight bytes + Σ over sequences length · bytes a token) / rate

with the copy rate (read + write) measured in the same run; prefill counts nothing, and of the 256
requests all run at once, so there are as many steps as the longest output has tokens.
It takes 40 GB of GPU memory. `tiny` runs the same code in seconds on a CPU, without graphs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_kernels import machine, measure_ceilings
from bench_output import print_rows, write_json

from kernels import linear_logprob
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.device import enter_device, resolve_device
from nanoinfer.config import CacheKind, InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.engine_memory import bytes_per_block
from nanoinfer.gpu.cuda_graph import StaticDecode
from nanoinfer.params import SamplingParams
from nanoinfer.variants.fp8_cache import cache_dtype
from nanoinfer.variants.full_runner import FullRunner

Row = dict[str, Any]
KINDS: tuple[CacheKind, ...] = ("auto", "fp8")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model's shape, and what is asked of it."""

    model: ModelConfig
    num_requests: int
    lengths: tuple[int, int]  # of inputs and outputs, both ends included
    max_id: int
    batches: tuple[int, ...]
    context: int
    num_steps: int  # timed at a time, with and without graphs, three times each
    max_tokens: int  # enough for those
    max_batch_tokens: int


QWEN3 = Workload(
    model=ModelConfig(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        rope_theta=1e6,
        qk_norm=True,
        tie_word_embeddings=True,
    ),
    num_requests=256,
    lengths=(100, 1024),
    max_id=10_000,
    batches=(1, 8, 32, 128, 256),
    context=1024,
    num_steps=10,
    max_tokens=120,
    max_batch_tokens=16_384,
)
TINY = Workload(
    model=replace(
        QWEN3.model,
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    ),
    num_requests=6,
    lengths=(4, 20),
    max_id=299,
    batches=(1, 3),
    context=20,
    num_steps=2,
    max_tokens=40,
    max_batch_tokens=64,
)
WORKLOADS = {"qwen3-0.6b": QWEN3, "tiny": TINY}


def make_model(shape: ModelConfig, device: str) -> Transformer:
    """Random weights, drawn on the device: what they are does not change the time."""
    model = Transformer(shape, torch.bfloat16, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    model.repack()
    return model


def requests(work: Workload) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths, drawn in the order of nano-vllm's bench.py."""
    draw = random.Random(0)
    low, high = work.lengths
    prompts = [
        [draw.randint(0, work.max_id) for _ in range(draw.randint(low, high))]
        for _ in range(work.num_requests)
    ]
    return prompts, [draw.randint(low, high) for _ in range(work.num_requests)]


class Bench:
    """One engine and what every measurement of it needs. `rate` is in bytes a second."""

    def __init__(self, model: Transformer, work: Workload, rate: float, kind: CacheKind) -> None:
        self.model, self.work, self.rate, self.kind = model, work, rate, kind
        prompts, sizes = requests(work)
        num_tokens = max(
            sum(map(len, prompts)) + sum(sizes),
            max(work.batches) * (work.context + work.max_tokens),
        )
        config = InferConfig(
            num_blocks=-(-num_tokens // 16) + work.num_requests,
            block_size=16,
            max_batch_tokens=work.max_batch_tokens,
            max_num_seqs=work.num_requests,
            kv_cache_dtype=kind,
        )
        self.engine = LLMEngine(model, config)
        graphs = graphs_of(self.engine)
        if graphs is not None:
            with torch.inference_mode():
                graphs.prepare()
        self.engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))

    def bound_s(self, num_steps: int, num_read: int) -> float:
        """That many decode steps, which together read `num_read` tokens of the cache."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        dtype = cache_dtype(self.kind, self.model.dtype)
        token = bytes_per_block(self.model.config, 1, dtype)
        return (num_steps * weights + num_read * token) / self.rate

    def row(self, name: str, unit: str, value: float, **more: Any) -> Row:
        columns = dict.fromkeys(("threads", "peer", "peer_value", "ratio", "bound", "bound_ratio"))
        name = name if self.kind == "auto" else f"{name}-{self.kind}"
        return {"name": name, "dtype": "bf16", **columns, "value": value, "unit": unit, **more}


def throughput(bench: Bench) -> list[Row]:
    prompts, sizes = requests(bench.work)
    each = [SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True) for n in sizes]
    before = bench.engine.metrics()
    start = time.perf_counter()
    outputs = bench.engine.generate(prompts, each)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.ids) for output in outputs)
    pairs = zip(prompts, sizes, strict=True)
    num_read = sum(n * len(prompt) + n * (n - 1) // 2 for prompt, n in pairs)
    bound = num_tokens / bench.bound_s(max(sizes), num_read)
    counted = ("num_steps", "num_preemptions", "prompt_tokens", "computed_tokens")
    run = {name: bench.engine.metrics()[name] - before[name] for name in counted}
    more = {"bound": bound, "bound_ratio": num_tokens / seconds / bound, "tokens": num_tokens}
    runs = [{"seconds": seconds, **run}]
    return [bench.row("nano-vllm", "tokens/s", num_tokens / seconds, **more, runs=runs)]


def decode_steps(bench: Bench) -> list[Row]:
    work, engine = bench.work, bench.engine
    rows = []
    for batch in work.batches:
        params = SamplingParams(max_tokens=work.max_tokens, ignore_eos=True)
        draw = random.Random(batch)
        prompts = (draw.choices(range(work.max_id), k=work.context) for _ in range(batch))
        handles = [engine.add(prompt, params) for prompt in prompts]
        num_computed = 0.0
        while num_computed != batch:  # until all decode
            before = engine.metrics()["computed_tokens"]
            engine.step()
            num_computed = engine.metrics()["computed_tokens"] - before
        fast, slow = _alternate(engine, work.num_steps)
        for handle in handles:
            engine.abort(handle)
        bound = bench.bound_s(1, batch * work.context) * 1e3
        more: Row = {"batch": batch, "context": work.context, "bound": bound}
        more |= {"bound_ratio": bound / median(fast), "runs": {"ours": fast, "peer": slow}}
        if slow:
            more |= {"peer": "no-graphs", "peer_value": median(slow)}
            more["ratio"] = median(slow) / median(fast)
        rows.append(bench.row(f"decode-step-{batch}", "ms", median(fast), **more))
    return rows


def graphs_of(engine: LLMEngine) -> StaticDecode | None:
    """The CUDA graphs of its decode steps; a CPU has none."""
    return engine._runner.decode if isinstance(engine._runner, FullRunner) else None


def _alternate(engine: LLMEngine, num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of steps with and without graphs; where there are no graphs, of all steps."""
    runner, static = engine._runner, graphs_of(engine)
    times: dict[bool, list[float]] = {True: [], False: []}
    for is_fast in (True, False) * 3 if static is not None else (True,) * 3:
        if isinstance(runner, FullRunner):
            runner.decode = static if is_fast else None
        times[is_fast] += _time_steps(engine, num_steps)
    if isinstance(runner, FullRunner):
        runner.decode = static
    return times[True], times[False]


def _time_steps(engine: LLMEngine, num_steps: int) -> list[float]:
    """A step ends when its tokens are on the host, so no other wait for the GPU is needed."""
    engine.step()  # the first after a change of path
    found = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def logp_gap(bench: Bench) -> list[Row]:
    gap = measure_gap(bench, bench.engine)
    return [
        bench.row("logp-gap-max", "nats", float(gap.max()), tokens=len(gap)),
        bench.row("logp-gap-mean", "nats", float(gap.mean()), tokens=len(gap)),
    ]


def exact_gap(bench: Bench) -> list[Row]:
    """Of an engine of its own, small enough to stand beside the other."""
    if bench.kind != "auto":  # a cache in 8 bits is not exact, and says so
        return []
    config = replace(bench.engine.config, num_blocks=600, max_num_seqs=8, deterministic=True)
    bench.model.batch_invariant = True
    gap = measure_gap(bench, LLMEngine(bench.model, config))
    bench.model.batch_invariant = False
    return [bench.row("logp-gap-max-exact", "nats", float(gap.max()), tokens=len(gap))]


def measure_gap(bench: Bench, engine: LLMEngine) -> torch.Tensor:
    """Token by token: sampled by the engine, scored again by the training forward pass."""
    model = bench.model
    prompts = requests(bench.work)[0][:8]
    size = min(64, bench.work.lengths[1])
    each = [SamplingParams(max_tokens=size, seed=i, ignore_eos=True) for i in range(len(prompts))]
    gaps = []
    for prompt, output in zip(prompts, engine.generate(prompts, each), strict=True):
        ids = torch.tensor(prompt + output.ids, device=model.device)
        context = PackedContext.from_lengths([len(ids)], str(model.device))
        context.batch_invariant = model.batch_invariant
        with torch.no_grad():
            hidden = model(ids, packed_positions([len(ids)]).to(model.device), context)
            logp = linear_logprob(
                hidden[len(prompt) - 1 : -1],
                model.lm_head_weight,
                ids[len(prompt) :],
                packed=model.lm_head_packed,
                batch_invariant=model.batch_invariant,
            )
        gaps.append((logp.float().cpu() - torch.tensor(output.logps)).abs())
    return torch.cat(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=sorted(WORKLOADS), default="qwen3-0.6b")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="then skip the rest")
    args = parser.parse_args()
    place = resolve_device(args.device)
    enter_device(place)
    device = place.type
    start, skipped = time.monotonic(), []
    ceilings = measure_ceilings(device)
    extra = {"ceilings": ceilings, "machine": machine(device)}
    work = WORKLOADS[args.shape]
    model = make_model(work.model, str(place))
    rows: list[Row] = []
    for kind in KINDS:
        bench = None  # the last one's cache goes before the next one's comes
        for measure in (throughput, logp_gap, exact_gap, decode_steps):
            if time.monotonic() - start > args.budget_s:
                skipped.append(f"{measure.__name__} {kind}")
                continue
            bench = bench or Bench(model, work, ceilings["TB/s"] * 1e12, kind)
            rows += measure(bench)
            if args.json:  # after each: whoever stops this keeps what it had
                save(args.json, rows, extra | {"skipped": skipped})
    print_rows(rows)
    if args.json:
        save(args.json, rows, extra | {"skipped": skipped})
    return 0


def save(path: Path, rows: list[Row], extra: Row) -> None:
    write_json(path, rows)
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, **extra}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
