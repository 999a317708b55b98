"""Runs the GPU tests of kernels and inference engine, the benchmark of the engine and that of the
kernels, each in its share of 9 minutes, and writes one JSON: the kernel benchmark's, with the rows
of both and the tests' counts and failures. Refuses without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S, RESERVE_S = 520.0, 25.0
KERNELS_SHARE_S, INFER_SHARE_S = 180.0, 100.0
TESTS = ("tests/kernels/gpu", "tests/nanoinfer/gpu")


def refuse_without_gpu() -> None:
    missing = [m for m in ("torch", "triton", "pytest") if importlib.util.find_spec(m) is None]
    if missing:
        sys.exit(f"error: {sys.executable} has no {', '.join(missing)}; gpu_check installs nothing")
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "error: no CUDA GPU is visible to PyTorch "
            f"({torch.__version__}); gpu_check needs one.\n"
            "On a CPU run: bash scripts/test.sh (kernels in the interpreter) and "
            "bash scripts/kernel_gate.sh (kernels compiled for sm_90a)."
        )


def run_tests(limit_s: float, tests: Sequence[str] = TESTS) -> dict[str, Any]:
    """Counts and failures. At a time-out pytest is interrupted, so that it writes what it knows."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", *tests, "-q", "-o", "addopts="]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        process = subprocess.Popen(command, cwd=ROOT, preexec_fn=heed_interrupts)
        try:
            code, late = process.wait(limit_s), []
        except subprocess.TimeoutExpired:
            code, late = None, [f"stopped after {limit_s:.0f} s"]
            process.send_signal(signal.SIGINT)
            try:
                process.wait(RESERVE_S / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not report.exists():
            return {"exit_code": code, "failures": [*late, "pytest wrote no report"]}
        found = _counts(list(ElementTree.parse(report).getroot().iter("testsuite")))
        return {"exit_code": code, **found, "failures": late + found["failures"]}


def _counts(suites: list[ElementTree.Element]) -> dict[str, Any]:
    totals = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {_message(case)}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"counts": totals, "failures": failed}


def _message(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return found.get("message", "")[:500]
    return ""


def heed_interrupts() -> None:
    """The background job of a shell ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_benchmark(script: str, limit_s: float) -> tuple[int | None, dict[str, Any]]:
    """The exit code, None where it ran out of time, and what it had written until then."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, f"scripts/{script}", "--json", str(path)]
        command += ["--budget-s", str(limit_s - 30)]
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.run(command, cwd=ROOT, timeout=limit_s).returncode
        return code, json.loads(path.read_text()) if path.exists() else {"rows": []}


def merged(infer: dict[str, Any], kernels: dict[str, Any]) -> dict[str, Any]:
    """One result: the kernels' head, the rows of both, and what either left out for time."""
    rows = infer["rows"] + kernels["rows"]
    skipped = infer.get("skipped", []) + kernels.get("skipped", [])
    return {**infer, **kernels, "rows": rows, "skipped": skipped}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "gpu_check.json")
    args = parser.parse_args()
    refuse_without_gpu()
    start = time.monotonic()

    def time_left() -> float:
        return TOTAL_S - RESERVE_S - (time.monotonic() - start)

    tests = run_tests(time_left() - KERNELS_SHARE_S - INFER_SHARE_S)
    infer_code, infer = run_benchmark("bench_infer_gpu.py", time_left() - KERNELS_SHARE_S)
    code, kernels = run_benchmark("bench_kernels.py", time_left())
    result = merged(infer, kernels)
    result |= {"tests": tests, "bench_exit_code": code, "infer_exit_code": infer_code}
    result |= {"seconds": time.monotonic() - start, "command": "bash scripts/gpu_check.sh"}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.json}: tests {tests.get('counts')}, {len(result['rows'])} rows")
    return 0 if tests["exit_code"] == code == infer_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
