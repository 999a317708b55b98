"""The compile gate can fail: it rejects a spill, a misaligned stride, an offset that can overflow,
exponents that two loops would round differently, rows that are summed in another order and a worse
table; and nothing escapes it: every kernel, every tile and every op is in the committed table.

The gate itself runs as a step of its own (`scripts/kernel_gate.sh`): it compiles for a minute.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from kernel_gate import find_regressions  # noqa: E402

import kernels  # noqa: E402
from kernels.triton.tiles import TILES  # noqa: E402

TABLE = max((ROOT / "benchmarks").glob("kernels_compile_*.json"))
COMMITTED = json.loads(TABLE.read_text())["rows"]
VERSIONS = ("3.9.0", "3.6.0")


def run_gate(*arguments):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts/kernel_gate.py"), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def test_what_is_planted_is_rejected_and_its_good_neighbours_pass():
    done = run_gate("--cases", ROOT / "tests/kernels/gate/planted")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "planted_matmul_kernel: spills" in done.stderr
    assert "planted-misaligned" in done.stderr and "no ld128" in done.stderr
    assert "planted-aligned" not in done.stderr
    assert "planted-narrow: planted_narrow_kernel: products of 32 bits" in done.stderr
    assert "planted-wide" not in done.stderr
    assert "planted-loose: _attention_kernel: 4 exponents are a product and a diff" in done.stderr
    assert "planted-fused" not in done.stderr
    assert "planted-other-sums: planted_sum_kernel: sums 4096xf32:" in done.stderr
    assert "planted-sums-again:" not in done.stderr


@pytest.mark.skipif(
    triton.__version__ not in VERSIONS, reason="tables are of the gate's two versions of Triton"
)
@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            {"registers": -20, "resident_blocks": 1},
            ["kernel: resident_blocks", "kernel: registers"],
        ),
        ({"triton": "0.0"}, ["no committed table"]),
    ],
)
def test_a_table_that_promises_more_makes_the_gate_fail(tmp_path, change, messages):
    rows = [dict(row) for row in COMMITTED if row["case"] == "apply_token_bitmask"]
    assert rows
    for row in rows:
        row |= {k: v if k == "triton" else row[k] + v for k, v in change.items()}
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"rows": rows}))
    done = run_gate("--only", "apply_token_bitmask", "--table", table)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(messages), done.stderr
    assert all(message in line for message, line in zip(messages, lines, strict=True))


ROW = {"case": "op", "launch": 0, "kernel": "k", "spill": 0, "resident_blocks": 2}
ROW |= {"registers": 128, "shared": 1000, "wgmma": 4, "mma_sync": 0, "ld128": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spill": 8}, "spill 0 -> 8"),
        ({"resident_blocks": 1}, "resident_blocks 2 -> 1"),
        ({"registers": 137}, "registers 128 -> 137"),
        ({"shared": 1200}, "shared 1000 -> 1200"),
        ({"wgmma": 0}, "wgmma 4 -> 0"),
        ({"ld128": 1}, "ld128 4 -> 1"),
        ({"case": "renamed"}, "not launched now"),
    ],
)
def test_a_worse_table_is_a_regression(change, message):
    assert message in "".join(find_regressions([ROW | change], [ROW]))


def test_equal_better_and_new_rows_are_no_regression():
    better = ROW | {"registers": 120, "resident_blocks": 3, "wgmma": 2, "ld128": 2}
    assert find_regressions([better, ROW | {"case": "new"}], [ROW]) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_and_every_tile_is_in_the_committed_table(version):
    rows = [row for row in COMMITTED if row["triton"] == version]
    source = "".join(path.read_text() for path in (ROOT / "kernels/triton").glob("*.py"))
    launched = set(re.findall(r"launch\((\w+_kernel),", source))
    assert len(launched) > 40
    assert launched == {row["kernel"] for row in rows}
    cases = {row["case"] for row in rows}
    for op, shapes in TILES:
        if shapes != "all":
            family = op.split("_")[0]
            assert any(c.startswith(family) and c.endswith(shapes) for c in cases), (op, shapes)


NO_TRITON = {"linear_topk", "logits_logprob", "make_paged_plan"}
"""They have no kernel of their own: the first two launch `linear_logprob`'s, the third plans for a
CPU."""


def public_ops():
    """Functions of `kernels` that a caller can send to Triton."""
    every = {name: getattr(kernels, name) for name in kernels.__all__ if name not in NO_TRITON}
    return [n for n, f in every.items() if "backend" in getattr(f, "__annotations__", {})]


@pytest.mark.parametrize(
    "folder", ["tests/kernels/gate", "tests/kernels/interpreter", "scripts/kernel_bench", "docs"]
)
def test_every_op_is_gated_interpreted_benchmarked_and_described(folder):
    files = [path for path in (ROOT / folder).glob("*") if path.is_file()]
    if folder == "docs":
        files = [path for path in files if path.name.startswith("kernels")]
    text = "".join(path.read_text() for path in files)
    missing = [name for name in public_ops() if not re.search(rf"\b{name}\b", text)]
    assert len(public_ops()) > 20 and not missing
