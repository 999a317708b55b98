"""Runs public protocols, with several seeds, and says what a model of 135 M parameters learns.

    bash scripts/protocols.sh --out runs/protocols                    all of scripts/protocols/
    bash scripts/protocols.sh --protocols reverse_text --seeds 0
    python scripts/protocols.py --page docs/protocols.md        the newest figures, into the page

A protocol is a file of options for `nanorl train --config`; words after -- go to every run. Called
again with the same options it goes on where it was stopped, also after kill -9. It writes
protocols.json and protocols.md into --out after each call.

Exit status: 0 all runs finished, 1 some failed or could not begin, 2 an option is wrong, 130
stopped with Ctrl-C.
Left out: comparing algorithms, which compare_algorithms.py does from shared warm starts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro
from bench_output import ROOT, write_json
from comparison.matrix import Matrix, RunJob

from nanoengine.state.run_folder import LOCK, take_lock
from nanoengine.stop_signals import EXIT_STATUS
from nanorl.options import parse_arguments
from nanorl.report.evaluation import Evaluation
from nanorl.report.metrics import read_metrics
from nanorl.report.statistics import mean_of_runs
from nanorl.report.summary import read_summary, write_atomically

FOLDER = Path(__file__).resolve().parent / "protocols"
STAGES: Mapping[str, str] = {
    "untrained": "untrained",
    "before": "after the supervised start",
    "after": "after RL",
}
BEGIN, END = "<!-- figures: scripts/protocols.py -->\n", "<!-- end of figures -->\n"
_OURS = ("--config", "--seed", "--out", "--resume", "--fork")


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """Which protocols run, and where."""

    protocols: tuple[str, ...] = ()
    """Names of files in scripts/protocols/, or paths of TOML files; empty: all that come along."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every protocol runs with each."""
    out: Path = Path("runs/protocols")
    """Where runs and results go."""
    page: Path | None = None
    """Write the newest table of benchmarks/ into this page, and run nothing."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"--seeds {' '.join(map(str, self.seeds))}: give each seed once")

    def files(self) -> dict[str, Path]:
        """The files of options by the names of the protocols."""
        shipped = {file.stem: file for file in sorted(FOLDER.glob("*.toml"))}
        found = {}
        for name in self.protocols or shipped:
            file = shipped.get(name, Path(name))
            if not file.is_file():
                raise ValueError(
                    f"--protocols {name}: no such protocol; name a TOML file, or one of "
                    f"{', '.join(shipped)}"
                )
            found[file.stem] = file
        return found


def jobs_of(options: ProtocolOptions, extra: Sequence[str]) -> list[RunJob]:
    """All runs, seed by seed. ValueError where options are wrong or a folder has another run."""
    for word in extra:
        if word.partition("=")[0] in _OURS:
            raise ValueError(f"{word} after --: this script sets it for every run; leave it out")
    jobs = []
    for seed in options.seeds:
        for name, file in options.files().items():
            words = ("--config", str(file), "--seed", str(seed), *extra)
            try:
                parse_arguments([*words, "--out", str(options.out)])
            except SystemExit:
                raise ValueError(f"{file}: nanorl train refuses its options, see above") from None
            folder = options.out / name / f"seed{seed}"
            jobs.append(RunJob(label=name, seed=seed, folder=folder, words=words))
    for job in jobs:
        job.check()
    return jobs


def run(options: ProtocolOptions, extra: Sequence[str]) -> int:
    """Run what is missing, then write the results; the exit status."""
    jobs = jobs_of(options, extra)
    options.out.mkdir(parents=True, exist_ok=True)
    lock = take_lock(options.out / LOCK)
    try:
        failed = Matrix(jobs, num_parallel=1, threads=os.cpu_count() or 1, say=say).run()
    finally:
        os.close(lock)
        write_results(jobs, options.out)
    for job in failed:
        say(f"{job.name} failed: {job.error}; see {job.log}")
    return 1 if failed else 0


# -- figures ---------------------------------------------------------------------------------------


def write_results(jobs: Sequence[RunJob], out: Path) -> None:
    """protocols.json and protocols.md, of the runs that are finished."""
    by_label: dict[str, list[RunJob]] = {}
    for job in jobs:
        if job.is_finished:
            by_label.setdefault(job.label, []).append(job)
    rows = [row_of(label, found) for label, found in by_label.items()]
    write_json(out / "protocols.json", rows)
    write_atomically(out / "protocols.md", table(rows))
    say(table(rows))


def row_of(label: str, jobs: Sequence[RunJob]) -> dict[str, Any]:
    """One protocol: each stage's success and mean reward, means over the seeds."""
    runs = [figures_of(job) for job in jobs]
    stages = {
        stage: {
            key: mean_of_runs([one[stage][key] for one in runs]).to_json()
            for key in ("success", "reward")
        }
        for stage in STAGES
        if all(stage in one for one in runs)
    }
    return {
        "name": label,
        "value": 100 * stages["after"]["success"]["value"],
        "unit": "%",
        "num_tasks": runs[0]["num_tasks"],
        **stages,
        **{key: fmean(one[key] for one in runs) for key in ("wall_s", "sampled_tokens")},
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in runs),
        "runs": runs,
    }


def figures_of(job: RunJob) -> dict[str, Any]:
    """What a finished run came to. Sampled tokens are those of its RL steps."""
    summary = read_summary(job.folder / "summary.json")
    found: dict[str, Any] = {
        "seed": job.seed,
        "wall_s": summary["wall_s"],
        "sampled_tokens": sum(
            row["action_tokens"] for row in read_metrics(job.folder / "metrics.jsonl")
        ),
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "num_tasks": summary["heldout_n"],
        "logp_gap_max": summary["logp_gap_max"],
        "commit": summary["git_commit"],
    }
    for stage in STAGES:
        file = job.folder / f"eval-{stage}.json"
        if file.is_file():
            evaluation = Evaluation.read(file)
            success, reward = evaluation.success.value, evaluation.mean_reward.value
            found[stage] = {"success": success, "reward": reward}
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown: success, and the mean reward in brackets."""
    titles = ["protocol", *STAGES.values(), "seeds", "minutes a run", "sampled tokens"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        name, file = row["name"], FOLDER / f"{row['name']}.toml"
        cells = [f"[{name}](../{file.relative_to(ROOT)})" if file.is_file() else name]
        cells += [_stage(row.get(stage)) for stage in STAGES]
        seeds = ", ".join(str(one["seed"]) for one in row["runs"])
        cells += [seeds, f"{row['wall_s'] / 60:.0f}", f"{row['sampled_tokens']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _stage(stage: Mapping[str, Any] | None) -> str:
    if stage is None:
        return "–"
    success, reward = stage["success"], stage["reward"]
    ends = ""
    if success["low"] is not None:  # Student's ends know nothing of 0 and 100
        low, high = max(0.0, success["low"]), min(1.0, success["high"])
        ends = f" ({100 * low:.0f} to {100 * high:.0f})"
    return f"{success['value']:.1%}{ends}; {reward['value']:.2f}"


def write_page(page: Path) -> None:
    """Put the newest table of benchmarks/ between the marks of the page."""
    page.write_text(written(page.read_text("utf-8"), newest()), "utf-8")


def newest(folder: Path = ROOT / "benchmarks") -> dict[str, Any] | None:
    """The latest figures by the date in the file's name; None without any."""
    files = sorted(folder.glob("protocols_*.json"))
    return {"file": files[-1].name, **json.loads(files[-1].read_text("utf-8"))} if files else None


def written(page: str, measured: Mapping[str, Any] | None) -> str:
    """The page with the table of `measured`."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table; write {BEGIN!r} and {END!r} there")
    said = "No figures lie in `benchmarks/` as `protocols_DATE.json` yet.\n"
    if measured is not None:
        said = (
            f"Measured on {measured['date']} ({measured['hardware']}), "
            f"[benchmarks/{measured['file']}](../benchmarks/{measured['file']}). Success is a "
            "reward of 1, greedy, on held-out tasks, with the interval of 95 % over the seeds "
            "(Student's); after it stands the mean reward.\n\n" + table(measured["rows"])
        )
    return f"{head}{BEGIN}\n{said}\n{END}{tail}"


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str]) -> int:
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    try:
        options = tyro.cli(ProtocolOptions, args=words[:cut], prog="protocols.sh")
        if options.page is not None:
            write_page(options.page)
            return 0
        return run(options, words[cut + 1 :])
    except KeyboardInterrupt:
        print("stopped; the runs are saved: the same command goes on", file=sys.stderr)
        return EXIT_STATUS
    except (ValueError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
