"""Sends signals, drawn with a seed, to every process of training runs; no run may end by itself.

    python scripts/signal_run.py --json benchmarks/signals_2026-11-26.json [--signals 200]
                                 [--per-run 12] [--seed 0] [--layouts local,ray,...] [--out FOLDER]

fault_run.py strikes roles within the limits that a role's restart promises. This one knows none:
any process of ours (driver, fork server, roles, ranks, the sandbox's workers, environment hosts),
any of SIGKILL, SIGSTOP (with and without a later SIGCONT), SIGTERM and SIGINT, at any moment from
the start to the last evaluation. Runs of the tiny preset follow each other, each of one of
`LAYOUTS`, until so many signals were sent. Where the driver was told to end, the run goes on with
`--resume`, and so it does, for the count alone, where it ended by itself.

Afterwards weights and stored rollouts are compared with an undisturbed run, bit for bit; what an
asynchronous one has stored is played again by the engine of its version (`nanorl replay`). The file
is written after every run and read at the start: runs that are in it are not made again.
Exit status 0: no run ended by itself, and all comparisons hold.

Left out: Ray's own processes, and the processes in which a policy's program runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_output import ROOT, commit, write_json
from fault_run import (
    KINDS,
    SCORERS,
    SMALL,
    DisturbedRun,
    Process,
    expected_ids,
    processes,
    stored_rollouts,
    train_undisturbed,
    weights_digest,
)

STEPS = 16
HOSTED = "hosted_guess.py"
"""An environment of a user's file, in processes of its own."""
HOSTED_TEXT = '''"""A number is to be said; longer answers pay a little."""
import nanorl

class HostedGuess(nanorl.Env):
    def tasks(self, rng):
        n = rng.randint(1, 9)
        return nanorl.Task(f"Say {n}.", answer=str(n))

    def step(self, text):
        return self.done(reward=len(text) % 7 / 10)
'''
LOCAL = ("--cluster.backend", "local", "--rollout.replicas", "2")
QUICK = (
    *("--cluster.heartbeat-s", "0.5", "--cluster.hang-s", "8", "--cluster.start-s", "60"),
    *("--monitor.restarts", "30"),
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "local": (*LOCAL, *SCORERS["both"]),
    "local tp2": (*LOCAL, "--learner.tp", "2", "--rollout.tp", "2"),
    "local dp2": (*LOCAL, "--learner.dp", "2", "--learner.zero", "2"),
    "local async": (*LOCAL, "--rl.max-staleness", "2", "--rl.batch.order", "finish"),
    "local hosted": (*LOCAL, "--env", HOSTED, "--env-workers", "2", "--warm-start.steps", "0"),
    "ray": ("--cluster.backend", "ray", "--rollout.replicas", "2"),
    "ray dp2": ("--cluster.backend", "ray", "--rollout.replicas", "1", "--learner.dp", "2"),
    "inline": (),
}
SIGNALS = {
    "SIGKILL": 5,
    "SIGSTOP": 3,
    "SIGSTOP, SIGCONT": 2,
    "SIGTERM": 1,
    "SIGINT": 1,
}
"""How likely each is."""
ENDS_DRIVER = ("SIGKILL", "SIGTERM", "SIGINT")
INTERRUPTED = 130
RUN_S = 600.0
"""A driver that takes longer is stuck."""


def is_fork_server(process: Process) -> bool:
    with suppress(OSError):
        return b"nanosched.local.forkserver" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return False


def classified(driver: int) -> Iterator[tuple[str, Process]]:
    """Every living process of the run that is ours, by its kind."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        if process.state not in "ZX":
            children.setdefault(process.parent, []).append(process)
        if process.pid == driver:
            yield "driver", process

    def below(parent: int, kind: str) -> Iterator[tuple[str, Process]]:
        for process in children.get(parent, ()):
            own = kind_of(process, kind)
            if own:
                yield own, process
            # Where a worker of the sandbox forks, policies' programs begin.
            if own != "sandbox worker":
                yield from below(process.pid, own or kind)

    yield from below(driver, "driver")


def kind_of(process: Process, parent: str) -> str:
    """Empty: not ours."""
    if process.name in KINDS:
        return KINDS[process.name]
    if process.name.startswith("ray::AsyncHost") or process.name.startswith("ray::SyncHost"):
        return "actor of Ray"
    if process.name == "bwrap":
        return "sandbox bwrap"
    if parent == "sandbox bwrap":
        return "sandbox worker"
    if process.name == "CodeWorker":
        return "environment host"
    return "fork server" if is_fork_server(process) else ""


@dataclass(kw_only=True)
class Sent:
    """A signal: to whom, when, and how the driver that it met fared."""

    at_s: float
    kind: str
    signal: str
    step: int
    attempt: int
    """Which driver of the run it was: each resume is another."""


@dataclass
class SignalledRun:
    """One run, over all its drivers."""

    layout: str
    out: Path
    arguments: Sequence[str]
    random: random.Random
    wanted: int
    sent: list[Sent] = field(default_factory=list)
    ended_by_itself: list[str] = field(default_factory=list)
    """What the run said when it did."""
    restarts: int = 0
    stopped: dict[int, float] = field(default_factory=dict)
    """Processes that go on again, and when."""

    def train(self) -> None:
        """Until it is finished, resumed as often as it takes."""
        self.began_s = time.monotonic()
        for attempt in range(4 + self.wanted):
            has_begun = (self.out / "config.json").exists()
            if not has_begun:  # killed before it was a run: it may have made a model by then
                shutil.rmtree(self.out, ignore_errors=True)
            arguments = [*self.arguments, *(["--resume"] if has_begun else [])]
            with DisturbedRun(self.out, arguments) as run:
                said = len(run.output())
                told = self.torment(run, attempt)
                status = run.wait(max(1.0, RUN_S - run.now_s))
                tail = run.output()[said:]
            self.restarts += tail.count("begins again from its newest checkpoint")
            if status == 0:
                return
            # A signal that comes before it is handled ends a process as it does everywhere, or as
            # Ray has it, with its number.
            number = getattr(signal, told) if told else 0
            if not told or status not in (-number, number, INTERRUPTED):
                self.ended_by_itself.append(last_words(tail, status))
        raise RuntimeError(f"{self.out}: never finished")

    def torment(self, run: DisturbedRun, attempt: int) -> str:
        """The signal by which the driver was told to end, if it was."""
        # Half of all drivers are left alone until they train: a start takes most of a short run.
        begin = run.step() + 1 if self.random.random() < 0.5 else 0
        while run.is_alive and run.step() < begin and run.now_s < RUN_S / 2:
            self.pause(run, 0.1)
        self.pause(run, self.random.uniform(0.0, 8.0 if begin == 0 else 2.0))
        while len(self.sent) < self.wanted and run.is_alive and run.now_s < RUN_S - 120:
            drawn = self.draw(run)
            if drawn is not None:
                kind, process, name = drawn
                was_struck = self.strike(run, kind, process, name, attempt)
                if was_struck and kind == "driver" and name in ENDS_DRIVER:
                    return name
            self.pause(run, self.random.choice((0.2, 1.5, 6.0)) * self.random.random())
        while self.stopped and run.is_alive:
            self.pause(run, 0.2)
        return ""

    def draw(self, run: DisturbedRun) -> tuple[str, Process, str] | None:
        """All kinds alike, but the driver: its end ends a run, which is known."""
        there: dict[str, list[Process]] = {}
        for kind, process in classified(run.driver.pid):
            if process.state not in "Tt":
                there.setdefault(kind, []).append(process)
        if not there or (len(there) == 1 and self.random.random() < 0.8):
            return None  # it is all there is for long while a run begins
        weights = [0.4 if kind == "driver" else 1.0 for kind in there]
        (kind,) = self.random.choices(list(there), weights)
        (name,) = self.random.choices(list(SIGNALS), list(SIGNALS.values()))
        if kind == "driver" and name == "SIGSTOP":
            name = "SIGSTOP, SIGCONT"  # nobody else would have it go on
        return kind, self.random.choice(there[kind]), name

    def strike(
        self, run: DisturbedRun, kind: str, process: Process, name: str, attempt: int
    ) -> bool:
        try:
            os.kill(process.pid, getattr(signal, name.split(",")[0]))
        except ProcessLookupError:
            return False
        if "SIGCONT" in name:
            self.stopped[process.pid] = time.monotonic() + self.random.uniform(0.5, 12.0)
        self.sent.append(
            Sent(
                at_s=round(time.monotonic() - self.began_s, 1),
                kind=kind,
                signal=name,
                step=run.step(),
                attempt=attempt,
            )
        )
        return True

    def pause(self, run: DisturbedRun, seconds: float) -> None:
        """While it lasts, those that are to go on do."""
        deadline_s = time.monotonic() + seconds
        while run.is_alive:
            for pid, at_s in list(self.stopped.items()):
                if time.monotonic() >= at_s:
                    del self.stopped[pid]
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
            if (left_s := deadline_s - time.monotonic()) <= 0:
                return
            time.sleep(min(left_s, 0.05))
        self.stopped.clear()


def last_words(output: str, status: int) -> str:
    """The error of a run that ended."""
    lines = [line for line in output.splitlines() if line.strip()] or ["it said nothing"]
    said = next((line for line in reversed(lines) if line.startswith("error:")), lines[-1])
    return f"status {status}: {said}"[:400]


def check(layout: str, out: Path, calm: dict[str, Any]) -> dict[str, bool]:
    """What holds of a run that has finished."""
    stored = stored_rollouts(out)
    admitted = {name for name in stored if "failed" not in name}
    checks = {"each rollout once": admitted == expected_ids(STEPS)}
    if "async" in layout:
        command = [sys.executable, "-m", "nanorl", "replay", str(out), "--phase", "rl"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        checks["stored tokens exact"] = done.returncode == 0
        return checks
    checks["weights bit-equal"] = weights_digest(out) == calm["weights"]
    differing = [name for name, digest in calm["rollouts"].items() if stored.get(name) != digest]
    checks["rollouts bit-equal"] = not differing
    return checks


def undisturbed(layout: str, folder: Path, common: Sequence[str]) -> dict[str, Any]:
    """Weights and rollouts of a run of that layout: made once, and kept as a file."""
    file = folder / f"calm-{layout.replace(' ', '-')}.json"
    if not file.exists():
        out = file.with_suffix("")
        shutil.rmtree(out, ignore_errors=True)
        seconds = train_undisturbed(out, [*common, "--out", str(out)])
        kept = {
            "weights": weights_digest(out),
            "rollouts": stored_rollouts(out),
            "seconds": seconds,
        }
        file.write_text(json.dumps(kept))
    return json.loads(file.read_text())


def arguments_of(layout: str, folder: Path) -> list[str]:
    options = [str(folder / HOSTED) if one == HOSTED else one for one in LAYOUTS[layout]]
    kept = ("--keep-checkpoints", "100") if "async" in layout else ()
    return [*SMALL, "--rl.steps", str(STEPS), *kept, *options, *QUICK]


def signal_one(layout: str, number: int, options: argparse.Namespace, folder: Path) -> dict:
    arguments = arguments_of(layout, folder)
    calm = {} if "async" in layout else undisturbed(layout, folder, arguments)
    out = folder / f"run{number}"
    shutil.rmtree(out, ignore_errors=True)
    run = SignalledRun(
        layout,
        out,
        [*arguments, "--out", str(out)],
        random.Random(f"{options.seed}/{number}"),
        options.per_run,
    )
    run.train()
    row = {
        "layout": layout,
        "number": number,
        "seed": options.seed,
        "commit": commit(),
        "signals": len(run.sent),
        "resumes": max((one.attempt for one in run.sent), default=0),
        "restarts": run.restarts,
        "ended_by_itself": run.ended_by_itself,
        "seconds": round(time.monotonic() - run.began_s, 1),
        "undisturbed_s": round(calm.get("seconds", 0.0), 1),
        "checks": check(layout, out, calm),
        "sent": [vars(one) for one in run.sent],
    }
    if not row["ended_by_itself"] and all(row["checks"].values()):
        shutil.rmtree(out)  # what failed is kept, to be looked at
    return row


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all runs."""
    sent = Counter((one["kind"], one["signal"]) for row in rows for one in row["sent"])
    failed = Counter(name for row in rows for name, holds in row["checks"].items() if not holds)
    return {
        "signals": sum(sent.values()),
        "runs": len(rows),
        "runs_that_ended_by_themselves": sum(len(row["ended_by_itself"]) for row in rows),
        "restarts_of_whole_runs": sum(row["restarts"] for row in rows),
        "checks_that_failed": dict(failed),
        "by_kind_and_signal": {f"{kind}: {name}": n for (kind, name), n in sorted(sent.items())},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--per-run", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--out", type=Path, help="a folder to keep runs in")
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def main() -> int:
    options = parse()
    folder = options.out or Path(tempfile.mkdtemp(prefix="signal-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HOSTED).write_text(HOSTED_TEXT)
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    layouts = options.layouts.split(",")
    while sum(row["signals"] for row in rows) < options.signals:
        number = len(rows)
        row = signal_one(layouts[number % len(layouts)], number, options, folder)
        rows.append(row)
        write_json(options.json, rows, about=summary_of(rows))
        print(json.dumps({k: v for k, v in row.items() if k != "sent"}), flush=True)
    if options.out is None:
        shutil.rmtree(folder)
    done = summary_of(rows)
    print(json.dumps(done, indent=1))
    return int(bool(done["runs_that_ended_by_themselves"] or done["checks_that_failed"]))


if __name__ == "__main__":
    sys.exit(main())
