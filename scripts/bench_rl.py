"""Times agent rollouts and a whole GRPO step, beside transformers and TRL in the same run.

    bash scripts/bench.sh rl [--peers] [--json FILE] [--threads 1 2] [--dtypes bf16 fp32] [--small]

Rows (workloads in peers/workload.py):
    rollout-agent        sampled tokens/s of 64 rollouts of 3 turns; peer transformers.generate
    grpo-step            seconds of generate + train + weight sync; peer TRL's GRPOTrainer
    grpo-peak-memory     peak resident bytes of that process

and, on several threads, what roles in processes of their own change (rl_work.py):
    rollout-2-replicas   the tokens/s of rollout-agent's load on two replicas that share the
                         threads; peer inline: one engine with all of them
    rollout-apart-step   seconds of a GRPO step with learner and replica apart, --rl.max-staleness
                         1; peer inline: one process, synchronous. Runs hold the roles' idle shares
    tools-sleep          seconds of 64 rollouts whose tool sleeps 300 ms; the bound is the larger of
                         the model's seconds without the tool and of the tool's alone

With --to-success, instead of all these:
    async-to-success     seconds of RL until 60 % of the rollouts of three steps succeed, of preset
                         tiny with staleness 2, beside the same run without (peer sync), one at a
                         time on all cores; means over three seeds, which share their warm starts.
                         -apart: trainer and replica in processes of their own; -slow: with a tool
                         that takes 300 ms longer. About 40 minutes; compare_algorithms.sh
                         --variants async is the same with curves

Measurements of ours and of the peer alternate (model_bench.py), medians are compared. Rollouts are
bench_infer.py's. The bounds are roofline.py's; a group's prompt is forwarded once. `--small` tries
the rows of roles out with a tiny model of random weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import roofline
from bench_infer import bound, run_agent
from comparison.figures import Figures
from comparison.matrix import Matrix, MatrixPlan
from comparison.variants import read_variants
from model_bench import (
    PEERS,
    Peer,
    alternate,
    make_parser,
    make_row,
    measure,
    peak,
    run_benchmark,
    run_rate,
    with_rates,
)

sys.path.insert(0, str(PEERS))

import workload
from scored_groups import make_groups

PEER_OF = {
    "rollouts": Peer("transformers", "transformers_rollout.py"),
    "step": Peer("trl", "trl_grpo.py"),
}


# -- our side, in a process of its own -----------------------------------------------------------


def run_step(
    folder: str, dtype: str, threads: int, group_size: int = workload.STEP_GROUP
) -> dict[str, Any]:
    """Three GRPO steps as TRL does them; the first warms up. As in a run of one process, both
    engines read the trainer's weights and take turns (nanorl/learner.py)."""
    import torch

    from nanoengine.config import EngineConfig
    from nanoengine.formats.hf import load_model
    from nanoengine.state.whole_engine import Engine
    from nanoengine.text.tokenizer import ChatTokenizer
    from nanoinfer.config import InferConfig
    from nanoinfer.engine import LLMEngine
    from nanoinfer.params import SamplingParams
    from nanorl.algorithms.spec import AlgorithmSpec
    from nanorl.batch_metrics import logp_gap
    from nanorl.batching import build_batch
    from nanorl.options.engine_config import EngineLimits

    torch.set_num_threads(threads)
    tokenizer = ChatTokenizer.from_folder(folder)
    sizes = {"micro_batch_tokens": 1024, "activation_mb": EngineLimits().activation_mb}
    config: Any = {"dtype": dtype, "lr": 1e-6, "share_prefix": True, **sizes}
    trainer = Engine(load_model(folder, packs=False), EngineConfig(**config))
    rollout_engine = LLMEngine(trainer.model, InferConfig(cache_bytes=64 << 20))
    prompts = [tokenizer.encode(text) for text in workload.step_prompts()]
    parts: list[dict[str, float]] = []
    for step in range(3):
        begin = time.perf_counter()
        ids = [prompt for prompt in prompts for _ in range(group_size)]
        params = [
            SamplingParams(max_tokens=workload.STEP_COMPLETION, ignore_eos=True, seed=99 * step + i)
            for i in range(len(ids))
        ]
        outputs = rollout_engine.generate(ids, params)
        generated = time.perf_counter()
        groups = make_groups(prompts, outputs)
        batch = build_batch(groups, AlgorithmSpec(), max_tokens=512, version=step)
        rollout_engine.sleep()
        trainer.train_step(batch.samples, replace(batch.loss_fn, is_exact=True))  # as a run does
        trained = time.perf_counter()
        rollout_engine.adopt_weights(step + 1)
        rollout_engine.wake()
        end = time.perf_counter()
        parts.append(
            {
                "seconds": end - begin,
                "generate_s": generated - begin,
                "train_s": trained - generated,
                "sync_s": end - trained,
                "logp_gap_max": logp_gap(batch.samples, trainer.last_logps)["logp_gap_max"],
            }
        )
    measured = sorted(parts[1:], key=lambda p: p["seconds"])
    return {**measured[len(measured) // 2], **peak()}


def run_roles(work: str, folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """One of the functions of rl_work.py."""
    import rl_work

    found: dict[str, Any] = getattr(rl_work, work)(folder, dtype, threads)
    return found


ROWS_OF_ROLES = ("rollout-2-replicas", "rollout-apart-step", "tools-sleep")
ROLES = ("inline_load", "replicas_load", "sleeping_tools", "inline_steps", "apart_steps")
WORKERS = {"rollouts": run_agent, "step": run_step, "rate": run_rate} | {
    work: partial(run_roles, work) for work in ROLES
}


# -- the comparison ------------------------------------------------------------------------------


def step_bound(dtype: str, rates: roofline.Rates, group_size: int = workload.STEP_GROUP) -> float:
    """The least seconds of a GRPO step: its rollouts, then forward and backward over them."""
    w, sampled = workload, workload.STEP_COMPLETION
    prompts = [len(text.split()) for text in w.step_prompts()]  # a word is at least a token
    generate_s = (
        sum(
            roofline.group_rollouts(1, group_size, prompt, 1, sampled, 0).flops()
            for prompt in prompts
        )
        / rates["flops"]
    )
    own = [
        group_size * (roofline.causal_pairs(p + sampled) - roofline.causal_pairs(p))
        for p in prompts
    ]
    trained = len(prompts) * group_size * sampled
    pairs = sum(map(roofline.causal_pairs, prompts)) + sum(own)
    train = roofline.training_flops(sum(prompts) + trained, trained, pairs)
    return generate_s + train / rates["flops"]


def compare(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    def measure_all() -> dict[str, dict[str, list[dict[str, Any]]]]:
        return {
            work: alternate(args, __file__, work, [peer], dtype, threads)
            for work, peer in PEER_OF.items()
        }

    runs, rates = with_rates(args, __file__, dtype, threads, measure_all)

    def row(name: str, work: str, key: str, unit: str, bound: float | None) -> Any:
        peer = PEER_OF[work].name
        value = {who: median(run[key] for run in found) for who, found in runs[work].items()}
        return make_row(
            name,
            unit,
            dtype=dtype,
            threads=threads,
            value=value["ours"],
            peer=peer,
            peer_value=value.get(peer),
            bound=bound,
            runs={"rates": rates} | runs[work],
        )

    rate, bytes_ = "tokens_per_s", "peak_rss_bytes"
    return [
        row("rollout-agent", "rollouts", rate, "tokens/s", bound("W1-agent", dtype, rates)),
        row("grpo-step", "step", "seconds", "s", step_bound(dtype, rates)),
        row("grpo-peak-memory", "step", bytes_, "bytes", None),
    ]


def take_turns(
    args: argparse.Namespace, dtype: str, threads: int, works: tuple[str, ...]
) -> list[list[dict[str, Any]]]:
    """The measurements of each work of rl_work.py, taken in turns."""
    runs: list[list[dict[str, Any]]] = [[] for _ in works]
    for _ in range(args.runs):
        for found, work in zip(runs, works, strict=True):
            command = [sys.executable, __file__, "--worker", work, args.model, dtype, str(threads)]
            found.append(measure(command, threads))
    return runs


def compare_roles(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    """The rows of roles in processes of their own beside those of one process."""

    def pair(name: str, key: str, unit: str, ours: str, inline: str) -> dict[str, Any]:
        runs = take_turns(args, dtype, threads, (ours, inline))
        value, peer_value = (median(run[key] for run in found) for found in runs)
        return make_row(
            name,
            unit,
            dtype=dtype,
            threads=threads,
            value=value,
            peer="inline",
            peer_value=peer_value,
            runs=dict(zip(("ours", "inline"), runs, strict=True)),
        )

    replicas, apart, tools = ROWS_OF_ROLES
    rows = [
        pair(replicas, "tokens_per_s", "tokens/s", "replicas_load", "inline_load"),
        pair(apart, "step_s", "s", "apart_steps", "inline_steps"),
    ]
    (runs,) = take_turns(args, dtype, threads, ("sleeping_tools",))
    row = make_row(
        tools,
        "s",
        dtype=dtype,
        threads=threads,
        value=median(run["wall_s"] for run in runs),
        bound=median(max(run["model_s"], run["tools_s"]) for run in runs),
        runs={"ours": runs},
    )
    return [*rows, row]


def compare_to_success(work: Path) -> list[dict[str, Any]]:
    """The rows of `--to-success`, from runs below `work`, which are not repeated if they are there.
    A value is None where not every seed came so far."""
    chosen = read_variants("async")
    plan = MatrixPlan(out=work, preset="tiny", seeds=(0, 1, 2), steps=12, extra=())
    jobs = plan.jobs(chosen)
    threads = len(os.sched_getaffinity(0))
    if failed := Matrix(jobs, num_parallel=1, threads=threads, say=print).run():
        raise SystemExit(f"{failed[0].name} failed: {failed[0].error}; see {failed[0].log}")
    figures = Figures.read(jobs, chosen, level=0.6, window=3, notes={})
    found = {row["name"]: row for row in figures.rows()}

    def row(name: str, ours: str, peer: str) -> dict[str, Any]:
        seconds = "seconds_to_level"
        return make_row(
            name,
            "s",
            dtype="bf16",
            threads=threads,
            value=found[ours][seconds],
            peer="sync",
            peer_value=found[peer][seconds],
            runs={"ours": found[ours]["runs"], "sync": found[peer]["runs"]},
        )

    return [
        row(f"async-to-success{apart}{slow}", f"{way}-{tool}", f"sync-{tool}")
        for slow, tool in (("", "quick"), ("-slow", "slow"))
        for apart, way in (("", "async"), ("-apart", "apart"))
    ]


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.to_success:
        return compare_to_success(args.to_success)
    if args.small:
        from nanorl.envs.tasks.tiny_model import build_tiny_model

        with tempfile.TemporaryDirectory() as folder:
            args.model = str(build_tiny_model(Path(folder)))
            return compare_roles(args, "fp32", 1)
    rows = [row for dtype in args.dtypes for n in args.threads for row in compare(args, dtype, n)]
    for dtype in args.dtypes:
        for threads in (n for n in args.threads if n > 1):
            rows += compare_roles(args, dtype, threads)
    return rows


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, ["bf16", "fp32"])
    parser.add_argument("--to-success", type=Path, help="only that row; the folder of its runs")
    parser.add_argument("--small", action="store_true", help="the rows of roles, on a tiny model")
    arguments = parser.parse_args(words)
    arguments.small |= arguments.to_success is not None  # neither needs the real model
    return arguments


if __name__ == "__main__":
    sys.exit(run_benchmark(read_arguments(sys.argv[1:]), WORKERS, make_rows))
