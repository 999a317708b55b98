"""A run of hundreds of steps, watched from outside: does anything grow with the steps?

    python scripts/soak.py [--backends inline local] [--steps 300] [--json FILE]

The smallest run that has every part: the tiny model, two tasks in groups of two, programs in the
sandbox, checkpoints, store. After every step this process reads what all processes of the run hold.
Rows, one for each back end and kind, each the median of ten steps:

    BACKEND-rss       resident bytes, at the end; `bound` is that at a third of the way
    BACKEND-files     open file descriptors, likewise
    BACKEND-threads   likewise
    BACKEND-store     bytes of the store that a step adds, in the last third; `bound`: in the middle

`ratio` is `value` over `bound`; exit status 1 where one is more than 1.02. Left out: what a GPU
holds, and growth within a step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_output import ROOT, print_rows, write_json

MOST = 1.02
WINDOW = 10  # steps
SMALLEST = (
    *("--preset", "tiny", "--dtype", "fp32", "--threads", "1", "--tool.workers", "1"),
    *("--warm-start.steps", "1", "--warm-start.traces-per-step", "1"),
    *("--rl.tasks-per-step", "2", "--rl.group-size", "2", "--agent.max-turn-tokens", "16"),
    *("--evaluation.num-tasks", "1", "--evaluation.num-tasks-untrained", "0"),
    *("--evaluation.num-tasks-no-tool", "0", "--rl.algorithm.entropy-coef", "0.01"),
    # A cache is mapped as its blocks are first used: one of 256 MB would seem to grow for 1,000
    # steps. This one is full after some 40.
    *("--engine.cache-mb", "8"),
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What all processes of a run hold after a step."""

    step: int
    rss: int
    files: int
    threads: int
    store: int
    """Bytes of the store."""


def held(run: int, step: int, folder: Path) -> Held:
    """By process `run` and all that it has started."""
    rss = files = threads = 0
    for process in _family(run):
        try:
            files += len(list((process / "fd").iterdir()))
            lines = (process / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        facts = {name: value.split() for name, _, value in (one.partition(":") for one in lines)}
        rss += int(facts["VmRSS"][0]) * 1024 if "VmRSS" in facts else 0
        threads += int(facts["Threads"][0])
    # The write-ahead log beside it is of constant size.
    store = (folder / "rollouts.sqlite").stat().st_size
    return Held(step=step, rss=rss, files=files, threads=threads, store=store)


def _family(run: int) -> list[Path]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = [run]
    for one in family:  # which grows meanwhile
        family += [child for child, parent in parents.items() if parent == one]
    return [Path("/proc") / str(one) for one in family]


def watch(backend: str, steps: int, folder: Path, options: Sequence[str]) -> list[Held]:
    """Run to the end; what was held after each step, as far as this process came to look."""
    command = [sys.executable, "scripts/train_agent.py", *SMALLEST, "--out", str(folder)]
    command += ["--rl.steps", str(steps), "--cluster.backend", backend, *options]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        found = list(_each_step(run, folder))
    finally:
        run.kill()
        run.wait()
    if run.returncode != 0 and (not found or found[-1].step < steps - 1):
        raise RuntimeError(f"{backend}: the run ended early\n{log.read_text()[-2000:]}")
    return found


def _each_step(run: subprocess.Popen[bytes], folder: Path) -> Iterator[Held]:
    metrics, seen = folder / "metrics.jsonl", 0
    while run.poll() is None:
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if done > seen:
            seen = done
            yield held(run.pid, done - 1, folder)
        time.sleep(0.02)


def rows_of(backend: str, steps: int, found: Sequence[Held]) -> list[dict[str, Any]]:
    """The rows of one back end."""

    def at(step: int, number: Callable[[Held], int]) -> float:
        near = [number(one) for one in found if step - WINDOW < one.step <= step]
        return median(near)

    first, middle, last = steps // 3, 2 * steps // 3, steps - 2  # the last step is followed by more
    kinds: dict[str, tuple[Callable[[Held], int], str]] = {
        "rss": (lambda one: one.rss, "bytes"),
        "files": (lambda one: one.files, "descriptors"),
        "threads": (lambda one: one.threads, "threads"),
    }
    rows = [
        row(f"{backend}-{name}", at(last, number), at(first, number), unit)
        for name, (number, unit) in kinds.items()
    ]

    def per_step(begin: int, end: int) -> float:
        size = [at(step, lambda one: one.store) for step in (begin, end)]
        return (size[1] - size[0]) / (end - begin)

    bytes_a_step = per_step(middle, last), per_step(first, middle)
    return [*rows, row(f"{backend}-store", *bytes_a_step, "bytes a step")]


def row(name: str, value: float, bound: float, unit: str) -> dict[str, Any]:
    common = {"name": name, "dtype": "fp32", "threads": 1, "value": value, "unit": unit}
    nobody = {"peer": None, "peer_value": None, "ratio": value / bound, "bound": bound}
    return {**common, **nobody, "bound_ratio": value / bound, "runs": 1}


def main() -> int:
    """Run, print, write; 1 where something grew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["inline", "local"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    given, options = parser.parse_known_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for backend in given.backends:
            found = watch(backend, given.steps, Path(folder) / backend, options)
            rows += rows_of(backend, given.steps, found)
    print_rows(rows)
    if given.json:
        write_json(given.json, rows)
    grown = [one["name"] for one in rows if one["ratio"] > MOST]
    print(f"grew: {', '.join(grown)}" if grown else "nothing grew")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
