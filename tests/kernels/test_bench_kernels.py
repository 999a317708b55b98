"""The kernel benchmark records what fails instead of ending, and leaves slow peers to the end."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import bench_kernels  # noqa: E402
from kernel_bench.case import BenchCase  # noqa: E402

CEILINGS = {"TB/s": 1.0, "TFLOP/s": 1.0}


def step(name, log):
    return lambda: log.append(name)


def broken():
    raise RuntimeError("no such instruction")


def test_a_peer_that_fails_costs_its_own_row_only():
    case = BenchCase("op", "op", "s", "bf16", lambda: None, {"bad": broken, "good": lambda: None})
    bad, good = bench_kernels.run_case(case, case.peers, "cpu", CEILINGS)
    assert bad["peer_error"] == "RuntimeError: no such instruction" and "ratio" not in bad
    assert good["ratio"] > 0 and good["ms"] == bad["ms"]


def test_rate_and_share_of_the_bound_by_hand(monkeypatch):
    monkeypatch.setattr(bench_kernels, "measure", lambda step, device: (2.0, 1.0, 3.0))
    case = BenchCase("op", "op", "s", "bf16", lambda: None, bytes=10**9)
    (row,) = bench_kernels.run_case(case, {}, "cpu", CEILINGS)
    assert row["value"] == 0.5 and row["unit"] == "TB/s"  # 1 GB in 2 ms
    assert row["bound_ratio"] == 0.5


def test_slow_peers_come_after_every_case_and_an_op_that_fails_is_an_error_at_the_end(
    monkeypatch, tmp_path
):
    log = []
    cases = [
        BenchCase("a", "a", "s", "bf16", step("a", log), slow_peers={"slow": step("slow", log)}),
        BenchCase("b", "b", "s", "bf16", broken),
        BenchCase("c", "c", "s", "bf16", step("c", log), {"fast": step("fast", log)}),
    ]
    monkeypatch.setattr(bench_kernels, "find_cases", lambda device: iter(cases))
    monkeypatch.setattr(bench_kernels, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(bench_kernels, "measure", lambda step, device: (step(), (1.0,) * 3)[1])
    target = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--json", str(target)])
    assert bench_kernels.main() == 1
    assert log == ["a", "c", "fast", "a", "slow"]
    written = json.loads(target.read_text())
    assert [row["peer"] for row in written["rows"]] == [None, None, "fast", "slow"]
    assert "no such instruction" in written["rows"][1]["error"]
    assert written["ceilings"] == CEILINGS and written["skipped"] == []
