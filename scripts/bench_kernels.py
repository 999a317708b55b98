"""Times every kernel beside its peers and against what the machine can do.

    bash scripts/bench.sh kernels [--json FILE] [--only REGEX] [--budget-s N]

On a GPU `triton.testing.do_bench` (cold L2; median, 20 % and 80 % quantiles) at the shapes of
Qwen3-0.6B, Qwen3-4B and Llama-3-8B. On a CPU the ops' PyTorch paths at reduced shapes, marked
`"path": "torch-cpu-reduced"`. The bounds are the copy and matmul rates measured in the same run.
`ratio` above 1 means faster than the peer. Cases come from `scripts/kernel_bench/*.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from bench_output import ROOT, print_rows, write_json

if TYPE_CHECKING:
    from kernel_bench.case import BenchCase

NAMES = Path(__file__).parent / "kernel_bench"
Times = tuple[float, float, float]  # median, 20 % and 80 % quantile, in ms


def find_cases(device: str) -> Iterator[BenchCase]:
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    for path in sorted(NAMES.glob("[!_]*.py")):
        if path.stem != "case":
            yield from import_module(f"kernel_bench.{path.stem}").cases(device)


def measure(step: Callable[[], object], device: str) -> Times:
    if device == "cuda":
        from triton.testing import do_bench

        middle, low, high = do_bench(step, quantiles=[0.5, 0.2, 0.8])
        return middle, low, high
    step()
    runs = []
    while len(runs) < 5 or (sum(runs) < 100 and len(runs) < 50):
        start = time.perf_counter()
        step()
        runs.append((time.perf_counter() - start) * 1e3)
    fifths = quantiles(runs, n=5)
    return median(runs), fifths[0], fifths[3]


def measure_ceilings(device: str) -> dict[str, float]:
    """TB/s of a copy (read + write) and TFLOP/s of a matmul."""
    import torch

    is_gpu = device == "cuda"
    dtype, side = (torch.bfloat16, 8192) if is_gpu else (torch.float32, 768)
    source = torch.ones((1 << 30) if is_gpu else (1 << 25), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in "ab")
    copy_ms = measure(lambda: target.copy_(source), device)[0]
    matmul_ms = measure(lambda: a @ b, device)[0]
    return {
        "TB/s": 2 * source.numel() / copy_ms / 1e9,
        "TFLOP/s": 2 * side**3 / matmul_ms / 1e9,
    }


def run_case(case: BenchCase, device: str, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """One row a peer, or one without."""
    import torch

    ours = measure(case.run, device)
    unit, work = "us", None
    if case.flops is not None:
        unit, work = "TFLOP/s", case.flops
    elif case.bytes is not None:
        unit, work = "TB/s", case.bytes

    def rate(ms: float) -> float:
        return ms * 1e3 if work is None else work / ms / 1e9

    base = {
        "name": case.name,
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "threads": None if device == "cuda" else torch.get_num_threads(),
        "path": "triton" if device == "cuda" else "torch-cpu-reduced",
        "ms": ours[0],
        "ms_20": ours[1],
        "ms_80": ours[2],
        "value": rate(ours[0]),
        "unit": unit,
        "bound": ceilings.get(unit),
        "bound_ratio": rate(ours[0]) / ceilings[unit] if unit in ceilings else None,
    }
    rows = []
    for peer, step in case.peers.items():
        try:
            theirs = measure(step, device)
        except Exception as error:  # a peer that cannot run here is a result, not a failure
            rows.append({**base, "peer": peer, "peer_error": f"{type(error).__name__}: {error}"})
            continue
        value = rate(theirs[0])
        ratio = theirs[0] / ours[0]
        rows.append({**base, "peer": peer, "peer_value": value, "peer_ms": theirs[0]})
        rows[-1]["ratio"] = ratio
    return rows or [{**base, "peer": None}]


def machine(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device == "cuda":
        import triton

        query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            told = f"nvidia-smi: {error}"
        found |= {"triton": triton.__version__, "cuda": torch.version.cuda}
        found |= {"card": torch.cuda.get_device_name(), query: told.strip()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="run the cases whose name or op matches")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="then skip the rest")
    args = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, skipped = time.monotonic(), []
    ceilings = measure_ceilings(device)
    rows: list[dict[str, Any]] = []
    for case in find_cases(device):
        if not re.search(args.only, f"{case.name} {case.op}"):
            continue
        if time.monotonic() - start > args.budget_s:
            skipped.append(f"{case.name} {case.shape}")
            continue
        rows += run_case(case, device, ceilings)
    print_rows([{**row, "name": f"{row['name']} {row['shape']}"} for row in rows])
    print("measured ceilings:", ", ".join(f"{v:.4g} {unit}" for unit, v in ceilings.items()))
    if skipped:
        print(f"skipped, out of time: {len(skipped)}", file=sys.stderr)
    if args.json:
        write_json(args.json, rows)
        written = json.loads(args.json.read_text())
        extra = {"machine": machine(device), "ceilings": ceilings, "skipped": skipped}
        args.json.write_text(json.dumps({**written, **extra}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
