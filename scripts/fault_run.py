"""Kills and stops the processes of a training run at random moments; it must not matter.

    python scripts/fault_run.py [--faults 50] [--seed 0] [--scorers none|reference|critic|both]
                                [--dp N] [--tp N] [--replicas N] [--roles trainer,store,...]
                                [--rollout-tp N] [--placement separate|colocated]
                                [--transport shm|dist|disk] [--backend local] [--steps N]
                                [--out FOLDER] [--json FILE]

A run of the tiny preset is trained twice: undisturbed (in one process, or with the same ranks where
trainer or replicas have several, since they add in another order), and on processes, to which
`kill -9` and SIGSTOP are sent by a seeded generator: one by one, two at once, while a process
starts, while a checkpoint is written, while another role is being replaced. Two limits are
respected, because the run gives up beyond them by design: the trainer and the critic may be lost
twice without getting any further, and a role may die once while it starts.

Then it compares weights and rollouts bit for bit, counts the rollouts, and looks for what was
left behind: processes (it is the subreaper of all), files of /dev/shm and of the run's temporary
folder, and descriptors that became more while the run went on. Exit status 0: all of it holds.

Left out: Ray, whose processes have other names and whose own daemons stay on for a while.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
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

from bench_output import ROOT, write_json

from nanorl.observability.store import RolloutStore

KINDS = {
    "PolicyRank": "trainer",
    "Replica": "replica",
    "CollectorRole": "collector",
    "RolloutStore": "store",
    "ReferenceRole": "reference",
    "CriticRole": "critic",
}
"""Roles by the name of their process, which is that of their class."""
LEARNERS = ("trainer", "critic")  # a death of theirs takes the run back to the newest checkpoint
SMALL = (
    *("--preset", "tiny", "--dtype", "fp32", "--threads", "1", "--tool.workers", "1"),
    *("--warm-start.steps", "3", "--warm-start.traces-per-step", "2"),
    *("--rl.tasks-per-step", "2", "--rl.group-size", "2"),
    *("--evaluation.num-tasks", "2", "--evaluation.num-tasks-untrained", "0"),
    *("--evaluation.num-tasks-no-tool", "1", "--agent.max-turn-tokens", "16"),
    *("--rl.algorithm.entropy-coef", "0.01", "--save-every", "1"),
)
SCORERS = {
    "none": (),
    "reference": ("--rl.algorithm.kl-coef", "0.01"),
    "critic": ("--rl.algorithm.advantage", "gae"),
    "both": ("--rl.algorithm.kl-coef", "0.01", "--rl.algorithm.advantage", "gae"),
}
NOISE = ("Traceback", "never retrieved", "was destroyed but it is pending", "Exception ignored")
PR_SET_CHILD_SUBREAPER = 36
YOUNG_S = 1.5  # a process of this age may still be starting


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """One process of this machine, as /proc tells of it."""

    pid: int
    parent: int
    name: str
    state: str
    age_s: float

    @property
    def kind(self) -> str | None:
        """Its role, if it is one."""
        return KINDS.get(self.name)


def processes() -> Iterator[Process]:
    """All that can be seen."""
    tick = os.sysconf("SC_CLK_TCK")
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            age_s = now_s - int(fields[19]) / tick
            yield Process(int(entry), int(fields[1]), name, fields[0], age_s)


def descendants(root: int) -> list[Process]:
    """The living processes that `root` started, and those that they started."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, line = [], [root]
    while line:
        for process in children.get(line.pop(), ()):
            line.append(process.pid)
            if process.state not in "ZX":
                found.append(process)
    return found


def num_descriptors(pid: int) -> int | None:
    """Open descriptors of a process; None if it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


# -- a run and what was done to it -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal that was sent."""

    at_s: float
    role: str
    signal: str
    step: int
    is_starting: bool
    """The process was so young that it may still have been starting."""


@dataclass
class DisturbedRun:
    """A run on processes: the process of train_agent.py, and what was sent to whom."""

    out: Path
    arguments: Sequence[str]
    program: Path = ROOT / "scripts" / "train_agent.py"
    faults: list[Fault] = field(default_factory=list)
    descriptors: list[tuple[int, int, int]] = field(default_factory=list)
    """How many roles lived; open descriptors of the driver and of the process that forks."""

    def __post_init__(self) -> None:
        self.log = self.out.with_suffix(".log")
        self.segments_before = set(os.listdir("/dev/shm"))
        self.others = {process.pid for process in descendants(os.getpid())}
        self.scratch = Path(tempfile.mkdtemp(prefix="fr-"))  # short: Ray has sockets below it
        set_subreaper(True)
        self.started_s = time.monotonic()
        self._places: list[str] = []  # the newest checkpoint when a learner was struck
        self._last_young: dict[str, float] = {}
        environment = os.environ | {"TMPDIR": str(self.scratch), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(self.program), *self.arguments]
        with self.log.open("a") as log:
            self.driver = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
            )

    def __enter__(self) -> DisturbedRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing stays: not what leaked, either."""
        for process in self.left_processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.driver.wait()
        self._reap()
        set_subreaper(False)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def left_processes(self) -> list[Process]:
        """What lives of all that the run has started."""
        return [p for p in descendants(os.getpid()) if p.pid not in self.others]

    def _reap(self) -> None:
        """Orphans became our children."""
        for process in list(processes()):
            if process.parent == os.getpid() and process.pid not in self.others:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)

    @property
    def is_alive(self) -> bool:
        return self.driver.poll() is None

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.started_s

    def output(self) -> str:
        return self.log.read_text()

    def roles(self) -> list[Process]:
        """The processes of roles that live."""
        return [process for process in descendants(self.driver.pid) if process.kind is not None]

    def checkpoint(self) -> str:
        """The newest one's name; empty before the first."""
        try:
            return (self.out / "checkpoints" / "latest").read_text().strip()
        except FileNotFoundError:
            return ""

    def step(self) -> int:
        """Steps of reinforcement learning that are recorded."""
        try:
            return (self.out / "metrics.jsonl").read_text().count("\n")
        except FileNotFoundError:
            return 0

    def may_strike(self, process: Process) -> bool:
        """Within the limits that the run promises to survive."""
        assert process.kind is not None
        if process.state == "T":
            return False  # it has had its share
        if process.kind in LEARNERS and sum(p in self._recent_places() for p in self._places) >= 2:
            return False
        last_s = self._last_young.get(process.kind, -1e9)
        return process.age_s >= YOUNG_S or self.now_s - last_s > 20.0

    def _recent_places(self) -> set[str]:
        """The newest checkpoint and the one before: what was lost while the newest was being
        written counts against what came after it."""
        newest = self.checkpoint()
        kept = sorted(path.name for path in (self.out / "checkpoints").glob("step_*"))
        return {newest, *kept[-2:]} if kept else {newest}

    def strike(self, process: Process, number: signal.Signals) -> bool:
        """Send the signal; False if the process was gone."""
        assert process.kind is not None
        is_young = process.age_s < YOUNG_S
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return False
        if process.kind in LEARNERS:
            self._places.append(self.checkpoint())
        if is_young:
            self._last_young[process.kind] = self.now_s
        self.faults.append(
            Fault(
                at_s=round(self.now_s, 2),
                role=process.kind,
                signal=number.name,
                step=self.step(),
                is_starting=is_young,
            )
        )
        return True

    def note_descriptors(self) -> None:
        """Of the two processes that outlive all roles."""
        driver = num_descriptors(self.driver.pid)
        forkers = [p for p in descendants(self.driver.pid) if p.parent == self.driver.pid]
        counts = [count for p in forkers if (count := num_descriptors(p.pid)) is not None]
        if driver is not None and counts:
            self.descriptors.append((len(self.roles()), driver, max(counts)))

    def wait(self, limit_s: float) -> int:
        """The driver's exit status; one that takes longer is killed, and its status is -9."""
        try:
            return self.driver.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            return self.driver.wait()

    def leftovers(self, limit_s: float = 60.0) -> dict[str, list[str]]:
        """After the driver's end: names of what is left, by kind. Processes have so long to go."""
        deadline_s = time.monotonic() + limit_s
        while (left := self.left_processes()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return {
            "processes": [f"{process.name} ({process.pid}, {process.state})" for process in left],
            "segments": unowned_segments(self.segments_before),
            "temporary files": sorted(path.name for path in self.scratch.iterdir()),
        }

    def noise(self) -> list[str]:
        """Lines of the output that a user should not see."""
        return [line for line in self.output().splitlines() if any(n in line for n in NOISE)]


def set_subreaper(is_wanted: bool) -> None:
    """Processes whose parent died become our children, so that no orphan can hide."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


class Tormentor:
    """Chooses whom to strike, how and when, from one seed and what is there."""

    def __init__(self, run: DisturbedRun, seed: int, num_faults: int, roles: Sequence[str]) -> None:
        self.run, self.num_faults, self.roles = run, num_faults, roles
        self._random = random.Random(seed)
        self._due: Counter[tuple[str, signal.Signals]] = Counter()

    def work(self, limit_s: float) -> None:
        """Until all faults are done or the run has ended."""
        deadline_s = time.monotonic() + limit_s
        self._pause(0.0, 6.0)  # the first ones fall into the start
        while len(self.run.faults) < self.num_faults and self.run.is_alive:
            if time.monotonic() > deadline_s:
                return
            if self._random.random() < 0.25:
                self._await_saving()
            for _ in range(2 if self._random.random() < 0.2 else 1):
                self._strike_one()
            self._rest()

    def _strike_one(self) -> None:
        """Of the roles that may be struck the one that was struck least, or now and then any."""
        if len(self.run.faults) >= self.num_faults:
            return
        living = [p for p in self.run.roles() if p.kind in self.roles and self.run.may_strike(p)]
        if not living:
            return
        number = signal.SIGSTOP if self._random.random() < 0.3 else signal.SIGKILL
        least = min(self._due[p.kind or "", number] for p in living)
        rare = [p for p in living if self._due[p.kind or "", number] == least]
        process = self._random.choice(rare if self._random.random() < 0.7 else living)
        if self.run.strike(process, number):
            self._due[process.kind or "", number] += 1

    def _await_saving(self, limit_s: float = 2.0) -> None:
        """Until a checkpoint is being written, or a little after."""
        deadline_s = time.monotonic() + limit_s
        folder = self.run.out / "checkpoints"
        while time.monotonic() < deadline_s and not any(folder.glob(".tmp-*")):
            time.sleep(0.001)

    def _rest(self) -> None:
        """Sometimes hardly at all: the next one falls into the restart. Otherwise until the run has
        got further."""
        if self._random.random() < 0.3:
            self._pause(0.0, 1.0)
            return
        deadline_s, step = time.monotonic() + 20.0, self.run.step()
        wanted = step + self._random.randint(1, 2)
        while self.run.is_alive and self.run.step() < wanted and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self._pause(0.0, 0.5)
        self.run.note_descriptors()

    def _pause(self, least_s: float, most_s: float) -> None:
        deadline_s = time.monotonic() + self._random.uniform(least_s, most_s)
        while self.run.is_alive and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))


# -- checks ----------------------------------------------------------------------------------------


def weights_digest(out: Path) -> str:
    """Of the trained model's file."""
    return hashlib.sha256((out / "model-trained" / "model.safetensors").read_bytes()).hexdigest()


def stored_rollouts(out: Path) -> dict[str, str]:
    """A digest of what each stored rollout says, by its id. Times are no part of it."""
    with RolloutStore(out / "rollouts.sqlite") as store:
        pairs = list(zip(store.entries(), store.query(), strict=True))
    ids = [entry.rollout_id for entry, _ in pairs]
    assert len(set(ids)) == len(ids), "the column is unique"
    said = {
        entry.rollout_id: (entry, rollout.status, rollout.logps, rollout.versions)
        for entry, rollout in pairs
    }
    return {name: hashlib.sha256(repr(one).encode()).hexdigest() for name, one in said.items()}


def expected_ids(steps: int, tasks: int = 2, members: int = 2) -> set[str]:
    """The ids of the rollouts that such a run admits."""
    return {
        f"s{step}-g{step * tasks + offset}-m{member}"
        for step in range(steps)
        for offset in range(tasks)
        for member in range(members)
    }


def unowned_segments(before: set[str]) -> list[str]:
    """Files of /dev/shm that are new and that no process has mapped or open: others may be using
    this machine, too."""
    new = {f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - before}
    for process in processes() if new else ():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            opened = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        except OSError:
            continue
        new = {name for name in new if name not in maps and name not in opened}
    return sorted(new)


def descriptor_growth(samples: Sequence[tuple[int, int, int]]) -> int:
    """By how much the least number of open descriptors rose from the first to the last third of
    the samples with as many roles as there ever were: each living role has some."""
    most = max((num_roles for num_roles, _, _ in samples), default=0)
    full = [counts for num_roles, *counts in samples if num_roles == most]
    third = len(full) // 3
    if third == 0:
        return 0
    early, late = zip(*full[:third], strict=True), zip(*full[-third:], strict=True)
    return max(min(after) - min(before) for before, after in zip(early, late, strict=True))


# -- the program -----------------------------------------------------------------------------------


def train_undisturbed(out: Path, arguments: Sequence[str]) -> float:
    """Train; returns the seconds."""
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / "scripts" / "train_agent.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"the undisturbed run failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - start


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["local"], default="local")
    parser.add_argument("--roles", default=",".join(KINDS.values()))
    parser.add_argument("--scorers", choices=sorted(SCORERS), default="none")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--placement", choices=["separate", "colocated"], default="separate")
    parser.add_argument("--transport", choices=["auto", "shm", "dist", "disk"], default="auto")
    parser.add_argument("--steps", type=int, default=0, help="0: three for each fault")
    parser.add_argument("--heartbeat-s", type=float, default=0.3)
    parser.add_argument("--hang-s", type=float, default=4.0)
    parser.add_argument("--start-s", type=float, default=30.0)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="for the disturbed run")
    parser.add_argument("--out", type=Path, help="a folder to keep both runs in")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def cluster_arguments(options: argparse.Namespace) -> list[str]:
    return [
        *("--cluster.backend", options.backend, "--rollout.replicas", str(options.replicas)),
        *("--learner.dp", str(options.dp), "--learner.tp", str(options.tp)),
        *("--rollout.tp", str(options.rollout_tp), "--cluster.placement", options.placement),
        *("--cluster.transport", options.transport),
        *("--cluster.heartbeat-s", str(options.heartbeat_s)),
        *("--cluster.hang-s", str(options.hang_s), "--cluster.start-s", str(options.start_s)),
    ]


def main() -> int:
    options = parse()
    folder = options.out or Path(tempfile.mkdtemp(prefix="fault-run-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return disturb(options, folder)
    finally:
        if options.out is None:
            shutil.rmtree(folder)


def disturb(options: argparse.Namespace, folder: Path) -> int:
    steps = options.steps or 3 * options.faults
    common = [*SMALL, "--rl.steps", str(steps), *SCORERS[options.scorers]]
    cluster = cluster_arguments(options)
    is_split = options.dp * options.tp * options.rollout_tp > 1
    calm, wild = folder / "undisturbed", folder / "disturbed"
    calm_s = train_undisturbed(calm, [*common, *(cluster if is_split else ()), "--out", str(calm)])
    print(f"undisturbed: {calm_s:.1f} s", flush=True)
    with DisturbedRun(wild, [*common, *cluster, "--out", str(wild)]) as run:
        roles = options.roles.split(",")
        Tormentor(run, options.seed, options.faults, roles).work(options.limit_s)
        status = run.wait(options.limit_s)
        wild_s = run.now_s
        checks = check(run, status, calm, steps)
    enough = len(run.faults) >= options.faults
    checks["faults"] = (enough, f"{len(run.faults)} of {options.faults}; else raise --steps")
    report(run, checks, calm_s, wild_s, options)
    return 0 if all(passed for passed, _ in checks.values()) else 1


def check(run: DisturbedRun, status: int, calm: Path, steps: int) -> dict[str, tuple[bool, str]]:
    """What has to hold of a run that has ended, by its name: whether it does, and what was found.
    `calm` is the folder of an undisturbed one."""
    checks = {"finished": (status == 0, f"exit status {status}")}
    if status == 0:
        stored, wanted = stored_rollouts(run.out), stored_rollouts(calm)
        same = weights_digest(run.out) == weights_digest(calm)
        checks["weights"] = (same, "bit-equal" if same else "differ")
        differing = sum(stored.get(key) != value for key, value in wanted.items())
        checks["rollouts"] = (differing == 0, f"{differing} of {len(wanted)} differ")
        once = set(stored) == expected_ids(steps)
        checks["each rollout once"] = (once, f"{len(stored)} stored")
    growth = descriptor_growth(run.descriptors)
    checks["descriptors"] = (growth <= 2, f"{growth:+d}")
    drafts = [str(path.relative_to(run.out)) for path in run.out.rglob(".tmp-*")]
    found = {**run.leftovers(), "drafts": drafts, "noise": run.noise()}
    for name, names in found.items():
        checks[name] = (not names, "none" if not names else "; ".join(names[:5]))
    return checks


def report(
    run: DisturbedRun,
    checks: dict[str, tuple[bool, str]],
    calm_s: float,
    wild_s: float,
    options: argparse.Namespace,
) -> None:
    """Print it, and write it as JSON where that is wanted."""
    sent = Counter((fault.role, fault.signal) for fault in run.faults)
    restarts = run.output().count("starting it again")
    rows = [
        {"role": role, "signal": name, "faults": sent[role, name]} for role, name in sorted(sent)
    ]
    for row in rows:
        print(f"{row['role']:<12}{row['signal']:<10}{row['faults']:>4}")
    young = sum(fault.is_starting for fault in run.faults)
    print(f"{len(run.faults)} faults, {young} of them while a process started; {restarts} restarts")
    print(f"{wild_s:.1f} s, undisturbed {calm_s:.1f} s")
    for name, (passed, what) in checks.items():
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {what}")
    if options.json is not None:
        summary = {
            "name": "faults",
            "faults": len(run.faults),
            "while_starting": young,
            "restarts": restarts,
            "undisturbed_s": round(calm_s, 1),
            "disturbed_s": round(wild_s, 1),
            "checks": {name: {"holds": ok, "found": what} for name, (ok, what) in checks.items()},
        }
        write_json(options.json, [summary, *rows])


if __name__ == "__main__":
    sys.exit(main())
