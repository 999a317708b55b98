"""Predicts the published runs and writes the errors down: a JSON, and the tables of a document.

    python scripts/simulate_published.py --json benchmarks/simulation_2026-11-24.json
    python scripts/simulate_published.py --page docs/simulation.md

The first simulates all runs of simulate/published.json (minutes), `--page` alone writes the
newest such JSON's rows between the marks of the page.
Left out: fitting (nanorl/inspection/simulate/fit.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_output import write_json
from generated_part import GeneratedPart, newest

from nanorl.inspection.simulate.fit import Comparison, compare, table
from nanorl.inspection.simulate.published import PublishedFamily, read_published

PART = GeneratedPart("predictions", "simulate_published.py")


def make_row(family: PublishedFamily, one: Comparison, seconds: float) -> dict[str, Any]:
    """The published figure is the peer; `ratio` is simulated over published."""
    is_ratio = one.figure in ("speed_up", "num_preemptions")
    return {
        "name": f"{one.run} {one.figure}", "dtype": None, "threads": 1, "value": one.simulated,
        "unit": f"{'1' if is_ratio else 's'}, SIMULATED", "peer": family.source,
        "peer_value": one.published, "ratio": one.error + 1, "bound": None, "bound_ratio": None,
        "runs": {"family": family.name, "role": one.role, "family_took_s": round(seconds, 1)},
    }  # fmt: skip


def rows_of_all() -> list[dict[str, Any]]:
    rows = []
    for family in read_published():
        start = time.perf_counter()
        comparisons = compare(family)
        seconds = time.perf_counter() - start
        rows += [make_row(family, one, seconds) for one in comparisons]
        print(f"{family.name}, {seconds:.0f} s\n{table(comparisons)}", flush=True)
    return rows


def page_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """The predictions of every family as Markdown, with what was fitted."""
    parts = []
    for family in read_published():
        mine = [row for row in rows if row["runs"]["family"] == family.name]
        fitted = ", ".join(f"`{name}` {value:g}" for name, value in family.fitted.items())
        comparisons = [
            Comparison(
                run=row["name"].split()[0],
                figure=row["name"].split()[1],
                role=row["runs"]["role"],
                published=row["peer_value"],
                simulated=row["value"],
            )
            for row in mine
        ]
        parts.append(
            f"**{family.name}** ({family.source}). Fitted: {fitted}.\n\n{table(comparisons)}\n"
        )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.json or not options.page:
        rows = rows_of_all()
        if options.json:
            write_json(options.json, rows)
    if options.page:
        predicted = newest("simulation")
        assert predicted is not None, "benchmarks/ comes with one"
        options.page.write_text(PART.put(options.page.read_text(), page_tables(predicted["rows"])))


if __name__ == "__main__":
    main()
