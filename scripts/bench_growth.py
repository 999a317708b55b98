"""Measures what work costs as it grows: batches, contexts, queues, groups.

    bash scripts/bench.sh growth [--json FILE] [--threads 1 2] [--dtypes bf16] [--only waiting]
    python scripts/bench_growth.py --draw docs/growth.svg       the newest figures of benchmarks/

Rows, one for each size N:
    batch-N      sampled tokens/s of N requests at once, prompts of 64 tokens, 32 sampled each
    int8-N       the same with int8 matrices
    prefill-N    prompt tokens/s of two requests of N tokens
    context-N    sampled tokens/s of two requests, 32 tokens after a context of N that is cached
    waiting-N    microseconds in which the scheduler chooses a step and commits it, 32 requests
                 running and N waiting; every step one ends and another is admitted
    group-N      milliseconds of a whole GRPO step a sampled token, 4 prompts, groups of N

Every kind of row is measured in a process of its own, pinned to as many cores as it has threads.
The bounds are roofline.py's. There are no peers: what is read off is the shape of the curve.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import roofline
from bench_infer import Clock
from bench_rl import run_step, step_bound
from generated_part import newest
from model_bench import PEERS, make_parser, make_row, measure, run_benchmark, run_rate, with_rates

from nanorl.observability.report.markup import element, tenth
from nanorl.observability.report.svg import Scale, curve, label, sheet

sys.path.insert(0, str(PEERS))

import workload

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT, SAMPLED = 64, 32
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8160)  # 8,192 is the model's longest, with SAMPLED
PAIR = 2  # requests of a long context
WAITING = (10, 100, 1_000, 10_000)
RUNNING, QUEUE_STEPS = 32, 200
GROUPS = (2, 4, 8, 16, 32)

Points = dict[str, float]  # the names of rows and their values


# -- the work of each kind, in a process of its own ------------------------------------------------


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Prompts that share nothing."""
    draw = np.random.RandomState(length * 1000 + count)
    found: list[list[int]] = draw.randint(
        workload.FIRST_ID, workload.VOCAB, (count, length)
    ).tolist()
    return found


def make_engine(folder: str, dtype: str, threads: int, **options: Any) -> Any:
    import torch

    from nanoengine.formats.hf import load_model
    from nanoengine.optim import DTYPES
    from nanoinfer.config import InferConfig
    from nanoinfer.engine import LLMEngine
    from nanoinfer.params import SamplingParams

    torch.set_num_threads(threads)
    engine = LLMEngine(load_model(folder, DTYPES[dtype]), InferConfig(**options))
    engine.generate(prompts_of(2, 32), SamplingParams(max_tokens=8, ignore_eos=True))
    return engine


def sample(engine: Any, prompts: Sequence[list[int]], num_tokens: int) -> tuple[float, list[Any]]:
    """Seconds, and what each request sampled."""
    from nanoinfer.params import SamplingParams

    each = [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i) for i in range(len(prompts))
    ]
    with Clock() as clock:
        outputs = engine.generate(prompts, each)
    return clock.seconds, outputs


def run_batch(folder: str, dtype: str, threads: int) -> Points:
    return measure_batches("batch", make_engine(folder, dtype, threads, max_num_seqs=max(BATCHES)))


def run_int8(folder: str, dtype: str, threads: int) -> Points:
    options = {"max_num_seqs": max(BATCHES), "quantization": "int8"}
    return measure_batches("int8", make_engine(folder, dtype, threads, **options))


def measure_batches(kind: str, engine: Any) -> Points:
    points = {}
    for size in BATCHES:
        repeats = max(1, 16 // size)
        seconds = [sample(engine, prompts_of(size, PROMPT + i), SAMPLED)[0] for i in range(repeats)]
        points[f"{kind}-{size}"] = size * SAMPLED / median(seconds)
    return points


def run_context(folder: str, dtype: str, threads: int) -> Points:
    engine = make_engine(folder, dtype, threads)
    points = {}
    for length in CONTEXTS:
        prompts = prompts_of(PAIR, length)
        prefill_s, _ = sample(engine, prompts, 1)
        points[f"prefill-{length}"] = PAIR * length / prefill_s
        decode_s, _ = sample(engine, prompts, SAMPLED)  # all but the last token is cached
        points[f"context-{length}"] = PAIR * SAMPLED / decode_s
    return points


def run_waiting(_: str, __: str, ___: int) -> Points:
    return {f"waiting-{count}": 1e6 * step_seconds(count) for count in WAITING}


def step_seconds(num_waiting: int) -> float:
    """Median seconds of the scheduler's part of a step."""
    from nanoinfer.block_manager import BlockManager
    from nanoinfer.params import SamplingParams
    from nanoinfer.scheduler import BatchScheduler
    from nanoinfer.sequence import Sequence as Request

    blocks = BlockManager(RUNNING * (2 * PROMPT + QUEUE_STEPS) // 16, 16, True)
    scheduler = BatchScheduler(blocks, PROMPT + RUNNING, RUNNING)
    params = SamplingParams(max_tokens=PROMPT, ignore_eos=True)
    for handle, prompt in enumerate(prompts_of(num_waiting + QUEUE_STEPS + RUNNING, PROMPT)):
        scheduler.add(Request(handle, prompt, params))
    times: list[float] = []
    while len(times) < QUEUE_STEPS:
        begin = time.perf_counter()
        step = scheduler.schedule()
        scheduler.commit(step)
        seconds = time.perf_counter() - begin
        for seq in step.seqs:
            if not seq.num_uncomputed_tokens:
                seq.ids.append(seq.handle % 7)
        if len(scheduler.running) == RUNNING:
            times.append(seconds)
            scheduler.remove(scheduler.running[0])
    return median(times)


def run_groups(folder: str, dtype: str, threads: int) -> Points:
    tokens = len(workload.step_prompts()) * workload.STEP_COMPLETION
    return {
        f"group-{size}": 1e3 * run_step(folder, dtype, threads, size)["seconds"] / (tokens * size)
        for size in GROUPS
    }


WORKERS: Mapping[str, Callable[[str, str, int], dict[str, Any]]] = {
    "batch": run_batch,
    "int8": run_int8,
    "context": run_context,
    "waiting": run_waiting,
    "group": run_groups,
    "rate": run_rate,
}
KINDS = tuple(WORKERS)[:-1]
UNITS = {
    "batch": "tokens/s",
    "int8": "tokens/s",
    "prefill": "tokens/s",
    "context": "tokens/s",
    "waiting": "us",
    "group": "ms",
}


# -- rows ------------------------------------------------------------------------------------------


def bound_of(name: str, dtype: str, rates: roofline.Rates) -> float | None:
    """In the row's unit; the scheduler's has none."""
    kind, _, size = name.partition("-")
    n, element = int(size), {"bf16": 2, "fp32": 4}[dtype]
    if kind == "batch":
        work = roofline.requests([PROMPT] * n, [SAMPLED] * n)
        return work.num_sampled / work.seconds(rates, element)
    if kind == "prefill":
        return PAIR * n / roofline.requests([n] * PAIR, [1] * PAIR).seconds(rates, element)
    if kind == "context":
        lengths = range(n, n + SAMPLED)  # keys that a row sees
        steps = [roofline.DecodeStep(PAIR, PAIR * length, PAIR * length) for length in lengths]
        work = roofline.Generation(PAIR * SAMPLED, 0, 0, steps)
        return work.num_sampled / work.seconds(rates, element)
    if kind == "group":
        sampled = len(workload.step_prompts()) * workload.STEP_COMPLETION * n
        return 1e3 * step_bound(dtype, rates, n) / sampled
    return None


def compare(args: argparse.Namespace, dtype: str, threads: int) -> Iterator[dict[str, Any]]:
    def measure_all() -> list[Points]:
        tail = [args.model, dtype, str(threads)]
        return [
            measure([sys.executable, __file__, "--worker", kind, *tail], threads)
            for kind in args.only
        ]

    measured, rates = with_rates(args, __file__, dtype, threads, measure_all)
    for points in measured:
        for name, value in points.items():
            yield make_row(
                name,
                UNITS[name.partition("-")[0]],
                dtype=dtype,
                threads=threads,
                value=value,
                bound=bound_of(name, dtype, rates),
                runs={"rates": rates},
            )


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for dtype in args.dtypes for n in args.threads for row in compare(args, dtype, n)]


# -- the picture -----------------------------------------------------------------------------------

PANELS = (
    ("requests at once", "tokens/s", ("batch",)),
    ("tokens of context", "tokens/s", ("prefill", "context")),
    ("requests waiting", "µs a step", ("waiting",)),
    ("rollouts a group", "ms of a GRPO step a token", ("group",)),
)
COLOURS = ("#3568b0", "#b0552f")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 430, 240, 58, 16, 44, 34


def draw(measured: Mapping[str, Any]) -> str:
    """Four panels, both axes in powers of two; the bound is dashed. One dtype and number of
    threads: the last of the file."""
    dtype, threads = measured["rows"][-1]["dtype"], measured["rows"][-1]["threads"]
    rows = [r for r in measured["rows"] if (r["dtype"], r["threads"]) == (dtype, threads)]
    cores = f"{threads} thread{'s' if threads > 1 else ''}"
    title = f"SmolLM2-135M, {dtype}, {cores}, {measured['hardware']}, {measured['date']}"
    parts = []
    for i, (across, up, kinds) in enumerate(PANELS):
        curves = {kind: [r for r in rows if r["name"].startswith(f"{kind}-")] for kind in kinds}
        if any(curves.values()):
            place = f"translate({i % 2 * WIDTH} {24 + i // 2 * HEIGHT})"
            parts.append(element("g", _panel(f"{up}, by {across}", curves), transform=place))
    return sheet(parts, 2 * WIDTH, 2 * HEIGHT + 24, title=title, font_size=11)


def _panel(said: str, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    points = {kind: [(_size(r), r["value"], r["bound"]) for r in c] for kind, c in curves.items()}
    every = [point for line in points.values() for point in line]
    sizes = sorted({n for n, _, _ in every})
    ends = [y for _, value, bound in every for y in (value, bound) if y]
    low, high = int(log2(min(ends)) // 1), int(-(-log2(max(ends)) // 1))
    x = Scale(log2(sizes[0]), log2(sizes[-1]), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)

    parts = [label(LEFT, TOP - 22, said)]
    for power in range(low, high + 1, max(1, (high - low) // 5)):
        line = f"M{LEFT} {tenth(y(power))}H{WIDTH - RIGHT}"
        parts.append(element("path", d=line, stroke="#ddd"))
        number = f"{2.0**power:,.4g}"
        parts.append(label(LEFT - 6, y(power), number, text_anchor="end", dy=4))
    for n in sizes:
        parts.append(label(x(log2(n)), HEIGHT - 14, f"{n:,}", text_anchor="middle"))
    for i, (kind, line_of_kind) in enumerate(points.items()):
        own = [(x(log2(n)), y(log2(value))) for n, value, _ in line_of_kind]
        bound = [(x(log2(n)), y(log2(limit))) for n, _, limit in line_of_kind if limit]
        named = f"{kind} (dashed: bound)" if bound and len(points) == 1 else kind
        parts += [
            curve(own, fill="none", stroke=COLOURS[i], stroke_width=2),
            curve(bound, fill="none", stroke=COLOURS[i], stroke_dasharray="3 3"),
            label(LEFT + 110 * i, TOP - 8, named, fill=COLOURS[i]),
        ]
    return "".join(parts)


def _size(row: Mapping[str, Any]) -> int:
    return int(row["name"].partition("-")[2])


def main() -> int:
    parser = make_parser(__doc__, ["bf16"])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--draw", type=Path, help="draw the newest figures, and measure nothing")
    args = parser.parse_args()
    if args.draw:
        measured = newest("growth")
        if measured is None:
            raise SystemExit("--draw: no benchmarks/growth_DATE.json yet; measure with --json")
        args.draw.write_text(draw(measured), "utf-8")
        return 0
    return run_benchmark(args, WORKERS, make_rows)


if __name__ == "__main__":
    sys.exit(main())
