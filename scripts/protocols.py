"""Runs public protocols, with several seeds, and says what a model of 135 M parameters learns.

    bash scripts/protocols.sh --out runs/protocols                    all of scripts/protocols/
    bash scripts/protocols.sh --protocols reverse_text --seeds 0
    python scripts/protocols.py --page docs/protocols.md        the newest figures, into the page

A protocol is a file of options for `nanorl train --config`; words after -- go to every run. Called
again with the same options it goes on where it was stopped, also after kill -9. It writes
protocols.json and protocols.md into --out after each call. Of a finished run the trained model and
all figures stay; its checkpoints go, 5 GB of a model of 135 M parameters.

Exit status: 0 all runs finished, 1 some failed or could not begin, 2 an option is wrong, 130
stopped with Ctrl-C.
Left out: comparing algorithms, which compare_algorithms.py does from shared warm starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_output import ROOT, write_json
from comparison.command import main_of, run_all, say
from comparison.matrix import RunJob
from generated_part import GeneratedPart, newest

from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.statistics import mean_of_runs, share_of_tasks
from nanorl.observability.report.summary import read_summary, write_atomically
from nanorl.run.parse import parse_arguments

FOLDER = Path(__file__).resolve().parent / "protocols"
STAGES: Mapping[str, str] = {
    "untrained": "untrained",
    "before": "after the supervised start",
    "after": "after RL",
}
PART = GeneratedPart("figures", "protocols.py")
_WHILE_TRAINING = ("first_reward", "last_reward")
_CHECKPOINTS = ("start", "checkpoints")
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
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs."""
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
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from None
            folder = options.out / name / f"seed{seed}"
            leftovers = () if options.keep_checkpoints else _CHECKPOINTS
            jobs.append(
                RunJob(label=name, seed=seed, folder=folder, words=words, leftovers=leftovers)
            )
    for job in jobs:
        job.check()
    return jobs


def run(options: ProtocolOptions, extra: Sequence[str]) -> int:
    """Run what is missing, then write the results; the exit status."""
    jobs = jobs_of(options, extra)
    try:
        return run_all(jobs, options.out, num_parallel=1)
    finally:
        write_results(jobs, options.out)


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
        **sampled_of(runs),
        **{
            key: fmean(one[key] for one in runs)
            for key in ("wall_s", "sampled_tokens", *_WHILE_TRAINING)
        },
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in runs),
        "runs": runs,
    }


def sampled_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sampled held-out success before and after RL, and what each seed gained; nothing where a run
    was not evaluated while RL went on."""
    if not all("sampled" in one for one in runs):
        return {}
    first, last = ([one["sampled"][place] for one in runs] for place in (0, -1))
    gains = [new["success"] - old["success"] for old, new in zip(first, last, strict=True)]
    found = {
        when: {
            key: mean_of_runs([one[key] for one in rows]).to_json()
            for key in ("success", "pass_at_k")
        }
        for when, rows in (("before", first), ("after", last))
    }
    return {"sampled": {"k": runs[0]["k"], "gain": mean_of_runs(gains).to_json(), **found}}


def figures_of(job: RunJob) -> dict[str, Any]:
    """What a finished run came to. Sampled tokens are those of its RL steps; first and last reward
    are the mean rewards of the rollouts, at the temperature of training, of its two first and its
    two last steps."""
    summary = read_summary(job.folder / "summary.json")
    steps = read_metrics(job.folder / "metrics.jsonl")
    found: dict[str, Any] = {
        "seed": job.seed,
        "wall_s": summary["wall_s"],
        "sampled_tokens": sum(row["action_tokens"] for row in steps),
        "first_reward": fmean(row["reward"] for row in steps[:2]),
        "last_reward": fmean(row["reward"] for row in steps[-2:]),
        "peak_rss_bytes": summary["peak_rss_bytes"],
        "num_tasks": summary["heldout_n"],
        "logp_gap_max": summary["logp_gap_max"],
        "commit": summary["git_commit"],
    }
    if rows := summary.get("evaluations"):
        found["k"] = rows[0]["k"]
        found["sampled"] = [{"step": row["step"], **row["heldout"]} for row in rows]
    for stage in STAGES:
        file = job.folder / f"eval-{stage}.json"
        if file.is_file():
            evaluation = Evaluation.read(file)
            success, reward = evaluation.success.value, evaluation.mean_reward.value
            kinds = {
                kind: share_of_tasks([score.share for score in scores]).value
                for kind, scores in evaluation.per_kind().items()
            }
            found[stage] = {"success": success, "reward": reward, "kinds": kinds}
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown: success, and the mean reward in brackets."""
    titles = [
        "protocol",
        *STAGES.values(),
        "sampled, before and after RL",
        "gained",
        "reward of rollouts",
        "seeds",
        "minutes a run",
        "sampled tokens",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        name, file = row["name"], FOLDER / f"{row['name']}.toml"
        cells = [f"[{name}](../{file.relative_to(ROOT)})" if file.is_file() else name]
        cells += [_stage(row.get(stage)) for stage in STAGES]
        cells += _sampled(row.get("sampled"))
        cells.append(f"{row['first_reward']:.2f} → {row['last_reward']:.2f}")
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


def _sampled(sampled: Mapping[str, Any] | None) -> tuple[str, str]:
    """Sampled success with pass@k, and the gain in points, bold where its interval excludes 0."""
    if sampled is None:
        return "–", "–"
    ends = (sampled["before"], sampled["after"])
    success, among = (
        " → ".join(f"{one[key]['value']:.1%}" for one in ends) for key in ("success", "pass_at_k")
    )
    gain = sampled["gain"]
    text = f"{100 * gain['value']:+.1f}"
    if gain["low"] is not None:
        text += f" ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"
        text = f"**{text}**" if gain["low"] > 0 or gain["high"] < 0 else text
    return f"{success}; pass@{sampled['k']} {among}", text


def measured_text(measured: Mapping[str, Any] | None) -> str:
    """What the page says of the newest figures."""
    if measured is None:
        return "No figures lie in `benchmarks/` as `protocols_DATE.json` yet."
    return (
        f"Measured on {measured['date']} ({measured['hardware']}), "
        f"[benchmarks/{measured['file']}](../benchmarks/{measured['file']}). Success is a reward "
        "of 1, greedy, on held-out tasks, with the interval of 95 % over the seeds (Student's); "
        "after it stands the mean reward. Sampled success is of the same temperature as the "
        "rollouts; what was gained is the mean of the seeds' differences in points, with its "
        "interval, bold where that excludes 0. The reward of rollouts is that of the first two and "
        f"of the last two steps of RL.\n\n{table(measured['rows'])}"
    )


def command(options: ProtocolOptions, extra: Sequence[str]) -> int:
    if options.page is None:
        return run(options, extra)
    text = measured_text(newest("protocols"))
    options.page.write_text(PART.put(options.page.read_text("utf-8"), text), "utf-8")
    return 0


def main(words: Sequence[str]) -> int:
    return main_of(command, ProtocolOptions, "protocols.sh", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
