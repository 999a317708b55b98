"""Scheduler benchmark: nanosched's processes against Ray's, and what either adds to the work.

    python scripts/bench_sched.py [--json FILE] [--peers] [--rounds N] [--small]

Sides are measured in turns, each in a process of its own (sched_work.py); values are medians of the
rounds. `pass-100MB` and `return-100MB` are bounded by the best rate at which this machine copied
memory in those processes. `calls-per-s-8` counts calls of eight actors. `death-detection` is
the time from `kill -9` of an actor to the driver's knowledge. Ray is its own interface. The rows of
`sync-...` are those of bench_weights.py: weights published to a replica, bounded by a plain copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_output import print_rows, write_json
from model_bench import make_row

SCRIPTS = Path(__file__).resolve().parent
UNITS = {
    "start-up": "s",
    "call": "ms",
    "pass-100MB": "GB/s",
    "return-100MB": "GB/s",
    "calls-per-s-1": "calls/s",
    "calls-per-s-8": "calls/s",
    "death-detection": "s",
}
GIGABYTES = 0.1  # of the rows whose unit is GB/s


def run(script: str, *arguments: str) -> str:
    """What the script, in a process of its own, prints last."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def run_side(side: str, is_small: bool) -> dict[str, float]:
    """The figures of sched_work.py."""
    found: dict[str, float] = json.loads(run("sched_work.py", side, *["--small"] * is_small))
    print(f"  {side}: {found}", file=sys.stderr, flush=True)
    return found


def run_weights(megabytes: int) -> list[dict[str, Any]]:
    """The rows of bench_weights.py that stand for a publication after the first."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        run("bench_weights.py", "--megabytes", str(megabytes), "--json", str(file))
        rows = json.loads(file.read_text())["rows"]
    found = [row for row in rows if row["name"].startswith("sync-")]
    print(
        f"  weights: {[(row['name'], row['value']) for row in found]}", file=sys.stderr, flush=True
    )
    return found


def weight_rows(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The same rows of several rounds as one each, with the copy as its bound."""
    rows = []
    for same in zip(*rounds, strict=True):
        values = [row["value"] for row in same]
        row = make_row(
            same[0]["name"],
            "GB/s",
            dtype=same[0]["dtype"],
            threads=same[0]["threads"],
            value=statistics.median(values),
            bound=statistics.median(row["peer_value"] for row in same),
            runs={"ours": values},
        )
        rows.append(row)
    return rows


def in_unit(name: str, figures: dict[str, float]) -> float:
    value, unit = figures[name], UNITS[name]
    return {"ms": 1e3 * value, "GB/s": GIGABYTES / value}.get(unit, value)


def call_rows(rounds: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """One row a figure of calls, from the sides' figures in each round."""
    copy = max(one["copy"] / 1e9 for figures in rounds for one in figures.values())
    rows = []
    for name, unit in UNITS.items():
        runs = {side: [in_unit(name, one[side]) for one in rounds] for side in rounds[0]}
        medians = {side: statistics.median(values) for side, values in runs.items()}
        row = make_row(
            name,
            unit,
            dtype=None,
            threads=1,
            value=medians["local"],
            peer="ray",
            peer_value=medians.get("ray"),
            bound=copy if unit == "GB/s" else None,
            runs=runs,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--peers", action="store_true", help="measure Ray in the same run")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--small", action="store_true", help="few calls: to try the benchmark out")
    arguments = parser.parse_args()
    sides = ["local", "ray"] if arguments.peers else ["local"]
    rounds, weights = [], []
    for number in range(arguments.rounds):
        rounds.append({side: run_side(side, arguments.small) for side in sides})
        if number % 2 == 0:  # each is a median of several publications, and takes a minute
            weights.append(run_weights(50 if arguments.small else 300))
    rows = call_rows(rounds) + weight_rows(weights)
    print_rows(rows)
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
