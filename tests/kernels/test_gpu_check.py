"""`gpu_check` refuses clearly where there is no GPU, gives each part a verdict, a time and an end,
keeps what its tests found when they run out of time, and needs no package that a GPU machine lacks.
"""

import json
import math
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
from host_processes import is_running
from waiting import eventually

pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
GPU_MACHINE = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "rich")
GPU_MACHINE += ("pytest", "hypothesis")
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_parts  # noqa: E402
from gpu_check import PARTS, Part, _counts, check, choose, run_program, run_tests, verdict_of  # noqa: E402


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


def test_parts_fit_into_nine_minutes_by_their_limits():
    assert sum(part.limit_s for part in PARTS) <= 535


def test_one_failing_part_makes_the_verdict_fail_and_a_skip_does_not():
    rows = {"status": "pass", "rows": [{"name": "a"}], "date": "d"}
    good, empty = (
        Part("good", 1, lambda s: dict(rows)),
        Part("none", 1, lambda s: {"status": "skip"}),
    )
    bad = Part("bad", 1, lambda s: verdict_of(3, s))
    result = check([good, empty])
    assert result["verdict"] == "pass" and result["skipped"] == ["none"]
    assert result["rows"] == [{"name": "a"}] and result["date"] == "d"
    result = check([bad, good])
    assert result["verdict"] == "fail" and result["failed"] == ["bad"]
    assert result["parts"]["bad"]["failures"] == ["exit status 3"]
    assert result["parts"]["good"]["status"] == "pass" and result["rows"] == [{"name": "a"}]


def test_what_was_found_is_kept_after_each_part():
    good = Part("good", 1, lambda s: {"status": "pass", "rows": [{"name": "a"}]})
    last = Part("last", 1, lambda s: {"status": "pass"})
    kept = []
    result = check([good, last], lambda found: kept.append(json.loads(json.dumps(found))))
    assert [found["verdict"] for found in kept] == ["not run: last", "pass"]
    assert list(kept[0]["parts"]) == ["good"] and kept[0]["rows"] == [{"name": "a"}]
    assert kept[1] == result


def test_programs_find_the_project_where_it_is_not_installed(monkeypatch, tmp_path):
    """As on a GPU machine with a Python of its own; its packages of PYTHONPATH stay."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "carried.py").write_text("")
    program = tmp_path / "program.py"
    program.write_text("import nanorl, carried\n")
    assert run_program(["-S", str(program)], 60) == 0  # -S: without what is installed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_collectives_of_no_gpu_do_not_pass():
    with pytest.raises(ValueError, match="sees no GPU"):
        gpu_parts.check_collectives("cuda")


def test_parts_are_chosen_by_name():
    assert [part.name for part in choose("mfu,tests")] == ["mfu", "tests"]
    assert len(choose(None)) == len(PARTS)
    with pytest.raises(ValueError, match="--parts nvlink: there are tests, train-tiny"):
        choose("tests,nvlink")


HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""


def test_a_hung_program_and_what_it_started_are_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    begin = time.monotonic()
    assert run_program(["-c", HANGS, str(tmp_path / "pid")], 6) is None
    assert time.monotonic() - begin < 60
    started = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not is_running(started))  # the kernel takes a moment
    assert verdict_of(None, 6)["failures"] == ["stopped after 6 s"]


@pytest.mark.rare
def test_a_time_out_keeps_the_results_so_far(tmp_path):
    """Also where interrupts are ignored, as in the background job of a shell."""
    bad = tmp_path / "test_bad.py"
    bad.write_text("def test_bad(): assert 0, 'wrong'\n")
    begin = time.monotonic()
    assert run_tests(300, [str(bad)])["exit_code"] == 1
    start = time.monotonic() - begin  # of pytest on this machine
    limit = 3 * round(start) + 3 + gpu_check.GRACE_S
    bad.write_text(bad.read_text() + "def test_slow():\n    import time\n    time.sleep(600)\n")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        found = run_tests(limit, [str(bad)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert found["exit_code"] is None and found["status"] == "fail"
    assert found["failures"][0] == f"stopped after {limit:.0f} s"
    assert "test_bad" in found["failures"][1] and "wrong" in found["failures"][1]


def test_a_run_must_end_well_and_its_summary_hold_numbers(monkeypatch):
    def fake(summary, code):
        def run(arguments, limit_s):
            out = Path(arguments[arguments.index("--out") + 1])
            out.mkdir(parents=True)
            if summary is not None:
                (out / "summary.json").write_text(json.dumps(summary))
            return code

        monkeypatch.setattr(gpu_check, "run_program", run)
        return gpu_check.train("tiny", 10)

    assert fake({"logp_gap_max": 0.01}, 0)["status"] == "pass"
    assert fake({"logp_gap_max": math.nan}, 0)["failures"] == ["summary.json: logp_gap_max is nan"]
    assert fake({"logp_gap_max": 0.01}, 1)["failures"] == ["exit status 1"]
    assert fake(None, 0)["failures"] == ["the run wrote no summary.json"]


def test_a_benchmark_without_rows_fails(monkeypatch):
    monkeypatch.setattr(gpu_check, "run_program", lambda arguments, limit_s: 0)
    assert gpu_check.run_benchmark("bench_kernels.py", 60)["failures"] == ["no row"]


def test_peaks_by_the_names_that_cards_have():
    assert gpu_parts.peak_flops("NVIDIA H200") == 989.5e12
    assert gpu_parts.peak_flops("NVIDIA H100 80GB HBM3") == 989.5e12
    assert gpu_parts.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert gpu_parts.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert gpu_parts.peak_flops("Tesla T4") is None


def test_the_parts_run_on_a_cpu_too(tmp_path):
    """Collectives of two ranks, training steps that lower the loss, a server that answers."""
    found = {}
    for name in ("nccl", "mfu", "server"):
        path = tmp_path / f"{name}.json"
        command = [sys.executable, str(ROOT / "scripts/gpu_parts.py"), name, "--json", str(path)]
        done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = json.loads(path.read_text())
    assert found["nccl"]["found"] == [{"sum": 3.0, "gathered": [1.0, 2.0]}] * 2
    assert found["mfu"]["tokens_per_s"] > 0 and found["mfu"]["mfu"] is None


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
for name in ("bench_kernels", "bench_infer_gpu", "gpu_check", "gpu_parts"):
    import_module(name)
options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
sys.exit(pytest.main(["tests/kernels/on_gpu", "tests/nanoinfer/on_gpu", *options]))
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
