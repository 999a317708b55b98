"""What runs on a GPU machine runs here on a tiny shape, with no more packages than such a machine
has: torch, triton, numpy, safetensors, tokenizers, transformers, rich, pytest, hypothesis."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from bench_infer_gpu import QWEN3, TINY, Bench, make_model, requests  # noqa: E402

ONLY = """
import sys, runpy

ALLOWED = {"torch", "torchgen", "functorch", "triton", "numpy", "safetensors", "tokenizers"}
ALLOWED |= {"transformers", "rich", "pytest", "_pytest", "hypothesis"}
NEEDED = {"typing_extensions", "sympy", "mpmath", "networkx", "filelock", "fsspec"}  # by torch
OURS = {"kernels", "nanoengine", "nanoinfer"}
OURS |= {"bench_kernels", "bench_output", "kernel_bench", "roofline"}


class Gate:
    refused = set()

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names | ALLOWED | NEEDED | OURS:
            return None
        self.refused.add(top)
        raise ModuleNotFoundError(f"No module named {name!r} on a GPU machine", name=name)


sys.meta_path.insert(0, Gate())
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/scripts"]
"""
RUN = """
sys.argv = ["scripts/bench_infer_gpu.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
IMPORT = """
import nanoengine.formats.hf, nanoinfer.engine, nanoinfer.gpu.cuda_graph, nanoinfer.async_engine
try:
    import jinja2
except ModuleNotFoundError:
    print("gate holds")
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ONLY + program, str(ROOT), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_imports_without_the_packages_of_chat_templates_and_command_lines() -> None:
    assert run(IMPORT).strip() == "gate holds"


def test_a_tiny_workload_on_a_cpu_writes_the_rows_of_the_gpu_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    run(RUN, "--shape", "tiny", "--json", str(path))
    written = json.loads(path.read_text())
    rows = {row["name"]: row for row in written["rows"]}
    names = ["nano-vllm", "logp-gap-max", "logp-gap-mean", "decode-step-1", "decode-step-3"]
    fp8 = [f"{name}-fp8" for name in names]
    names.insert(3, "logp-gap-max-exact")
    assert list(rows) == names + fp8
    columns = "name dtype threads value unit peer peer_value ratio bound bound_ratio"
    for name, row in rows.items():
        assert set(columns.split()) <= set(row)
        assert row["value"] >= 0 and row["dtype"] == "bf16"
        if not name.startswith("logp"):
            assert 0 < row["bound_ratio"] < 1
    for name in ("logp-gap-max", "logp-gap-max-exact"):
        assert rows[name]["value"] == 0  # a CPU repeats the trainer's bits
    assert rows["logp-gap-max-fp8"]["value"] > 0
    assert written["skipped"] == [] and written["ceilings"]["TB/s"] > 0


def test_the_workload_is_nano_vllms() -> None:
    """Its README reports 133,966 sampled tokens for this script, with seed 0."""
    prompts, sizes = requests(QWEN3)
    assert len(prompts) == 256 and sum(sizes) == 133_966
    assert min(map(len, prompts)) >= 100 and max(map(len, prompts)) <= 1024


@pytest.mark.parametrize(("num_steps", "num_read"), [(3, 0), (1, 50)])
def test_the_bound_counts_weights_and_cache_by_hand(num_steps: int, num_read: int) -> None:
    """tiny: embedding 300 · 32, two layers of qkv 128 · 32, out 32 · 64, gate and up 96 · 32, down
    32 · 48, norms 2 · 32 + 2 · 16, a last norm of 32: 31,296 parameters in bf16. A token: 2 layers
    of 2 heads of 16 keys and values, 256 bytes."""
    bench = Bench(make_model(TINY.model, "cpu"), TINY, 1e6, "auto")
    weights = 2 * (9600 + 2 * (4096 + 2048 + 3072 + 1536 + 64 + 32) + 32)
    expected = (num_steps * weights + num_read * 256) / 1e6
    assert bench.bound_s(num_steps, num_read) == pytest.approx(expected)
