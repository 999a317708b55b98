"""The runs of a comparison: one base run for each seed, and a fork of it for each variant.

    OUT/base/seed0/          a run that ends where RL would begin: warm start, and the scores before
    OUT/gspo/seed0/          a fork of it: the same weights, the same tasks, another algorithm
    OUT/gspo/seed0.json      its record: the options, whether it is finished, or its error
    OUT/gspo/seed0.log       what it printed

Every run is a process of train_agent.py, which dies with this one. A record is written before and
after each; so what is finished is not repeated, and what was cut off goes on with --resume.
Left out: several machines.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comparison.variants import BASE, Variant, VariantSet

from nanorl.observability.report.summary import write_atomically
from nanorl.run.parse import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train_agent.py"
_PR_SET_PDEATHSIG = 1
_OURS = ("--preset", "--seed", "--out", "--fork", "--resume", "--rl.steps")
_POLL_S = 0.1
_ERROR_CHARS = 600


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One run of the matrix: where it is, how it begins, and which runs must be finished first."""

    label: str
    seed: int
    folder: Path
    words: tuple[str, ...]
    needs: tuple[tuple[str, int], ...] = ()
    leftovers: tuple[str, ...] = ()
    """Folders in `folder` that nobody needs once it is finished."""

    @property
    def name(self) -> str:
        return f"{self.label} seed {self.seed}"

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def record_file(self) -> Path:
        return self.folder.with_suffix(".json")

    def record(self) -> dict[str, Any]:
        """What was noted of it; {} where it was never begun."""
        try:
            return json.loads(self.record_file.read_text("utf-8"))
        except FileNotFoundError:
            return {}

    def note(self, status: str, error: str = "") -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        data = {"status": status, "error": error, "words": list(self.words)}
        write_atomically(self.record_file, json.dumps(data, indent=1) + "\n")

    @property
    def is_finished(self) -> bool:
        return self.record().get("status") == "finished"

    @property
    def error(self) -> str:
        """Why it failed; empty where it did not."""
        record = self.record()
        return record["error"] if record.get("status") == "failed" else ""

    def check(self) -> None:
        """ValueError where the folder has a run of other options."""
        words = self.record().get("words", list(self.words))
        if self.folder.exists() and words != list(self.words):
            raise ValueError(
                f"--out: {self.folder} was made with other options ({shlex.join(words)}; now "
                f"{shlex.join(self.words)}); choose another --out, or remove {self.folder} and "
                f"{self.record_file}"
            )


@dataclass(frozen=True, kw_only=True)
class MatrixPlan:
    """What all runs have in common, and where they go."""

    out: Path
    preset: str
    seeds: Sequence[int]
    steps: int
    extra: Sequence[str]
    """Options for every run; those of a variant come after them."""

    def __post_init__(self) -> None:
        for word in self.extra:
            if word.partition("=")[0] in _OURS:
                raise ValueError(
                    f"{word} after --: this script sets it for every run; leave it out"
                )

    def folder(self, label: str, seed: int) -> Path:
        return self.out / label / f"seed{seed}"

    def jobs(self, chosen: VariantSet) -> list[RunJob]:
        """Base runs first, then seed by seed, so that a whole seed is there early. ValueError where
        options are wrong or a folder has another run."""
        self._check_options(chosen)
        jobs = [self._base(seed) for seed in self.seeds]
        jobs += [self._fork(one, seed) for seed in self.seeds for one in chosen.variants.values()]
        for job in jobs:
            job.check()
        return jobs

    def _base(self, seed: int) -> RunJob:
        words = ["--preset", self.preset, "--seed", str(seed), *self._common(0)]
        return RunJob(label=BASE, seed=seed, folder=self.folder(BASE, seed), words=tuple(words))

    def _fork(self, variant: Variant, seed: int) -> RunJob:
        models = {need: self.folder(need, seed) / "model-trained" for need in variant.needs}
        origin = f"{self.folder(BASE, seed)}@0"
        words = ["--fork", origin, *self._common(self.steps), *variant.words(models)]
        return RunJob(
            label=variant.label,
            seed=seed,
            folder=self.folder(variant.label, seed),
            words=tuple(words),
            needs=((BASE, seed), *((need, seed) for need in variant.needs)),
        )

    def _common(self, steps: int) -> list[str]:
        # Without the tool nobody is compared; the untrained model is the base run's to score.
        return ["--evaluation.num-tasks-no-tool", "0", *self.extra, "--rl.steps", str(steps)]

    def _check_options(self, chosen: VariantSet) -> None:
        for one in chosen.variants.values():
            models = {need: self.out for need in one.needs}
            words = ["--preset", self.preset, *self._common(self.steps), *one.words(models)]
            try:
                parse_arguments(words)
            except ValueError as error:
                raise ValueError(f"variant {one.label}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    since_s: float
    log_start: int  # bytes of the log that are of earlier attempts


class Matrix:
    """Runs the jobs, `num_parallel` at a time, and records how each ended."""

    def __init__(
        self,
        jobs: Sequence[RunJob],
        *,
        num_parallel: int,
        threads: int,
        say: Callable[[str], None],
        on_finished: Callable[[RunJob], None] = lambda job: None,
    ) -> None:
        """`on_finished` is called with each job that ends well."""
        self.jobs = {(job.label, job.seed): job for job in jobs}
        self.num_parallel, self.threads, self.say = num_parallel, threads, say
        self.on_finished = on_finished
        self.running: dict[RunJob, _Running] = {}

    def run(self) -> list[RunJob]:
        """Run what is not finished; those that failed. A job whose needs failed fails too."""
        waiting = [job for job in self.jobs.values() if not job.is_finished]
        self.say(f"{len(self.jobs)} runs, {len(self.jobs) - len(waiting)} of them finished before")
        try:
            while waiting or self.running:
                waiting = self._start_some(waiting)
                self._collect()
        except BaseException:  # Ctrl-C too: runs must not outlive their comparison
            self._stop()
            raise
        return [job for job in self.jobs.values() if not job.is_finished]

    def _start_some(self, waiting: Sequence[RunJob]) -> list[RunJob]:
        left = []
        for job in waiting:
            needs = [self.jobs[need] for need in job.needs]
            if lost := [one for one in needs if one not in waiting and self._is_lost(one)]:
                job.note("failed", f"it needs {lost[0].name}, which failed")
                self.say(f"{job.name}: {job.error}")
            elif len(self.running) < self.num_parallel and all(one.is_finished for one in needs):
                self._start(job)
            else:
                left.append(job)
        return left

    def _is_lost(self, job: RunJob) -> bool:
        return job not in self.running and bool(job.error)

    def _start(self, job: RunJob) -> None:
        words = list(job.words)
        threads = [] if "--threads" in words else ["--threads", str(self.threads)]
        if (job.folder / "config.json").is_file():
            words = ["--resume"]
        elif job.folder.exists():  # cut off before it was a run
            shutil.rmtree(job.folder)
        job.note("running")
        start = job.log.stat().st_size if job.log.exists() else 0
        process = start_run([*threads, *words, "--out", str(job.folder)], job.log)
        self.running[job] = _Running(process=process, since_s=time.monotonic(), log_start=start)

    def _collect(self) -> None:
        time.sleep(_POLL_S if self.running else 0.0)
        for job, one in list(self.running.items()):
            status = one.process.poll()
            if status is None:
                continue
            del self.running[job]
            if status == 0:
                for name in job.leftovers:
                    shutil.rmtree(job.folder / name, ignore_errors=True)
                job.note("finished")
                self.on_finished(job)
            else:
                job.note("failed", _last_words(job.log, one.log_start, status))
            took = f"{time.monotonic() - one.since_s:.0f} s"
            self.say(f"{job.name}: {f'failed: {job.error}' if job.error else 'finished'} ({took})")

    def _stop(self) -> None:
        """Let the runs save, as on Ctrl-C, and wait for them."""
        for one in self.running.values():
            one.process.send_signal(signal.SIGINT)
        for one in self.running.values():
            one.process.wait()


def start_run(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A process of train_agent.py that ends with this one; it adds what it prints to `log`."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, str(TRAIN), *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,  # Ctrl-C reaches this program alone, which hands it on
            preexec_fn=partial(die_with, os.getpid()),
        )


def die_with(parent: int) -> None:
    """In the child: a run that outlived this program would hold its folder against the next."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _last_words(log: Path, start: int, status: int) -> str:
    """The error that the run printed, or how its output ends."""
    text = log.read_bytes()[start:].decode("utf-8", errors="replace")
    _, said, error = text.rpartition("\nerror: ")
    if not said:
        lines = [line for line in text.splitlines() if line.strip()]
        error = f"exit status {status}; {lines[-1] if lines else 'it said nothing'}"
    return " ".join(error.split())[:_ERROR_CHARS]
