"""`gpu_check` refuses clearly where there is no GPU, needs no package that a GPU machine lacks, and
keeps what its tests found when they run out of time."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
GPU_MACHINE = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "rich")
GPU_MACHINE += ("pytest", "hypothesis")
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_check import _counts, merged, run_tests  # noqa: E402


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


def test_a_time_out_keeps_the_results_so_far(tmp_path):
    """Also where interrupts are ignored, as in the background job of a shell."""
    bad = tmp_path / "test_bad.py"
    bad.write_text("def test_bad(): assert 0, 'wrong'\n")
    begin = time.monotonic()
    assert run_tests(300, [str(bad)])["exit_code"] == 1
    limit = 3 * round(time.monotonic() - begin) + 3  # this machine's start of pytest, and then some
    bad.write_text(bad.read_text() + "def test_slow():\n    import time\n    time.sleep(600)\n")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = run_tests(limit, [str(bad)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert found["exit_code"] is None
    assert found["failures"][0] == f"stopped after {limit} s"
    assert "test_bad" in found["failures"][1] and "wrong" in found["failures"][1]


def requirements(names):
    """The distributions with all they need."""
    found, left = set(), [*names]
    while left:
        name = left.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                needs = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            needs = [need for need in needs if "extra ==" not in need]
            left += [re.split(r"[^\w.-]", need)[0] for need in needs]
    return found


PROGRAM = """
import sys
from importlib import import_module
from pathlib import Path
blocked = set(sys.argv[1].split(","))
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import pytest
for path in sorted(Path("scripts/kernel_bench").glob("*.py")):
    sys.path[:0] = [".", "scripts"]
    import_module(f"kernel_bench.{path.stem}")
import_module("bench_kernels"), import_module("bench_infer_gpu"), import_module("gpu_check")
options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
sys.exit(pytest.main(["tests/kernels/gpu", "tests/nanoinfer/gpu", *options]))
"""


def test_the_gpu_tests_and_benchmarks_import_nothing_a_gpu_machine_lacks():
    allowed = requirements(GPU_MACHINE)
    blocked = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not allowed & {owner.lower().replace("_", "-") for owner in owners}
    }
    blocked -= {path.stem for path in ROOT.iterdir()}  # this project, where it is installed
    assert {"tyro", "xdist", "tensorboard"} <= blocked and not {"torch", "sympy"} & blocked
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(blocked)], cwd=ROOT, env=env,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "test_flash_attention" in done.stdout and "test_gpu_engine" in done.stdout
