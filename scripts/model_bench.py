"""What the benchmarks of a real model share: their options, measurements in processes, the bound.

Every measurement is a process of its own, pinned to as many cores as it has threads. A benchmark
calls itself as `--worker WORK MODEL DTYPE THREADS` and prints one JSON line there.

Next: roofline.py (the bounds), bench_rl.py, bench_infer.py, bench_train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench_output import print_rows, write_json
from roofline import best_of, measure_rates

import nanorl  # noqa: F401  (what threads of PyTorch do is said before it is loaded)

SCRIPTS = Path(__file__).resolve().parent
PEERS = SCRIPTS / "peers"

Worker = Callable[[str, str, int], dict[str, Any]]  # (model folder, dtype, threads)
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Peer:
    """A script in peers/, with what it wants before the model, and the environment it runs in."""

    name: str
    script: str
    options: tuple[str, ...] = ()
    venv: str = ".venv-peers"

    @property
    def python(self) -> Path:
        return SCRIPTS.parent / self.venv / "bin/python"


def make_parser(doc: str | None, dtypes: Sequence[str]) -> argparse.ArgumentParser:
    """The options that they all have; `doc` is the benchmark's module docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peers", action="store_true", help="measure the peers in the same run")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=list(dtypes))
    parser.add_argument("--runs", type=int, default=1, help="alternations of ours and the peer")
    parser.add_argument("--model", help="a SmolLM2-135M folder; default: fetched into the cache")
    parser.add_argument("--worker", nargs=4, metavar=("WORK", "MODEL", "DTYPE", "THREADS"))
    return parser


def run_benchmark(
    args: argparse.Namespace,
    workers: Mapping[str, Worker],
    make_rows: Callable[[argparse.Namespace], list[dict[str, Any]]],
) -> int:
    """One worker's measurement, or all rows, printed and written. Returns the exit status."""
    if args.worker:
        from kernels.torch.allocator import reuse_large_buffers

        reuse_large_buffers()
        work, folder, dtype, threads = args.worker
        print(json.dumps(workers[work](folder, dtype, int(threads))))
        return 0
    if args.model is None and not getattr(args, "small", False):
        from nanoengine.formats.sources import SMOLLM2, resolve_model

        args.model = str(resolve_model(SMOLLM2.name))
    rows = make_rows(args)
    print_rows(rows)
    if args.json:
        write_json(args.json, rows)
    return 0


def measure(command: list[str], threads: int) -> dict[str, Any]:
    """Run a process that prints one JSON line, pinned to `threads` cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        cause = "killed, out of memory?" if done.returncode == -9 else f"exit {done.returncode}"
        raise RuntimeError(f"{' '.join(command)} failed ({cause}):\n{done.stderr[-2000:]}")
    found = json.loads(lines[-1])
    shown = {key: value for key, value in found.items() if not isinstance(value, list)}
    print(f"  {Path(command[1]).name} {command[-4:]}: {shown}", file=sys.stderr, flush=True)
    return found


@contextmanager
def busy_neighbour(threads: int) -> Iterator[None]:
    """One other process that computes all the time, on the cores that `measure` takes."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    endless = f"import os; os.sched_setaffinity(0, {cores})\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", endless])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def alternate(
    args: argparse.Namespace,
    script: str,
    work: str,
    peers: Sequence[Peer],
    dtype: str,
    threads: int,
) -> dict[str, list[dict[str, Any]]]:
    """Measurements of one piece of work in turns, under "ours" and the peers' names. Peers are
    measured with `--peers`, those whose environment does not exist are passed over."""
    tail = [args.model, dtype, str(threads)]
    commands = {"ours": [sys.executable, script, "--worker", work, *tail]}
    for peer in peers:
        if args.peers and peer.python.exists():
            path = str(PEERS / peer.script)
            commands[peer.name] = [str(peer.python), path, *peer.options, *tail]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for _ in range(args.runs):
        for name, command in commands.items():
            runs[name].append(measure(command, threads))
    return runs


def make_row(
    name: str,
    unit: str,
    *,
    dtype: str | None,
    threads: int,
    value: float | None,
    peer: str | None = None,
    peer_value: float | None = None,
    bound: float | None = None,
    runs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A row of the JSON. Ratios are above 1 where we are better than the peer, below 1 where we
    are worse than the bound. A bound that was beaten is none: it is left out, with a warning, since
    its rates were measured in a disturbed moment."""
    more_is_better = "/" in unit  # a rate

    def ratio(other: float | None) -> float | None:
        if other is None or value is None:
            return None
        return value / other if more_is_better else other / value

    if (ratio(bound) or 0.0) > 1.0:
        print(f"{name}: {value} {unit} beats the bound {bound}: left out", file=sys.stderr)
        bound = None
    return {
        "name": name,
        "dtype": dtype,
        "threads": threads,
        "value": value,
        "unit": unit,
        "peer": None if peer_value is None else peer,
        "peer_value": peer_value,
        "ratio": ratio(peer_value),
        "bound": bound,
        "bound_ratio": ratio(bound),
        "runs": runs,
    }


def peak() -> dict[str, int]:
    """Peak resident bytes of this process."""
    return {"peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def run_rate(_: str, dtype: str, threads: int) -> dict[str, Any]:
    """Rates of this machine (roofline.py), in a process of its own."""
    return measure_rates(dtype, threads)


def with_rates(
    args: argparse.Namespace, script: str, dtype: str, threads: int, work: Callable[[], Measured]
) -> tuple[Measured, dict[str, float]]:
    """What `work` measures, and the best rates that the machine showed before or after it: it may
    have been disturbed at either time."""
    command = [sys.executable, script, "--worker", "rate", args.model, dtype, str(threads)]
    before = measure(command, threads)
    measured = work()
    return measured, best_of([before, measure(command, threads)])
