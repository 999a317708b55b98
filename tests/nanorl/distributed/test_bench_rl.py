"""The rows of `bench.sh rl` that need processes, from end to end on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_rl  # noqa: E402
import rl_work  # noqa: E402


@pytest.mark.xdist_group("actors")
def test_the_rows_of_roles_are_there_and_hold_together(monkeypatch):
    def measure(command, threads):  # here, not in a process that imports everything again
        work, folder, dtype = command[3:6]
        return getattr(rl_work, work)(folder, dtype, threads)

    monkeypatch.setattr(bench_rl, "measure", measure)
    monkeypatch.setattr(rl_work, "TOOL_S", 0.05)
    monkeypatch.setattr(rl_work, "STEPS", 2)
    rows = bench_rl.make_rows(bench_rl.read_arguments(["--small"]))
    assert [row["name"] for row in rows] == list(bench_rl.ROWS_OF_ROLES)
    replicas, apart, tools = rows
    assert replicas["peer"] == apart["peer"] == "inline"
    assert replicas["ratio"] > 0 and apart["ratio"] > 0
    (run,) = replicas["runs"]["ours"]
    assert run["busy_0"] > 0 and run["busy_1"] > 0, "both replicas have worked"
    for (run,) in apart["runs"].values():
        # two small steps may pass between two heartbeats, which say how long the engine has worked
        assert 0 <= run["idle_learner"] < 1 and 0 <= run["idle_engine"] <= 1
        assert run["tokens_per_step"] > 0
    (run,) = tools["runs"]["ours"]
    assert run["num_calls"] > run["num_rollouts"], "there was more than one turn"
    assert run["tools_s"] >= 0.05 and tools["value"] == run["wall_s"]
