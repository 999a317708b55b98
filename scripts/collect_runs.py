"""Gathers the summaries of finished runs into one file: collect_runs.py OUT.json RUN..."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench_output import write_json
from model_bench import make_row

from nanorl.observability.report.summary import read_summary

FIGURES = {
    "heldout-success-untrained": ("heldout_success_untrained", "fraction"),
    "heldout-success-before": ("heldout_success_before", "fraction"),
    "heldout-success-after": ("heldout_success_after", "fraction"),
    "heldout-success-no-tool": ("heldout_success_no_tool", "fraction"),
    "heldout-success-blind": ("heldout_success_blind", "fraction"),  # of models that see alone
    "heldout-success-first-hidden": ("heldout_success_first_hidden", "fraction"),
    "run-wall": ("wall_s", "s"),
    "logp-gap-max": ("logp_gap_max", "nats"),
    "rollout": ("tokens_per_s_rollout", "tokens/s"),
    "train": ("tokens_per_s_train", "tokens/s"),
    "peak-memory": ("peak_rss_bytes", "bytes"),
}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """A row for each figure of the run; the whole summary travels with the first."""
    summary = read_summary(run / "summary.json")
    about = {"seed": summary["seed"], "n": summary["heldout_n"]}
    rows = [
        make_row(
            f"{summary['preset']}/{name}",
            unit,
            dtype=summary["dtype"],
            threads=summary["threads"],
            value=summary[field],
            runs=about,
        )
        for name, (field, unit) in FIGURES.items()
        if field in summary
    ]
    rows[0]["runs"] = summary
    return rows


def main() -> int:
    out, *runs = map(Path, sys.argv[1:])
    write_json(out, [row for run in runs for row in rows_of(run)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
