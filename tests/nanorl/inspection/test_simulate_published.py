"""The published runs: what was measured once is found again, and the page shows that and no other
number."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from simulate_published import PART, page_tables  # noqa: E402

from nanorl.inspection.simulate.fit import compare, descend, fit  # noqa: E402
from nanorl.inspection.simulate.published import PublishedFamily, read_published  # noqa: E402
from nanorl.inspection.simulate.simulation import simulate  # noqa: E402
from nanorl.inspection.simulate.simulation_config import SimulationConfig  # noqa: E402
from nanorl.inspection.simulate.simulation_result import SimulationResult  # noqa: E402

ROWS = json.loads((ROOT / "benchmarks/simulation_2026-11-24.json").read_text())["rows"]
TOLERANCE = 0.02  # relative; one machine's exp and log may round another way than another's


def family(name: str) -> PublishedFamily:
    return next(one for one in read_published() if one.name == name)


def test_the_stored_predictions_come_out_again() -> None:
    stored = {row["name"]: row for row in ROWS}
    comparisons = compare(family("verl-tools"))
    assert len(comparisons) == 5
    for one in comparisons:
        row = stored[f"{one.run} {one.figure}"]
        assert row["peer_value"] == one.published
        assert one.simulated == pytest.approx(row["value"], rel=TOLERANCE)


def test_every_published_figure_has_its_row_and_the_page_shows_them_all() -> None:
    names = [
        f"{name} {figure}"
        for one in read_published()
        for name, run in one.runs.items()
        for figure in run.figures
    ]
    assert [row["name"] for row in ROWS] == names
    page = (ROOT / "docs/simulation.md").read_text()
    assert PART.put(page, page_tables(ROWS)) == page
    for row in ROWS:
        assert row["ratio"] == pytest.approx(row["value"] / row["peer_value"])


def test_a_search_finds_the_minimum_of_a_bowl() -> None:
    def miss(values: Mapping[str, float]) -> float:
        return math.log(values["a"] / 3.0) ** 2 + 2 * math.log(values["b"] / 0.02) ** 2

    found = descend(miss, {"a": 1.0, "b": 1.0}, 8)
    assert found == pytest.approx({"a": 3.0, "b": 0.02}, rel=0.01)


def test_a_fit_sees_the_runs_of_its_role_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[str] = []

    def note(config: SimulationConfig) -> SimulationResult:
        simulated.append(config.name)
        return simulate(replace(config, workload=replace(config.workload, tasks_per_step=1)))

    monkeypatch.setattr("nanorl.inspection.simulate.fit.simulate", note)
    found = fit(family("verl-tools"), 1)
    assert set(simulated) == {"verl-tools-sync"} and set(found) == {"workload.tool_s"}
