"""The figures of a comparison: what each run came to, and of each variant the means over its seeds.

Intervals of a mean over seeds are Student's. With a single seed they are paired over the held-out
tasks that both evaluations played (report/comparison.py), which says nothing about seeds.
Every difference is paired: a run's scores before and after, and two runs of one seed, which began
with equal weights and play the same tasks.
Left out: correction for many comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison.matrix import RunJob
from comparison.variants import BASE, Variant, VariantSet

from nanorl.observability.report.comparison import PairedComparison
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.statistics import Measured, mean_of_runs
from nanorl.observability.report.summary import read_summary

LITTLE = 0.5
"""A variant that gains less than this share of the baseline's gain is to be explained."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One finished run of a variant. Tokens and seconds are of its RL steps alone."""

    seed: int
    before: Evaluation
    after: Evaluation
    sampled_tokens: list[float]
    """By step, all up to it."""
    success: list[float | None]
    """Of the rollouts, by step."""
    trained_tokens: float
    """Those with a gradient, in every pass over a batch."""
    step_s: list[float]
    """Seconds of each step."""
    cpu_s: float
    """Of the run's own process; a sandbox's programs are not in it."""
    peak_rss_bytes: int
    commit: str

    @classmethod
    def read(cls, base: Path, folder: Path, seed: int) -> RunFigures:
        """From the folders of the base run and of a finished fork of it."""
        rows, summary = (
            read_metrics(folder / "metrics.jsonl"),
            read_summary(folder / "summary.json"),
        )
        epochs = json.loads((folder / "config.json").read_text("utf-8"))["rl"]["epochs"]
        return cls(
            seed=seed,
            before=Evaluation.read(base / "eval-before.json"),
            after=Evaluation.read(folder / "eval-after.json"),
            sampled_tokens=list(accumulate(row["action_tokens"] for row in rows)),
            success=[row.get("success") for row in rows],
            trained_tokens=epochs * sum(row["trained_tokens"] for row in rows),
            step_s=[row["step_s"] for row in rows],
            cpu_s=sum(row["cpu_s"] for row in rows),
            peak_rss_bytes=summary["peak_rss_bytes"],
            commit=summary["git_commit"],
        )

    @property
    def gain(self) -> PairedComparison:
        return PairedComparison.of(self.before, self.after)

    def to_json(self, level: float, window: int) -> dict[str, Any]:
        gain = self.gain
        reached = step_to_level(self.success, level, window)
        return {
            "seed": self.seed,
            "before": self.before.success.to_json(),
            "after": self.after.success.to_json(),
            "num_tasks": len(gain.pairs),
            "gain": gain.difference.to_json(),
            "num_won": len(gain.won),
            "num_lost": len(gain.lost),
            "sampled_tokens": self.sampled_tokens[-1] if self.sampled_tokens else 0.0,
            "trained_tokens": self.trained_tokens,
            "wall_s": sum(self.step_s),
            "cpu_s": self.cpu_s,
            "peak_rss_bytes": self.peak_rss_bytes,
            "step_to_level": reached,
            "seconds_to_level": None if reached is None else sum(self.step_s[:reached]),
            "commit": self.commit,
        }


def step_to_level(success: Sequence[float | None], level: float, window: int) -> int | None:
    """How many steps it took until the mean of the last `window` steps reached `level`; None where
    it never did. A step without rollouts has no success, and is left out of its window."""
    for end in range(window, len(success) + 1):
        known = [value for value in success[end - window : end] if value is not None]
        if known and fmean(known) >= level - 1e-12:
            return end
    return None


def over_seeds(values: Sequence[float], alone: Measured) -> Measured:
    """The mean over seeds; of one seed what `alone` says, from its tasks."""
    return mean_of_runs(values) if len(values) > 1 else alone


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All finished runs of a comparison by variant, and the errors of the others."""

    chosen: VariantSet
    runs: Mapping[str, list[RunFigures]]
    errors: Mapping[str, dict[int, str]]
    level: float
    window: int
    notes: Mapping[str, str]

    @classmethod
    def read(
        cls,
        jobs: Sequence[RunJob],
        chosen: VariantSet,
        *,
        level: float,
        window: int,
        notes: Mapping[str, str],
    ) -> Figures:
        """Of every run that is recorded as finished."""
        runs: dict[str, list[RunFigures]] = {label: [] for label in chosen.variants}
        errors: dict[str, dict[int, str]] = {label: {} for label in chosen.variants}
        bases = {job.seed: job.folder for job in jobs if job.label == BASE}
        for job in jobs:
            if job.label == BASE:
                continue
            if job.is_finished:
                runs[job.label].append(RunFigures.read(bases[job.seed], job.folder, job.seed))
            elif job.error:
                errors[job.label][job.seed] = job.error
        return cls(chosen=chosen, runs=runs, errors=errors, level=level, window=window, notes=notes)

    @property
    def helping_little(self) -> list[str]:
        """The variants that gain less than half as much as the baseline, where that gained."""
        shares = {label: self._share_of_baseline(label) for label in self.chosen.variants}
        return [label for label, share in shares.items() if share is not None and share < LITTLE]

    def rows(self) -> list[dict[str, Any]]:
        """One for each variant, in the form of a benchmark's rows."""
        return [self._row(one) for one in self.chosen.variants.values()]

    def _row(self, variant: Variant) -> dict[str, Any]:
        runs, label = self.runs[variant.label], variant.label
        common = {"name": label, "options": variant.options, "reason": variant.reason}
        failed = {str(seed): error for seed, error in self.errors[label].items()}
        if not runs:
            return common | {"value": None, "unit": "points", "errors": failed, "runs": []}
        of_runs = [run.to_json(self.level, self.window) for run in runs]
        gain = over_seeds([one["gain"]["value"] for one in of_runs], runs[0].gain.difference)
        after = over_seeds([one["after"]["value"] for one in of_runs], runs[0].after.success)
        costs = ("sampled_tokens", "trained_tokens", "wall_s", "cpu_s", "peak_rss_bytes")
        steps, seconds = (
            [one[name] for one in of_runs] for name in ("step_to_level", "seconds_to_level")
        )
        return common | {
            "value": 100 * gain.value,
            "unit": "points",
            "num_seeds": len(runs),
            "before": fmean(one["before"]["value"] for one in of_runs),
            "after": after.to_json(),
            "gain": gain.to_json(),
            "share_of_baseline": self._share_of_baseline(label),
            "against_baseline": self._against_baseline(label),
            "is_little": label in self.helping_little,
            "note": self.notes.get(label, ""),
            **{name: fmean(one[name] for one in of_runs) for name in costs},
            "num_reached": sum(step is not None for step in steps),
            "step_to_level": None if None in steps else fmean(steps),
            "seconds_to_level": None if None in seconds else fmean(seconds),
            "curve": self._curve(runs),
            "errors": failed,
            "runs": of_runs,
        }

    def _pairs(self, label: str) -> list[tuple[RunFigures, RunFigures]]:
        """(baseline, variant) of the seeds that both have."""
        of_baseline = (
            {run.seed: run for run in self.runs[self.chosen.baseline]}
            if (self.chosen.baseline in self.runs)
            else {}
        )
        return [(of_baseline[run.seed], run) for run in self.runs[label] if run.seed in of_baseline]

    def _share_of_baseline(self, label: str) -> float | None:
        """Its gain over the baseline's, of the seeds that both have; None where that gained
        nothing."""
        pairs = self._pairs(label)
        if not pairs:
            return None
        of_baseline = fmean(one.gain.difference.value for one, _ in pairs)
        own = fmean(other.gain.difference.value for _, other in pairs)
        return own / of_baseline if of_baseline > 0 else None

    def _against_baseline(self, label: str) -> dict[str, Any] | None:
        pairs = [PairedComparison.of(one.after, two.after) for one, two in self._pairs(label)]
        if not pairs or label == self.chosen.baseline:
            return None
        values = [pair.difference.value for pair in pairs]
        return over_seeds(values, pairs[0].difference).to_json()

    def _curve(self, runs: Sequence[RunFigures]) -> list[dict[str, Any]]:
        """By step: sampled tokens so far, and success as a moving average: mean, least and most of
        the seeds."""
        smooth = [moving_average(run.success, self.window) for run in runs]
        points = []
        for step in range(min(len(run.success) for run in runs)):
            values = [one[step] for one in smooth if one[step] is not None]
            tokens = fmean(run.sampled_tokens[step] for run in runs)
            mean, low, high = None, None, None
            if values:
                mean, low, high = fmean(values), min(values), max(values)
            points.append(
                {"step": step + 1, "tokens": tokens, "mean": mean, "low": low, "high": high}
            )
        return points


def moving_average(values: Sequence[float | None], window: int) -> list[float | None]:
    """Each with the `window` − 1 before it, fewer at the beginning."""
    found: list[float | None] = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if value is not None]
        found.append(fmean(known) if known else None)
    return found
