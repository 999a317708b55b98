"""What a finished run leaves behind: summary.json, report.html and the trained model's folder."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoengine.model.hf import replace_model
from nanorl.assembly import num_threads
from nanorl.data.rows import Entry
from nanorl.report.examples import Example, choose, choose_entries, rates_by_stage
from nanorl.report.html import write_report
from nanorl.report.metrics import read_metrics
from nanorl.report.summary import build_summary, git_commit, write_summary

if TYPE_CHECKING:
    from nanorl.run import Run

ROOT = Path(__file__).resolve().parent.parent


def write_outcome(run: Run) -> dict[str, Any]:
    """Write everything; returns the summary."""
    run.note_time()
    summary = summarise(run)
    write_summary(run.dir / "summary.json", summary)
    entries = run.store.entries()
    write_report(
        run.dir / "report.html",
        config=run.config.to_json(),
        summary=summary,
        metrics_rows=read_metrics(run.metrics.path),
        examples=[*heldout_examples(run), *training_examples(run, entries)],
        training_rates=rates_by_stage(entries),
        decode=run.parts.tokenizer.decode,
    )
    replace_model(run.parts.trained, run.dir / "model-trained", run.parts.folder)
    return summary


def heldout_examples(run: Run) -> list[Example]:
    """Of the evaluation after RL, if this process played it."""
    played = run.played.get("after", ())
    return [
        Example(rollout=rollout, task=task, when="held out")
        for task, rollout in choose(
            played, kind=lambda pair: pair[0].kind, is_right=lambda pair: pair[1].reward >= 1.0
        )
    ]


def training_examples(run: Run, entries: Sequence[Entry]) -> list[Example]:
    """Rollouts of each task type from each stage of RL, and attempts that failed."""
    chosen = choose_entries(entries)
    tasks = {
        task.task_id: task
        for step in {entry.step for entry in chosen}
        for task in run.train_tasks(step)
    }
    return [
        Example(
            rollout=run.store.get(entry.rollout_id),
            task=tasks.get(entry.task_id),
            when=f"step {entry.step}",
        )
        for entry in chosen
    ]


def summarise(run: Run) -> dict[str, Any]:
    """The fields of the contract (DESIGN: summary.json) and where they come from."""
    config, cursor = run.config, run.cursor
    totals, results = cursor.totals, cursor.results

    def success(name: str) -> float | None:
        return results[name]["success"] if name in results else None

    def ratio(numerator: str, denominator: str) -> float | None:
        below = totals.get(denominator, 0.0)
        return totals.get(numerator, 0.0) / below if below else None

    return build_summary(
        {
            "preset": config.preset,
            "seed": config.seed,
            "steps": config.rl.steps,
            "wall_s": totals.get("wall_s", 0.0),
            "heldout_success_before": success("before"),
            "heldout_success_after": success("after"),
            "heldout_n": results["after"]["num_tasks"] if "after" in results else 0,
            "heldout_success_untrained": success("untrained"),
            "heldout_success_no_tool": success("no_tool"),
            "dtype": config.dtype,
            "logp_gap_max": totals.get("logp_gap_max"),
            "logp_gap_mean": ratio("logp_gap_sum", "logp_gap_tokens"),
            "tokens_per_s_rollout": ratio("rollout_tokens", "rollout_s"),
            "tokens_per_s_train": ratio("train_tokens", "train_s"),
            "num_rollouts": int(totals.get("num_rollouts", 0)),
            "num_failed_rollouts": int(totals.get("num_failed_rollouts", 0)),
            "peak_rss_bytes": int(totals.get("peak_rss_bytes", 0)),
            "git_commit": git_commit(ROOT) or "unknown",
        },
        {
            "per_type": per_type(results),
            "phase_wall_s": {
                name.removeprefix("phase_s."): value
                for name, value in totals.items()
                if name.startswith("phase_s.")
            },
            "warm_start_steps": config.warm_start.steps,
            "heldout_n_untrained": results.get("untrained", {}).get("num_tasks", 0),
            "heldout_n_no_tool": results.get("no_tool", {}).get("num_tasks", 0),
            "model": config.model or config.preset,
            "num_parameters": sum(p.numel() for p in run.parts.trained.parameters()),
            "date": datetime.date.today().isoformat(),
            "hardware": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "threads": num_threads(config),
            "command": " ".join(sys.argv),
            "torch_version": str(torch.__version__),
            "status": "finished" if cursor.phase == "done" else f"stopped in phase {cursor.phase}",
        },
    )


def per_type(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Success by task type in every evaluation, and of how many tasks; `n` is of the one after
    RL."""
    table: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        for kind, (solved, played) in result["per_kind"].items():
            row = table.setdefault(kind, {})
            row[name] = solved / played
            row[f"n_{name}"] = played
            if name == "after" or "n" not in row:
                row["n"] = played
    return dict(sorted(table.items()))
