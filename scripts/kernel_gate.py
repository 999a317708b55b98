"""Compiles every launch of every public Triton op for sm_90a, without a GPU, and fails where a
kernel spills registers, asks for too much shared memory, lost the instructions it lives by, or got
worse than the committed table.

    python scripts/kernel_gate.py [--only REGEX] [--json F] [--table F] [--cases DIR]

Cases are found in tests/kernels/gate/case_*.py (`gate_case.py` there). `--json F` replaces the rows
of this Triton version in F (with --only, of the cases that ran) and keeps the others. The table to
compare with is `--table`, by default the newest benchmarks/kernels_compile_*.json with rows of this
Triton version; without one the gate fails. The compiler is deterministic: what gets worse on
purpose is committed with a new table. `scripts/kernel_gate.sh` runs this with both versions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("registers", "spill", "shared", "num_warps", "resident_blocks")
COLUMNS += ("wgmma", "mma_sync", "ld128")
MORE_REGISTERS = 8  # a thread; the allocator's granularity
MORE_SHARED = 1.1
CASES = ROOT / "tests/kernels/gate"
Row = dict[str, Any]

EXACT = ("_forward_kernel", "_attention_kernel")
"""The trainer's attention and the rollouts', which are to be alike to the bit."""

WORSE_IF: Mapping[str, Callable[[int, int], bool]] = {
    "spill": lambda old, new: new > old,
    "resident_blocks": lambda old, new: new < old,
    "registers": lambda old, new: new > old + MORE_REGISTERS,
    "shared": lambda old, new: new > old * MORE_SHARED,
    "wgmma": lambda old, new: bool(old) and not new,
    "mma_sync": lambda old, new: bool(old) and not new,
    "ld128": lambda old, new: 2 * new < old,
}
"""By column of the table, whether a launch is worse than it was."""


def find_cases(folder: Path) -> Iterator[Any]:
    sys.path[:0] = [str(ROOT), str(CASES), str(folder)]
    for path in sorted(folder.glob("case_*.py")):
        yield from import_module(path.stem).cases()


def run_case(case: Any) -> tuple[list[Row], list[str]]:
    """The rows of a case's kernels, and what is wrong with them."""
    import torch
    from kernel_compile import capture, measure

    with capture() as launched, torch.device("meta"):
        case.call()
    rows: list[Row] = []
    problems = [] if launched else [f"{case.name}: no Triton kernel was launched"]
    for kernel in {k.hash: k for k in launched}.values():
        use = measure(kernel)
        rows.append({"case": case.name, "launch": len(rows), **asdict(use), "alike": case.alike})
        problems += [f"{case.name}: {use.kernel}: {text}" for text in find_problems(use, case)]
    return rows, problems


def find_problems(use: Any, case: Any) -> list[str]:
    from kernel_compile import SHARED_LIMIT

    problems = []
    if use.spill > case.allow_spill:
        problems.append(
            f"spills {use.spill} bytes ({use.registers} registers, {use.num_warps} warps)"
        )
    if use.shared > SHARED_LIMIT:
        problems.append(f"{use.shared} bytes of shared memory exceed {SHARED_LIMIT}")
    if use.narrow:
        problems.append(f"products of 32 bits that can pass 2^31, cast one factor: {use.narrow}")
    if use.kernel in EXACT and use.apart > use.fused:  # a row's own few are differences
        problems.append(
            f"{use.apart} exponents are a product and a difference, {use.fused} one fused "
            "multiply-add: a loop with a mask and one without would round differently"
        )
    for need in case.need_of.get(use.kernel, case.need):
        if getattr(use, need) == 0:
            problems.append(f"no {need} instruction")
    return problems


def find_disagreements(rows: list[Row]) -> list[str]:
    """Kernels that sum in another layout than in the first case that is to be alike: the same row
    would be added in another order, and rollout and trainer differ in the last bits."""
    first: dict[tuple[str, str], Row] = {}
    problems = []
    for row in rows:
        if not row["alike"]:
            continue
        like = first.setdefault((row["alike"], row["kernel"]), row)
        if row["sums"] != like["sums"]:
            problems.append(
                f"{row['case']}: {row['kernel']}: sums {row['sums']}, and in {like['case']} "
                f"{like['sums']}: they are to agree to the bit"
            )
    return problems


def find_regressions(rows: list[Row], before: list[Row]) -> list[str]:
    """Rows that got worse against the same launch of the committed table, and launches that are
    gone. New ones are no regression."""
    now = {(row["case"], row["launch"]): row for row in rows}
    problems = []
    for old in before:
        name = f"{old['case']}: {old['kernel']}"
        new = now.get((old["case"], old["launch"]))
        if new is None or new["kernel"] != old["kernel"]:
            problems.append(f"{name}: in the committed table, not launched now")
            continue
        problems += [
            f"{name}: {column} {old[column]} -> {new[column]}"
            for column in WORSE_IF
            if WORSE_IF[column](old[column], new[column])
        ]
    return problems


def committed_rows(version: str, table: Path | None) -> list[Row]:
    """This version's rows of `table`, or of the newest committed table that has any."""
    committed = sorted((ROOT / "benchmarks").glob("kernels_compile_*.json"), reverse=True)
    for path in [table] if table else committed:
        rows = [r for r in json.loads(path.read_text())["rows"] if r["triton"] == version]
        if rows:
            return rows
    return []


def print_table(rows: list[Row]) -> None:
    table = [["case", "kernel", *COLUMNS]]
    table += [[str(row[c]) for c in table[0]] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)))


def save(path: Path, rows: list[Row], version: str, is_part: bool) -> None:
    """Replaces this version's rows, or of a part of the cases those that ran."""
    from bench_output import write_json

    ran = {row["case"] for row in rows}
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    others = [r for r in old if r["triton"] != version or (is_part and r["case"] not in ran)]
    write_json(path, others + rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--only", default="", help="run the cases whose name matches")
    parser.add_argument("--json", type=Path, help="where to write the table")
    parser.add_argument("--table", type=Path, help="the table to compare with")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default of 3.6 to 3.9, fixed
    import triton

    version = triton.__version__
    rows: list[Row] = []
    problems: list[str] = []
    for case in find_cases(args.cases.resolve()):
        if re.search(args.only, case.name):
            found, wrong = run_case(case)
            rows += [{"triton": version, **row} for row in found]
            problems += wrong
    problems += find_disagreements(rows)
    names = {row["case"] for row in rows}
    before = committed_rows(version, args.table)
    if not before and not args.json:
        problems.append(f"no committed table has rows of triton {version}: write one with --json")
    is_part = bool(args.only) or args.cases != CASES
    problems += find_regressions(rows, [r for r in before if not is_part or r["case"] in names])
    print_table(rows)
    print(f"triton {version}: {len(names)} cases, {len(rows)} kernels, {len(problems)} problems")
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    if args.json:
        save(args.json, rows, version, is_part)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
