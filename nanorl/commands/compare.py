"""`nanorl compare A B`: which of two is better on the same held-out tasks, and by which of them.

    nanorl compare runs/eval-smollm2 runs/eval-smollm2-seed0
    nanorl compare runs/a runs/b runs/c            # b and c, each against a
    nanorl compare runs/a:before runs/a            # one run, before RL and after
    nanorl compare runs/a@0 runs/a@8 runs/a:best   # with --evaluation.every: while RL went on

Each is the folder or file of a `nanorl eval`, or a run's folder, which stands for its evaluation
after RL; FOLDER:NAME is another one of it (untrained, before, after, no_tool, best), FOLDER@8 that
after eight steps of RL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from nanoengine.command_line import program
from nanorl.observability.report.comparison import PairedComparison, comparison_text
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.run.cursor import BEST, run_and_place

PREFERRED = ("eval.json", "eval-after.json", "eval-before.json", "eval-untrained.json")


def compare(
    results: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    *,
    as_json: bool = False,
) -> None:
    """Compare evaluations on the tasks that they have in common: each with the first.

    Args:
        results: Folders of evaluations or runs; RUN:before is a run's evaluation before RL.
        as_json: Print the comparisons as JSON.
    """
    if len(results) < 2:
        raise ValueError(
            f"compare: {len(results)} given; name two or more, folders of nanorl eval or of runs"
        )
    old, *others = (read_evaluation(name) for name in results)
    comparisons = [PairedComparison.of(old, new) for new in others]
    if as_json:
        print(json.dumps([one.to_json() for one in comparisons], indent=2))
    else:
        print("\n\n".join(comparison_text(one) for one in comparisons))


def read_evaluation(name: str) -> Evaluation:
    """The evaluation that `name` stands for, titled by it."""
    path = _file(name)
    result = Evaluation.read(path)
    phase = path.stem.removeprefix("eval-")
    of_run = f" ({EVALUATIONS[phase]})" if phase in EVALUATIONS else ""
    result.title = name.rpartition(":")[0] + of_run if name.endswith(f":{phase}") else name + of_run
    return result


def _best_step(run: Path) -> int:
    """The steps of RL that were done at the best evaluation. ValueError where none was kept."""
    from nanoengine.state.checkpoint import latest_checkpoint, read_cursor  # here: it imports torch

    best = latest_checkpoint(run / BEST)
    if best is None:
        raise ValueError(f"{run}:best: there is none; train with --evaluation.every N")
    return int(read_cursor(best)["best"]["step"])


def _file(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    folder, step = run_and_place(name)
    colon, phase = "@", f"step-{step}"
    if not step.isdigit():
        folder, colon, phase = name.rpartition(":")
    if phase == "best":
        phase = f"step-{_best_step(Path(folder))}"
    if colon and not path.exists():
        path, wanted = Path(folder), [f"eval-{phase}.json"]
    else:
        wanted = list(PREFERRED)
    for file in wanted:
        if (path / file).is_file():
            return path / file
    found = sorted(one.name for one in path.glob("eval*.json"))
    raise ValueError(
        f"{name}: no evaluation there ({', '.join(wanted)}); "
        + (f"{path} has {', '.join(found)}" if found else f"make one with: {program()} eval MODEL")
    )
