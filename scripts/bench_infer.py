"""Times generation, beside transformers in the same run.

    bash scripts/bench.sh infer [--peers] [--json FILE] [--threads 1 2] [--dtype bf16 fp32]

Rows, sampled tokens/s (workloads in peers/workload.py):
    W1         32 requests of mixed lengths, all at once, greedy; peer transformers.generate, the
               faster of one batch and of batches of 8
    W1-agent   64 rollouts of 3 turns, members of a group share their prompt; peer
               transformers.generate, all in one batch

Every measurement is a process of its own, pinned to as many cores as it has threads; ours and the
peer's alternate, medians are compared. The bound is arithmetic: the operations of the linear
layers over the matmul rate of decoding measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS / "peers"))

import bench_rl  # noqa: E402
import workload  # noqa: E402


def run_serve(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    import torch

    from nanoengine.model.hf import load_model
    from nanoinfer.engine import InferConfig, LLMEngine
    from nanoinfer.sampling import SamplingParams

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    engine = LLMEngine(load_model(folder, kind), InferConfig())
    requests = workload.serve_requests()
    warm_up = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.generate([[1] * 32] * 2, warm_up)
    params = [
        SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for _, tokens in requests
    ]
    start = time.perf_counter()
    outputs = engine.generate([prompt for prompt, _ in requests], params)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.ids) for output in outputs)
    return {"seconds": seconds, "tokens_per_s": num_tokens / seconds, **bench_rl.peak()}


WORKERS = {"serve": run_serve, "rollouts": bench_rl.run_rollouts, "rate": bench_rl.run_rate}
ROWS = {"serve": "W1", "rollouts": "W1-agent"}
PEERS = {"serve": "transformers_serve.py", "rollouts": "transformers_rollout.py"}


def serve_bound(rate: float) -> float:
    """Tokens/s of W1 if nothing but the linear layers took time."""
    requests = workload.serve_requests()
    sampled = sum(tokens for _, tokens in requests)
    forwarded = sum(len(prompt) + tokens - 1 for prompt, tokens in requests)
    flops = 2.0 * bench_rl.BODY * forwarded + 2.0 * bench_rl.HEAD * sampled
    return sampled / (flops / rate)


def compare(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    worker = [sys.executable, __file__, "--worker"]
    tail = [args.model, dtype, str(threads)]
    rates = bench_rl.measure([*worker, "rate", *tail], threads)
    bounds = {
        "serve": serve_bound(rates["decode"]),
        "rollouts": bench_rl.bounds(rates)["rollouts"],
    }
    ours: dict[str, list[dict]] = {work: [] for work in ROWS}
    theirs: dict[str, list[dict]] = {work: [] for work in ROWS}
    for _ in range(args.runs):
        for work, script in PEERS.items():
            ours[work].append(bench_rl.measure([*worker, work, *tail], threads))
            log(f"{ROWS[work]} {dtype} x{threads}: {ours[work][-1]}")
            if args.peers:
                command = [args.peers_python, str(SCRIPTS / "peers" / script), *tail]
                theirs[work].append(bench_rl.measure(command, threads))
                log(f"peer {theirs[work][-1]}")
    return [make_row(work, dtype, threads, ours[work], theirs[work], bounds[work]) for work in ROWS]


def make_row(
    work: str, dtype: str, threads: int, ours: list[dict], theirs: list[dict], bound: float
) -> dict[str, Any]:
    value = median(run["tokens_per_s"] for run in ours)
    peer_value = median(run["tokens_per_s"] for run in theirs) if theirs else None
    return {
        "name": ROWS[work],
        "dtype": dtype,
        "threads": threads,
        "value": value,
        "unit": "tokens/s",
        "peer": "transformers" if theirs else None,
        "peer_value": peer_value,
        "ratio": None if peer_value is None else value / peer_value,
        "bound": bound,
        "bound_ratio": value / bound,
        "runs": {"ours": ours, "peer": theirs},
    }


def log(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true", help="measure the peer in the same run")
    parser.add_argument("--peers-python", default=str(SCRIPTS.parent / ".venv-peers/bin/python"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--runs", type=int, default=3, help="alternations of ours and the peer")
    parser.add_argument("--model", help="a SmolLM2-135M folder; default: fetched into the cache")
    parser.add_argument("--worker", nargs=4, metavar=("WORK", "MODEL", "DTYPE", "THREADS"))
    args = parser.parse_args()
    if args.worker:
        from kernels.host_memory import reuse_large_buffers

        reuse_large_buffers()
        work, folder, dtype, threads = args.worker
        print(json.dumps(WORKERS[work](folder, dtype, int(threads))))
        return 0
    if args.model is None:
        from nanoengine.model.sources import SMOLLM2, resolve_model

        args.model = str(resolve_model(SMOLLM2.name))
    rows = [row for dtype in args.dtype for n in args.threads for row in compare(args, dtype, n)]
    from bench_output import print_rows, write_json

    print_rows(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
