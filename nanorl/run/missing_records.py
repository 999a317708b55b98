"""What a run's folder has lost of its own records: said as the run goes on, and in its report.

Nothing is computed from metrics, stored rollouts and written evaluations. A run goes on without
them as it would have gone on with them, but whatever shows it has holes, and a hole that nobody
mentions is taken for the whole. Left out: what a resumed run is computed from, which is refused
where it is damaged (continuation.py, nanoengine/state/checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from nanoengine.state.checkpoint import lost_newest
from nanorl.observability.report.metrics import read_metrics
from nanorl.options.store_address import EVALUATIONS_FILE
from nanorl.run.cursor import Cursor
from nanorl.run.history import RunHistory

METRICS = "metrics.jsonl"


def passed_over(checkpoints: Path, found: Path | None) -> str:
    """A sentence where a run goes on from `found`, or from the beginning, because its newest
    checkpoint is not whole; else nothing."""
    lost = lost_newest(checkpoints)
    if lost is None:
        return ""
    instead = "from the beginning" if found is None else f"from {found.name}"
    return (
        f"{lost} was the newest checkpoint and has no meta.json, so it is none any more: going on "
        f"{instead}, and the steps since are done again"
    )


def missing_records(run: Path, cursor: Cursor, stored: Collection[int], *, first: int) -> list[str]:
    """A sentence for each kind of record that the run has made up to its cursor and that is not
    there. `stored` are the steps whose rollouts are or were in the store, `first` is the one that
    the run began with itself: what came before a fork is elsewhere."""
    history = RunHistory(run)
    return [
        *_missing_steps(run, cursor.rl_steps_done, stored, first=first),
        *_missing_starts(len(history.read()), cursor.num_starts),
        *(_missing_evaluations(run, cursor) if not history.is_fork else ()),
    ]


def _missing_steps(run: Path, done: int, stored: Collection[int], *, first: int) -> Iterator[str]:
    rows = read_metrics(run / METRICS)
    if steps := set(range(done)) - {row["step"] for row in rows}:
        yield f"{METRICS} lacks {_named(steps)}: curves and tables do"
    played_none = {row["step"] for row in rows if not row.get("num_rollouts", 1)}
    if steps := set(range(first, done)) - played_none - set(stored):
        yield (
            f"the store lacks the rollouts of {_named(steps)}: nanorl view and replay do, and so "
            "do the examples of the report"
        )


def _missing_starts(found: int, recorded: int) -> Iterator[str]:
    if found < recorded:
        yield (
            f"history.jsonl has {found} of at least {recorded} starts of this run: what changed "
            "with the others is not known"
        )


def _missing_evaluations(run: Path, cursor: Cursor) -> Iterator[str]:
    if cursor.results and not (run / EVALUATIONS_FILE).is_file():
        yield f"{EVALUATIONS_FILE} is missing: nanorl view lacks the rollouts of evaluations"
    for name in cursor.results:
        if not (run / f"eval-{name}.json").is_file():
            yield f"eval-{name}.json is missing: nanorl compare and the model card lack it"


def _named(steps: Iterable[int]) -> str:
    """step 3; steps 0 to 4 and 7."""
    ordered, runs = sorted(steps), list[list[int]]()
    for step in ordered:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    said = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    whole = f"{', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else said[0]
    return f"{'steps' if len(ordered) > 1 else 'step'} {whole}"
