"""Sandbox benchmark: warm stateless workers against one bubblewrap for each program.

    python scripts/bench_sandbox.py [--json FILE] [--rounds N] [--runs N]

Both sides run the same trivial program behind the same walls (namespaces, system-call filter,
dropped uid) and are measured in turns. The value is executions per CPU second of the whole process
tree, host included: what one core can do. Wall-clock figures are printed beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_output import print_rows, write_json
from model_bench import make_row

from nanorl.sandbox import SandboxPool, SandboxSpec, seccomp
from nanorl.sandbox.bwrap import bwrap_arguments
from nanorl.sandbox.interpreter import Interpreter, find_python
from nanorl.sandbox.machine import find_bwrap, reachable

PROGRAM = "print(6 * 7)"
COLD_UID = 61183


def cpu_s() -> float:
    """CPU seconds of this process and of every child that has ended and been waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_warm(num_runs: int) -> tuple[float, float]:
    """(CPU, wall) seconds for each execution; the cost of an idle pool is taken off."""
    start_cpu = cpu_s()
    with SandboxPool(SandboxSpec()) as pool:
        pool.run_sync(PROGRAM)
    idle_cpu = cpu_s() - start_cpu
    start_cpu = cpu_s()
    with SandboxPool(SandboxSpec()) as pool:
        pool.run_sync(PROGRAM)
        start = time.perf_counter()
        for _ in range(num_runs):
            assert pool.run_sync(PROGRAM).stdout == b"42\n"
        wall = time.perf_counter() - start
    return (cpu_s() - start_cpu - idle_cpu) / num_runs, wall / num_runs


def measure_cold(num_runs: int) -> tuple[float, float]:
    """(CPU, wall) seconds for each execution in a bubblewrap of its own."""
    python = find_python(SandboxSpec())
    identity = {"user": COLD_UID, "group": COLD_UID, "extra_groups": []}
    start_cpu, start = cpu_s(), time.perf_counter()
    with contextlib.ExitStack() as stack:
        executable = stack.enter_context(reachable(find_bwrap(SandboxSpec())[0]))
        for _ in range(num_runs):
            run_cold(str(executable), python, identity if os.geteuid() == 0 else {})
    return (cpu_s() - start_cpu) / num_runs, (time.perf_counter() - start) / num_runs


def run_cold(executable: str, python: Interpreter, identity: dict[str, object]) -> None:
    code = seccomp.filter_bytes(platform.machine())
    descriptor = os.memfd_create("filter")
    try:
        os.write(descriptor, code)
        os.lseek(descriptor, 0, os.SEEK_SET)
        walls = bwrap_arguments(python, {})
        at = walls.index("--cap-add")
        walls[at : at + 4] = []  # no server that would need capabilities
        done = subprocess.run(
            [executable, "--seccomp", str(descriptor), *walls, "-c", PROGRAM],
            pass_fds=[descriptor],
            capture_output=True,
            check=True,
            **identity,  # type: ignore[call-overload]
        )
        assert done.stdout == b"42\n", done
    finally:
        os.close(descriptor)


def bench(num_rounds: int, num_runs: int) -> list[dict[str, object]]:
    warm, cold = [], []
    for _ in range(num_rounds):
        warm.append(measure_warm(num_runs))
        cold.append(measure_cold(max(5, num_runs // 5)))
    rows: list[dict[str, object]] = []
    for index, unit in enumerate(("executions/CPU-s", "executions/s")):
        value = statistics.median(1 / figures[index] for figures in warm)
        peer_value = statistics.median(1 / figures[index] for figures in cold)
        row = make_row(
            "bwrap-stateless" if index == 0 else "bwrap-stateless-wall",
            unit,
            dtype=None,
            threads=1,
            value=round(value, 1),
            peer="bwrap-cold",
            peer_value=round(peer_value, 1),
            runs={"ours": [round(1 / figures[index], 1) for figures in warm]},
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--runs", type=int, default=150, help="executions in each turn")
    arguments = parser.parse_args()
    rows = bench(arguments.rounds, arguments.runs)
    print_rows(rows)
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
