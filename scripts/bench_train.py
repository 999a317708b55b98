"""Times training: a step beside transformers, pipeline bubbles, and moving weights.

    bash scripts/bench.sh train [--peers] [--json FILE] [--threads 1 2] [--dtypes fp32]

Rows:
    step-vs-transformers   tokens/s of a training step, 8 sequences of 256 tokens (SmolLM2-135M)
    step-ragged-packed     the same on 16 sequences of 33 to 512 tokens: packed, the peer pads
    step-beside-busy       the share of that speed (even sequences) which is left beside another
                           process that computes all the time on the same cores
    tree-vs-rows           the same on 8 rollouts with 4 forks each, 32 sequences: as a tree, whose
                           every distinct token is forwarded once; the peer is our own engine with
                           separate rows, the bound its speed times how much less arithmetic it is
    lora-step              the same on 4 sequences of 256 tokens with an adapter of rank 16 on every
                           linear layer in place of the weights, by processor time; the peer is our
                           own engine that trains all weights
    lora-memory            bytes of what a trainer keeps between steps: weights, masters, moments
                           and gradients, in GB; the peer is the same
    bubble-*               idle share of 4 pipeline processes, 8 micro-batches, sleep as compute;
                           the bound is the closed form (schedules.py)
    export-inproc          GB/s from one model into another by the resharding plan; the bound is
                           plain memory copies in the same run
    export-inproc-tp3      the same from three tensor-parallel parts into a whole model

Training measurements of ours and of the peer alternate (model_bench.py), medians are compared; each
takes the better of two steps after a warm-up. Their bound, but for the tree's, is arithmetic alone
(roofline.py).
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import roofline
from model_bench import (
    PEERS,
    Peer,
    alternate,
    busy_neighbour,
    make_parser,
    make_row,
    measure,
    peak,
    run_benchmark,
    run_rate,
    with_rates,
)

sys.path.insert(0, str(PEERS))

import train_workload as workload

ROWS = {"even": "step-vs-transformers", "ragged": "step-ragged-packed"}
BUBBLES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1}
RANKS, MICROS = 4, 8
RANK = 16  # of the adapter
TP = 3  # SmolLM2-135M has nine heads


def run_train(
    name: str, folder: str, dtype: str, threads: int, *, share_prefix: bool = False
) -> dict[str, Any]:
    """Our step, in this process."""
    import torch

    from nanoengine.config import EngineConfig
    from nanoengine.formats.hf import load_model
    from nanoengine.packing import Sample
    from nanoengine.sft.chats import num_loss_tokens, sft_loss
    from nanoengine.state.whole_engine import Engine

    torch.set_num_threads(threads)
    config: Any = {"dtype": dtype, "lr": 1e-6, "micro_batch_tokens": 2048}
    engine = Engine(load_model(folder), EngineConfig(share_prefix=share_prefix, **config))
    times, losses = [], []
    for step in range(workload.STEPS):
        begin = time.perf_counter()
        sequences = workload.tree_batch(step) if name == "tree" else plain_batch(name, step)
        samples = [Sample(tokens=ids, loss_mask=mask, group="g") for ids, mask in sequences]
        losses.append(engine.train_step(samples, sft_loss, num_loss_tokens)["loss"])
        times.append(time.perf_counter() - begin)
    return {"seconds": min(times[1:]), "loss": losses[0], **peak()}


def run_lora(is_full: bool, folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """A step of an adapter, or of all weights, and what the trainer keeps between two."""
    import torch

    from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
    from nanoengine.adapters.lora_config import LoraConfig
    from nanoengine.adapters.lora_engine import LoraEngine
    from nanoengine.config import EngineConfig
    from nanoengine.formats.hf import load_model
    from nanoengine.optim import DTYPES
    from nanoengine.packing import Sample
    from nanoengine.sft.chats import num_loss_tokens, sft_loss
    from nanoengine.state.whole_engine import Engine

    torch.set_num_threads(threads)
    given: Any = {"dtype": dtype, "lr": 1e-6, "micro_batch_tokens": 1024}
    config, frozen = EngineConfig(**given), 0
    if is_full:
        engine = Engine(load_model(folder), config)
    else:
        base = LoraBase(load_model(folder, DTYPES[dtype]))
        engine = LoraEngine(LoraAdapter(base, LoraConfig(rank=RANK)), config)
        frozen = sum(base.places[name].weight.nbytes for name in engine.adapter.targets)
    for step in range(2):  # the first warms up
        half = plain_batch("even", step)[::2]
        samples = [Sample(tokens=ids, loss_mask=mask) for ids, mask in half]
        begin, cpu = time.perf_counter(), time.process_time()
        loss = engine.train_step(samples, sft_loss, num_loss_tokens)["loss"]
    taken = {"seconds": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
    optimizer = engine.optimizer
    kinds = ("grad", "exp_avg", "exp_avg_sq", *["master"] * (not is_full or dtype == "bf16"))
    trained = sum(x.nbytes for kind in kinds for _, x in optimizer.entries(kind))
    weights = sum(parameter.nbytes for parameter in engine.model.parameters())
    kept = {"weights": weights, "frozen": frozen, "optimizer": trained}
    return {**taken, "loss": loss, "bytes": kept, **peak()}


def plain_batch(name: str, step: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and loss mask of each sequence: all but the first token are trained."""
    return [(ids, [0] + [1] * (len(ids) - 1)) for ids in workload.batch(name, step)]


def run_export(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Bytes a second of plans and of plain copies, alternating."""
    import torch
    from torch import distributed as dist

    from nanoengine.formats.hf import export_state, load_model, load_state
    from nanoengine.model.transformer import Transformer
    from nanoengine.parallel.layout import Layout
    from nanoengine.parallel.mesh import Mesh
    from nanoengine.parallel.tensor_parallel import TensorParallel
    from nanoengine.state.reshard import copy_local, model_pieces
    from nanoengine.state.slices import make_plan

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    source = load_model(folder, kind)
    parts = []
    for rank in range(TP):  # all in this process, so no message travels
        split = TensorParallel(Mesh(Layout(tp=TP), rank, dist.HashStore()))
        parts.append(Transformer(source.config, kind, split=split))
        load_state(parts[-1], export_state(source))
    target = Transformer(source.config, kind)
    into = model_pieces([target])
    plans = {
        "whole": model_pieces([source]),
        "tp": [pair for part in parts for pair in model_pieces([part])],
    }
    size = sum(tensor.nbytes for _, tensor in into)
    flat, other = (torch.ones(size // 4) for _ in range(2))
    best: dict[str, float] = {}

    def clock(name: str, work: Any) -> None:
        begin = time.perf_counter()
        work()
        best[name] = min(best.get(name, float("inf")), time.perf_counter() - begin)

    made = {
        name: make_plan([[p for p, _ in held]], [[p for p, _ in into]])
        for name, held in plans.items()
    }
    for _ in range(7):
        clock("memory", lambda: other.copy_(flat))
        for name, held in plans.items():
            clock(name, lambda name=name, held=held: copy_local(made[name], held, into))
    return {name: size / seconds / 1e9 for name, seconds in best.items()}


WORKERS = {
    "even": partial(run_train, "even"),
    "ragged": partial(run_train, "ragged"),
    "tree": partial(run_train, "tree", share_prefix=True),
    "rows": partial(run_train, "tree"),
    "lora": partial(run_lora, False),
    "full": partial(run_lora, True),
    "export": run_export,
    "rate": run_rate,
}


class _Sleeper:
    """A pipeline chunk that sleeps."""

    def __init__(self, unit_s: float, is_last: bool) -> None:
        self._unit_s, self._is_last = unit_s, is_last
        self.busy_s = self.end = 0.0
        self.num_live = 0

    def boundary(self, micro: int, *, is_output: bool = False) -> Any:
        import torch

        return torch.empty(16)

    def forward(self, micro: int, x: Any) -> Any:
        self.num_live += 1
        self._work(1)
        return None if self._is_last else self.boundary(micro)

    def backward(self, micro: int, dy: Any) -> Any:
        self.num_live -= 1
        self._work(2)
        return self.boundary(micro)

    def backward_input(self, micro: int, dy: Any) -> Any:
        self._work(1)
        return self.boundary(micro)

    def backward_weight(self, micro: int) -> None:
        self.num_live -= 1
        self._work(1)

    def _work(self, units: int) -> None:
        begin = time.monotonic()
        time.sleep(units * self._unit_s)
        self.end = time.monotonic()
        self.busy_s += self.end - begin


def _pipeline_rank(rank: int, meeting: Any, unit_s: float, results: Any) -> None:
    import torch

    from nanoengine.parallel.layout import Layout
    from nanoengine.parallel.pipeline import PipelineRunner
    from nanoengine.parallel.rendezvous import join_mesh
    from nanoengine.parallel.schedules import make_schedule

    torch.set_num_threads(1)
    mesh = join_mesh(meeting, Layout(pp=RANKS), rank)
    for name, chunks in BUBBLES.items():
        parts = [
            _Sleeper(unit_s / chunks, c == chunks - 1 and rank == RANKS - 1) for c in range(chunks)
        ]
        runner = PipelineRunner(mesh, parts)
        mesh.barrier()
        begin = time.monotonic()
        runner.run(make_schedule(name, RANKS, MICROS, chunks))
        busy = sum(part.busy_s for part in parts)
        results.put((name, rank, begin, max(part.end for part in parts), busy, runner.peak_live))
    mesh.barrier()
    mesh.close()


def bubble_rows(unit_s: float) -> list[dict[str, Any]]:
    from nanoengine.parallel.rendezvous import open_store
    from nanoengine.parallel.schedules import bubble_closed_form, make_schedule

    store, meeting = open_store()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_pipeline_rank, args=(rank, meeting, unit_s, results))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    told = [results.get(timeout=600) for _ in range(RANKS * len(BUBBLES))]
    for process in processes:
        process.join()
    store.close()
    rows = []
    for name, chunks in BUBBLES.items():
        mine = sorted(entry[1:] for entry in told if entry[0] == name)
        wall = max(end for _, _, end, _, _ in mine) - min(begin for _, begin, _, _, _ in mine)
        value = 1 - sum(busy for *_, busy, _ in mine) / (RANKS * wall)
        bound = bubble_closed_form(make_schedule(name, RANKS, MICROS, chunks))
        runs = {"unit_s": unit_s, "wall_s": wall, "peak_live": [entry[4] for entry in mine]}
        row = make_row(
            f"bubble-{name}",
            "idle share",
            dtype=None,
            threads=1,
            value=value,
            bound=bound,
            runs=runs,
        )
        rows.append(row)
    return rows


def peer_of(name: str) -> Peer:
    return Peer("transformers", "transformers_train.py", (name,))


def step_rows(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    def measure_all() -> dict[str, dict[str, list[dict[str, Any]]]]:
        return {
            name: alternate(args, __file__, name, [peer_of(name)], dtype, threads) for name in ROWS
        }

    measured, rates = with_rates(args, __file__, dtype, threads, measure_all)
    rows = []
    for name, runs in measured.items():
        seconds = {who: median(run["seconds"] for run in found) for who, found in runs.items()}
        tokens, peer_s = workload.num_tokens(name), seconds.get("transformers")
        row = make_row(
            ROWS[name],
            "tokens/s",
            dtype=dtype,
            threads=threads,
            value=tokens / seconds["ours"],
            peer="transformers",
            peer_value=tokens / peer_s if peer_s else None,
            bound=tokens / (step_flops(name) / rates["flops"]),
            runs={"rates": rates} | runs,
        )
        rows.append(row)
    return rows


def busy_rows(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    """The step alone and beside a busy process, ours and the peer's."""
    quiet = alternate(args, __file__, "even", [peer_of("even")], dtype, threads)
    with busy_neighbour(threads):
        busy = alternate(args, __file__, "even", [peer_of("even")], dtype, threads)
    kept = {
        who: median(run["seconds"] for run in quiet[who])
        / median(run["seconds"] for run in busy[who])
        for who in quiet
    }
    row = make_row(
        "step-beside-busy",
        "busy/quiet",
        dtype=dtype,
        threads=threads,
        value=kept["ours"],
        peer="transformers",
        peer_value=kept.get("transformers"),
        runs={"quiet": quiet, "busy": busy},
    )
    return [row]


def step_flops(name: str) -> float:
    lengths = workload.BATCHES[name]
    pairs = sum(map(roofline.causal_pairs, lengths))
    return roofline.training_flops(sum(lengths), workload.num_tokens(name), pairs)


def tree_rows(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    """The same batch as a tree and as separate rows, in turns."""
    command = [sys.executable, __file__, "--worker"]
    runs: dict[str, list[dict[str, Any]]] = {"tree": [], "rows": []}
    for _ in range(args.runs):
        for work, found in runs.items():
            found.append(measure([*command, work, args.model, dtype, str(threads)], threads))
    seconds = {work: median(run["seconds"] for run in found) for work, found in runs.items()}
    read = [tokens[:-1] for tokens, _ in workload.tree_batch(0)]
    num_tokens = sum(map(len, read))
    less = tree_flops(is_shared=False) / tree_flops(is_shared=True)
    return [
        make_row(
            "tree-vs-rows",
            "tokens/s",
            dtype=dtype,
            threads=threads,
            value=num_tokens / seconds["tree"],
            peer="rows",
            peer_value=num_tokens / seconds["rows"],
            bound=less * num_tokens / seconds["rows"],
            runs={"tokens": num_tokens, "distinct": len(prefixes(read)), "less": less} | runs,
        )
    ]


def lora_rows(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    """An adapter and all weights, in turns."""
    command = [sys.executable, __file__, "--worker"]
    runs: dict[str, list[dict[str, Any]]] = {"lora": [], "full": []}
    for _ in range(args.runs):
        for work, found in runs.items():
            found.append(measure([*command, work, args.model, dtype, str(threads)], threads))
    seconds = {work: median(run["cpu_s"] for run in found) for work, found in runs.items()}
    kept = {work: sum(found[0]["bytes"].values()) / 1e9 for work, found in runs.items()}
    tokens, row = workload.num_tokens("even") // 2, partial(make_row, dtype=dtype, threads=threads)
    return [
        row(
            "lora-step",
            "tokens/CPU-s",
            value=tokens / seconds["lora"],
            peer="full",
            peer_value=tokens / seconds["full"],
            runs={"rank": RANK} | runs,
        ),
        row("lora-memory", "GB", value=kept["lora"], peer="full", peer_value=kept["full"]),
    ]


def tree_flops(*, is_shared: bool) -> float:
    """Of a step on the tree: its rows, those that the head scores, and the pairs of attention."""
    sequences = workload.tree_batch(0)
    read = [tokens[:-1] for tokens, _ in sequences]
    lengths = prefixes(read) if is_shared else [t for ids in read for t in range(1, len(ids) + 1)]
    trained = sum(sum(mask) for _, mask in sequences)
    return roofline.training_flops(len(lengths), trained, sum(lengths))


def prefixes(sequences: Sequence[list[int]]) -> list[int]:
    """The lengths of all distinct prefixes: each is a row, and what its query sees."""
    return [
        len(prefix) for prefix in {tuple(s[:t]) for s in sequences for t in range(1, len(s) + 1)}
    ]


def export_rows(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--worker", "export", args.model, dtype, str(threads)]
    found = measure(command, threads)
    names = {"whole": "export-inproc", "tp": f"export-inproc-tp{TP}"}
    return [
        make_row(
            name,
            "GB/s",
            dtype=dtype,
            threads=threads,
            value=found[work],
            bound=found["memory"],
            runs=found,
        )
        for work, name in names.items()
    ]


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for dtype in args.dtypes:
        for threads in args.threads:
            rows += step_rows(args, dtype, threads) if "step" in args.only else []
            rows += busy_rows(args, dtype, threads) if "busy" in args.only else []
            rows += tree_rows(args, dtype, threads) if "tree" in args.only else []
            rows += lora_rows(args, dtype, threads) if "lora" in args.only else []
            rows += export_rows(args, dtype, threads) if "export" in args.only else []
    return rows + (bubble_rows(args.unit_s) if "bubble" in args.only else [])


def main() -> int:
    parser = make_parser(__doc__, ["fp32"])
    parser.add_argument("--unit-s", type=float, default=0.2, help="sleep of one forward pass")
    kinds = ("step", "busy", "tree", "lora", "bubble", "export")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    return run_benchmark(parser.parse_args(), WORKERS, make_rows)


if __name__ == "__main__":
    sys.exit(main())
