"""Runs public protocols and other recipes, with several seeds, and says what a small model learns.

    bash scripts/protocols.sh --out runs/protocols                    the public protocols
    bash scripts/protocols.sh --protocols reverse_text maze --seeds 0
    bash scripts/protocols.sh --gallery                               all of examples/recipes/
    python scripts/protocols.py --pages                   the newest figures, into the pages

A recipe is a file of options for `nanorl train --config`; words after -- go to every run. Called
again with the same options it goes on where it was stopped, also after kill -9. It writes
protocols.json and protocols.md into --out after each run. Of a finished run the trained model and
all figures stay; its checkpoints go, 5 GB of a model of 135 M parameters. With --keep FILE the
figures of each finished run are in that file, too, as it ends, and runs whose figures are in it
already are not made again, in whichever --out.

Exit status: 0 all runs finished, 1 some failed or could not begin, 2 an option is wrong, 130
stopped with Ctrl-C.
Left out: comparing algorithms, which compare_algorithms.py does from shared warm starts.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from bench_output import ROOT, hardware, write_json
from comparison.command import main_of, run_all, say
from comparison.matrix import RunJob
from generated_part import GeneratedPart, newest

from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.statistics import mean_of_runs, share_of_tasks
from nanorl.observability.report.summary import read_summary, write_atomically
from nanorl.run.parse import parse_arguments

FOLDER = ROOT / "examples" / "recipes"
PROTOCOLS = (
    *("alphabet_sort", "arithmetic", "arithmetic_tool"),
    *("chain_sum", "reverse_text", "wordle"),
)
"""Those that other projects begin with, too."""
STAGES: Mapping[str, str] = {
    "untrained": "untrained",
    "before": "after the supervised start",
    "after": "after RL",
}
PAGES: Mapping[str, Path] = {
    "protocols": ROOT / "docs" / "protocols.md",
    "gallery": ROOT / "docs" / "gallery.md",
    "warm_starts": ROOT / "docs" / "environments.md",
}
"""The pages with figures; what is in scripts/comparison/warm_starts/ is measured by its paths."""
PARTS = {name: GeneratedPart(name, "protocols.py") for name in PAGES}
_WHILE_TRAINING = ("first_reward", "last_reward")
_CHECKPOINTS = ("start", "checkpoints")
_OURS = ("--config", "--seed", "--out", "--resume", "--fork")


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions:
    """Which protocols run, and where."""

    protocols: tuple[str, ...] = ()
    """Names of files in examples/recipes/, or paths of TOML files; empty: the public protocols."""
    gallery: bool = False
    """All files of examples/recipes/."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every protocol runs with each."""
    out: Path = Path("runs/protocols")
    """Where runs and results go."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of finished runs."""
    keep: Path | None = None
    """A JSON file that gets the figures of each finished run, and saves what it has already."""
    pages: bool = False
    """Write the newest figures of benchmarks/ into docs/, and run nothing."""

    def __post_init__(self) -> None:
        if self.gallery and self.protocols:
            raise ValueError("--gallery and --protocols: the first means all of them; give one")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"--seeds {' '.join(map(str, self.seeds))}: give each seed once")

    def files(self) -> dict[str, Path]:
        """The files of options by the names of the recipes."""
        shipped = {file.stem: file for file in sorted(FOLDER.glob("*.toml"))}
        found = {}
        for name in self.protocols or (shipped if self.gallery else PROTOCOLS):
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
    """Run what is missing, then say the results; the exit status."""
    jobs = jobs_of(options, extra)
    kept = KeptFigures.read(options.keep)
    kept.identities = {job.name: identity(job) for job in jobs}  # a file may change while it runs
    missing = [job for job in jobs if kept.of(job) is None]
    if num_kept := len(jobs) - len(missing):
        say(f"{options.keep} has the figures of {num_kept} of {len(jobs)} runs")

    def keep(job: RunJob) -> None:
        kept.add(job, figures_of(job))
        write_results(kept.rows(jobs), options.out)

    for job in missing:
        if job.is_finished:  # before: its figures may be anywhere else
            kept.add(job, figures_of(job))
    try:
        return run_all(missing, options.out, num_parallel=1, on_finished=keep)
    finally:
        rows = kept.rows(jobs)
        write_results(rows, options.out)
        say(table(rows))


# -- figures ---------------------------------------------------------------------------------------


def identity(job: RunJob) -> str:
    """A digest of all options of a run but its seed: those in its file, and those after --."""
    place = job.words.index("--config") + 1
    words = [word for i, word in enumerate(job.words) if i not in (place, place + 2)]
    text = Path(job.words[place]).read_text("utf-8")
    return hashlib.sha256(json.dumps([text, *words]).encode()).hexdigest()[:16]


@dataclass
class KeptFigures:
    """The figures of finished runs by label, options and seed; in `file`, if there is one."""

    file: Path | None
    runs: dict[tuple[str, str, int], dict[str, Any]]
    identities: dict[str, str] = field(default_factory=dict)
    """Of jobs by their names, as they were when they began."""

    @classmethod
    def read(cls, file: Path | None) -> KeptFigures:
        """ValueError for a file that is none of this script."""
        runs: dict[tuple[str, str, int], dict[str, Any]] = {}
        if file is not None and file.is_file():
            try:
                for row in json.loads(file.read_text("utf-8"))["rows"]:
                    for one in row["runs"]:
                        runs[row["name"], one.get("options", ""), one["seed"]] = one
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"--keep {file}: holds no figures of this script ({error!r}); name another"
                ) from None
        return cls(file, runs)

    def of(self, job: RunJob) -> dict[str, Any] | None:
        return self.runs.get((job.label, self._identity(job), job.seed))

    def add(self, job: RunJob, figures: Mapping[str, Any]) -> None:
        options = self._identity(job)
        about = {"options": options, "date": str(datetime.date.today()), "hardware": hardware()}
        self.runs[job.label, options, job.seed] = {**figures, **about}
        if self.file is not None:
            write_json(self.file, self._all_rows())

    def _identity(self, job: RunJob) -> str:
        return self.identities.get(job.name) or identity(job)

    def rows(self, jobs: Sequence[RunJob]) -> list[dict[str, Any]]:
        """A row for each label of these jobs that has figures."""
        by_label: dict[str, list[dict[str, Any]]] = {}
        for job in jobs:
            if (figures := self.of(job)) is not None:
                by_label.setdefault(job.label, []).append(figures)
        return [row_of(label, runs) for label, runs in by_label.items()]

    def _all_rows(self) -> list[dict[str, Any]]:
        """Of each label the runs with the newest options."""
        by_label: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for (label, options, _), figures in self.runs.items():
            by_label.setdefault(label, {}).setdefault(options, []).append(figures)
        return [
            row_of(label, sorted([*by_options.values()][-1], key=lambda one: one["seed"]))
            for label, by_options in sorted(by_label.items())
        ]


def write_results(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """protocols.json and protocols.md, of the runs that are finished."""
    write_json(out / "protocols.json", rows)
    write_atomically(out / "protocols.md", table(rows))


def row_of(label: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One recipe: each stage's success and mean reward, means over the figures of its runs."""
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
        "runs": list(runs),
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


def _stage(stage: Mapping[str, Any] | None, *, has_reward: bool = True) -> str:
    if stage is None:
        return "–"
    success, reward = stage["success"], stage["reward"]
    ends = ""
    if success["low"] is not None:  # Student's ends know nothing of 0 and 100
        low, high = max(0.0, success["low"]), min(1.0, success["high"])
        ends = f" ({100 * low:.0f} to {100 * high:.0f})"
    return f"{success['value']:.1%}{ends}" + (f"; {reward['value']:.2f}" if has_reward else "")


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


def about(name: str) -> str:
    """What a recipe is: the comment that its file begins with."""
    lines = (FOLDER / f"{name}.toml").read_text("utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in takewhile(_is_comment, lines))


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def gallery_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All recipes that come along: what each is, and what came out where it was measured."""
    measured = {row["name"]: row for row in rows}
    titles = ["recipe", "what it is", *STAGES.values(), "sampled gain", "minutes", "seeds"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for file in sorted(FOLDER.glob("*.toml")):
        row = measured.get(file.stem)
        cells = [f"[{file.stem}](../{file.relative_to(ROOT)})", about(file.stem)]
        if row is None:
            cells += ["not measured yet", *["–"] * (len(titles) - 3)]
        else:
            cells += [_stage(row.get(stage), has_reward=False) for stage in STAGES]
            seeds = ", ".join(str(one["seed"]) for one in row["runs"])
            cells += [_sampled(row.get("sampled"))[1], f"{row['wall_s'] / 60:.0f}", seeds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measured_text(page: str, measured: Mapping[str, Any] | None) -> str:
    """What a page says of the newest figures."""
    if measured is None:
        return f"No figures lie in `benchmarks/` as `{_kind(page)}_DATE.json` yet."
    rows = measured["rows"]
    runs = [one for row in rows for one in row["runs"]]
    machines = "; ".join(dict.fromkeys(one.get("hardware", measured["hardware"]) for one in runs))
    source = (
        f"Measured until {measured['date']} ({machines}), "
        f"[benchmarks/{measured['file']}](../benchmarks/{measured['file']}). "
    )
    if page == "gallery":
        return f"{source}\n\n{gallery_table(rows)}"
    if page == "warm_starts":
        return f"{source}\n\n{table(sorted(rows, key=lambda row: int(row['name'].split('_')[1])))}"
    missing = sorted(set(PROTOCOLS) - {row["name"] for row in rows})
    unmeasured = f"Not measured with these settings yet: {', '.join(missing)}. " if missing else ""
    return (
        f"{source}{unmeasured}Success is a reward "
        "of 1, greedy, on held-out tasks, with the interval of 95 % over the seeds (Student's); "
        "after it stands the mean reward. Sampled success is of the same temperature as the "
        "rollouts; what was gained is the mean of the seeds' differences in points, with its "
        "interval, bold where that excludes 0. The reward of rollouts is that of the first two and "
        "of the last two steps of RL.\n\n"
        f"{table([row for row in rows if row['name'] in PROTOCOLS])}"
    )


def _kind(page: str) -> str:
    """What the files in benchmarks/ begin with that a page is made of."""
    return "warm_starts" if page == "warm_starts" else "protocols"


def written(page: str) -> str:
    """A page with the newest figures."""
    text = measured_text(page, newest(_kind(page)))
    return PARTS[page].put(PAGES[page].read_text("utf-8"), text)


def command(options: ProtocolOptions, extra: Sequence[str]) -> int:
    if not options.pages:
        return run(options, extra)
    for page, file in PAGES.items():
        file.write_text(written(page), "utf-8")
    return 0


def main(words: Sequence[str]) -> int:
    return main_of(command, ProtocolOptions, "protocols.sh", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
