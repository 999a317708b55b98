"""Checks this project on a GPU, part by part, each within its own time: all together take less
than 9 minutes whatever hangs. Writes one JSON with pass, fail or skip of every part and a verdict,
anew after each part, so that what was found stays if the machine goes. Ends with status 0 where the
verdict is "pass". Refuses without a GPU.

    bash scripts/gpu_check.sh [--json FILE] [--parts NAME,NAME]

tests          every GPU test (tests/*/on_gpu)
train-tiny     a short run of `train_agent.py` on the card; train-smollm2, where its weights are;
               train-exact with `--deterministic` (its texts are short: the tests have long ones)
server         a request to the server (`gpu_parts.py`, with the next two)
nccl           collectives, between two cards where there are two
mfu            training steps of Qwen3-0.6B's shape, and their share of the card's peak
bench-infer, bench-kernels    what `bench_infer_gpu.py` and `bench_kernels.py` measure in their time
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
NUM_TEST_PROCESSES = 8  # a card of 80 GB holds what so many tests take at once
GRACE_S = 8.0  # between asking a program to stop and killing it
TESTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/on_gpu"))
SHORT_RUN = (
    "--device cuda --warm-start.steps 4 --rl.steps 2 --rl.tasks-per-step 2 "
    "--evaluation.num-tasks 4 --evaluation.num-tasks-untrained 2 --evaluation.num-tasks-no-tool 2"
)
Result = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """`run(limit_s)` returns {"status": "pass", "fail" or "skip", ...} before the limit."""

    name: str
    limit_s: float
    run: Callable[[float], Result]


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


def run_program(arguments: Sequence[str], limit_s: float) -> int | None:
    """The exit status, or None where the time was over. Then the program and all that it started
    are interrupted, so that they write what they know, and killed `GRACE_S` later."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment(), start_new_session=True,
        preexec_fn=heed_interrupts,
    )  # fmt: skip
    try:
        return process.wait(max(1.0, limit_s - GRACE_S))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:  # also what a program that ended by itself has left running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment() -> dict[str, str]:
    """The caller's, in which this project is found though it is not installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def heed_interrupts() -> None:
    """The background job of a shell ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def verdict_of(code: int | None, limit_s: float, reasons: Iterable[str] = ()) -> Result:
    """Pass or fail of a program that ended with `code`, with the reasons that speak against it."""
    late = [f"stopped after {limit_s:.0f} s"] if code is None else []
    wrong = [f"exit status {code}"] if code else []
    failures = [*late, *wrong, *reasons]
    return {"status": "fail" if failures else "pass", "exit_code": code, "failures": failures}


def run_tests(limit_s: float, tests: Sequence[str] = TESTS) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if importlib.util.find_spec("xdist"):  # most of the time goes to compiling kernels
            options += ["-n", str(min(NUM_TEST_PROCESSES, os.cpu_count() or 1))]
        code = run_program(["-m", "pytest", *tests, *options], limit_s)
        if not report.exists():
            return verdict_of(code, limit_s, ["pytest wrote no report"])
        found = _counts(list(ElementTree.parse(report).getroot().iter("testsuite")))
        return {**verdict_of(code, limit_s, found["failures"]), "counts": found["counts"]}


def _counts(suites: list[ElementTree.Element]) -> Result:
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


def train_tiny(limit_s: float) -> Result:
    return train("tiny", limit_s)


def train_exact(limit_s: float) -> Result:
    return train("tiny", limit_s, f"{SHORT_RUN} --deterministic")


def train_smollm2(limit_s: float) -> Result:
    from nanoengine.formats.sources import SMOLLM2, cached_folder

    if cached_folder(SMOLLM2) is None:
        return {"status": "skip", "reason": "its weights are not in ~/.cache/nanorl"}
    return train("smollm2", limit_s)


def train(preset: str, limit_s: float, options: str = SHORT_RUN) -> Result:
    """A run that ends well, with a summary whose numbers are numbers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / preset
        command = ["scripts/train_agent.py", "--preset", preset, "--out", str(out)]
        code = run_program([*command, *options.split()], limit_s)
        summary = _read(out / "summary.json")
        metrics = out / "metrics.jsonl"
        rows = [json.loads(r) for r in metrics.read_text().splitlines()] if metrics.exists() else []
    wrong = [
        f"summary.json: {name} is {value}"
        for name, value in summary.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if not summary:
        wrong.append("the run wrote no summary.json")
    return {**verdict_of(code, limit_s, wrong), "summary": summary, "steps": rows}


def run_part(name: str, limit_s: float) -> Result:
    """One of `gpu_parts.py`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        code = run_program(["scripts/gpu_parts.py", name, "--json", str(path)], limit_s)
        return {**verdict_of(code, limit_s), **_read(path)}


def run_benchmark(script: str, limit_s: float) -> Result:
    """What it has measured by its time; running out of it is no failure, an empty table is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        budget = str(limit_s - 30)
        code = run_program(
            [f"scripts/{script}", "--json", str(path), "--budget-s", budget], limit_s
        )
        found = _read(path)
    wrong = [] if found.get("rows") else ["no row"]
    return {**verdict_of(code, limit_s, wrong), **found}


def _read(path: Path) -> Result:
    return dict(json.loads(path.read_text())) if path.exists() else {}


PARTS = (
    Part("tests", 110, run_tests),
    Part("train-tiny", 40, train_tiny),
    Part("train-exact", 40, train_exact),
    Part("train-smollm2", 50, train_smollm2),
    Part("server", 30, lambda limit_s: run_part("server", limit_s)),
    Part("nccl", 25, lambda limit_s: run_part("nccl", limit_s)),
    Part("mfu", 40, lambda limit_s: run_part("mfu", limit_s)),
    Part("bench-infer", 75, lambda limit_s: run_benchmark("bench_infer_gpu.py", limit_s)),
    Part("bench-kernels", 125, lambda limit_s: run_benchmark("bench_kernels.py", limit_s)),
)


def check(parts: Sequence[Part], keep: Callable[[Result], object] = lambda _: None) -> Result:
    """Every part's result, and the rows of the benchmarks together; `keep` is given what there is
    after each part."""
    found: Result = {"command": "bash scripts/gpu_check.sh", "parts": {}, "rows": []}
    for part in parts:
        start = time.monotonic()
        result = part.run(part.limit_s)
        found["rows"] += result.pop("rows", [])
        head = ("date", "hardware", "commit", "machine")
        found |= {k: result.pop(k) for k in head if k in result}
        found["parts"][part.name] = {**result, "seconds": time.monotonic() - start}
        print(f"{part.name}: {result['status']} {result.get('failures') or ''}", flush=True)
        keep(found | _verdict(found["parts"], parts))
    return found | _verdict(found["parts"], parts)


def _verdict(results: dict[str, Result], parts: Sequence[Part]) -> Result:
    """Of the parts that ran; with some left to run there is none yet."""
    failed = [name for name, result in results.items() if result["status"] == "fail"]
    left = [part.name for part in parts if part.name not in results]
    return {
        "verdict": "fail" if failed else f"not run: {', '.join(left)}" if left else "pass",
        "failed": failed,
        "skipped": [name for name, result in results.items() if result["status"] == "skip"],
        "seconds": sum(result["seconds"] for result in results.values()),
    }


def choose(names: str | None, parts: Sequence[Part] = PARTS) -> list[Part]:
    if names is None:
        return list(parts)
    known = {part.name: part for part in parts}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"--parts {','.join(unknown)}: there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "gpu_check.json")
    parser.add_argument("--parts", help=f"of {', '.join(part.name for part in PARTS)}")
    args = parser.parse_args()
    try:
        parts = choose(args.parts)
    except ValueError as error:
        parser.error(str(error))
    refuse_without_gpu()
    sys.path.insert(0, str(ROOT))
    result = check(parts, lambda so_far: args.json.write_text(json.dumps(so_far, indent=1) + "\n"))
    print(f"wrote {args.json}: {result['verdict']}, {len(result['rows'])} rows")
    return 0 if result["verdict"] == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
