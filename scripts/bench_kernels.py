"""Times every kernel beside its peers and against what the machine can do.

    bash scripts/bench.sh kernels [--json FILE] [--only REGEX] [--budget-s N]

On a GPU `triton.testing.do_bench` (cold L2; median, 20 % and 80 % quantiles) at the shapes of
Qwen3-0.6B, Qwen3-4B and Llama-3-8B. On a CPU the ops' own paths (C++, PyTorch), smaller, marked
`"path": "cpu-reduced"`. The bounds are copy and matmul rates measured in the same run; on a CPU of
products in the case's dtype, and of copying or reading as few bytes, which a cache may hold.
`ratio` above 1 means faster than the peer. Cases come from `scripts/kernel_bench/*.py`.

Two rounds: every op beside the peers that run at once, then, while the budget lasts, beside those
that compile first. FlashAttention, FlashInfer and Liger are peers where they are installed; which
were not is printed. FILE is written after every case, so a run that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import roofline
from bench_output import ROOT, print_rows, write_json

if TYPE_CHECKING:
    from kernel_bench.case import BenchCase, Step

NAMES = Path(__file__).parent / "kernel_bench"
Times = tuple[float, float, float]  # median, 20 % and 80 % quantile, in ms
MOVED_BYTES = (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26)


def find_cases(device: str) -> Iterator[BenchCase]:
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    for path in sorted(NAMES.glob("[!_]*.py")):
        if path.stem != "case":
            yield from import_module(f"kernel_bench.{path.stem}").cases(device)


def measure(step: Step, device: str) -> Times:
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
    """TB/s of a copy (read + write) and TFLOP/s of a matmul; `ceiling_of` knows the names."""
    import torch

    if device == "cpu":
        return cpu_ceilings()
    side = 8192
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in "ab")
    copy_ms = measure(lambda: target.copy_(source), device)[0]
    matmul_ms = measure(lambda: a @ b, device)[0]
    return {
        "TB/s": 2 * source.numel() / copy_ms / 1e9,
        "TFLOP/s": 2 * side**3 / matmul_ms / 1e9,
    }


def cpu_ceilings() -> dict[str, float]:
    """The best of many runs, for each dtype and for each size of `MOVED_BYTES`."""
    import torch

    threads = torch.get_num_threads()
    fp32 = roofline.product_rate("fp32", threads) / 1e12
    bf16 = roofline.product_rate("bf16", threads) / 1e12
    found = {"TFLOP/s float32": fp32, "TFLOP/s bfloat16": max(fp32, bf16)}
    for size in MOVED_BYTES:
        found[f"TB/s of {size}"] = roofline.memory_rate(size) / 1e12
    return found | {"TB/s": found[f"TB/s of {max(MOVED_BYTES)}"]}


def ceiling_of(case: BenchCase, unit: str, ceilings: Mapping[str, float]) -> float | None:
    """What bounds this case; None for a latency."""
    fits = [size for size in MOVED_BYTES if case.bytes is not None and size <= case.bytes]
    names = (f"{unit} {case.dtype}", f"{unit} of {max(fits, default=MOVED_BYTES[0])}", unit)
    return next((ceilings[name] for name in names if name in ceilings), None)


def run_case(
    case: BenchCase, peers: Mapping[str, Step], device: str, ceilings: dict[str, float]
) -> list[dict[str, Any]]:
    """One row a peer, or one without. What cannot run here is a row with its error."""
    unit, work = "us", None
    if case.flops is not None:
        unit, work = "TFLOP/s", case.flops
    elif case.bytes is not None:
        unit, work = "TB/s", case.bytes

    def rate(ms: float) -> float:
        return ms * 1e3 if work is None else work / ms / 1e9

    bound = ceiling_of(case, unit, ceilings)
    base = head(case, device) | {"unit": unit, "bound": bound}
    ours, error = try_measure(case.run, device)
    if ours is None:
        return [{**base, "peer": None, "error": error}]
    value = rate(ours[0])
    base |= {"ms": ours[0], "ms_20": ours[1], "ms_80": ours[2], "value": value}
    if bound is not None and value > bound:
        print(f"{case.name} {case.shape}: {value:.3g} {unit} beats its bound", file=sys.stderr)
        base["bound"] = bound = None  # the machine was disturbed when it was measured
    base["bound_ratio"] = None if bound is None else value / bound
    rows = []
    for peer, step in peers.items():
        theirs, error = try_measure(step, device)
        if theirs is None:
            rows.append({**base, "peer": peer, "peer_error": error})
            continue
        found = {"peer_value": rate(theirs[0]), "peer_ms": theirs[0]}
        rows.append({**base, "peer": peer, **found, "ratio": theirs[0] / ours[0]})
    return rows or [{**base, "peer": None}]


def try_measure(step: Step, device: str) -> tuple[Times | None, str]:
    """The times, or None and the error: one op or peer that fails must not end the run."""
    try:
        return measure(step, device), ""
    except Exception as error:  # recorded in its row, and the exit code is 1 if it is ours
        return None, f"{type(error).__name__}: {error}"


def head(case: BenchCase, device: str) -> dict[str, Any]:
    import torch

    return {
        "name": case.name,
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "threads": None if device == "cuda" else torch.get_num_threads(),
        "path": "triton" if device == "cuda" else "cpu-reduced",
    }


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
    end = time.monotonic() + args.budget_s
    ceilings = measure_ceilings(device)
    skipped: list[str] = []
    rows: list[dict[str, Any]] = []
    sys.path.insert(0, str(Path(__file__).parent))
    from kernel_bench import _peers

    absent = _peers.absent()
    extra = {"machine": machine(device), "ceilings": ceilings, "skipped": skipped}
    extra["peers_not_installed"] = absent
    for is_second in (False, True):
        for case in find_cases(device):
            peers = case.slow_peers if is_second else case.peers
            if not re.search(args.only, f"{case.name} {case.op}") or (is_second and not peers):
                continue
            if time.monotonic() > end:
                skipped.append(f"{case.name} {case.shape}: {', '.join(peers) or 'no peer'}")
                continue
            rows += run_case(case, peers, device, ceilings)
            if args.json:
                save(args.json, rows, extra)
    print_rows([{**row, "name": f"{row['name']} {row['shape']}"} for row in rows])
    print("measured ceilings:", ", ".join(f"{v:.4g} {unit}" for unit, v in ceilings.items()))
    if absent:
        print("peers that are not installed:", ", ".join(absent))
    if skipped:
        print(f"skipped, out of time: {len(skipped)}", file=sys.stderr)
    failed = [f"{row['name']} {row['shape']}: {row['error']}" for row in rows if "error" in row]
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def save(path: Path, rows: list[dict[str, Any]], extra: dict[str, Any]) -> None:
    write_json(path, rows)
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, **extra}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
