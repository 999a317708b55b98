"""`gpu_check` refuses clearly where there is no GPU, and reads its own test report right."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_check import _counts, merged  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_refuses_without_a_gpu_and_says_what_to_run_instead(tmp_path):
    target = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--json", str(target)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no CUDA GPU" in done.stderr and "kernel_gate.sh" in done.stderr
    assert not target.exists()


def test_failures_are_counted_and_named():
    report = ElementTree.fromstring(
        '<testsuites><testsuite tests="3" failures="1" errors="1" skipped="0">'
        '<testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="1 != 2"/></testcase>'
        '<testcase classname="b" name="worse"><error message="no memory"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = _counts(list(report.iter("testsuite")))
    assert found["counts"] == {"tests": 3, "failures": 1, "errors": 1, "skipped": 0}
    assert found["failures"] == ["a::bad: 1 != 2", "b::worse: no memory"]


def test_one_result_has_the_rows_of_both_benchmarks_even_if_one_wrote_nothing():
    infer = {"date": "d", "rows": [{"name": "a"}], "skipped": ["x"], "ceilings": {"TB/s": 1.0}}
    kernels = {"date": "d", "rows": [{"name": "b"}], "skipped": [], "ceilings": {"TB/s": 2.0}}
    both = merged(infer, kernels)
    assert both["rows"] == [{"name": "a"}, {"name": "b"}] and both["skipped"] == ["x"]
    assert both["ceilings"] == {"TB/s": 2.0} and both["date"] == "d"
    assert merged({"rows": []}, kernels)["rows"] == [{"name": "b"}]
