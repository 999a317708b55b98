"""What a run leaves behind at its end: summary.json, the model's card and report.html."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nanorl.observability.diagnosis.diagnosis import diagnose
from nanorl.observability.diagnosis.run_record import read_record
from nanorl.observability.report.chat_decode import ChatDecode
from nanorl.observability.report.examples import collect_examples, rates_by_stage
from nanorl.observability.report.html import write_report
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.report.summary import HIDING, build_summary, git_commit, write_summary
from nanorl.observability.report.ways import ways_of_run
from nanorl.observability.store import RolloutStore
from nanorl.options.parts import num_threads
from nanorl.options.run_kind import runs_programs
from nanorl.run.cards.model_card import write_cards
from nanorl.run.cards.model_source import model_source
from nanorl.run.missing_records import METRICS, missing_records
from nanorl.run.state import RunState
from nanorl.shown_pictures import RunPictures, SeeingDecode

ROOT = Path(__file__).resolve().parents[2]


def write_outcome(run: RunState) -> dict[str, Any]:
    """Write everything; returns the summary."""
    run.note_time()
    with RolloutStore(run.config.store_address) as store:
        stored = store.steps()
        rates = rates_by_stage(store.entries())
        examples = collect_examples(run.dir, store)
        rows = read_metrics(run.dir / METRICS)
        ways = ways_of_run(run.dir, store, ChatDecode(run.parts.tokenizer))
        findings = diagnose(read_record(run.dir, run.config, rows, store, run.parts.tokenizer))
    summary = summarise(run)
    if findings:
        summary["findings"] = [one.to_json() for one in findings]
    if ways:
        summary["ways"] = ways.to_json()
    if missing := missing_records(run.dir, run.cursor, stored, first=run.history.first_step):
        summary["missing"] = missing
    write_summary(run.dir / "summary.json", summary)
    write_cards(run.config, summary, model_source(run.config, run.parts.folder))
    write_report(
        run.dir / "report.html",
        config=run.config.to_json(),
        summary=summary,
        metrics_rows=rows,
        examples=examples,
        training_rates=rates,
        decode=SeeingDecode(run.parts.tokenizer.decode, RunPictures.of(run.parts.tokenizer)),
    )
    return summary


def summarise(run: RunState) -> dict[str, Any]:
    """The fields of the contract (DESIGN: summary.json) and where they come from."""
    # Without a warm start RL begins with the weights of the untrained model.
    first = "untrained" if run.config.warm_start.steps else "before"
    return build_summary(_measured(run, first), _about(run, first))


def _measured(run: RunState, first: str) -> dict[str, Any]:
    """The required fields. `first` names the evaluation of the untrained model."""
    config, totals, results = run.config, run.cursor.totals, run.cursor.results

    def success(name: str) -> float | None:
        return results[name]["success"] if name in results else None

    return {
        "preset": config.preset,
        "seed": config.seed,
        "steps": config.rl.steps,
        "wall_s": totals.get("wall_s", 0.0),
        "heldout_success_before": success("before"),
        "heldout_success_after": success("after"),
        "heldout_n": results["after"]["num_tasks"] if "after" in results else 0,
        "heldout_success_untrained": success(first),
        "heldout_success_no_tool": success("no_tool"),
        "dtype": config.dtype,
        "logp_gap_max": totals.get("logp_gap_max"),
        "logp_gap_mean": _ratio(totals, "logp_gap_sum", "logp_gap_tokens"),
        "tokens_per_s_rollout": _ratio(totals, "rollout_tokens", "rollout_s"),
        "tokens_per_s_train": _ratio(totals, "train_tokens", "train_s"),
        "num_rollouts": int(totals.get("num_rollouts", 0)),
        "num_failed_rollouts": int(totals.get("num_failed_rollouts", 0)),
        "peak_rss_bytes": int(totals.get("peak_rss_bytes", 0)),
        "git_commit": git_commit(ROOT) or "unknown",
    }


def _about(run: RunState, first: str) -> dict[str, Any]:
    """The other fields: details of the evaluations, the model, the machine and the history."""
    config, totals, results = run.config, run.cursor.totals, run.cursor.results
    phase, best = run.cursor.phase, run.cursor.best
    watched = {"evaluations": run.cursor.evaluations, "best_step": best["step"]} if best else {}
    if isinstance(config.env, tuple):
        from nanorl.envs.mix import environment_of  # here: few runs have several

        watched["per_environment"] = per_type(results, environment_of)
    for name in HIDING:
        if name in results:
            watched[f"heldout_success_{name}"] = results[name]["success"]
            watched["heldout_n_hidden"] = results[name]["num_tasks"]
    return watched | {
        "per_type": per_type(results),
        "phase_wall_s": {
            name.removeprefix("phase_s."): value
            for name, value in totals.items()
            if name.startswith("phase_s.")
        },
        "logp_gap_steps": int(totals.get("logp_gap_steps", 0)),
        "logp_gap_share": _ratio(totals, "logp_gap_tokens", "rollout_tokens") or 0.0,
        "warm_start_steps": int(totals.get("warm_start_steps", config.warm_start.steps)),
        "heldout_n_before": results.get("before", {}).get("num_tasks", 0),
        "heldout_n_untrained": results.get(first, {}).get("num_tasks", 0),
        "heldout_n_no_tool": results.get("no_tool", {}).get("num_tasks", 0),
        "model": config.model or config.preset,
        "model_source": model_source(config, run.parts.folder).text,
        "num_parameters": run.parts.num_parameters,
        "date": datetime.date.today().isoformat(),
        "hardware": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "threads": num_threads(config),
        "command": " ".join(sys.argv),
        "torch_version": str(torch.__version__),
        "sandbox": config.tool.sandbox if runs_programs(config, run.parts.kind) else "none",
        "history": run.history.read(),
        "status": "finished" if phase == "done" else f"stopped in phase {phase}",
    }


def _ratio(totals: Mapping[str, float], numerator: str, denominator: str) -> float | None:
    below = totals.get(denominator, 0.0)
    return totals.get(numerator, 0.0) / below if below else None


def per_type(
    results: dict[str, Any], whose: Callable[[str], str] = str
) -> dict[str, dict[str, Any]]:
    """Success by task type in every evaluation, and of how many tasks; `n` is of the one after
    RL. `whose` maps a task type to what the rows are of, the type itself where it is not given."""
    table: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        counts: dict[str, tuple[int, int]] = {}
        for kind, (solved, played) in result["per_kind"].items():
            before = counts.get(whose(kind), (0, 0))
            counts[whose(kind)] = (before[0] + solved, before[1] + played)
        for row_of, (solved, played) in counts.items():
            row = table.setdefault(row_of, {})
            row[name] = solved / played
            row[f"n_{name}"] = played
            if name == "after" or "n" not in row:
                row["n"] = played
    return dict(sorted(table.items()))
