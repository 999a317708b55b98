"""Times a model that sees, beside transformers and TRL in the same run, and weighs its pictures.

    bash scripts/bench.sh vision [--peers] [--json FILE] [--rows ROW ...] [--runs N] [--threads 1 2]

Rows (workloads in peers/vision_workload.py, the model in smolvlm_folder.py: SmolVLM-256M's shape,
random weights):
    vision-tower       pictures a second through the tower alone; peer transformers' tower
    vision-rollout     sampled tokens/s of 8 rollouts of 3 turns, a new picture each turn; peer
                       transformers.generate
    vision-grpo-step   seconds of generate + train + weight sync, the tower trained; peer TRL's
                       GRPOTrainer
    vision-memory      bytes by which the process grows that plays 32 rollouts of 10 turns, a new
                       picture of 1024 x 768 each turn; beside them those of the pictures as the
                       model takes them. Agents, engine and the run's pictures, with two layers:
                       what a picture leaves behind does not depend on their number

One thread and bf16 by default. Measurements of ours and of the peer alternate (model_bench.py),
medians are compared; `cpu_util` of a run well below 1 means that the machine was busy. The bounds
are roofline.py's, with the tower's arithmetic. `--small` tries all rows out on a tiny model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import roofline
from model_bench import (
    PEERS,
    Peer,
    alternate,
    make_parser,
    make_row,
    run_benchmark,
    run_rate,
    with_rates,
)

sys.path.insert(0, str(PEERS))

from smolvlm_folder import build_folder
from vision_workload import Workload

DTYPES = ("bf16", "fp32")
SCRIPT = "transformers_vision.py"


def run_work(work: str, folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """One of the functions of vision_work.py."""
    import vision_work

    found: dict[str, Any] = getattr(vision_work, f"run_{work}")(folder, dtype, threads)
    return found


WORKS = ("tower", "rollouts", "step", "memory")
WORKERS = {work: partial(run_work, work) for work in WORKS} | {"rate": run_rate}


# -- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row, who measures it, and what of a run is its value."""

    work: str
    key: str
    unit: str
    peers: tuple[Peer, ...] = ()


ROWS = {
    "vision-tower": Row(
        "tower", "pictures_per_s", "pictures/s", (Peer("transformers", SCRIPT, ("tower",)),)
    ),
    "vision-rollout": Row(
        "rollouts", "tokens_per_s", "tokens/s", (Peer("transformers", SCRIPT, ("rollouts",)),)
    ),
    "vision-grpo-step": Row("step", "seconds", "s", (Peer("trl", "trl_vision.py"),)),
    "vision-memory": Row("memory", "growth_bytes", "bytes"),
}


def tower_flops(folder: str) -> float:
    """Of the products and the attention for one picture."""
    from nanoengine.model.config import ModelConfig

    config: Any = ModelConfig.from_folder(Path(folder))
    load, vision = Workload.of(folder), config.vision
    tokens, width = load.picture_tokens, vision.hidden_size
    patches = tokens * vision.patches_per_token
    matrices = 4 * width**2 + 2 * width * vision.intermediate_size
    block = 2.0 * patches * matrices + 4.0 * patches**2 * width
    ends = patches * vision.patch_width * width
    ends += tokens * vision.patches_per_token * width * vision.out_hidden_size
    return vision.depth * block + 2.0 * ends


def bound(name: str, folder: str, dtype: str, rates: roofline.Rates) -> float | None:
    """What the machine allows; nothing is said of memory, or of a tiny model."""
    load = Workload.of(folder)
    if load.side != 512:
        return None
    look_s = tower_flops(folder) / rates["flops"]
    asked = load.text + len(load.picture_ids())
    if name == "vision-tower":
        return 1 / look_s
    if name == "vision-rollout":
        work = roofline.group_rollouts(load.rollouts, 1, asked, load.turns, load.turn, asked)
        element = {"bf16": 2, "fp32": 4}[dtype]
        seconds = work.seconds(rates, element) + load.rollouts * load.turns * look_s
        return load.num_sampled / seconds
    if name == "vision-grpo-step":
        prompt, sampled = len(load.picture_ids()), load.completion
        work = roofline.group_rollouts(load.groups, load.members, prompt, 1, sampled, 0)
        trained = load.groups * load.members * sampled
        pairs = roofline.causal_pairs
        own = load.members * (pairs(prompt + sampled) - pairs(prompt))
        rows, seen = load.groups * prompt + trained, load.groups * (pairs(prompt) + own)
        train = roofline.training_flops(rows, trained, seen)
        return (work.flops() + train) / rates["flops"] + 4 * load.groups * look_s
    return None


def compare(args: argparse.Namespace, dtype: str, threads: int) -> list[dict[str, Any]]:
    def measured_runs(name: str) -> dict[str, list[dict[str, Any]]]:
        row, asked = ROWS[name], argparse.Namespace(**vars(args))
        asked.model = args.shallow if row.work == "memory" else args.model
        return alternate(asked, __file__, row.work, row.peers, dtype, threads)

    def measure_all() -> dict[str, dict[str, list[dict[str, Any]]]]:
        return {name: measured_runs(name) for name in args.rows}

    measured, rates = with_rates(args, __file__, dtype, threads, measure_all)
    return [row_of(name, measured[name], args.model, dtype, threads, rates) for name in measured]


def row_of(
    name: str,
    runs: dict[str, list[dict[str, Any]]],
    folder: str,
    dtype: str,
    threads: int,
    rates: dict[str, float],
) -> dict[str, Any]:
    """The row of a name. Of the tower also how far its features are from the peer's."""
    row = ROWS[name]
    features = {who: [run.pop("features", []) for run in found] for who, found in runs.items()}
    value = {who: median(run[row.key] for run in found) for who, found in runs.items()}
    (peer,) = [one.name for one in row.peers] or ["the resized pictures"]
    peer_value = value.get(peer)
    if row.work == "memory":
        peer_value = median(run["resized_bytes"] for run in runs["ours"])
    made = make_row(
        name,
        row.unit,
        dtype=dtype,
        threads=threads,
        value=value["ours"],
        peer=peer,
        peer_value=peer_value,
        bound=bound(name, folder, dtype, rates),
        runs={"rates": rates} | runs,
    )
    if row.work == "tower" and peer in features:
        theirs = np.array(features[peer][0])
        far = np.abs(np.array(features["ours"][0]) - theirs).max()
        made["difference"] = float(far / np.abs(theirs).max())
    return made


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows that were asked for, of a folder that is built for them: `args.model` is that of the
    text model, whose tokenizer and shape it takes."""
    text, rows = args.model, []
    with tempfile.TemporaryDirectory() as folder:
        args.model = str(build_folder(Path(folder) / "model", text))
        args.shallow = args.model
        if "vision-memory" in args.rows and text is not None:
            args.shallow = str(build_folder(Path(folder) / "shallow", text, num_layers=2))
        for dtype in args.dtypes:
            for threads in args.threads:
                rows += compare(args, dtype, threads)
    return rows


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, DTYPES)
    parser.set_defaults(threads=[1], dtypes=["bf16"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--small", action="store_true", help="all rows, on a tiny model")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run_benchmark(read_arguments(sys.argv[1:]), WORKERS, make_rows))
