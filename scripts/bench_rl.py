"""Times agent rollouts and a whole GRPO step, beside transformers and TRL in the same run.

    bash scripts/bench.sh rl [--peers] [--json FILE] [--threads 1 2] [--dtypes bf16 fp32]

Rows (workloads in peers/workload.py):
    rollout-agent      sampled tokens/s of 64 rollouts of 3 turns; peer transformers.generate
    grpo-step          seconds of generate + train + weight sync; peer TRL's GRPOTrainer
    grpo-peak-memory   peak resident bytes of that process

Measurements of ours and of the peer alternate (model_bench.py), medians are compared. Rollouts are
bench_infer.py's. The bounds are roofline.py's; a group's prompt is forwarded once.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import roofline
from bench_infer import bound, run_agent
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

PEER_OF = {
    "rollouts": Peer("transformers", "transformers_rollout.py"),
    "step": Peer("trl", "trl_grpo.py"),
}


# -- our side, in a process of its own -----------------------------------------------------------


def run_step(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Three GRPO steps as TRL does them; the first warms up."""
    import torch

    from nanoengine.engine import Engine, EngineConfig
    from nanoengine.model.hf import load_model
    from nanoengine.model.tokenizer import ChatTokenizer
    from nanoinfer.config import InferConfig
    from nanoinfer.engine import LLMEngine
    from nanoinfer.params import SamplingParams
    from nanorl.algorithms.spec import AlgorithmSpec
    from nanorl.batching import build_batch, logp_gap

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    tokenizer = ChatTokenizer.from_folder(folder)
    rollout_engine = LLMEngine(load_model(folder, kind), InferConfig(cache_bytes=64 << 20))
    config: Any = {"dtype": dtype, "lr": 1e-6, "share_prefix": True, "micro_batch_tokens": 1024}
    trainer = Engine(load_model(folder, torch.float32), EngineConfig(**config))
    prompts = [tokenizer.encode(text) for text in workload.step_prompts()]
    parts: list[dict[str, float]] = []
    for step in range(3):
        begin = time.perf_counter()
        ids = [prompt for prompt in prompts for _ in range(workload.STEP_GROUP)]
        params = [
            SamplingParams(max_tokens=workload.STEP_COMPLETION, ignore_eos=True, seed=99 * step + i)
            for i in range(len(ids))
        ]
        outputs = rollout_engine.generate(ids, params)
        generated = time.perf_counter()
        groups = make_groups(prompts, outputs)
        batch = build_batch(groups, AlgorithmSpec(), max_tokens=512, version=step)
        trainer.train_step(batch.samples, batch.loss_fn)
        trained = time.perf_counter()
        rollout_engine.update_weights(trainer.export_state(), step + 1)
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


def make_groups(prompts: list[list[int]], outputs: list[Any]) -> list[list[Any]]:
    """The rollouts of each prompt, scored as the peer scores them."""
    from nanorl.types import Rollout

    size = workload.STEP_GROUP
    return [
        [
            Rollout(
                task_id=str(g),
                group_id=str(g),
                rollout_id=f"{g}-{m}",
                tokens=prompt + out.ids,
                loss_mask=[0] * len(prompt) + [1] * len(out.ids),
                logps=[0.0] * len(prompt) + out.logps,
                versions=[-1] * len(prompt) + out.versions,
                reward=workload.reward(out.ids),
            )
            for m, out in enumerate(outputs[g * size : (g + 1) * size])
        ]
        for g, prompt in enumerate(prompts)
    ]


WORKERS = {"rollouts": run_agent, "step": run_step, "rate": run_rate}


# -- the comparison ------------------------------------------------------------------------------


def step_bound(dtype: str, rates: roofline.Rates) -> float:
    """The least seconds of a GRPO step: its rollouts, then forward and backward over them."""
    w, sampled = workload, workload.STEP_COMPLETION
    prompts = [len(text.split()) for text in w.step_prompts()]  # a word is at least a token
    generate_s = (
        sum(
            roofline.group_rollouts(1, w.STEP_GROUP, prompt, 1, sampled, 0).flops()
            for prompt in prompts
        )
        / rates["flops"]
    )
    own = [
        w.STEP_GROUP * (roofline.causal_pairs(p + sampled) - roofline.causal_pairs(p))
        for p in prompts
    ]
    pairs = sum(map(roofline.causal_pairs, prompts)) + sum(own)
    train = roofline.training_flops(sum(prompts) + w.STEP_TOKENS, w.STEP_TOKENS, pairs)
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


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for dtype in args.dtypes for n in args.threads for row in compare(args, dtype, n)]


if __name__ == "__main__":
    arguments = make_parser(__doc__, ["bf16", "fp32"]).parse_args()
    sys.exit(run_benchmark(arguments, WORKERS, make_rows))
