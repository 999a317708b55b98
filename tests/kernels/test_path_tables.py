"""The tables in which ops name what they reach: every name is there, and dispatch takes it."""

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernels
from kernels.backend import resolve

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"kernels(\.\w+)+:\w+")
# Not a path of the book's: the calls that belong to it lie beside the C++.
BOOK_IN_CPP = {"kernels.cpp.ops", "kernels.cpp.decoder"}


def book() -> list[Path]:
    """What a dense model's step on a CPU runs through."""
    return [
        *(ROOT / "kernels").glob("*.py"),
        ROOT / "kernels/cpp/ops.py",
        ROOT / "kernels/cpp/decoder.py",
    ]


def names() -> Iterator[tuple[str, str]]:
    """(file, "module:name") of every table of names in the package."""
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and NAME.fullmatch(str(node.value)):
                yield str(path.relative_to(ROOT)), node.value


def tables() -> Iterator[tuple[str, dict[str, str]]]:
    """Tables of one function's paths that all take the same arguments."""
    for path in book():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                name = getattr(node.targets[0], "id", "")
                if name in ("_FORWARD", "_BACKWARD", "_STATS", "_GRADIENT"):
                    yield f"{path.name} {name}", ast.literal_eval(node.value)


@pytest.mark.parametrize(("file", "name"), sorted(set(names())))
def test_every_name_of_every_table_is_defined_where_the_table_says(file, name):
    if name.startswith(("kernels.triton", "kernels.gpu")):
        pytest.importorskip("triton", reason="Triton exists on Linux only")
    found = pkgutil.resolve_name(name)
    assert callable(found)
    assert found.__module__ == name.partition(":")[0]


def test_the_paths_of_a_pass_take_the_same_arguments():
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    found = dict(tables())
    assert len(found) == 6
    for table, paths in found.items():
        assert set(paths) == {"triton", "torch"}
        required = {
            path: sum(
                p.default is p.empty for p in inspect.signature(resolve(name)).parameters.values()
            )
            for path, name in paths.items()
        }
        assert len(set(required.values())) == 1, (table, required)


def test_the_book_of_kernels_imports_no_other_room():
    allowed = {f"kernels.{path.stem}" for path in (ROOT / "kernels").glob("*.py")} | BOOK_IN_CPP
    for path in book():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kernels"):
                modules = {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
                assert modules & allowed, f"{path.name}:{node.lineno} imports {node.module}"


def test_a_step_on_a_cpu_imports_no_other_room():
    program = (
        "import sys, torch, kernels as k\n"
        "x = torch.ones(64, 4, requires_grad=True)\n"
        "w = torch.ones(4, 4)\n"
        "k.swiglu(k.linear(k.rms_norm(x, torch.ones(4)), w)).sum().backward()\n"
        "print(*sorted(m for m in sys.modules if m.startswith('kernels.') and hasattr(\n"
        "    sys.modules[m], '__path__')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120, capture_output=True,
        text=True,
    )  # fmt: skip
    rooms = set(done.stdout.split())
    from kernels.cpp import ops

    assert rooms == {"kernels.cpp"} or ops.library() is None


def test_every_name_of_the_door_is_there_and_no_other():
    assert all(callable(getattr(kernels, name)) for name in kernels.__all__)
    with pytest.raises(AttributeError, match="no attribute 'not_an_op'"):
        _ = kernels.not_an_op


def test_on_a_gpu_dispatch_takes_tritons_names():
    """On a GPU that is not there: launches are noted, not made."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    sys.path.insert(0, str(ROOT / "tests/nanoengine"))
    from fake_cuda import fake_gpu

    with fake_gpu():
        gpu = torch.device("cuda:0")
        x = torch.randn(4, 16, device=gpu, requires_grad=True)
        w = torch.ones(16, device=gpu, requires_grad=True)
        kernels.rms_norm(x, w).sum().backward()
        y, total = kernels.add_rms_norm(x, x, w)
        (y + total).sum().backward()
        kernels.swiglu(x).sum().backward()
        q = torch.randn(4, 2, 8, device=gpu, requires_grad=True)
        k = torch.randn(4, 1, 8, device=gpu, requires_grad=True)
        cos, sin = torch.randn(9, 4, device=gpu), torch.randn(9, 4, device=gpu)
        positions = torch.zeros(4, dtype=torch.int64, device=gpu)
        kernels.apply_rope(q, k, cos, sin, positions)[0].sum().backward()
        norms = (torch.ones(8, device=gpu), torch.ones(8, device=gpu))
        kernels.qk_norm_rope(q, k, *norms, cos, sin, positions)[0].sum().backward()
        bounds = torch.tensor([0, 4], dtype=torch.int32, device=gpu)
        found = kernels.flash_attn_varlen(q, k, k, bounds, bounds, 4, 4)
        found.sum().backward()
        assert kernels.tree_attention(q, k, k, kernels.make_varlen_plan([0, 4])).device == gpu
        head, ids = torch.randn(32, 16, device=gpu, requires_grad=True), positions
        kernels.linear_logprob(x, head, ids).sum().backward()
        assert kernels.linear(x, head, batch_invariant=True).device == gpu
        kernels.add_rows_(torch.zeros(32, 16, device=gpu), ids, x.detach())
        cache = kernels.make_kv_cache((2, 16, 1, 8), torch.float32, gpu)
        with torch.no_grad():
            kernels.reshape_and_cache(k, k, cache, cache, positions)
            lens, tables = bounds[1:], torch.zeros(1, 1, dtype=torch.int32, device=gpu)
            out = kernels.paged_attention(
                q, cache, cache, bounds, lens, tables, max_query_len=4, max_seq_len=4
            )
        assert out.device == gpu
        weights, moments = [torch.zeros(8, device=gpu)], [torch.zeros(8, device=gpu)]
        kernels.fused_adamw_(
            weights, [torch.ones(8, device=gpu)], moments, moments, None, lr=0.1, betas=(0.9, 0.99),
            eps=1e-8, weight_decay=0.0, step=1,
        )  # fmt: skip
