"""Times agent rollouts and a whole GRPO step, beside transformers and TRL in the same run.

    bash scripts/bench.sh rl [--peers] [--json FILE] [--threads 1 2] [--dtypes bf16 fp32]

Rows (workloads in peers/workload.py):
    rollout-agent      sampled tokens/s of 64 rollouts of 3 turns; peer transformers.generate
    grpo-step          seconds of generate + train + weight sync; peer TRL's GRPOTrainer
    grpo-peak-memory   peak resident bytes of that process

Every measurement is a process of its own, pinned to as many cores as it has threads; ours and the
peer's alternate, medians are compared. The bound is arithmetic: floating-point operations over the
matmul rate measured in the same run, with a group's prompt forwarded once and nothing else counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS / "peers"))

import workload  # noqa: E402

HEAD, BODY = 28_311_552, 106_203_456  # SmolLM2-135M: weights of the (tied) head and of the rest


# -- our side, in a process of its own -----------------------------------------------------------


def run_rollouts(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    import torch

    from nanoengine.model.hf import load_model
    from nanoinfer.engine import InferConfig, LLMEngine
    from nanoinfer.sampling import SamplingParams

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    engine = LLMEngine(load_model(folder, kind), InferConfig())
    contexts, observations = workload.agent_prompts(), workload.agent_observations()
    engine.generate([contexts[0][:32]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
    start = time.perf_counter()
    for turn in range(workload.TURNS):
        params = [
            SamplingParams(max_tokens=workload.TURN, ignore_eos=True, seed=1000 * turn + i)
            for i in range(len(contexts))
        ]
        for i, output in enumerate(engine.generate(contexts, params)):
            last = turn == workload.TURNS - 1
            contexts[i] += output.ids + ([] if last else observations[turn][i])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_s": workload.AGENT_TOKENS / seconds, **peak()}


def run_step(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Three GRPO steps as TRL does them; the first warms up."""
    import torch

    from nanoengine.engine import Engine, EngineConfig
    from nanoengine.model.hf import load_model
    from nanoengine.model.tokenizer import ChatTokenizer
    from nanoinfer.engine import InferConfig, LLMEngine
    from nanoinfer.sampling import SamplingParams
    from nanorl.algorithms.spec import AlgorithmSpec
    from nanorl.batching import build_batch, logp_gap
    from nanorl.types import Rollout

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
        groups = [
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
                for m, out in enumerate(outputs[g * 8 : (g + 1) * 8])
            ]
            for g, prompt in enumerate(prompts)
        ]
        batch = build_batch(groups, AlgorithmSpec(), max_tokens=512)
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


def peak() -> dict[str, int]:
    return {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def run_rate(_: str, dtype: str, threads: int) -> dict[str, Any]:
    """Matmul rates of this machine in FLOP/s: large, and decoding (64 rows, prepacked weights)."""
    import torch

    from kernels import linear, pack_weight

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def best(work: Any, flops: float) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return flops / min(times)

    weight = torch.randn(3072, 576).to(kind)
    packed = pack_weight(weight)
    with torch.no_grad():
        rates = {}
        for name, rows in (("train", 1024), ("decode", 64)):
            x = torch.randn(rows, 576).to(kind)
            flops = 2.0 * rows * 576 * 3072
            rates[name] = best(lambda x=x: linear(x, weight, packed=packed), flops)
    return rates


WORKERS = {"rollouts": run_rollouts, "step": run_step, "rate": run_rate}


# -- the comparison ------------------------------------------------------------------------------


def measure(command: list[str], threads: int) -> dict[str, Any]:
    """Run a process that prints one JSON line, pinned to `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def bounds(rates: dict[str, float]) -> dict[str, float]:
    """Lower bounds: tokens/s of the rollouts, seconds of the GRPO step."""
    w = workload
    new = w.GROUPS * w.MEMBERS * (w.TURN * w.TURNS + w.OBSERVATION * (w.TURNS - 1))
    body = 2.0 * BODY * (w.GROUPS * w.PROMPT + new)
    rollouts_s = (body + 2.0 * HEAD * w.AGENT_TOKENS) / rates["decode"]
    prompt_tokens = sum(len(text.split()) for text in w.step_prompts())
    rows = prompt_tokens + w.STEP_TOKENS
    generate_s = (2.0 * BODY * rows + 2.0 * HEAD * w.STEP_TOKENS) / rates["decode"]
    # Backward twice the forward; the head's logits are computed again in backward.
    train_s = (6.0 * BODY * rows + 8.0 * HEAD * w.STEP_TOKENS) / rates["train"]
    return {"rollouts": w.AGENT_TOKENS / rollouts_s, "step": generate_s + train_s}


def compare(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    mine = [sys.executable, __file__, "--worker"]
    tail = [args.model, dtype, str(threads)]
    peers = SCRIPTS / "peers"
    ours: dict[str, list[dict]] = {"rollouts": [], "step": []}
    theirs: dict[str, list[dict]] = {"rollouts": [], "step": []}
    scripts = {"rollouts": "transformers_rollout.py", "step": "trl_grpo.py"}
    rates = measure([*mine, "rate", *tail], threads)
    for _ in range(args.runs):
        for name, script in scripts.items():
            ours[name].append(measure([*mine, name, *tail], threads))
            print(f"  {name} {dtype} x{threads}: {ours[name][-1]}", file=sys.stderr, flush=True)
            if args.peers:
                theirs[name].append(
                    measure([args.peers_python, str(peers / script), *tail], threads)
                )
                print(f"  peer {theirs[name][-1]}", file=sys.stderr, flush=True)
    bound = bounds(rates)

    def row(name: str, work: str, key: str, unit: str, peer: str, limit: float | None) -> dict:
        value = median(r[key] for r in ours[work])
        other = median(r[key] for r in theirs[work]) if theirs[work] else None
        higher_is_better = unit == "tokens/s"
        ratio = None if other is None else (value / other if higher_is_better else other / value)
        bound_ratio = None
        if limit is not None:
            bound_ratio = value / limit if higher_is_better else limit / value
        return {
            "name": name,
            "dtype": dtype,
            "threads": threads,
            "value": value,
            "unit": unit,
            "peer": peer if theirs[work] else None,
            "peer_value": other,
            "ratio": ratio,
            "bound": limit,
            "bound_ratio": bound_ratio,
            "runs": {"ours": ours[work], "peer": theirs[work]},
        }

    return [
        row(
            "rollout-agent",
            "rollouts",
            "tokens_per_s",
            "tokens/s",
            "transformers",
            bound["rollouts"],
        ),
        row("grpo-step", "step", "seconds", "s", "trl", bound["step"]),
        row("grpo-peak-memory", "step", "peak_rss_bytes", "bytes", "trl", None),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true", help="measure the peers in the same run")
    parser.add_argument("--peers-python", default=str(SCRIPTS.parent / ".venv-peers/bin/python"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--runs", type=int, default=1, help="alternations of ours and the peer")
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
    rows = [row for dtype in args.dtypes for n in args.threads for row in compare(args, dtype, n)]
    from bench_output import print_rows, write_json

    print_rows(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
