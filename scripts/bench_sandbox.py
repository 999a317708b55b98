"""Sandbox benchmark: warm workers against one bubblewrap for each program, on one core.

    python scripts/bench_sandbox.py [--json FILE] [--rounds N] [--runs N] [--only NAME ...]
    python scripts/bench_sandbox.py --stress

Host and workers share one core (sched_setaffinity). Both sides of `bwrap-stateless` run the same
trivial program behind the same walls (namespaces, system-call filter, dropped uid) and are measured
in turns; its value is executions per CPU second of the whole process tree, host included. The other
rows are wall-clock figures, and suffer from whatever else the machine does. `bwrap-repl` is a call
of a session's kept interpreter, `bwrap-workdir` a fresh Python process in a session's folder, one
after the other. Every other back end that opens on this machine gets the same rows of its own name;
`--only bwrap` leaves them out. `--stress` runs 1,500 mixed programs instead, and fails on a wrong
status or on growth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_output import print_rows, write_json
from model_bench import make_row
from sandbox_stress import stress

from nanorl.sandbox import SandboxPool, SandboxSpec, seccomp
from nanorl.sandbox.backends import BACKENDS, open_sandbox
from nanorl.sandbox.base import SandboxUnavailable
from nanorl.sandbox.bwrap import bwrap_arguments
from nanorl.sandbox.host_machine import find_bwrap, reachable
from nanorl.sandbox.interpreter import Interpreter, find_python

PROGRAM = "print(6 * 7)"
COLD_UID = 61183
NUM_SESSION_CALLS = 200
Open = Callable[[], Any]


def cpu_s() -> float:
    """CPU seconds of this process and of every child that has ended and been waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# Stateless executions.


def measure_warm(open_pool: Open, num_runs: int) -> tuple[float, list[float]]:
    """(CPU seconds for each execution, their wall seconds); the cost of an idle pool is off."""
    start_cpu = cpu_s()
    with open_pool() as pool:
        pool.run_sync(PROGRAM)
    idle_cpu = cpu_s() - start_cpu
    start_cpu, walls = cpu_s(), []
    with open_pool() as pool:
        pool.run_sync(PROGRAM)
        for _ in range(num_runs):
            start = time.perf_counter()
            assert pool.run_sync(PROGRAM).stdout == b"42\n"
            walls.append(time.perf_counter() - start)
    return (cpu_s() - start_cpu - idle_cpu) / num_runs, walls


def measure_cold(num_runs: int) -> tuple[float, list[float]]:
    """The same of executions in a bubblewrap of their own."""
    python = find_python(SandboxSpec())
    identity = {"user": COLD_UID, "group": COLD_UID, "extra_groups": []}
    start_cpu, walls = cpu_s(), []
    with contextlib.ExitStack() as stack:
        executable = stack.enter_context(reachable(find_bwrap(SandboxSpec())[0]))
        for _ in range(num_runs):
            start = time.perf_counter()
            run_cold(str(executable), python, identity if os.geteuid() == 0 else {})
            walls.append(time.perf_counter() - start)
    return (cpu_s() - start_cpu) / num_runs, walls


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


def measure_start(open_pool: Open) -> float:
    """Seconds from nothing to the first result, the canary's run included."""
    start = time.perf_counter()
    with open_pool() as pool:
        assert pool.run_sync(PROGRAM).stdout == b"42\n"
        return time.perf_counter() - start


# Sessions.


async def measure_session(pool: Any, kind: str) -> float:
    """Wall seconds of one call: the median of many, one after the other."""
    async with await pool.open_session() as session:
        call: Callable[[], Awaitable[Any]]
        if kind == "repl":
            call = lambda: session.repl("6 * 7", 5)  # noqa: E731
        else:
            call = lambda: session.run(PROGRAM, 5)  # noqa: E731
        assert (await call()).stdout == b"42\n"
        start = time.perf_counter()
        for _ in range(NUM_SESSION_CALLS):
            await call()
        return (time.perf_counter() - start) / NUM_SESSION_CALLS


def measure_sessions(open_pool: Open, kind: str) -> float:
    with open_pool() as pool:
        return asyncio.run(measure_session(pool, kind))


# Rows.


class Figures:
    """What the rounds of one back end saw; every list has one figure a round."""

    def __init__(self) -> None:
        self.seen: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(value)

    def add_runs(self, name: str, cpu: float, walls: list[float]) -> None:
        cuts = statistics.quantiles(walls, n=100) if len(walls) > 1 else [walls[0]] * 99
        self.add(f"{name}-cpu", 1 / cpu)
        self.add(f"{name}-wall", len(walls) / sum(walls))
        self.add(f"{name}-p50", 1e3 * cuts[49])
        self.add(f"{name}-p99", 1e3 * cuts[98])

    def median(self, name: str) -> float | None:
        return round(statistics.median(self.seen[name]), 2) if name in self.seen else None


def measure_round(figures: Figures, open_pool: Open, num_runs: int) -> None:
    """One round of one back end; sessions only where it has them."""
    figures.add_runs("warm", *measure_warm(open_pool, num_runs))
    figures.add("start", 1e3 * measure_start(open_pool))
    for kind in ("repl", "workdir"):
        with contextlib.suppress(SandboxUnavailable):  # a job that it refuses
            figures.add(kind, 1 / measure_sessions(open_pool, kind))


def rows_of(name: str, figures: Figures) -> list[dict[str, object]]:
    """The rows of one back end; what it was not measured in is left out."""
    table = (
        (f"{name}-stateless", "executions/CPU-s", "warm-cpu", "cold-cpu"),
        (f"{name}-stateless-wall", "executions/s", "warm-wall", "cold-wall"),
        (f"{name}-p50-ms", "ms", "warm-p50", "cold-p50"),
        (f"{name}-p99-ms", "ms", "warm-p99", "cold-p99"),
        (f"{name}-start-ms", "ms", "start", ""),
        (f"{name}-repl", "executions/s", "repl", "warm-wall"),
        (f"{name}-workdir", "executions/s", "workdir", "warm-wall"),
    )
    rows = []
    for row, unit, ours, theirs in table:
        if (value := figures.median(ours)) is None:
            continue
        peer_value = figures.median(theirs)
        peer = f"{name}-cold" if theirs.startswith("cold") else f"{name}-stateless-wall"
        runs = {"ours": [round(each, 2) for each in figures.seen[ours]]}
        rows.append(
            make_row(
                row,
                unit,
                dtype=None,
                threads=1,
                value=value,
                peer=peer if peer_value is not None else None,
                peer_value=peer_value,
                runs=runs,
            )
        )
    return rows


def other_backends(names: Sequence[str]) -> Iterable[tuple[str, Open]]:
    """Those of `names` that open here; why not is printed for the rest."""
    for name in names:

        def opened(name: str = name) -> Any:
            return open_sandbox(name, SandboxSpec(), num_workers=1, allow_unsafe=True)

        try:
            opened().close()
        except (RuntimeError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
        else:
            yield name, opened


def bench(num_rounds: int, num_runs: int, names: Sequence[str]) -> list[dict[str, object]]:
    figures, others = Figures(), list(other_backends(names))
    of_others = {name: Figures() for name, _ in others}
    for _ in range(num_rounds):
        measure_round(figures, lambda: SandboxPool(SandboxSpec()), num_runs)
        figures.add_runs("cold", *measure_cold(max(5, num_runs // 5)))
        for name, opened in others:
            measure_round(of_others[name], opened, max(5, num_runs // 10))
    rows = rows_of("bwrap", figures)
    for name, seen in of_others.items():
        rows += rows_of(name, seen)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--runs", type=int, default=150, help="executions in each turn")
    everything = ("bwrap", *BACKENDS)
    parser.add_argument(
        "--only", nargs="+", choices=everything, default=everything, help="beside bwrap"
    )
    parser.add_argument("--stress", action="store_true", help="1,500 mixed programs instead")
    arguments = parser.parse_args()
    if arguments.stress:
        sys.exit(stress())
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    names = [name for name in arguments.only if name != "bwrap"]
    rows = bench(arguments.rounds, arguments.runs, names)
    print_rows(rows)
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
