"""Compares algorithms on the same tasks, seeds and budget: one table, one picture, one page.

    bash scripts/compare_algorithms.sh --seeds 0 1 2 --steps 12 --out runs/recipes
    bash scripts/compare_algorithms.sh --algorithms grpo gspo ppo
    bash scripts/compare_algorithms.sh --variants staleness --jobs 2 -- --rl.lr 2e-4

What stands after -- goes to every run, the warm start's too. One warm start for each seed is
shared: every variant forks from it, so all begin with equal weights. Called again with the same
options it goes on where it was stopped, also after kill -9; runs that failed are tried again.
It writes comparison.json, .md and .svg and report.html into --out, anew after each call, and
notes.json, where a person says why a variant helps little.

Exit status: 0 all runs finished, 1 some failed or could not begin, 2 an option is wrong, 130
stopped with Ctrl-C.
Next: comparison/ (variants.py, matrix.py, figures.py, pages.py).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_output import write_json
from comparison.command import main_of, run_all, say
from comparison.figures import Figures
from comparison.matrix import MatrixPlan
from comparison.pages import html, markdown, picture
from comparison.variants import read_variants

from nanorl.observability.report.summary import write_atomically
from nanorl.options.presets import get_preset


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """One comparison."""

    preset: str = "tiny"
    """Which preset all runs are of: tiny or smollm2."""
    variants: str = "recipes"
    """What is compared: recipes (every published algorithm), reuse (four updates from each batch),
    staleness, async (wall time), distill (from a trained teacher, in fewer steps), or a JSON file
    of yours (scripts/comparison/variants.py says what is in it)."""
    algorithms: tuple[str, ...] = ()
    """Only these of them, by their labels; empty: all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every variant runs with each."""
    steps: int | None = None
    """RL steps of every run; None: the preset's."""
    out: Path = Path("runs/compare")
    """Where runs and results go. Other variants of the same seeds may go where a comparison lies:
    they begin in its warm starts, and the results are then theirs."""
    jobs: int = 1
    """Runs at a time; the CPU's cores are divided among them."""
    level: float = 0.6
    """The success in training, 0 to 1, of which the table says after how many steps it was
    reached."""
    window: int = 3
    """Steps of the moving average for that, and for the picture."""

    def __post_init__(self) -> None:
        for name, least in (("jobs", 1), ("window", 1), ("steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} {value}: must be at least {least}")
        if not 0 < self.level <= 1:
            raise ValueError(f"--level {self.level}: must be a share above 0 and at most 1")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"--seeds {' '.join(map(str, self.seeds))}: give each seed once")

    def plan(self, extra: Sequence[str]) -> MatrixPlan:
        steps = get_preset(self.preset).config().rl.steps if self.steps is None else self.steps
        return MatrixPlan(
            out=self.out, preset=self.preset, seeds=self.seeds, steps=steps, extra=tuple(extra)
        )


def compare(options: CompareOptions, extra: Sequence[str]) -> int:
    """Run what is missing, then write the results; the exit status. ValueError where something is
    wrong, before any work, or where another process is at work in the folder."""
    chosen = read_variants(options.variants).chosen(options.algorithms)
    plan = options.plan(extra)
    jobs = plan.jobs(chosen)
    read_notes(options.out)  # a file that cannot be read is refused before hours of work
    status = run_all(jobs, options.out, num_parallel=options.jobs)
    notes = read_notes(options.out)
    level, window = options.level, options.window
    figures = Figures.read(jobs, chosen, level=level, window=window, notes=notes)
    write_results(figures, plan)
    return status


def write_results(figures: Figures, plan: MatrixPlan) -> None:
    """The four files, from what the finished runs left, and the notes that are wanted."""
    out, notes = plan.out, figures.notes
    if wanted := [label for label in figures.helping_little if label not in notes]:
        text = json.dumps({**notes, **dict.fromkeys(wanted, "")}, indent=1)
        write_atomically(out / "notes.json", text + "\n")
        say(f"say in {out / 'notes.json'} why so little: {', '.join(wanted)}; then call this again")
    rows, about = figures.rows(), about_all(figures, plan)
    about["commits"] = sorted({run["commit"] for row in rows for run in row["runs"]})
    write_json(out / "comparison.json", rows, about=about)
    write_atomically(out / "comparison.md", markdown(rows, about))
    write_atomically(out / "comparison.svg", picture(rows, about))
    write_atomically(out / "report.html", html(rows, about))
    say(markdown(rows, about) + f"\nlook: {out / 'report.html'}   data: {out / 'comparison.json'}")


def about_all(figures: Figures, plan: MatrixPlan) -> dict[str, object]:
    """What holds for all rows."""
    return {
        "title": figures.chosen.title,
        "preset": plan.preset,
        "seeds": list(plan.seeds),
        "steps": plan.steps,
        "extra": shlex.join(plan.extra),
        "baseline": figures.chosen.baseline,
        "level": figures.level,
        "window": figures.window,
    }


def read_notes(out: Path) -> Mapping[str, str]:
    """Why variants help little, by their labels; {} without a file."""
    path = out / "notes.json"
    if not path.is_file():
        return {}
    try:
        notes = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); mend it, or remove it") from None
    if not isinstance(notes, dict) or not all(isinstance(one, str) for one in notes.values()):
        raise ValueError(f'{path}: must be {{"variant": "why it helps little"}}; mend or remove it')
    return notes


def main(words: Sequence[str]) -> int:
    return main_of(compare, CompareOptions, "compare_algorithms.sh", words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
