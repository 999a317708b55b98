"""The compile gate can fail: it rejects a spill, a misaligned stride and a worse table.

The gate itself runs as a step of its own (`scripts/kernel_gate.sh`): it compiles for minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from kernel_gate import find_regressions  # noqa: E402


def run_gate(*arguments):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    planted = ROOT / "tests/kernels/gate/planted"
    command = [sys.executable, str(ROOT / "scripts/kernel_gate.py"), "--cases", str(planted)]
    return subprocess.run(
        [*command, *arguments], env=env, capture_output=True, text=True, timeout=280
    )


def test_a_spilling_tile_is_rejected():
    done = run_gate("--only", "planted-spill")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "planted_matmul_kernel: spills" in done.stderr


def test_a_misaligned_stride_is_rejected_and_an_aligned_one_passes():
    done = run_gate("--only", "aligned")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "planted-misaligned" in done.stderr and "no ld128" in done.stderr
    assert "planted-aligned" not in done.stderr


ROW = {"case": "op", "launch": 0, "kernel": "k", "spill": 0, "resident_blocks": 2}
ROW |= {"registers": 128, "shared": 1000, "wgmma": 4, "ld128": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill": 8}, "spill 0 -> 8"),
        ({"resident_blocks": 1, "registers": 200}, "resident blocks 2 -> 1"),
        ({"wgmma": 0}, "wgmma 4 -> 0"),
        ({"ld128": 0}, "ld128 2 -> 0"),
        ({"case": "renamed"}, "not launched now"),
    ],
)
def test_a_worse_table_is_a_regression(change, message):
    assert message in "".join(find_regressions([ROW | change], [ROW]))


def test_equal_better_and_new_rows_are_no_regression():
    better = ROW | {"registers": 120, "resident_blocks": 3}
    assert find_regressions([better, ROW | {"case": "new"}], [ROW]) == []
