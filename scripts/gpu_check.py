"""Runs tests/kernels/gpu and the kernel benchmark, each in its share of 9 minutes, and writes one
JSON: the benchmark's, with the tests' counts and failures. Refuses without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S, RESERVE_S = 520.0, 25.0
BENCH_SHARE_S = 210.0


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


def run_tests(limit_s: float, tests: str = "tests/kernels/gpu") -> dict[str, Any]:
    """Counts and failures. At a time-out pytest is interrupted, so that it writes what it knows."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", tests, "-q", "-o", "addopts="]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        process = subprocess.Popen(command, cwd=ROOT)
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


def run_benchmark(path: Path, limit_s: float) -> int | None:
    command = [sys.executable, "scripts/bench_kernels.py", "--json", str(path)]
    command += ["--budget-s", str(limit_s - 30)]
    try:
        return subprocess.run(command, cwd=ROOT, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "gpu_check.json")
    args = parser.parse_args()
    refuse_without_gpu()
    start = time.monotonic()
    tests = run_tests(TOTAL_S - BENCH_SHARE_S - RESERVE_S)
    with tempfile.TemporaryDirectory() as folder:
        bench = Path(folder) / "bench.json"
        code = run_benchmark(bench, TOTAL_S - RESERVE_S - (time.monotonic() - start))
        result = json.loads(bench.read_text()) if bench.exists() else {"rows": []}
    result |= {"tests": tests, "bench_exit_code": code, "seconds": time.monotonic() - start}
    result["command"] = "bash scripts/gpu_check.sh"
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.json}: tests {tests.get('counts')}, {len(result['rows'])} rows")
    return 0 if tests["exit_code"] == 0 and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
